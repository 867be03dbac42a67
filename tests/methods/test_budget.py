"""Sizes and the text form of methods: everything valid round-trips, everything else is one clear error."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsketch
from kvsketch import CompressedCache
from kvsketch.methods.base import BudgetedMethod
from kvsketch.methods.budget import Size
from kvsketch.slots import LayerContext, SlotTable
from tests.helpers import zoo
from tests.helpers.common import generate

BOUNDED = [name for name, method in kvsketch.METHODS.items() if issubclass(method, BudgetedMethod)]


@given(st.integers(1, 10**9))
def test_tokens_round_trip(tokens: int) -> None:
    assert Size.parse(tokens) == Size.parse(str(tokens)) == Size.parse(str(Size.parse(tokens)))
    assert Size.parse(tokens).of(7) == tokens


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 10**6))
def test_shares_round_trip_and_never_round_to_nothing(a: int, b: int, whole: int) -> None:
    low, high = min(a, b), max(a, b)
    size = Size.parse(f"{low}/{high}")
    assert Size.parse(str(size)) == size
    assert 1 <= size.of(whole) <= whole
    assert size.of(whole * high) == whole * low


@settings(max_examples=50)
@given(
    st.sampled_from(BOUNDED), st.integers(1, 100), st.lists(st.integers(1, 9000), min_size=1, max_size=4),
    st.integers(0, 7),
)  # fmt: skip
def test_rows_of_a_batch_get_what_they_get_alone(name: str, percent: int, prompts: list[int], layer: int) -> None:
    """The device computes the budgets of left-padded rows, the host that of a row alone."""
    method, table = kvsketch.parse_method(f"{name}:budget={percent}%"), SlotTable(LayerContext(layer, 8))
    assert isinstance(method, BudgetedMethod)
    together = method.allot(table, torch.tensor(prompts).view(-1, 1, 1))
    alone = [method.allot(table, prompt) for prompt in prompts]
    for part, expected in ((together.total, [a.total for a in alone]), (together.recent, [a.recent for a in alone])):
        assert (part.flatten().tolist() if isinstance(part, torch.Tensor) else [part] * len(prompts)) == expected


@pytest.mark.parametrize(
    "bad", [0, -3, "0", "-5", "0%", "101%", "3/2", "1/0", "", "many", "1e3", 0.5, None, True, "25 % of it"]
)
def test_bad_sizes_name_the_value_and_the_forms(bad: object) -> None:
    with pytest.raises(ValueError, match=r"size|small|outside") as error:
        Size.parse(bad)  # type: ignore[arg-type]
    assert str(bad) in str(error.value) and "25%" in str(error.value) and "1024" in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("streamllm", ["streamllm", "streamingllm", "uniform"]),
        ("", ["unknown method", "full"]),
        ("streamingllm:budge=4", ["budge", "budget", "sinks"]),
        ("streamingllm:budget", ["key=value", "budget"]),
        ("streamingllm:budget=many", ["many", "1024"]),
        ("streamingllm:budget=4:budget=5", ["twice"]),
        ("streamingllm:budget=4:sinks=9", ["9 sinks", "budget=10"]),
        ("streamingllm:sinks=-1", ["sinks=-1", "0 or more"]),
        ("streamingllm:sinks=two", ["two", "whole number"]),
        ("streamingllm:recent=5", ["recent", "budget"]),
        ("uniform:weights=perhaps", ["perhaps", "true or false"]),
        ("full:budget=5", ["budget", "parameters: bits, key_bits, value_bits"]),
    ],
)
def test_bad_methods_name_the_choices(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\w") as error:
        kvsketch.parse_method(text)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(("tokens", "said"), [(1, "1 token"), (20, "20 token"), (40, None)])
def test_a_share_of_next_to_nothing_is_told(tokens: int, said: str | None) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, tokens)
    cache = CompressedCache(model, "h2o:budget=50%")
    with warnings.catch_warnings(record=True) as result:
        warnings.simplefilter("always")
        generate(model, ids, cache, max_new_tokens=3)
    told = [str(each.message) for each in result if "h2o: budget=50%" in str(each.message)]
    assert len(told) == (said is not None)
    assert said is None or (f"a prompt of {said}" in told[0] and "budget=1024" in told[0])
