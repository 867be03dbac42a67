"""What makes room under a limit, against a list that says it in the plainest way."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvsketch.lru import LRU

NAMES, USERS = st.sampled_from("abcdef"), st.sampled_from([None, 0, 1, 2])


@dataclass
class Thing:
    size: int = 1
    passed: bool = False


@dataclass
class Noted:
    """What the list says of an item."""

    name: str
    thing: Thing
    users: set[int] = field(default_factory=set)


def lru(*names: str) -> LRU[str, int]:
    result: LRU[str, int] = LRU()
    for number, name in enumerate(names):
        result[name] = number
    return result


def test_the_one_that_was_used_least_recently_makes_room() -> None:
    held = lru("a", "b", "c")
    assert held.use("a") == 0 and [*held] == ["b", "c", "a"]
    assert held["b"] == held.get("b") == 1 and "b" in held, "a look is no use"
    assert held.shrink(2) == {"b": 1} and held.shrink(2) == {} and [*held] == ["c", "a"]


def test_what_is_in_use_stays() -> None:
    held = lru("a", "b", "c")
    held.use("a", "request 1")
    held.use("a", "request 2")
    held.use("b", "request 1")
    assert held.users("a") == {"request 1", "request 2"} and held.users("d") == set() and held.size_in_use == 2
    assert held.shrink(0) == {"c": 2} and held.size == 2
    held.release("request 1")
    assert held.shrink(0) == {"b": 1} and [*held] == ["a"]
    held.release("request 2")
    assert held.shrink(0, but="a") == {} and held.shrink(0) == {"a": 0} and held.size == 0


def test_an_item_in_place_of_another_has_no_users() -> None:
    held = lru("a", "b")
    held.use("a", "request")
    held["a"] = 7
    assert held.users("a") == set() and [*held] == ["b", "a"] and held.size == 2


def test_what_has_passed_goes_first_once_it_has() -> None:
    held: LRU[str, Thing] = LRU(passed=lambda thing: thing.passed)
    for name in "abc":
        held[name] = Thing()
    held["b"].passed = held["c"].passed = True
    held.use("b")
    assert [*held.shrink(0)] == ["c", "b", "a"]


def test_a_size_is_that_which_an_item_had_when_it_came() -> None:
    held: LRU[str, Thing] = LRU(size=lambda thing: thing.size)
    held["a"], held["b"] = Thing(5), Thing(2)
    held["a"].size = 1
    assert held.size == 7 and [*held.shrink(6)] == ["a"] and held.size == 2
    held.clear()
    assert held.size == len(held) == 0


def test_a_name_that_is_not_there() -> None:
    held = lru("a")
    for ask in (held.use, held.__getitem__, held.__delitem__):
        with pytest.raises(KeyError, match="b"):
            ask("b")
    assert held.pop("b", None) is None and held.size == 1


class Machine(RuleBasedStateMachine):
    """Items come, are used and released, change, leave and make room, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.lru: LRU[str, Thing] = LRU(size=lambda thing: thing.size, passed=lambda thing: thing.passed)
        self.noted: list[Noted] = []  # that used least recently first

    def _taken(self, name: str) -> Noted | None:
        found = [each for each in self.noted if each.name == name]
        self.noted = [each for each in self.noted if each.name != name]
        return found[0] if found else None

    @rule(name=NAMES, size=st.integers(0, 4), passed=st.booleans())
    def put(self, name: str, size: int, passed: bool) -> None:
        self._taken(name)
        self.noted.append(Noted(name, Thing(size, passed)))
        self.lru[name] = self.noted[-1].thing

    @precondition(lambda self: self.noted)
    @rule(data=st.data(), user=USERS)
    def use(self, data: st.DataObject, user: int | None) -> None:
        noted = self._taken(data.draw(st.sampled_from([each.name for each in self.noted])))
        assert noted is not None
        self.noted.append(noted)
        if user is not None:
            noted.users.add(user)
        assert self.lru.use(noted.name, user) is noted.thing

    @rule(user=USERS.filter(lambda user: user is not None))
    def release(self, user: int) -> None:
        self.lru.release(user)
        for each in self.noted:
            each.users -= {user}

    @precondition(lambda self: self.noted)
    @rule(data=st.data())
    def pass_on(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([each.thing for each in self.noted])).passed = True

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        noted = self._taken(name)
        assert self.lru.pop(name, None) is (noted and noted.thing)

    @rule(most=st.integers(-1, 12), but=st.sets(NAMES, max_size=2))
    def shrink(self, most: int, but: set[str]) -> None:
        may_go = [each for each in self.noted if not each.users and each.name not in but]
        expected = []
        # False stands before True, and the order of the list stays.
        for each in sorted(may_go, key=lambda each: not each.thing.passed):
            if sum(each.thing.size for each in self.noted) <= most:
                break
            self._taken(each.name)
            expected.append((each.name, each.thing))
        assert [*self.lru.shrink(most, but).items()] == expected

    @invariant()
    def it_says_what_the_list_says(self) -> None:
        assert [*self.lru.items()] == [(each.name, each.thing) for each in self.noted]
        assert self.lru.size == sum(each.thing.size for each in self.noted)
        assert self.lru.size_in_use == sum(each.thing.size for each in self.noted if each.users)
        assert all(self.lru.users(each.name) == each.users for each in self.noted)


def test_it_says_what_a_list_says() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))
