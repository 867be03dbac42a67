"""Codes in learned directions: what theory promises of them, and attention over them against what they decode to."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch.ops import codec as codecs
from kvsketch.ops.codec import Codec, CodedSlots
from kvsketch.ops.codec.basis import (
    ERRORS,
    LEARNED_BITS,
    MOST_GROUP_BITS,
    Basis,
    LearnedCodec,
    layout_of,
    orthonormal,
    shares_of,
)
from kvsketch.ops.weighted_attention import Arguments
from kvsketch.ops.weighted_attention import reference as attention_reference
from kvsketch.slots.layout import Layout
from tests.ops.formula import needs_compiler, needs_triton, poison, relative_error

H = 3


def rotations(size: int, heads: int = H) -> Tensor:  # [H, D, D]
    generator = torch.Generator().manual_seed(size)
    return torch.linalg.qr(torch.randn(heads, size, size, generator=generator, dtype=torch.float64)).Q


def deviations(size: int, fall: float = 4.0) -> Tensor:  # [H, D]
    """Steep spectra: e^-fall from the first direction to the last, in heads of different size."""
    return torch.exp(-fall * torch.arange(size) / size) * torch.tensor([[1.0], [8.0], [0.5]])


def basis_of(size: int, fall: float = 4.0) -> Basis:
    directions, deviation = rotations(size), deviations(size, fall).double()
    return Basis.of(directions.mT @ torch.diag_embed(deviation**2) @ directions)


def vectors(
    size: int, count: int = 50, dtype: torch.dtype = torch.float32, common: float = 20.0, fall: float = 4.0
) -> tuple[Tensor, Tensor]:
    """Vectors [2, H, count, size] with these spectra around a large common part, and the mean of each head."""
    generator = torch.Generator().manual_seed(size + 1)
    near = torch.randn(2, H, count, size, generator=generator) * deviations(size, fall).unsqueeze(1)
    center = common * torch.randn(2, H, 1, size, generator=generator)
    x = (center + near @ rotations(size).float()).to(dtype)
    return x, x.float().mean(2)


def coded(x: Tensor, center: Tensor, codec: Codec, exact: int = 0) -> CodedSlots:
    at = torch.arange(exact, dtype=torch.int32, device=x.device).expand(*x.shape[:2], -1).clone()
    first = codec.rotated(x[:, :, :exact].float() - center.unsqueeze(2))
    if exact:
        # Exact slots may lie anywhere, or have been overwritten.
        at[0, 0], at[1, 0, -1] = at[0, 0] + 9, -1
        first[0, 0] = codec.rotated(x[:, :, 9 : 9 + exact].float() - center.unsqueeze(2))[0, 0]
    return CodedSlots(codec, center, first, at, *codecs.encode(x, center, codec))


# what is stored


@pytest.mark.parametrize("bits", LEARNED_BITS)
@pytest.mark.parametrize("size", [64, 80, 128])
def test_bits_of_channels_have_the_promised_mean_and_every_level_lies_in_its_own_place(bits: int, size: int) -> None:
    codec = LearnedCodec(bits, size, basis=basis_of(size))
    own = codec.bits_of_channels
    assert sum(own) == bits * size and list(own) == sorted(own, reverse=True)
    x, center = vectors(size)
    assert codecs.encode(x, center, codec).codes.shape[-1] * 8 == bits * size
    largest = torch.tensor([2**each - 1 for each in own])
    levels = (torch.rand(500, size, generator=torch.Generator().manual_seed(0)) * (largest + 1)).floor().to(torch.uint8)
    assert torch.equal(codec.numbers(codec.packed(levels)), levels - largest / 2)
    # All bits of a byte are used: whatever lies there is a vector's.
    everything = codec.packed(largest.to(torch.uint8))
    assert (everything == 255).all()


def test_fields_do_not_cross_bytes() -> None:
    at = layout_of((6, 5, 4, 3, 3, 2, 1, 0))
    for shift, mask in ((at.shift, at.mask), (at.second_shift, at.second_mask)):
        assert ((mask << shift) < 256).all()


def test_directions_are_orthonormal_after_eight_bits_and_in_the_order_of_what_they_hold() -> None:
    basis = basis_of(64)
    near = orthonormal(basis.directions)
    torch.testing.assert_close(near @ near.mT, torch.eye(64).double().expand(H, -1, -1), atol=1e-12, rtol=0)
    assert (basis.deviation.diff(dim=-1) <= 1e-3 * basis.deviation[:, :1]).all()
    # Eight bits move a direction by a few thousandths.
    assert ((near @ rotations(64).mT).diagonal(dim1=-2, dim2=-1).abs() > 0.999).float().mean() > 0.95


def test_a_basis_is_shared_by_copies_and_heads_are_part_of_it() -> None:
    basis = basis_of(64)
    codec = LearnedCodec(2, 64, basis=basis)
    assert copy.deepcopy(codec) is codec and copy.deepcopy(basis) is basis
    part = basis.heads(1, 2)
    assert torch.equal(part.directions, basis.directions[1:]) and basis.heads(0, H) is basis
    assert basis.same(Basis(basis.directions.clone(), basis.deviation.clone(), basis.shares.clone())) and not part.same(
        basis.heads(0, 2)
    )
    x, center = vectors(64)
    whole = codecs.encode(x, center, codec)
    two = codecs.encode(x[:, 1:], center[:, 1:], LearnedCodec(2, 64, basis=part))
    assert torch.equal(whole.codes[:, 1:], two.codes) and torch.equal(whole.steps[:, 1:], two.steps)


def test_what_cannot_be_coded_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"bits=8 cannot be coded in learned directions; use 2, 3, 4, or basis=random"):
        LearnedCodec(8, 64, basis=basis_of(64))
    with pytest.raises(ValueError, match=r"the basis is one of size 64, the vectors of 80"):
        LearnedCodec(4, 80, basis=basis_of(64))
    with pytest.raises(ValueError, match=r"are not 16 falling numbers up to 4 with the mean 2"):
        replace(basis_of(64), shares=torch.ones(16, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"are not int8 \[H, D, D\] and \[H, D\]"):
        Basis(torch.zeros(3, 64, 64), torch.zeros(3, 64), basis_of(64).shares)


# errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", LEARNED_BITS)
def test_the_error_is_the_sum_over_directions_of_that_of_their_bits(bits: int, dtype: torch.dtype) -> None:
    """A token's gain is estimated from the token, which adds a little; bfloat16 keys lie around a large common part."""
    size = 128
    x, center = vectors(size, 400, dtype, common=20.0 if dtype == torch.float32 else 4.0)
    codec = LearnedCodec(bits, size, basis=basis_of(size))
    variance = deviations(size) ** 2
    expected = (variance * torch.tensor([ERRORS[each] for each in codec.bits_of_channels])).mean(-1)
    error = (coded(x, center, codec).decoded(torch.float32) - x.float()).square().mean((0, 2, 3))
    assert (error < 1.25 * expected).all(), error / expected


@pytest.mark.parametrize("bits", LEARNED_BITS)
def test_steep_spectra_come_near_reverse_water_filling(bits: int) -> None:
    """Rate-distortion theory gives normal variables an error of D = sum min(d^2, t) with 1/2 sum log2+(d^2 / t) bits.

    Levels of one number cost 1.5 dB at many bits, uniform ones and classes of an eighth a little more; a random
    rotation gives the mean variance to all channels and loses what theory gains.
    """
    size, fall = 128, 3.0
    x, center = vectors(size, 400, fall=fall)
    variance = deviations(size, fall)[0].double() ** 2
    low, high = variance.min() * 1e-9, variance.max()
    for _ in range(200):
        water = (low * high).sqrt()
        spent = 0.5 * (variance / water).log2().clamp_min(0).sum()
        low, high = (low, water) if spent < bits * size else (water, high)
    best = variance.minimum(water).mean()
    codec = LearnedCodec(bits, size, basis=basis_of(size, fall))
    ours, rotated = (
        (coded(x, center, each).decoded(torch.float32) - x)[:, 0].square().mean() for each in (codec, Codec(bits, size))
    )
    assert best < ours < 3.2 * best, ours / best
    assert ours < 0.45 * rotated, ours / rotated


def test_what_is_decoded_is_what_queries_and_sums_meet() -> None:
    """<q, x^> = <q, center> + step <M q, z>, and exact vectors come back."""
    x, center = vectors(64)
    codec = LearnedCodec(3, 64, basis=basis_of(64))
    slots, q = coded(x, center, codec, 4), torch.randn(2, H, 5, 64, generator=torch.Generator().manual_seed(0))
    numbers = codec.numbers(slots.codes) * slots.steps.float().unsqueeze(-1)
    products = (q @ codec.rotation(x.device).mT) @ numbers.mT + q @ center.unsqueeze(-1)
    decoded = replace(slots, exact=slots.exact[:, :, :0], exact_at=slots.exact_at[:, :, :0]).decoded(torch.float32)
    torch.testing.assert_close(products, q @ decoded.mT, atol=1e-3, rtol=1e-4)
    back = slots.decoded(torch.float32)
    torch.testing.assert_close(back[1, 1, :4], x[1, 1, :4], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(back[0, 0, 9:13], x[0, 0, 9:13], atol=1e-4, rtol=1e-5)


def test_a_vector_is_coded_alone_and_the_scale_of_vectors_is_kept() -> None:
    x, center = vectors(64)
    codec = LearnedCodec(2, 64, basis=basis_of(64))
    whole, one = codecs.encode(x, center, codec), codecs.encode(x[:, :, 7:8], center, codec)
    assert torch.equal(whole.codes[:, :, 7:8], one.codes) and torch.equal(whole.steps[:, :, 7:8], one.steps)
    large = codecs.encode(center.unsqueeze(2) + 64 * (x - center.unsqueeze(2)), center, codec)
    torch.testing.assert_close(large.steps.float(), 64 * whole.steps.float(), rtol=5e-3, atol=0)


def test_equal_vectors_need_no_step_and_what_is_not_finite_is_marked() -> None:
    x, center = vectors(64)
    x[0, 0, 1] = center[0, 0]
    x[0, 1, 2, 5], x[1, 2, 3, 0] = float("nan"), float("inf")
    result = codecs.encode(x, center, LearnedCodec(2, 64, basis=basis_of(64)))
    assert result.steps[0, 0, 1] == 0
    assert result.steps.isnan().nonzero().tolist() == [[0, 1, 2], [1, 2, 3]]


def test_directions_that_never_varied_cost_nothing() -> None:
    """A spectrum that ends: the last half of the directions is empty."""
    directions, deviation = rotations(64), deviations(64).double()
    deviation[:, 32:] = 0.0
    basis = Basis.of(directions.mT @ torch.diag_embed(deviation**2) @ directions)
    near = torch.randn(2, H, 300, 64, generator=torch.Generator().manual_seed(0)) * deviation.float().unsqueeze(1)
    x = near @ directions.float()
    slots = coded(x, x.mean(2), LearnedCodec(2, 64, basis=basis), 1)
    back = slots.decoded(torch.float32)
    assert back.isfinite().all()
    assert ((back - x).square().mean((0, 2, 3)) < 0.05 * x.square().mean((0, 2, 3))).all()


# attention


def call_of(
    key_bits: int, value_bits: int, size: int, slots: int, group: int, exact: int, dtype: torch.dtype,
    device: torch.device, learned_values: bool = True,
) -> Arguments:  # fmt: skip
    torch.manual_seed(slots)
    basis, parts = basis_of(size), []
    for bits, common, learned in ((key_bits, 3.0, True), (value_bits, 1.0, learned_values)):
        x, center = (part.to(device) for part in vectors(size, slots, dtype, common))
        codec = LearnedCodec(bits, size, basis=basis) if learned else Codec(bits, size)
        parts.append(coded(x, center, codec, exact))
    q = (torch.randn(2, H * group, 1, size, device=device) * 0.3).to(dtype)
    weights = torch.randn(2, H, slots, device=device)
    weights[:, :, -5:] = float("-inf")
    return Arguments(q, parts[0], parts[1], weights, weights, size**-0.5)


def test_attention_reads_codes_as_what_they_stand_for() -> None:
    call = call_of(3, 2, 64, 50, 2, 4, torch.float32, torch.device("cpu"))
    k, v = (part.decoded(torch.float32) for part in (call.k, call.v) if isinstance(part, CodedSlots))
    ours, theirs = (attention_reference.weighted_attention(each) for each in (call, call._replace(k=k, v=v)))
    torch.testing.assert_close(ours.out, theirs.out, atol=1e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    ("keys", "values", "size", "group", "exact", "learned"),
    [(3, 2, 64, 2, 4, True), (2, 4, 80, 7, 3, False), (4, 3, 128, 1, 0, True)],
)
def test_the_program_in_c_reads_what_the_reference_reads(
    keys: int, values: int, size: int, group: int, exact: int, learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvsketch.ops.weighted_attention import native as attention_native

    call = call_of(keys, values, size, 50, group, exact, torch.float32, torch.device("cpu"), learned)
    lengths = torch.tensor([[50, 43, 30]] * 2)
    call = call._replace(lengths=lengths, sink_logits=torch.randn(H * group), return_logits=True)
    assert attention_native.supported(call)
    theirs = attention_reference.weighted_attention(call)
    poison(monkeypatch)
    ours = attention_native.weighted_attention(call)
    torch.testing.assert_close(ours.out, theirs.out, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(ours.log_sum_num, theirs.log_sum_num, atol=1e-3, rtol=1e-4)


@needs_compiler
def test_programs_in_c_that_encode_leave_learned_directions_to_the_reference() -> None:
    """They know one rotation for all heads, and would write other numbers."""
    from kvsketch.ops.codec import native as codec_native
    from kvsketch.ops.slot_update import native as update_native
    from kvsketch.ops.weighted_attention import native as attention_native

    call = call_of(3, 2, 64, 50, 2, 4, torch.float32, torch.device("cpu"))
    assert isinstance(call.k, CodedSlots) and isinstance(call.k.codec, LearnedCodec)
    assert not codec_native.supported(call.k.codec) and not update_native._fits(call.k, call.q)
    # Rows that are layers have directions of their own.
    layers = replace(call.k, codec=call.k.codec.of_layers([call.k.codec] * 2))
    assert not attention_native.supported(call._replace(k=layers))
    ours, theirs = (attention_reference.weighted_attention(call._replace(k=k)).out for k in (layers, call.k))
    torch.testing.assert_close(ours, theirs)


KERNEL_CALLS = [
    # key and value bits, size, slots, group, exact, dtype, values in learned directions too
    (2, 2, 64, 63, 1, 4, torch.bfloat16, True),
    (3, 2, 80, 70, 2, 3, torch.float32, True),
    (4, 3, 128, 90, 4, 4, torch.bfloat16, True),
    (2, 2, 64, 37, 7, 4, torch.bfloat16, False),
    (3, 4, 64, 150, 8, 0, torch.float16, True),
]


@needs_triton
@pytest.mark.parametrize(("keys", "values", "size", "slots", "group", "exact", "dtype", "learned"), KERNEL_CALLS)
def test_the_kernel_reads_what_the_reference_reads(
    keys: int, values: int, size: int, slots: int, group: int, exact: int, dtype: torch.dtype, learned: bool,
    device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from kvsketch.ops.weighted_attention import kernel

    call = call_of(keys, values, size, slots, group, exact, dtype, device, learned)
    lengths = torch.tensor([[slots, slots - 7, slots - 20]] * 2, device=device)
    options: dict[str, Any] = {"sink_logits": torch.randn(H * group, device=device), "lengths": lengths}
    call = call._replace(log_den=call.log_den + 0.1, clip=0.5, return_logits=True, **options)  # type: ignore[operator]
    theirs = attention_reference.weighted_attention(call)
    poison(monkeypatch)
    ours = kernel.weighted_attention(call)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    assert relative_error(ours.out.float(), theirs.out.float()) < tolerance
    torch.testing.assert_close(ours.log_sum_num, theirs.log_sum_num, atol=5e-3, rtol=1e-4)
    # Queries and exact keys are taken in two halves.
    torch.testing.assert_close(ours.logits, theirs.logits, atol=5e-3, rtol=1e-4)


@needs_triton
def test_the_kernel_reads_heads_of_different_size_from_a_flat_store(device: torch.device) -> None:
    from kvsketch.ops.weighted_attention import kernel

    size, capacity = 64, torch.tensor([[70, 9, 130], [40, 150, 20]], device=device)
    layout = Layout.of(capacity, coded=True)
    at = torch.arange(150, device=device)
    parts = []
    for bits, common in ((3, 3.0), (2, 1.0)):
        x, center = (part.to(device) for part in vectors(size, 150, torch.bfloat16, common))
        slots = coded(x, center, LearnedCodec(bits, size, basis=basis_of(size)), 4)
        there = at < capacity.unsqueeze(-1)
        parts.append(replace(slots, codes=slots.codes[there], steps=slots.steps[there]))
    weights = torch.randn(int(capacity.sum()), device=device)
    q = torch.randn(2, 2 * H, 1, size, device=device).bfloat16()
    call = Arguments(q, parts[0], parts[1], weights, weights, size**-0.5, ragged=layout)
    ours, theirs = kernel.weighted_attention(call), attention_reference.weighted_attention(call)
    assert relative_error(ours.out.float(), theirs.out.float()) < 1e-2


@needs_triton
def test_kernels_that_rotate_by_a_hadamard_matrix_leave_learned_directions_alone() -> None:
    from kvsketch.ops.codec import kernel as codec_kernel
    from kvsketch.ops.slot_update import kernel as update_kernel

    call = call_of(4, 4, 64, 50, 2, 4, torch.bfloat16, torch.device("cpu"))
    assert isinstance(call.k, CodedSlots) and isinstance(call.v, CodedSlots)
    assert not codec_kernel.supported(call.k.codec) and not update_kernel.supported(call.k, call.v)


def test_shares_have_the_promised_mean_and_are_the_best_that_one_more_swap_can_find() -> None:
    variance = deviations(64) ** 2
    shares = shares_of(variance)
    assert shares.sum() == 32 and shares.max() <= MOST_GROUP_BITS and (shares.diff() <= 0).all()
    group = (variance / variance.sum(-1, keepdim=True)).mean(0).view(16, -1).sum(-1)

    def lost(bits: Tensor) -> float:
        return float((group * torch.tensor([ERRORS[int(each)] for each in bits])).sum())

    for more in range(16):
        for less in range(16):
            other = shares.clone()
            other[more] += 1
            other[less] -= 1
            if other.min() >= 0 and other.max() <= MOST_GROUP_BITS:
                assert lost(other) >= lost(shares) - 1e-9
    flat = shares_of(torch.ones(3, 64))
    assert (flat == 2).all()
    with pytest.raises(ValueError, match="heads of size 72 have no 16 groups of directions; use basis=random"):
        shares_of(torch.ones(3, 72))
