"""What the codec promises, and attention over coded slots against attention over what they decode to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops import codec as codecs
from kvsketch.ops.codec import BITS, Codec, Coded, CodedSlots
from kvsketch.ops.codec import reference as codec_reference
from kvsketch.ops.weighted_attention import Arguments
from kvsketch.ops.weighted_attention import reference as attention_reference
from tests.ops.formula import needs_triton, relative_error

# Normal vectors: mean squared error of the best uniform quantiser (Max 1960).
NORMAL_ERROR = {2: 0.1188, 3: 0.03744, 4: 0.01154, 8: 0.000110}


def vectors(
    size: int, count: int = 50, dtype: torch.dtype = torch.float32, common: float = 20.0
) -> tuple[Tensor, Tensor]:
    """Vectors [2, 3, count, size] around a large common part, and the mean of each head."""
    generator = torch.Generator().manual_seed(size)
    center = common * torch.randn(2, 3, 1, size, generator=generator)
    x = (center + torch.randn(2, 3, count, size, generator=generator)).to(dtype)
    return x, x.float().mean(2)


def coded(x: Tensor, center: Tensor, bits: int, exact: int = 0) -> CodedSlots:
    codec = Codec(bits, x.shape[-1], seed=3)
    rotated = codecs.rotate(x[:, :, :exact].float() - center.unsqueeze(2), codec.signs(x.device), codec.block)
    at = torch.arange(exact, dtype=torch.int32, device=x.device).expand(*x.shape[:2], -1).clone()
    if exact:
        # Exact slots may lie anywhere, or have been overwritten.
        at[0, 0], at[1, 0, -1] = at[0, 0] + 9, -1
        rotated[0, 0] = codecs.rotate(x[0, 0, 9 : 9 + exact].float() - center[0, 0], codec.signs(x.device), codec.block)
    return CodedSlots(codec, center, rotated, at, *codecs.encode(x, center, codec))


@pytest.mark.parametrize("size", [64, 80, 96, 128])
@pytest.mark.parametrize("bits", BITS)
def test_error_is_that_of_the_best_uniform_levels(bits: int, size: int) -> None:
    x, center = vectors(size, 400)
    slots = coded(x, center, bits)
    assert slots.codes.shape[-1] == size * bits // 8
    assert (slots.decoded(torch.float32) - x).square().mean() < 1.05 * NORMAL_ERROR[bits]


@pytest.mark.parametrize(("bits", "size"), [(8, 80), (8, 256), (4, 128)])
def test_integers_lose_nothing_against_the_formula_in_float64(bits: int, size: int) -> None:
    x, center = vectors(size)
    # An outlier, which the scale of the integers follows.
    x[..., 3] += 300 * torch.randn(x.shape[:3], generator=torch.Generator().manual_seed(0))
    codec = Codec(bits, size, seed=3)
    turn = codec.integers(x.device) * (codec.norm / 2)
    d = x.double() - center.double().unsqueeze(2)
    y = d @ turn.T
    first = codecs.unit_step(codec) * y.norm(dim=-1, keepdim=True)
    z = (y / first + 2.0 ** (bits - 1)).floor().clamp(0, 2**bits - 1) - codec.half_range
    steps = (y * z).sum(-1, keepdim=True) / (z * z).sum(-1, keepdim=True)
    formula = steps.half().double() * z @ turn
    result = (coded(x, center, bits).decoded(torch.float64) - x).square().mean()
    assert result < 1.002 * (formula - d).square().mean()


@pytest.mark.parametrize("size", [8, 64, 80, 96, 72])
def test_rotation_is_orthonormal_and_spreads_one_channel_over_all(size: int) -> None:
    rotation = Codec(4, size).rotation(torch.device("cpu"))
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(size), atol=1e-6, rtol=0)
    assert rotation.abs().max() <= 2 / math.sqrt(size & -size)
    y = torch.randn(5, size)
    spread = codecs.rotate(y, Codec(4, size).signs(y.device), size & -size)
    torch.testing.assert_close(spread, y @ rotation.T, atol=1e-5, rtol=1e-5)


def test_a_vector_is_coded_alone() -> None:
    x, center = vectors(64)
    codec = Codec(4, 64)
    whole, one = codecs.encode(x, center, codec), codecs.encode(x[:, :, 7:8], center, codec)
    assert torch.equal(whole.codes[:, :, 7:8], one.codes) and torch.equal(whole.steps[:, :, 7:8], one.steps)
    at = torch.full((2, 3, 1), 11)
    codecs.encode_into(whole, x[:, :, 7:8], center, codec, at)
    assert torch.equal(whole.codes[:, :, 11], one.codes[:, :, 0]) and torch.equal(
        whole.steps[:, :, 11], one.steps[:, :, 0]
    )


def test_equal_vectors_need_no_step_and_what_is_not_finite_is_marked() -> None:
    x, center = vectors(64)
    x[0, 0, 1] = center[0, 0]
    x[0, 1, 2, 5], x[1, 2, 3, 0] = float("nan"), float("inf")
    result = codecs.encode(x, center, Codec(4, 64))
    assert result.steps[0, 0, 1] == 0
    assert result.steps.isnan().nonzero().tolist() == [[0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize("exact", [0, 1, 4])
def test_some_slots_are_decoded_as_all_are(exact: int) -> None:
    """Each exact one as it is, the last too, wherever it lies; one that was overwritten by its code."""
    x, center = vectors(64, 21)
    slots = coded(x, center, 4, exact)
    at = torch.stack([torch.randperm(21, generator=torch.Generator().manual_seed(n)) for n in range(6)]).view(2, 3, 21)
    expected = slots.decoded(torch.float32).gather(2, at.unsqueeze(-1).expand(-1, -1, -1, 64))
    torch.testing.assert_close(slots.decoded_at(at, torch.float32), expected, atol=1e-4, rtol=1e-5)


def test_bad_bits_and_sizes_name_the_choices() -> None:
    with pytest.raises(ValueError, match=r"bits=5 is not valid; use 2, 3, 4, 8, or 16"):
        Codec(5, 64)
    with pytest.raises(ValueError, match=r"heads of size 66, only multiples of 8; use bits=16"):
        Codec(4, 66)


@needs_triton
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("bits", "size", "dtype"),
    [(2, 64, torch.float32), (3, 128, torch.bfloat16), (4, 128, torch.float16), (8, 256, torch.bfloat16)],
)
def test_kernel_gives_the_same_codes_bit_for_bit(
    bits: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    from kvsketch.ops.codec import kernel

    x, center = vectors(size, 21, dtype)
    codec = Codec(bits, size)
    x[0, 0, 1], x[0, 1, 2, 5] = center[0, 0].to(dtype), float("inf")
    center[0, 2] = 0.0
    # The largest sums there are, vectors of which no step is left, and steps beyond float16.
    x[0, 2, :3] = codec.signs(x.device).to(dtype) * torch.tensor([[1.99], [1e-7], [6e4]]).to(dtype)
    x, center = x.to(device), center.to(device)
    ours, theirs = kernel.encode(x, center, codec), codec_reference.encode(x, center, codec)
    assert torch.equal(ours.codes, theirs.codes)
    assert torch.equal(ours.steps.view(torch.int16), theirs.steps.view(torch.int16)) or torch.equal(
        ours.steps.nan_to_num(-1.0), theirs.steps.nan_to_num(-1.0)
    )
    at = torch.randperm(21, device=device).expand(2, 3, 21)
    codec_reference.encode_into(theirs, x, center, codec, at)
    kernel.encode_into(ours, x, center, codec, at)
    assert torch.equal(ours.codes, theirs.codes)
    # A flat store: x of a model, whose heads lie between the tokens.
    at = torch.randperm(6 * 21 + 5, device=device)[: 6 * 21].view(2, 3, 21)
    apart = x.transpose(1, 2).contiguous().transpose(1, 2)
    stores = [
        Coded(
            torch.zeros(6 * 21 + 5, codec.code_bytes, dtype=torch.uint8, device=device),
            torch.zeros(6 * 21 + 5, dtype=torch.float16, device=device),
        )
        for _ in range(2)
    ]
    codec_reference.encode_into(stores[0], x, center, codec, at)
    kernel.encode_into(stores[1], apart, center, codec, at)
    assert torch.equal(stores[0].codes, stores[1].codes)
    assert torch.equal(stores[0].steps.nan_to_num(-1.0), stores[1].steps.nan_to_num(-1.0))


@needs_triton
@pytest.mark.parametrize("bits", BITS)
def test_kernel_decodes_what_the_reference_decodes(bits: int, device: torch.device) -> None:
    """All slots, and some of them: in any order, some twice, from tensors that have more."""
    from kvsketch.ops.codec import kernel

    x, center = vectors(64, 91)
    slots = coded(x.to(device), center.to(device), bits, exact=3)
    result, expected = kernel.decode(slots, torch.float32), codec_reference.decode(slots, torch.float32)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-5)
    slots.codes, slots.steps = (torch.cat([each] * 2, 1)[:, :3] for each in (slots.codes, slots.steps))
    for count in (1, 100):
        at = torch.randint(91, (2, 3, 2 * count), generator=torch.Generator().manual_seed(count)).to(device)
        at[:, 0, :2] = slots.exact_at[:, 0, 1:2]
        expected = codec_reference.decode_at(slots, at[:, :, ::2], torch.float32)
        torch.testing.assert_close(
            kernel.decode_at(slots, at[:, :, ::2], torch.float32), expected, atol=1e-4, rtol=1e-5
        )


@needs_triton
@pytest.mark.parametrize(
    ("key_bits", "value_bits", "size", "slots", "group", "exact", "tied", "dtype"),
    [
        (4, 4, 128, 63, 7, 4, False, torch.bfloat16),
        (3, 2, 80, 70, 2, 3, True, torch.float32),
        (4, 16, 64, 90, 8, 4, True, torch.bfloat16),
        (4, 4, 96, 90, 1, 4, False, torch.float16),
    ],
)
def test_attention_reads_codes_as_what_they_stand_for(
    key_bits: int, value_bits: int, size: int, slots: int, group: int, exact: int, tied: bool, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    from kvsketch.ops.weighted_attention import kernel

    torch.manual_seed(slots)
    parts = []
    for bits, common in ((key_bits, 3.0), (value_bits, 1.0)):
        x, center = vectors(size, slots, dtype, common)
        x, center = x.to(device), center.to(device)
        parts.append(x if bits == 16 else coded(x, center, bits, exact))
    q = torch.randn(2, 3 * group, 1, size, device=device).to(dtype)
    log_den = torch.randn(2, 3, slots, device=device)
    log_den[:, :, -5:] = float("-inf")
    log_num = log_den if tied else log_den + 0.3 * torch.randn(2, 3, slots, device=device)
    lengths = torch.tensor([[slots, slots - 7, slots - 20]] * 2, device=device)
    options = dict(softcap=20.0, sink_logits=torch.randn(3 * group, device=device), clip=0.5, lengths=lengths)
    bias = torch.rand(2, 1, 1, slots, device=device) > 0.1
    call = Arguments(q, parts[0], parts[1], log_num, log_den, size**-0.5, bias, return_logits=True, **options)
    ours, theirs = kernel.weighted_attention(call), attention_reference.weighted_attention(call)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert relative_error(ours.out.float(), theirs.out.float()) < tolerance
    for result, expected in ((ours.log_sum_num, theirs.log_sum_num), (ours.log_sum_den, theirs.log_sum_den)):
        torch.testing.assert_close(result, expected, atol=20 * tolerance, rtol=tolerance)
    # Queries that meet 4-bit keys are taken in two halves: nothing is lost by rounding them.
    close = 2e-4 if key_bits == 4 else tolerance
    torch.testing.assert_close(ours.logits, theirs.logits, atol=20 * close, rtol=close)


@needs_triton
@pytest.mark.parametrize(
    ("block_n", "value_bits", "group", "dtype"),
    [(64, 4, 7, torch.bfloat16), (128, 4, 4, torch.float16), (64, 16, 12, torch.float16)],
)
def test_the_last_tile_of_words_begins_early_and_counts_no_slot_twice(
    block_n: int, value_bits: int, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    from kvsketch.ops.weighted_attention import kernel

    slots, lengths = 150, torch.tensor([[150, 129, 60]] * 2, device=device)
    twice_read = range(slots - block_n, 128)  # by the last tile as well
    parts: list[Tensor | CodedSlots] = []
    for bits in (4, value_bits):
        x, center = (tensor.to(device) for tensor in vectors(128, slots, dtype, 3.0))
        part = coded(x, center, bits if bits < 16 else 8, 4)
        # Exact slots of both kinds, and numbers behind a head that spoil what they touch.
        at = torch.tensor([3, twice_read[5], 128, 149], dtype=torch.int32, device=device)
        part.exact_at.copy_(at)
        part.steps.masked_fill_(torch.arange(slots, device=device) >= lengths.unsqueeze(-1), float("nan"))
        parts.append(part if bits < 16 else x)
    torch.manual_seed(group)
    log_weight = torch.randn(2, 3, slots, device=device)
    log_weight[:, :, twice_read] += 4.0
    q = torch.randn(2, 3 * group, 1, 128, device=device).to(dtype)
    call = Arguments(q, parts[0], parts[1], log_weight, log_weight, 128**-0.5, lengths=lengths)
    ours = kernel.weighted_attention(call, kernel.Plan(block_n, 2, 1, 2, False))
    for each in parts:
        if isinstance(each, CodedSlots):
            each.steps.nan_to_num_(0.0)
    theirs = attention_reference.weighted_attention(call)
    assert relative_error(ours.out.float(), theirs.out.float()) < 1e-2
    torch.testing.assert_close(ours.log_sum_num, theirs.log_sum_num, atol=1e-3, rtol=0)


@needs_triton
def test_programs_of_words_fit_the_registers_of_a_multiprocessor() -> None:
    from kvsketch.ops.common.device import Device
    from kvsketch.ops.common.ragged import CODED_PROGRAMS
    from kvsketch.ops.weighted_attention.kernel import coded_plan

    h200 = Device(multiprocessors=132, shared_bytes=227 * 1024, overlap=True)
    for rows, size in ((4, 128), (8, 128), (4, 256)):
        launch = coded_plan(128, 32768, rows, size, h200)
        assert launch.registers is not None and launch.warps == 1
        assert CODED_PROGRAMS * 32 * launch.registers <= 65536
        assert 0.9 < 128 * launch.splits / (132 * CODED_PROGRAMS) <= 1
    # A program of a short table has two warps; so has that of a short work list, not that of one of fixed length.
    assert coded_plan(8, 2049, 4, 128, h200).warps == coded_plan(8, 9000, 4, 128, h200, pieces=512).warps == 2
    assert coded_plan(8, 9000, 4, 128, h200, pieces=6344).warps == 1
    # Heads of 2,048 slots on average start early, however many the largest has.
    assert coded_plan(64, 12000, 4, 128, h200, pieces=1060, total=64 * 2048).early
    assert not coded_plan(64, 12000, 4, 128, h200).early


def test_attention_over_many_bits_is_attention_over_the_vectors() -> None:
    k, key_center = vectors(64, 60)
    v, value_center = vectors(64, 60, common=1.0)
    q = torch.randn(2, 6, 1, 64)
    exact = ops.weighted_attention(q, k, v, None, None, 0.125)
    errors = []
    for bits in (2, 4, 8):
        out = ops.weighted_attention(
            q, coded(k, key_center, bits, 4), coded(v, value_center, bits, 4), None, None, 0.125
        )
        errors.append(relative_error(out, exact))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.01
