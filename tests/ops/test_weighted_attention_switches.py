"""Every pair of what a call of weighted attention can have or not, kernel against reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common.ragged import Ragged
from kvsketch.ops.weighted_attention import Arguments
from kvsketch.ops.weighted_attention.reference import weighted_attention as by_definition
from kvsketch.slots.layout import Layout
from tests.ops.formula import in_pages, needs_triton, quantised, relative_error
from tests.ops.pairwise import Case, pairs_of, pairwise

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
B, H, GROUP = 2, 2, 2
BITS = (16, 8, 4, 3, 2)
SWITCHES: dict[str, tuple[Any, ...]] = {
    "key_bits": BITS, "value_bits": BITS, "dtype": (torch.bfloat16, torch.float32, torch.float16),
    "weights": ("tied", "separate", "numerator", "denominator", "none"), "lie": ("rows", "lengths", "ragged", "pages"),
    "bias": ("none", "slot", "row"), "size": (32, 48), "slots": (64, 50), "values": ("all", "fewer"), "exact": (0, 3),
    "queries": (1, 3), "splits": (1, 2), "softcap": (None, 3.0), "sinks": (False, True), "clip": (None, 0.2),
    "logits": (False, True),
}  # fmt: skip
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def possible(case: Case) -> bool:
    return not (case.get("lie") == "ragged" and case.get("values") == "fewer")


CASES = pairwise(SWITCHES, possible)


def test_every_pair_of_choices_has_a_case() -> None:
    covered = set().union(*(pairs_of(case) for case in CASES))
    assert ("lie", "ragged", "values", "fewer") not in covered
    for a, b in product(SWITCHES, SWITCHES):
        if list(SWITCHES).index(a) < list(SWITCHES).index(b):
            for x, y in product(SWITCHES[a], SWITCHES[b]):
                assert (a, str(x), b, str(y)) in covered or not possible({a: x, b: y})
    assert len(CASES) < 2 * len(BITS) ** 2


def call_of(case: Case, device: torch.device) -> Arguments:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    dtype, slots, size, queries = case["dtype"], case["slots"], case["size"], case["queries"]
    counts = (slots, slots if case["values"] == "all" else slots - 13)
    vectors = [(normal(B, H, 1, size) + normal(B, H, count, size)).to(device, dtype) for count in counts]
    # Exact slots of keys and values are the same ones.
    k, v = (
        quantised(x, case[bits], case["exact"]) for x, bits in zip(vectors, ("key_bits", "value_bits"), strict=True)
    )
    log_num, log_den = (normal(B, H, slots).masked_fill(normal(B, H, slots) < -1, float("-inf")) for _ in range(2))
    log_num = None if case["weights"] in ("denominator", "none") else log_num.to(device)
    log_den = None if case["weights"] in ("numerator", "none") else log_den.to(device)
    bias = {"none": None, "slot": normal(B, 1, 1, slots) > -1, "row": normal(B, H * GROUP, queries, slots)}[
        case["bias"]
    ]
    call = Arguments(
        normal(B, H * GROUP, queries, size).to(device, dtype), k, v, log_num,
        log_num if case["weights"] == "tied" else log_den, size**-0.5,
        bias=None if bias is None else bias.to(device), softcap=case["softcap"],
        sink_logits=normal(H * GROUP).to(device) if case["sinks"] else None, clip=case["clip"],
        return_logits=case["logits"],
    )  # fmt: skip
    lengths = torch.tensor([[slots, 41], [7, 30]], device=device)
    if case["lie"] == "lengths":
        return call._replace(lengths=lengths)
    if case["lie"] == "pages":
        k, v = in_pages([k, v], [3, 1], 5)[1]
        return call._replace(k=k, v=v, pages=torch.tensor([3, 1], device=device))
    return ragged(call, lengths) if case["lie"] == "ragged" else call


def ragged(call: Arguments, capacity: Tensor) -> Arguments:
    """The same slots in a flat store, so many of each head."""
    layout = Layout.of(capacity, coded=True)
    k, v = (
        flat(part, layout) if isinstance(part, Tensor) else
        replace(part, codes=flat(part.codes, layout), steps=flat(part.steps, layout))
        for part in (call.k, call.v)
    )  # fmt: skip
    log_num, log_den = (None if part is None else flat(part, layout) for part in (call.log_num, call.log_den))
    return call._replace(
        k=k, v=v, log_num=log_num, log_den=log_num if call.log_num is call.log_den else log_den, ragged=layout
    )


def flat(x: Tensor, layout: Ragged) -> Tensor:
    store = x.new_zeros(layout.total, *x.shape[3:])
    for b, h in product(range(B), range(H)):
        start, count = int(layout.start[b, h]), int(layout.capacity[b, h])
        store[start : start + count] = x[b, h, :count]
    return store


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(choice) for choice in case.values()))
def test_kernel_is_the_reference(case: Case, device: torch.device) -> None:
    from kvsketch.ops.weighted_attention import kernel

    call = call_of(case, device)
    call.check()
    words = [
        isinstance(x, CodedSlots) and x.codec.bits in kernel.WORD_BITS and case["dtype"] != torch.float32
        for x in (call.k, call.v)
    ]
    result = kernel.weighted_attention(call, kernel.Plan(32, case["splits"], 4, 2, False, ahead=2 if all(words) else 0))
    expected = by_definition(call)
    bound = TOLERANCE[case["dtype"]]
    assert result.out.dtype == case["dtype"]
    assert relative_error(result.out, expected.out) < bound
    torch.testing.assert_close(result.log_sum_num, expected.log_sum_num, atol=bound, rtol=bound)
    torch.testing.assert_close(result.log_sum_den, expected.log_sum_den, atol=bound, rtol=bound)
    if case["logits"]:
        torch.testing.assert_close(result.logits, expected.logits, atol=2 * bound, rtol=bound)
