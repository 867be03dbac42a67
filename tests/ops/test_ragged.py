"""Heads of different sizes in one flat store: what attention over them is, and its kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.codec import Codec, CodedSlots, encode
from kvsketch.ops.common.ragged import EXACT_SLOTS, UNIT, Readers, work_list
from kvsketch.ops.weighted_attention import Arguments, Attended
from kvsketch.ops.weighted_attention import reference as attention_reference
from kvsketch.ops.work_list import fixed_work_list, most_of_list
from kvsketch.slots.layout import Layout
from tests.helpers.common import also
from tests.ops.formula import needs_triton, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
CAPACITY = [[20, 0, 150], [7, 3, 33]]


def flat_call(dtype: torch.dtype, group: int, size: int, tied: bool, bits: int, device: torch.device) -> Arguments:
    """A query, and slots around a large common part."""
    generator = torch.Generator().manual_seed(size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    layout = Layout.of(torch.tensor(CAPACITY, device=device), coded=True)
    total = layout.total
    k, v = ((common * normal(1, size) + normal(total, size)).to(dtype) for common in (20.0, 1.0))
    parts: list[Any] = [k, v]
    if bits != 16:
        codec = Codec(bits, size, seed=1)
        center = [x.float().mean(0).expand(2, 3, size).contiguous() for x in (k, v)]
        # Some slots of three heads are exact: their codes are not read.
        places = [[[5, -1], [-1, -1], [149, 0]], [[-1, -1], [-1, -1], [-1, 32]]]
        at = torch.tensor(places, dtype=torch.int32, device=device)
        parts = [
            CodedSlots(codec, c, normal(2, 3, 2, size), at, *(p[0, 0] for p in encode(x[None, None], c[:1, :1], codec)))
            for x, c in zip(parts, center, strict=True)
        ]
    log_den = normal(total)
    log_den[::9] = float("-inf")
    log_num = log_den if tied else log_den + 0.3 * normal(total)
    bias = (normal(2, 1, 1, layout.most) > -1).to(device)
    sinks = normal(3 * group)
    q = normal(2, 3 * group, 1, size).to(dtype)
    return Arguments(
        q, *parts, log_num, log_den, size**-0.5, bias, None, sinks, None, 0.5, return_logits=True, ragged=layout
    )


def test_each_head_reads_its_own_slots(device: torch.device) -> None:
    call = flat_call(torch.float32, 2, 16, False, 16, device)
    result = attention_reference.weighted_attention(call)
    assert call.ragged is not None and isinstance(call.k, Tensor) and isinstance(call.v, Tensor)
    assert call.log_num is not None and call.log_den is not None and call.bias is not None
    assert call.sink_logits is not None
    for b, h in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        start, count = int(call.ragged.start[b, h]), CAPACITY[b][h]
        here, heads = slice(start, start + count), slice(2 * h, 2 * h + 2)
        alone = ops.weighted_attention(
            call.q[b : b + 1, heads], call.k[None, None, here], call.v[None, None, here],
            call.log_num[None, None, here], call.log_den[None, None, here], call.scale,
            bias=call.bias[b : b + 1, ..., :count], sink_logits=call.sink_logits[heads], clip=0.5,
        )  # fmt: skip
        torch.testing.assert_close(result.out[b, heads], alone[0], atol=1e-5, rtol=1e-4)


@needs_triton
@pytest.mark.parametrize(
    ("bits", "dtype", "group", "size", "tied"),
    [
        (16, torch.float32, 1, 64, False),
        (16, torch.bfloat16, 7, 64, True),
        (4, torch.bfloat16, 4, 128, True),
        (4, torch.bfloat16, 2, 80, False),
        (4, torch.float16, 7, 64, False),
        (3, torch.float32, 2, 96, True),
    ],
)
def test_kernel_reads_a_work_list(
    bits: int, dtype: torch.dtype, group: int, size: int, tied: bool, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from kvsketch.ops.common import sums
    from kvsketch.ops.weighted_attention import kernel

    call = flat_call(dtype, group, size, tied, bits, device)
    expected = attention_reference.weighted_attention(call)
    # The largest head has more pieces than are combined at once.
    monkeypatch.setattr(sums, "COMBINE_SPLITS", 2)
    # What is not written shows.
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    result: Attended = kernel.weighted_attention(call)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    assert relative_error(result.out, expected.out) < tolerance
    assert (result.out[0, group : 2 * group] == 0).all()
    for ours, theirs in zip(result[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=20 * tolerance, rtol=tolerance)


@needs_triton
def test_kernel_reads_a_list_of_fixed_length(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries behind the last piece read and change nothing, and a head may be much smaller than heads may be."""
    from kvsketch.ops.weighted_attention import kernel

    call = flat_call(torch.bfloat16, 4, 128, True, 4, device)._replace(bias=None, return_logits=False)
    expected = attention_reference.weighted_attention(call)
    layout = call.ragged
    assert layout is not None
    work, first = fixed_work_list(layout.capacity.view(1, -1), most=1000, by=Readers(3, EXACT_SLOTS))
    assert len(work[0]) == most_of_list(6, 3) > int(first[0, -1])
    fixed = Layout(layout.start, layout.capacity, 1000, layout.total, work[0], first[0], most_pieces=8)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    result: Attended = kernel.weighted_attention(call._replace(ragged=fixed))
    assert relative_error(result.out, expected.out) < 1e-2


@needs_triton
@pytest.mark.parametrize(("bits", "group", "size"), [(4, 4, 128), *also((4, 2, 80)), (16, 4, 64)])
def test_kernel_reads_for_several_queries_together(
    bits: int, group: int, size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one document are such: heads next to each other, and a list of fixed length."""
    from kvsketch.ops.weighted_attention import kernel

    call = flat_call(torch.bfloat16, group, size, True, bits, device)._replace(
        bias=None, sink_logits=None, clip=None, return_logits=False
    )
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 4, 3 * group, size, generator=generator).to(device, torch.bfloat16).transpose(1, 2)
    layout = call.ragged
    assert layout is not None
    work, first = fixed_work_list(layout.capacity.view(1, -1), most=1000, by=Readers(3, EXACT_SLOTS * (bits == 4)))
    fixed = Layout(layout.start, layout.capacity, 1000, layout.total, work[0], first[0], most_pieces=8)
    expected = attention_reference.weighted_attention(call._replace(q=q))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    result: Attended = kernel.weighted_attention(call._replace(q=q, ragged=fixed))
    assert relative_error(result.out, expected.out) < 1e-2
    # The head without slots.
    assert (result.out[0, group : 2 * group] == 0).all()
    assert (result.log_sum_den[0, group : 2 * group] == float("-inf")).all()
    torch.testing.assert_close(result.log_sum_den, expected.log_sum_den, atol=0.2, rtol=1e-2)


@pytest.mark.parametrize("lead", [0, EXACT_SLOTS])
@pytest.mark.parametrize("resident", [1, 8, 1000])
def test_work_covers_every_slot_once_in_pieces_of_one_size(resident: int, lead: int) -> None:
    capacity = torch.tensor([[36, 6067, 0, 512], [128, 1, 129, 5000]])
    work, first = work_list(capacity, Readers(resident, lead))
    heads, begin, end, number, leads = work.long().unbind(1)
    # The first piece of a head has so many slots less.
    length = end - begin + torch.where(leads == 1, lead, 0)
    size = int(length.max())
    assert (begin % UNIT == 0).all() and (end >= begin).all() and (size % UNIT == 0 or size == 6067 + lead)
    assert torch.equal(torch.zeros(8, dtype=torch.long).index_add_(0, heads, end - begin), capacity.flatten())
    assert torch.equal(number.sort().values, torch.arange(len(work)))
    assert ((number >= first[heads]) & (number < first[heads + 1])).all()
    assert torch.equal(leads == 1, number == first[heads])
    # The end of a head is short, all else is not, unless its exact slots are longer than it.
    short = (end == capacity.flatten()[heads]) | (length < lead)
    assert ((length == size) | short).all() and torch.equal(length, length.sort(descending=True).values)


@needs_triton
@pytest.mark.parametrize("bits", [16, 8, 4, 3, 2])
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_pieces_begin_with_a_tile_of_the_kernel_that_reads_them(
    bits: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a launch with the largest tiles, over pieces of one unit."""
    from kvsketch.ops.common.device import Device
    from kvsketch.ops.weighted_attention import kernel

    tiles = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: tiles.append(options["BLOCK_N"])

    monkeypatch.setattr(kernel, "split_kernel" if bits == 16 else "coded_split_kernel", Kernel())
    monkeypatch.setattr(kernel, "combine", lambda *args: None)
    monkeypatch.setattr(kernel, "device_traits", lambda device: Device(1, 227 * 1024, True))
    kernel.weighted_attention(flat_call(torch.bfloat16, 4, size, True, bits, torch.device("cpu")))
    work, _ = work_list(torch.tensor([[1000, 70]]), Readers(10_000, 0 if bits == 16 else EXACT_SLOTS))
    begin, end = work[:, 1], work[:, 2]
    assert int((end - begin).max()) == UNIT and (begin % tiles[0] == 0).all()
