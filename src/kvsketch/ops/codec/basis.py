"""Codes in learned directions: bits go where vectors vary.

A random rotation makes all channels equally large, and each then needs the same bits. Keys after rotary embedding and
values vary much more in some directions than in others. With E the principal directions of a KV head, learned once for
a model (`kvsketch fit`), d the deviations along them and b their bits,

    u = E (x - center) / d,    g = rms of u over directions with bits
    c = clamp(floor(u / (g t_b) + 2^(b-1)), 0, 2^b - 1),    z = c - (2^b - 1) / 2
    step = sum d^2 u t z / sum d^2 (t z)^2,    x^ = center + M' (step z),    M = diag(d t_b) E

so that <q, x^> = <q, center> + step <M q, z>: M takes the place of the rotation R of `Codec`, with one matrix for each
head. Directions stand in the order of their deviation and have bits by their place, a sixteenth of them at a time: the
keys of all heads of a model have codes of one layout, and so have the values. Of a direction without bits nothing is
stored.

Codes of a channel with b bits lie in fields of 4, 2 and 1 bits, those of 4 first: no field is in two bytes.
Legend: D size of a vector, H heads.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.codec import Codec

LEARNED_BITS = (2, 3, 4)
SHARES = 16  # groups of directions that have bits of their own
LEAST_MEAN_BITS = LEARNED_BITS[0]  # the mean for which `Basis.shares` are; more bits are as many more in each group
MOST_GROUP_BITS = 4  # bits of a group then
# Best uniform step for a normal variable, and the error it leaves, by bits (Max 1960); without bits the deviation.
STEPS = {0: 1.0, 1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041}
ERRORS = {0: 1.0, 1: 0.3634, 2: 0.1188, 3: 0.03744, 4: 0.01154, 5: 0.00349, 6: 0.00104}
FIELDS = (4, 2, 1)  # widths
BASIS_PARTS = ("directions", "deviation", "shares")  # tensors of a `Basis`
FLOOR = 1e-3  # deviations are at least so much of a head's largest
FRACTION = 2.0**20  # directions are multiples of its inverse, so that their products with integers of 16 bits are exact


@dataclass(frozen=True, eq=False)
class Basis:
    """Directions of the keys or values of each head of a layer, as a file holds them; [L, H, ...]: of layers."""

    directions: Tensor  # [H, D, D] int8, a row for each direction and multiples of it; the largest deviation first
    deviation: Tensor  # [H, D] float32
    shares: Tensor  # [16] int8, bits of each group of directions where the mean is `LEAST_MEAN_BITS`

    def __post_init__(self) -> None:
        shape = [*self.deviation.shape]
        if [*self.directions.shape] != [*shape, shape[-1]] or self.directions.dtype != torch.int8:
            raise ValueError(
                f"directions {self.directions.dtype} {[*self.directions.shape]} and deviation {shape} are not int8 "
                "[H, D, D] and [H, D]"
            )
        shares = self.shares.tolist()
        fits = (
            len(shares) == SHARES
            and sum(shares) == SHARES * LEAST_MEAN_BITS
            and min(shares) >= 0
            and max(shares) <= MOST_GROUP_BITS
        )
        if not fits or shares != sorted(shares, reverse=True):
            raise ValueError(
                f"shares {shares} are not {SHARES} falling numbers up to {MOST_GROUP_BITS} "
                f"with the mean {LEAST_MEAN_BITS}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Basis:
        return self

    @classmethod
    def of(cls, covariance: Tensor) -> Basis:
        """The principal directions of vectors with these covariances [H, D, D], with shares of their own."""
        covariance = covariance.double().cpu()
        rows = torch.linalg.eigh(covariance).eigenvectors.mT.flip(-2)
        rounded = (rows * (127 / rows.abs().amax(-1, keepdim=True))).round().to(torch.int8)
        near = orthonormal(rounded)
        variance = (near @ covariance @ near.mT).diagonal(dim1=-2, dim2=-1).clamp_min(0)
        return cls(rounded.contiguous(), variance.sqrt().float().contiguous(), shares_of(variance))

    def same(self, other: Basis) -> bool:
        """Whether vectors have the same codes."""
        return self is other or all(torch.equal(getattr(self, p), getattr(other, p)) for p in BASIS_PARTS)

    def heads(self, first: int, count: int) -> Basis:
        """Those of the heads from `first` on."""
        if (first, count) == (0, len(self.deviation)):
            return self
        heads = slice(first, first + count)
        return replace(self, directions=self.directions[heads], deviation=self.deviation[heads])


@dataclass(frozen=True, eq=False)
class Bases:
    """Those of the layers of a model; layers without one are rotated at random. Copies of a cache share them."""

    keys: Mapping[int, Basis]
    values: Mapping[int, Basis]

    def __deepcopy__(self, memo: dict[int, Any]) -> Bases:
        return self


def shares_of(variance: Tensor) -> Tensor:  # [16] int8
    """Bits of each group of directions with which heads with these variances [.., D] lose the smallest part on average.

    Bit by bit to the group that gains most; a larger direction never has fewer.
    """
    share = variance.double().flatten(0, -2)
    share = (share / share.sum(-1, keepdim=True).clamp_min(1e-30)).mean(0)
    if len(share) % SHARES:
        raise ValueError(f"heads of size {len(share)} have no {SHARES} groups of directions; use basis=random")
    group = share.view(SHARES, -1).sum(-1).tolist()
    bits = [0] * SHARES
    for _ in range(SHARES * LEAST_MEAN_BITS):
        free = [i for i in range(SHARES) if bits[i] < (bits[i - 1] if i else MOST_GROUP_BITS)]
        best = max(free, key=lambda i: group[i] * (ERRORS[bits[i]] - ERRORS[bits[i] + 1]))
        bits[best] += 1
    return torch.tensor(bits, dtype=torch.int8)


def orthonormal(directions: Tensor) -> Tensor:  # [H, D, D] float64
    """Orthonormal rows near directions [H, D, D] of any length, one after the other."""
    q, r = torch.linalg.qr(directions.double().cpu().mT)
    return (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT.contiguous()


class Layout(NamedTuple):
    """Where the levels of a vector lie in its codes, [D] int64 each: one field, and for 3, 5 and 6 bits a second."""

    byte: Tensor
    shift: Tensor
    mask: Tensor
    second_byte: Tensor
    second_shift: Tensor
    second_mask: Tensor
    up: Tensor  # by how many bits the second field stands above the first


class Parts(NamedTuple):
    """What coding needs, on one device."""

    integers: Tensor  # [H, D, D] float64, E in multiples of 1 / FRACTION
    unit: Tensor  # [H, 1, D] float64: y times it is u / t
    deviation: Tensor  # [H, 1, D] float64
    steps: Tensor  # [D] float64, t_b
    bits: Tensor  # [D] float64
    half: Tensor  # [D] float32, z = c - half
    back: Tensor  # [H, D, D] float32, M
    layout: Layout
    fields: Tensor  # [8, D] int32: `layout`, and -2 half


@dataclass(frozen=True)
class LearnedCodec(Codec):
    """How vectors are coded in the directions of a basis; `bits` is the mean over channels, and exact."""

    basis: Basis = field(kw_only=True, repr=False)
    held: dict[torch.device, Parts] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in LEARNED_BITS:
            raise ValueError(
                f"bits={self.bits} cannot be coded in learned directions; use {', '.join(map(str, LEARNED_BITS))}, or "
                "basis=random"
            )
        if self.basis.deviation.shape[-1] != self.size:
            raise ValueError(f"the basis is one of size {self.basis.deviation.shape[-1]}, the vectors of {self.size}")

    def __deepcopy__(self, memo: dict[int, Any]) -> LearnedCodec:
        return self

    @property
    def learned(self) -> bool:
        return True

    @property
    def block(self) -> int:
        # No Hadamard matrix: kernels that rotate by one do not serve it.
        return 1

    @property
    def bits_of_channels(self) -> tuple[int, ...]:
        """Bits of each direction."""
        more = self.bits - LEAST_MEAN_BITS
        return tuple(bits + more for bits in self.basis.shares.tolist() for _ in range(self.size // SHARES))

    def of_layers(self, others: Sequence[LearnedCodec]) -> LearnedCodec:
        """One whose batch rows are layers, each with the directions of its own codec."""
        assert all(torch.equal(each.basis.shares, self.basis.shares) for each in others)
        directions, deviation = (
            torch.stack([getattr(each.basis, name) for each in others]) for name in BASIS_PARTS[:2]
        )
        return replace(self, basis=Basis(directions, deviation, self.basis.shares))

    def parts(self, device: torch.device) -> Parts:
        if device not in self.held:
            # They outlive the mode of the call that needs them first.
            with torch.inference_mode(False), torch.no_grad():
                self.held[device] = self._made(device)
        return self.held[device]

    def _made(self, device: torch.device) -> Parts:
        bits = torch.tensor(self.bits_of_channels, dtype=torch.float64)
        steps = torch.tensor([STEPS[b] for b in self.bits_of_channels], dtype=torch.float64)
        deviation = self.basis.deviation.double().cpu()
        deviation = deviation.clamp_min(1e-20).maximum(FLOOR * deviation.amax(-1, keepdim=True)).unsqueeze(-2)
        directions = orthonormal(self.basis.directions)
        half = torch.where(bits > 0, (2.0**bits - 1) / 2, 0.0)
        layout = layout_of(self.bits_of_channels)
        return Parts(
            integers=(directions * FRACTION).round().to(device),
            unit=(1.0 / (deviation * steps * FRACTION)).to(device),
            deviation=deviation.to(device),
            steps=steps.to(device),
            bits=bits.to(device),
            half=half.float().to(device),
            back=(directions * (deviation * steps).mT).float().contiguous().to(device),
            layout=Layout(*(part.to(device) for part in layout)),
            fields=torch.stack([*layout, (-2 * half).long()]).int().to(device),
        )

    def rotation(self, device: torch.device) -> Tensor:  # [H, D, D] float32
        """M: M q is what meets the numbers z, and M' takes sums of them back."""
        return self.parts(device).back

    def rotated(self, x: Tensor) -> Tensor:  # [B, H, n, D] float32
        """The numbers that stand for vectors without their center, not rounded."""
        parts = self.parts(x.device)
        return ((x.double() @ parts.integers.mT) * parts.unit).float()

    def numbers(self, codes: Tensor) -> Tensor:  # [..., D] float32
        parts = self.parts(codes.device)
        at = parts.layout
        low = (codes[..., at.byte].int() >> at.shift) & at.mask
        high = (codes[..., at.second_byte].int() >> at.second_shift) & at.second_mask
        return (low + (high << at.up)).float() - parts.half

    def fields(self, device: torch.device) -> Tensor:  # [8, D] int32
        """Where levels lie, and twice the number of the level 0, as programs read them."""
        return self.parts(device).fields

    def packed(self, levels: Tensor) -> Tensor:  # [..., bytes] uint8
        """Levels [..., D] uint8 as codes."""
        at, levels = self.parts(levels.device).layout, levels.int()
        codes = torch.zeros(*levels.shape[:-1], self.code_bytes, dtype=torch.int32, device=levels.device)
        codes.index_add_(-1, at.byte, ((levels & at.mask) << at.shift).int())
        codes.index_add_(-1, at.second_byte, (((levels >> at.up) & at.second_mask) << at.second_shift).int())
        return codes.to(torch.uint8)


@functools.lru_cache(maxsize=64)
def layout_of(bits: tuple[int, ...]) -> Layout:
    """Where levels of so many bits lie."""
    fields: list[list[tuple[int, int, int]]] = [[] for _ in bits]  # byte, shift, width
    end = 0
    for width in FIELDS:
        for channel, own in enumerate(bits):
            if own & width:
                fields[channel].append((end // 8, end % 8, width))
                end += width
    assert end == sum(bits) and all(len(own) < 3 for own in fields)
    rows = []
    for place in fields:
        (byte, shift, width), (byte_2, shift_2, width_2) = (*place, *[(0, 0, 0)] * 2)[:2]
        rows.append((byte, shift, 2**width - 1, byte_2, shift_2, 2**width_2 - 1, width))
    return Layout(*torch.tensor(rows).T.contiguous())
