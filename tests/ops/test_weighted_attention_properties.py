"""Any shape, any weights: reference and kernel equal the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.formula import by_kernel, by_reference, direct, make_inputs, needs_triton

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
CALM = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@st.composite
def calls(draw: st.DrawFn, most_slots: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and options of one call, on the CPU, in float32."""
    slots = draw(st.integers(1, most_slots))
    batch, kv_heads, group, queries = (draw(st.integers(1, most)) for most in (2, 2, 5, 3))
    inputs = make_inputs(
        torch.device("cpu"),
        slots=slots,
        group=group,
        size=draw(st.integers(1, 20)),
        batch=batch,
        kv_heads=kv_heads,
        queries=queries,
        value_slots=draw(st.integers(1, slots)),
        value_size=draw(st.integers(1, 20)),
        seed=draw(st.integers(0, 10_000)),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def some_hidden(weights: Tensor) -> Tensor:
        return weights.masked_fill(torch.rand(weights.shape, generator=generator) < hidden_share, float("-inf"))

    hidden_share = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    weights = {"none": None, "num": some_hidden(inputs.log_num), "den": some_hidden(inputs.log_den)}
    num, den = draw(
        st.sampled_from([("none", "none"), ("num", "num"), ("num", "den"), ("none", "den"), ("num", "none")])
    )
    options: dict[str, Any] = {"softcap": draw(st.sampled_from([None, 1.5]))}
    if draw(st.booleans()):
        options["lengths"] = torch.randint(0, slots + 1, (batch, kv_heads), generator=generator)
    if draw(st.booleans()):
        options["sink_logits"] = torch.randn(kv_heads * group, generator=generator)
    if draw(st.booleans()):
        heads, rows = draw(st.sampled_from([1, kv_heads, kv_heads * group])), draw(st.sampled_from([1, queries]))
        options["bias"] = torch.rand(1, heads, rows, slots, generator=generator) < 0.8
    return (inputs.q, inputs.k, inputs.v, weights[num], weights[den], inputs.scale), options


def assert_equal(actual: Any, expected: Any) -> None:
    for tensor, exact in zip(actual[:3], expected[:3], strict=True):
        torch.testing.assert_close(tensor.double().cpu(), exact, atol=1e-4, rtol=1e-4)


@settings(max_examples=150, **CALM)
@given(call=calls(most_slots=40))
def test_reference_equals_the_formula(call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    arguments, options = call
    assert_equal(by_reference(*arguments, **options), direct(*arguments, **options))


@needs_triton
@settings(max_examples=12, **CALM)
@given(call=calls(most_slots=40), splits=st.integers(1, 4))
def test_kernel_equals_the_formula(
    device: torch.device, call: tuple[tuple[Any, ...], dict[str, Any]], splits: int
) -> None:
    arguments, options = call
    # One copy for both weights when they are one: moving them apart would untie them.
    moved = {id(value): value.to(device) for value in (*arguments, *options.values()) if isinstance(value, Tensor)}
    there = [moved.get(id(value), value) for value in arguments]
    options_there = {name: moved.get(id(value), value) for name, value in options.items()}
    result = by_kernel(*there, **options_there, block_n=16, splits=splits)
    assert_equal(result, direct(*arguments, **options))
