"""How much of a prompt is read between two tokens of the others, on a clock that a test moves."""

from __future__ import annotations

import random

import pytest
import torch

from kvsketch import CompressedCache, prefill
from kvsketch.methods import parse_method
from kvsketch.serve.pace import PART, READ, Pace
from kvsketch.slots.pauses import letting, pause
from tests.helpers import zoo

STEP = 0.01  # seconds of a step


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pauses(pace: Pace, clock: Clock, kind: str, layers: int, amount: int, seconds: float) -> list[float]:
    """Times between steps while layers of `amount` tokens are read, each of which takes so long."""
    result, last = [], clock.now
    for _ in range(layers):
        if pace.due(kind, amount):
            clock.now += STEP
            pace.stepped(True)
            result.append(clock.now - last)
            last = clock.now
        pace.work(kind, amount)
        clock.now += seconds
    return result


@pytest.mark.parametrize(("seconds", "together"), [(0.001, 39), (0.01, 3), (0.08, 1)])
def test_as_much_is_read_as_the_pause_allows(seconds: float, together: int) -> None:
    """Whatever a layer takes: as many as fit beside a step into the pause, one at least."""
    clock = Clock()
    pace = Pace(0.05, clock=clock)
    pace.stepped(True)
    result = pauses(pace, clock, READ, 400, 2048, seconds)
    assert result[0] == pytest.approx(seconds + STEP), "as long as nobody knows, a step comes after each layer"
    assert max(result) < 0.0501 or together == 1
    assert result[-1] == pytest.approx(together * seconds + STEP, abs=1.1 * seconds)


def test_a_pace_follows_and_forgets_what_was_slow_once() -> None:
    clock = Clock()
    pace = Pace(0.05, clock=clock)
    pace.stepped(True)
    pauses(pace, clock, READ, 50, 100, 0.002)
    clock.now += 3.0  # such as another program
    assert pauses(pace, clock, READ, 50, 100, 0.002)[-1] > 0.03
    slower = pauses(pace, clock, READ, 50, 100, 0.02)
    assert slower[-1] <= 0.0501 < slower[0]


def test_parts_of_a_rehearsal_have_a_pace_of_their_own() -> None:
    clock = Clock()
    pace = Pace(0.05, clock=clock)
    pace.stepped(True)
    pauses(pace, clock, READ, 50, 100, 0.001)
    assert len(pauses(pace, clock, PART, 1, 1, 0.03)) <= 1
    assert all(gap < 0.0501 for gap in pauses(pace, clock, PART, 20, 1, 0.03)[1:])
    assert pauses(pace, clock, READ, 100, 100, 0.001)[-1] > 0.03, "which says nothing about layers"


def test_a_host_that_runs_ahead_of_its_device() -> None:
    """A step returns when the one before it is done: what is measured then is the work between these two."""
    clock, device, done = Clock(), 0.0, 0.0
    pace = Pace(0.05, behind=True, clock=clock)
    waits: list[float] = []
    since = 0.0
    for layer in range(200):
        if pace.due(READ, 100) or layer == 0:
            clock.now = max(clock.now, done)  # the step before
            device += STEP
            waits.append(device - since)
            done = since = device
            pace.stepped(True)
        pace.work(READ, 100)
        device += 0.004
    assert max(waits[3:]) < 0.0501 and waits[-1] > 0.03


def test_who_waits_is_heard_between_the_parts_of_a_rehearsal() -> None:
    """And what is kept is the same; others do not interrupt each other."""
    generator = torch.Generator().manual_seed(0)
    model, ids = zoo.build("llama"), zoo.tokens(1, 300)
    method = parse_method("rehearse:budget=1/2:chunk=64:sinks=2:recent=4")
    heard: list[float] = []

    def turn() -> None:
        torch.rand(3, generator=generator)
        pause()  # is heard by nobody
        heard.append(random.random())

    alone, other = CompressedCache(model, method), CompressedCache(model, method)
    logits = prefill(model, ids, alone)
    pause()
    with letting(turn):
        assert torch.equal(prefill(model, ids, other), logits)
    assert len(heard) >= 3
    for one, two in zip(alone.slot_layers, other.slot_layers, strict=True):
        pairs = zip(one.table.tensors(), two.table.tensors(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
