"""Attention to the slots before new tokens, reference and kernel alike; on a CPU the kernel runs in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.codec import Codec, CodedSlots, encode
from kvsketch.ops.common.device import Device, TileLaunch
from kvsketch.ops.join_attention import Part
from kvsketch.ops.past_attention import MOST_PARTIAL_BYTES, Arguments, in_blocks, reference
from kvsketch.slots.layout import Layout
from tests.helpers.common import also
from tests.ops.formula import needs_triton, poison, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
NEG_INF = float("-inf")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
H200 = Device(multiprocessors=132, shared_bytes=227 * 1024, overlap=True)
Attend = Callable[[Arguments], Part]


@pytest.fixture(params=["reference", pytest.param("kernel", marks=needs_triton)])
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attend:
    """Past attention by one implementation, whose new buffers hold NaN until they are written."""
    poison(monkeypatch)
    return reference.past_attention if request.param == "reference" else in_kernel


def in_kernel(call: Arguments, splits: int | None = None, slots: int = 32) -> Part:
    """The kernel in small tiles; `splits`: programs that share a head at most."""
    from kvsketch.ops.past_attention import kernel

    assert kernel.supported(call)
    rows = 32 if call.q.shape[1] // call.kv_heads * call.q.shape[2] < 100 else 64
    plan = kernel.plan_of(call, H200, TileLaunch(rows, slots if call.most_slots < 500 else 128, 4, 2))
    if splits is not None:
        plan = plan._replace(splits=splits)
    return kernel.past_attention(call, plan)


def vectors(seed: int, *shape: int, common: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) + common * torch.randn(shape[-1], generator=generator)


def coded(x: Tensor, bits: int, exact: int = 2) -> CodedSlots:
    """Quantised vectors [B, H, S, D]; of a head the first and the last slot are exact, as far as there are `exact`.

    What codes say of these is wrong, and no reader may use it.
    """
    codec = Codec(bits, x.shape[-1], seed=1)
    center = x.float().mean(2) if x.shape[2] else x.new_zeros(*x.shape[:2], x.shape[3])
    at = torch.full((*x.shape[:2], exact), -1, dtype=torch.int32, device=x.device)
    if exact and x.shape[2] > 1:
        at[..., 0] = x.shape[2] - 1
        at[..., exact - 1] = 0
    rows = at.long().clamp_min(0).unsqueeze(-1).expand(*at.shape, x.shape[3])
    kept = (
        codec.rotated(x.float().gather(2, rows) - center.unsqueeze(2)) if exact else x.new_zeros(*at.shape, x.shape[3])
    )
    codes, steps = encode(x, center, codec)
    for place in range(exact):
        there = (torch.arange(x.shape[2], device=x.device) == at[..., place : place + 1]).unsqueeze(-1)
        codes = torch.where(there, 255 - codes, codes)
    return CodedSlots(codec, center, kept.float(), at, codes, steps)


def make_call(
    device: torch.device,
    queries: int,
    slots: int,
    bits: tuple[int, int] = (16, 16),
    group: int = 2,
    size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    heads: int = 2,
    weights: str = "tied",
    common: float = 0.0,
    exact: int = 2,
    **options: Any,
) -> Arguments:
    q = vectors(queries, batch, heads * group, queries, size).to(device, dtype)
    parts: list[Any] = []
    for seed, (each, far) in enumerate(zip(bits, (common, 0.5 * common), strict=True)):
        x = vectors(slots + seed, batch, heads, slots, size, common=far).to(device, dtype)
        parts.append(x if each == 16 else coded(x, each, exact))
    log_num = log_den = None
    if weights != "none":
        log_num = log_den = vectors(7, batch, heads, slots).to(device)
        log_num[..., 2::5] = NEG_INF
        if weights == "two":
            log_den = log_num + 0.3 * vectors(8, batch, heads, slots).to(device)
            log_den[..., 1::7] = NEG_INF
    return Arguments(q, *parts, log_num, log_den, size**-0.5, **options)


def direct(call: Arguments) -> Part:
    """The definition in float64, for slots [B, H, S, D] of every row."""
    k, v = (part.decoded(torch.float64) if isinstance(part, CodedSlots) else part.double() for part in (call.k, call.v))
    group = call.q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = call.scale * call.q.double() @ k.mT
    if call.softcap is not None:
        s = call.softcap * (s / call.softcap).tanh()
    if call.lengths is not None:
        beyond = torch.arange(k.shape[2], device=k.device) >= call.lengths.unsqueeze(-1)
        s = s.masked_fill(beyond.repeat_interleave(group, 1).unsqueeze(2), NEG_INF)

    def weighted(weights: Tensor | None) -> Tensor:
        return s if weights is None else s + weights.double().repeat_interleave(group, 1).unsqueeze(2)

    num, den = weighted(call.log_num), weighted(call.log_den).logsumexp(-1)
    terms = (num - den.masked_fill(den == NEG_INF, 0.0).unsqueeze(-1)).exp()
    out = (terms @ v).masked_fill((den == NEG_INF).unsqueeze(-1), 0.0)
    return Part(out, den)


def check(result: Part, wanted: Part, dtype: torch.dtype, tolerance: float | None = None) -> None:
    bound = TOLERANCE[dtype] if tolerance is None else tolerance
    assert result.out.dtype == dtype and result.log_sum.dtype == torch.float32
    assert torch.equal(result.log_sum.isfinite(), wanted.log_sum.isfinite())
    assert relative_error(result.out, wanted.out) < bound
    there = wanted.log_sum.isfinite()
    assert not there.any() or (result.log_sum[there] - wanted.log_sum[there]).abs().max() < 4 * bound


SHAPES = [
    # queries, slots, bits, group, size, dtype, weights
    (1, 1, (16, 16), 1, 64, torch.bfloat16, "none"),
    (1, 63, (4, 4), 4, 128, torch.bfloat16, "tied"),
    (3, 100, (4, 4), 7, 64, torch.bfloat16, "two"),
    (20, 63, (8, 8), 2, 64, torch.bfloat16, "tied"),
    (9, 100, (3, 3), 8, 64, torch.bfloat16, "tied"),
    (33, 100, (2, 2), 1, 128, torch.bfloat16, "none"),
    (5, 63, (8, 4), 4, 64, torch.float16, "tied"),
    (7, 100, (16, 4), 2, 64, torch.bfloat16, "tied"),
    (7, 100, (4, 16), 2, 64, torch.bfloat16, "two"),
    (6, 65, (3, 2), 2, 80, torch.bfloat16, "tied"),
    (6, 65, (4, 3), 2, 96, torch.float32, "tied"),
    (6, 40, (8, 2), 3, 40, torch.float32, "two"),
    (100, 520, (4, 4), 1, 64, torch.bfloat16, "tied"),
    (100, 63, (16, 16), 2, 64, torch.float32, "two"),
    (2, 1, (4, 4), 2, 64, torch.bfloat16, "none"),
    (4, 16, (16, 16), 2, 256, torch.bfloat16, "tied"),
]


@pytest.mark.parametrize(("queries", "slots", "bits", "group", "size", "dtype", "weights"), SHAPES)
def test_attention_is_the_definition(
    attend: Attend, device: torch.device, queries: int, slots: int, bits: tuple[int, int], group: int, size: int,
    dtype: torch.dtype, weights: str,
) -> None:  # fmt: skip
    call = make_call(device, queries, slots, bits, group, size, dtype, weights=weights)
    call.check()
    check(attend(call), direct(call), dtype)


@needs_triton
@pytest.mark.parametrize("splits", [5, *also(1, 2)])
@pytest.mark.parametrize(("bits", "weights"), [((4, 4), "two"), ((16, 16), "none"), ((3, 8), "tied")])
def test_programs_that_share_a_head_give_the_same(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, splits: int, bits: tuple[int, int], weights: str
) -> None:
    poison(monkeypatch)
    call = make_call(device, 21, 300, bits, 3, weights=weights)
    check(in_kernel(call, splits), direct(call), call.q.dtype)


@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (4, 4)])
def test_a_large_common_part_of_keys_loses_nothing(
    attend: Attend, device: torch.device, bits: tuple[int, int]
) -> None:  # fmt: skip
    """Keys of some models have a mean that is 20 times their spread: what queries see is the rest."""
    call = make_call(device, 12, 100, bits, 2, 128, common=20.0)
    wanted = direct(call)
    result = attend(call)
    assert relative_error(result.out, wanted.out) < 1e-2
    # A logit of thousands has as many digits as float32 has.
    assert (result.log_sum - wanted.log_sum).abs().max() < 1e-5 * wanted.log_sum.abs().max() + 4e-2


@pytest.mark.parametrize("bits", [(16, 16), (4, 4)])
def test_softcap(attend: Attend, device: torch.device, bits: tuple[int, int]) -> None:
    call = make_call(device, 9, 70, bits, common=3.0, softcap=5.0)
    check(attend(call), direct(call), call.q.dtype)


@pytest.mark.parametrize("bits", [(16, 16), (4, 3)])
def test_what_lies_behind_a_row_is_not_read(attend: Attend, device: torch.device, bits: tuple[int, int]) -> None:
    lengths = torch.tensor([[50, 0], [1, 33]], device=device)
    call = make_call(device, 5, 50, bits, batch=2, lengths=lengths)
    wanted = direct(call)
    beyond = torch.arange(50, device=device) >= lengths.unsqueeze(-1)
    for part in (call.k, call.v):
        data = part.steps if isinstance(part, CodedSlots) else part
        data.masked_fill_(beyond if data.dim() == 3 else beyond.unsqueeze(-1), float("nan"))
    result = attend(call)
    assert not result.out[0, 2:].any() and (result.log_sum[0, 2:] == NEG_INF).all()
    check(result, wanted, call.q.dtype)


def test_slots_without_weight_are_none(attend: Attend, device: torch.device) -> None:
    call = make_call(device, 4, 40, (4, 4))
    assert call.log_num is not None
    call.log_num.fill_(NEG_INF)
    result = attend(call)
    assert not result.out.any() and (result.log_sum == NEG_INF).all()


def test_nothing_is_there(device: torch.device) -> None:
    for queries, slots in ((0, 5), (5, 0)):
        result = ops.past_attention(*make_call(device, queries, slots, weights="none")[:6])
        assert result.out.shape == (1, 4, queries, 64) and not result.out.any()
        assert result.log_sum.shape == (1, 4, queries) and (result.log_sum == NEG_INF).all()


def rows_of(call: Arguments, counts: list[int]) -> Arguments:
    """The same slots, for rows that have the first so many queries each: one after the other in one row."""
    q = torch.cat([call.q[row : row + 1, :, :count] for row, count in enumerate(counts)], 2)
    starts = torch.tensor([0, *counts], device=q.device).cumsum(0).int()
    return call._replace(q=q, starts=starts, longest=max(counts))


@pytest.mark.parametrize(("bits", "group"), [((16, 16), 1), ((4, 4), 4), ((8, 3), 7)])
@pytest.mark.parametrize("splits", [3, *also(None)])
def test_rows_have_as_many_queries_as_they_like(
    attend: Attend, device: torch.device, bits: tuple[int, int], group: int, splits: int | None
) -> None:
    counts = [0, 7, 1, 0, 30, 17, 0]
    lengths = torch.tensor([[40, 3], [100, 0], [1, 64], [9, 9], [0, 100], [77, 5], [5, 5]], device=device)
    equal = make_call(device, 30, 100, bits, group, batch=7, lengths=lengths)
    wanted = direct(equal)
    call = rows_of(equal, counts)
    call.check()
    result = in_kernel(call, splits) if attend is in_kernel else attend(call)
    out, log_sum = (
        torch.cat([part[row : row + 1, :, :count] for row, count in enumerate(counts)], 2) for part in wanted
    )
    check(result, Part(out, log_sum), equal.q.dtype)


CAPACITY = [[20, 0, 150], [7, 3, 33]]


def flat(call: Arguments) -> Arguments:
    """Slots of rows and heads with CAPACITY of them, in a flat store with others between."""
    sizes = torch.tensor(CAPACITY)
    layout = Layout.of(sizes + 1, True, call.q.device)
    layout.capacity = sizes.to(call.q.device)
    layout.most, at = int(sizes.max()), layout.start.flatten().tolist()

    def packed(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        store = x.new_full((layout.total, *x.shape[3:]), float("nan") if x.is_floating_point() else 7)
        for number, (b, h) in enumerate(product(range(2), range(3))):
            store[at[number] : at[number] + CAPACITY[b][h]] = x[b, h, : CAPACITY[b][h]]
        return store

    def moved(part: Any) -> Any:
        if isinstance(part, Tensor):
            return packed(part)
        codes, steps = packed(part.codes), packed(part.steps)
        assert codes is not None and steps is not None
        return CodedSlots(part.codec, part.center, part.exact, part.exact_at, codes, steps)

    log_num = packed(call.log_num)
    log_den = log_num if call.tied else packed(call.log_den)
    return call._replace(
        k=moved(call.k), v=moved(call.v), log_num=log_num, log_den=log_den, lengths=None, ragged=layout
    )


@pytest.mark.parametrize(
    ("bits", "weights", "dtype"),
    [((16, 16), "two", torch.float32), ((4, 4), "tied", torch.bfloat16), ((2, 8), "two", torch.float16)],
)
@pytest.mark.parametrize("varlen", [True, *also(False)])
def test_heads_of_different_sizes_lie_in_one_store(
    attend: Attend, device: torch.device, bits: tuple[int, int], weights: str, dtype: torch.dtype, varlen: bool
) -> None:
    lengths = torch.tensor(CAPACITY, device=device)
    equal = make_call(device, 11, 150, bits, 2, 64, dtype, 2, 3, weights, lengths=lengths)
    wanted, counts = direct(equal), [11, 4]
    call = flat(equal)
    if varlen:
        call = rows_of(call, counts)
        wanted = Part(*(torch.cat([part[row : row + 1, :, :n] for row, n in enumerate(counts)], 2) for part in wanted))
    call.check()
    check(attend(call), wanted, dtype)


@pytest.mark.parametrize("bits", [(16, 16), (4, 4), (8, 2)])
@pytest.mark.parametrize("varlen", [True, *also(False)])
def test_rows_share_blocks(attend: Attend, device: torch.device, bits: tuple[int, int], varlen: bool) -> None:
    """Blocks of 64 tokens; two rows begin with the same two."""
    table = torch.tensor([[3, 1, 0, 4], [3, 1, 2, -1]], device=device, dtype=torch.int32)
    lengths = torch.tensor([[200, 200], [130, 130]], device=device)
    centers = [vectors(seed, 1, 2, 64).to(device) for seed in range(2)]
    parts: list[Any] = []
    for seed, (each, center) in enumerate(zip(bits, centers, strict=True)):
        x = (vectors(20 + seed, 5, 2, 64, 64).to(device) + center.unsqueeze(2)).bfloat16()
        if each != 16:
            codec = Codec(each, 64)
            near = center.expand(2, -1, -1)
            first = codec.rotated(x[3:4, :, :1].float().expand(2, -1, -1, -1) - near.unsqueeze(2))
            at = torch.zeros(2, 2, 1, dtype=torch.int32, device=device)
            codes, steps = encode(x, center.expand(5, -1, -1), codec)
            codes[3, :, 0] = 255 - codes[3, :, 0]  # the first token is exact
            parts.append(CodedSlots(codec, near, first, at, codes, steps))
        else:
            parts.append(x)
    q = vectors(5, 2, 6, 13, 64).to(device, torch.bfloat16)
    call = Arguments(q, *parts, None, None, 0.2, lengths=lengths, blocks=table)
    k, v = (in_blocks(part, table) for part in parts)
    wanted, counts = direct(call._replace(k=k, v=v)), [13, 6]
    if varlen:
        call = rows_of(call, counts)
        wanted = Part(*(torch.cat([part[row : row + 1, :, :n] for row, n in enumerate(counts)], 2) for part in wanted))
    call.check()
    check(attend(call) if attend is not in_kernel else in_kernel(call, slots=64), wanted, q.dtype)


def test_joined_with_the_new_tokens_it_is_attention_to_both(attend: Attend, device: torch.device) -> None:
    call = make_call(device, 20, 90, (16, 16), dtype=torch.float32, weights="two")
    k, v = (vectors(seed, 1, 2, 20, 64).to(device) for seed in (3, 4))
    assert isinstance(call.k, Tensor) and isinstance(call.v, Tensor)
    past = ops.Past(call.k, call.v, call.log_num, call.log_den)
    both = ops.chunk_attention(call.q, k, v, call.scale, past=past)
    own, (_, log_sum) = ops.chunk_attention(call.q, k, v, call.scale, return_state=True)
    joined = ops.join_attention(Part(own, log_sum), attend(call))
    torch.testing.assert_close(joined, both, atol=1e-5, rtol=1e-5)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_beside_the_result_is_bounded(dtype: torch.dtype) -> None:
    """1 to 4,096 queries of 1 to 64 rows behind 1 to 32k slots: the buffers of a launch on an H200."""
    from kvsketch.ops.past_attention import kernel

    largest = 0
    for queries, slots, rows, uneven in product((1, 3, 64, 640, 4096), (1, 100, 8192, 32768), (1, 7, 64), (0, 1)):
        q = torch.empty(1, 32, queries, 128, dtype=dtype, device="meta")
        k = torch.empty(rows, 8, slots, 128, dtype=dtype, device="meta")
        starts = torch.empty(rows + 1, device="meta", dtype=torch.int32)
        lengths = torch.empty(rows, 8, device="meta", dtype=torch.int64) if uneven else None
        call = Arguments(q, k, k, None, None, 0.1, starts, None, None, lengths)
        plan = kernel.plan_of(call, H200)
        programs = plan.tiles * plan.splits * 8
        held = programs * kernel.partial_bytes(call, plan.tile) if plan.splits > 1 else 0
        largest = max(largest, held)
        assert held <= MOST_PARTIAL_BYTES == 64 << 20
        # Every query has a tile, and long slots with few queries find many programs.
        assert plan.tiles * plan.tile.rows >= 4 * queries
        assert rows > 1 or slots < 8192 or programs >= 0.7 * H200.multiprocessors
    assert largest > 1 << 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_on_a_gpu_is_bounded() -> None:
    device = torch.device("cuda")
    for bits, slots in product((16, 4), (1, 1000, 32768)):
        call = make_call(device, 1, slots, (bits, bits), 4, 128, heads=8)
        for queries in (1, 64, 640, 4096):
            q = torch.randn(1, 32, queries, 128, device=device, dtype=torch.bfloat16)
            ops.past_attention(q, *call[1:6])
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            result = ops.past_attention(q, *call[1:6])
            taken = torch.cuda.max_memory_allocated() - before
            given = sum(part.numel() * part.element_size() for part in result)
            assert taken <= given + MOST_PARTIAL_BYTES + (4 << 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": torch.zeros(3)}, "starts must be"),
        ({"longest": 99}, "longest=99"),
        ({"v": torch.zeros(1, 2, 4, 64, dtype=torch.bfloat16)}, "same slots"),
        ({"blocks": torch.zeros(1, 1, dtype=torch.int32)}, "lengths"),
        ({"k": torch.zeros(1, 2, 5, 32, dtype=torch.bfloat16)}, "k must be"),
        ({"softcap": -1.0}, "softcap"),
    ],
)
def test_a_call_that_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    call = make_call(torch.device("cpu"), 3, 5, weights="none")._replace(**change)
    with pytest.raises(ValueError, match=message):
        call.check()
