"""Keys or values of slots: in the dtype of the model, or quantised. A table moves and writes both by the same verbs.

`ops.codec` says what codes are. The center of a quantised head is the mean of its first prompt, without the first
tokens of the text: those have keys unlike all others, carry most attention, and stay exact. Codes never change when
slots move, so nothing is rounded twice. Several new tokens stay as they came until the method has chosen among them: it
scores exact keys, codes are what stays.
Legend: as in `table`; E tokens that stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvsketch.layer_bytes import AUTO, EXACT, FEW, MANY, MIN_TOKENS_TO_QUANTISE, SPARE, UNQUANTISED
from kvsketch.ops import codec as codecs
from kvsketch.ops.codec import Codec, CodedSlots
from kvsketch.ops.codec.basis import LEARNED_BITS, Bases, Basis, LearnedCodec
from kvsketch.slots import padding as left_padding
from kvsketch.slots import tensors

MOST_MANY = SPARE * 2 * FEW / (MANY - FEW)  # of all keys, that then have MANY bits


@dataclass(frozen=True)
class QuantBits:
    """How many bits a key and a value have, and in which directions."""

    keys: int = UNQUANTISED
    values: int = UNQUANTISED
    bases: Bases | None = None  # learned ones; None: vectors are rotated at random

    def basis(self, what: str, layer: int, first: int, heads: int) -> Basis | None:
        """That of the `keys` or `values` of the heads of a layer from `first` on; None: they are rotated at random."""
        if self.bases is None or getattr(self, what) not in LEARNED_BITS:
            return None
        own: Basis | None = getattr(self.bases, what).get(layer)
        return None if own is None else own.heads(first, heads)

    def __bool__(self) -> bool:
        return self.keys != UNQUANTISED or self.values != UNQUANTISED

    @property
    def pair(self) -> tuple[int, int]:
        return self.keys, self.values

    @property
    def auto(self) -> bool:
        """Whether a prompt chooses the bits of keys."""
        return self.keys == AUTO


@dataclass
class PlainSlots:
    """Keys or values in the dtype of the model, [B, H, S, D], or [N, D] of a flat store."""

    read: Tensor  # what kernels read

    @property
    def empty(self) -> bool:
        """Whether there is no row: no token has come."""
        return len(self.read) == 0

    @property
    def shape(self) -> torch.Size:
        return self.read.shape

    @property
    def device(self) -> torch.device:
        return self.read.device

    @property
    def dtype(self) -> torch.dtype:
        return self.read.dtype

    def plain(self) -> Tensor:  # [B, H, S, D]
        """All vectors."""
        return self.read

    def part(self, start: int, end: int) -> Tensor:  # [B, H, end - start, D]
        """The vectors of the slots [start, end)."""
        return self.read[:, :, start:end]

    def at(self, slots: Tensor, behind: int | None = None) -> Tensor:  # [B, H, m, D]
        """The vectors of the slots [B, H, m]; `behind`: those of the newest tokens, in order, but for the last of them.

        May be a part of what is held.
        """
        return tensors.gather_slots(self.read, slots)

    def coded(self, bits: int, padding: Tensor | None, like: Slots | None = None, basis: Basis | None = None) -> Slots:
        """The slots in `bits` bits. Plain slots store a text in order, behind left `padding` [B].

        like: slots of a text that this one continues, around whose center it is coded. basis: directions in which
        vectors are coded; None: they are rotated at random.
        """
        if bits == UNQUANTISED:
            return self
        return like.around(self.read) if isinstance(like, SlotCodes) else coded(self.read, bits, padding, basis)

    def tensors(self) -> list[Tensor]:
        """Every tensor that they consist of."""
        return [self.read]

    def slot_parts(self) -> dict[str, Tensor]:
        """What follows the slots, by name."""
        return {"": self.read}

    def head_parts(self) -> dict[str, Tensor]:
        """What follows the heads, [B, H, ...], by name."""
        return {}

    def with_parts(self, parts: Mapping[str, Tensor]) -> PlainSlots:
        """The same with other tensors of these names."""
        return PlainSlots(parts[""])

    def moved(self, move: Callable[[Tensor], Tensor]) -> PlainSlots:
        """With what `move` makes of all that follows the slots."""
        return PlainSlots(move(self.read))

    def gathered(self, source: Tensor | None) -> PlainSlots:
        """The slots `source` [B, H, m], in this order; no slot twice, negative: any. None: all of them."""
        return self if source is None else PlainSlots(self.at(source.clamp_min(0)))

    def packed(self, pack: Callable[[Tensor], Tensor], to: Tensor | None = None) -> PlainSlots:
        """Slots of equal heads in a flat store, into which `pack` brings tensors; `to` [B, H, S]: their new numbers in
        the head, -1 for those that go, None: as they are.
        """
        return self.moved(pack)

    def inserted(self, at: int, new: Tensor) -> PlainSlots:
        """With new vectors [B, H, n, D] from slot `at` on."""
        return PlainSlots(tensors.inserted(self.read, at, new))

    def removed(self, start: int, end: int) -> PlainSlots:
        """Without the slots [start, end); of coded ones those that are not coded yet."""
        return PlainSlots(tensors.removed(self.read, start, end))

    def narrowed(self, bits: int) -> PlainSlots:
        """What is coded in fewer bits around the same center; what is exact or not coded yet stays."""
        return self

    def exact_before(self, end: int) -> PlainSlots:
        """With exact vectors before slot `end` alone: kernels know one list of them for keys and values."""
        return self

    def copied(self, new: Slots) -> Slots:
        """These slots with the content of `new`, at the same addresses if they are alike; else `new`."""
        return PlainSlots(self.read.copy_(new.plain())) if _alike(self, new) else new

    def with_vectors(self, at: Tensor, x: Tensor) -> PlainSlots:
        """With the vectors x [B, H, m, D] in the slots `at` [B, H, m], negative: none."""
        return PlainSlots(_scattered(self.read, at, x.to(self.dtype)))

    def write(self, at: Tensor, x: Tensor) -> None:
        """Writes vectors x [B, H, n, D] to the places `at` [B H n] of a flat store, in place."""
        self.read.index_copy_(0, at, x.to(self.dtype).flatten(0, 2))

    def rows(self, rows: Tensor) -> PlainSlots:
        """The batch rows `rows`."""
        return PlainSlots(self.read.index_select(0, rows.to(self.device)))


@dataclass
class SlotCodes(CodedSlots):
    """The same, quantised; behind those that carry both, new ones that are not coded yet."""

    dtype: torch.dtype = torch.float32  # of what they stand for
    fresh: Tensor | None = None  # [B, H, n, D]
    tail: int = 0  # slots behind the new ones: those of a table that carry a key only

    @property
    def read(self) -> SlotCodes:
        return self

    @property
    def fresh_at(self) -> int:
        """Slots before the new ones."""
        return self.steps.shape[2] - self.tail

    @property
    def device(self) -> torch.device:
        return self.steps.device

    @property
    def empty(self) -> bool:
        return len(self.steps) == 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, slots = self.steps.shape
        return batch, heads, slots + (0 if self.fresh is None else self.fresh.shape[2]), self.codec.size

    def plain(self) -> Tensor:
        decoded = self.decoded(self.dtype)
        return decoded if self.fresh is None else tensors.inserted(decoded, self.fresh_at, self.fresh)

    def part(self, start: int, end: int) -> Tensor:
        if self.fresh is not None:
            return self.plain()[:, :, start:end]
        slots = torch.arange(start, end, device=self.device).expand(*self.shape[:2], -1)
        return self.decoded_at(slots, self.dtype)

    def at(self, slots: Tensor, behind: int | None = None) -> Tensor:
        if self.fresh is None:
            return self.decoded_at(slots, self.dtype)
        if behind is not None:
            end = max(0, self.fresh.shape[2] - behind)
            fresh = self.fresh[:, :, max(0, end - slots.shape[2]) : end]
            coded = slots[:, :, : slots.shape[2] - fresh.shape[2]]
            return torch.cat([self.decoded_at(coded, self.dtype), fresh], 2) if coded.shape[2] else fresh
        first, new = self.fresh_at, self.fresh.shape[2]
        is_fresh = (slots >= first) & (slots < first + new)
        decoded = self.decoded_at(torch.where(is_fresh, 0, torch.where(slots < first, slots, slots - new)), self.dtype)
        fresh = tensors.gather_slots(self.fresh, (slots - first).clamp(0, new - 1))
        return torch.where(is_fresh.unsqueeze(-1), fresh, decoded)

    def coded(
        self, bits: int = 0, padding: Tensor | None = None, like: Slots | None = None, basis: Basis | None = None
    ) -> SlotCodes:
        if self.fresh is None:
            return self
        new = codecs.encode(self.fresh, self.center, self.codec)
        codes, steps = (
            tensors.inserted(held, self.fresh_at, added)
            for held, added in ((self.codes, new.codes), (self.steps, new.steps))
        )
        return replace(self, codes=codes, steps=steps, fresh=None, tail=0)

    def around(self, vectors: Tensor) -> SlotCodes:
        """Vectors around the center of these slots, of one row; none of them stays exact."""
        rows = len(vectors)
        center = self.center.expand(rows, -1, -1).contiguous()
        exact = torch.zeros_like(self.exact[:, :, :EXACT]).expand(rows, -1, -1, -1).contiguous()
        at = torch.full_like(self.exact_at[:, :, :EXACT], -1).expand(rows, -1, -1).contiguous()
        return replace(
            self, center=center, exact=exact, exact_at=at, fresh=None, tail=0, dtype=vectors.dtype,
            **codecs.encode(vectors, center, self.codec)._asdict(),
        )  # fmt: skip

    def parts(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        return {name: getattr(self, name) for name in PARTS if getattr(self, name) is not None}

    def tensors(self) -> list[Tensor]:
        return [*self.parts().values()]

    def slot_parts(self) -> dict[str, Tensor]:
        return {".codes": self.codes, ".steps": self.steps}

    def head_parts(self) -> dict[str, Tensor]:
        return {".center": self.center, ".exact": self.exact, ".exact_at": self.exact_at}

    def with_parts(self, parts: Mapping[str, Any]) -> SlotCodes:
        return replace(self, **{name.removeprefix("."): part for name, part in parts.items()})

    def moved(self, move: Callable[[Tensor], Tensor]) -> SlotCodes:
        return replace(self, codes=move(self.codes), steps=move(self.steps))

    def gathered(self, source: Tensor | None) -> SlotCodes:
        slots = self.coded()
        if source is None:
            return slots
        moved = source.unsqueeze(-1) == slots.exact_at.unsqueeze(2)  # [B, H, m, E]
        at = torch.where(moved.any(2) & (slots.exact_at >= 0), moved.int().argmax(2), -1).int()
        there = source.clamp_min(0)
        return replace(slots.moved(lambda part: tensors.gather_slots(part, there)), exact_at=at)

    def packed(self, pack: Callable[[Tensor], Tensor], to: Tensor | None = None) -> SlotCodes:
        slots = self.coded()
        if to is None:
            return slots.moved(pack)
        at = to.gather(2, slots.exact_at.clamp_min(0).long()).masked_fill_(slots.exact_at < 0, -1)
        return replace(slots.moved(pack), exact_at=at.int())

    def inserted(self, at: int, new: Tensor) -> SlotCodes:
        # A view would keep what it is a part of, such as the queries, keys and values of one product.
        fresh = tensors.owned(new) if self.fresh is None else torch.cat([self.fresh, new], 2)
        return replace(self, fresh=fresh, tail=self.shape[2] - at)

    def removed(self, start: int, end: int) -> SlotCodes:
        assert self.fresh is not None and start >= self.fresh_at
        left = tensors.removed(self.fresh, start - self.fresh_at, end - self.fresh_at)
        return replace(self, fresh=left) if left.shape[2] else replace(self, fresh=None, tail=0)

    def narrowed(self, bits: int) -> SlotCodes:
        if bits == self.codec.bits:
            return self
        codec, steps = replace(self.codec, bits=bits), self.steps.float().unsqueeze(-1)
        rotated = self.codec.numbers(self.codes) * steps
        vectors = (rotated @ self.codec.rotation(self.device)).view(1, 1, -1, codec.size)
        new = codecs.encode(vectors, vectors.new_zeros(1, 1, codec.size), codec)
        codes = new.codes.view(*self.codes.shape[:-1], codec.code_bytes)
        return replace(self, codec=codec, codes=codes, steps=new.steps.view(self.steps.shape))

    def exact_before(self, end: int) -> SlotCodes:
        return replace(self, exact_at=self.exact_at.masked_fill(self.exact_at >= end, -1))

    def copied(self, new: Slots) -> Slots:
        if not _alike(self, new):
            return new
        for name in ("codes", "steps", "exact_at"):
            getattr(self, name).copy_(getattr(new, name))
        return self

    def with_vectors(self, at: Tensor, x: Tensor) -> SlotCodes:
        coded, fresh = self.steps.shape[2], self.fresh
        if fresh is not None:
            fresh = _scattered(fresh, at - coded, x.to(fresh.dtype))
        at, new = torch.where(at < coded, at, -1), codecs.encode(x, self.center, self.codec)
        codes, steps = _scattered(self.codes, at, new.codes), _scattered(self.steps, at, new.steps)
        return replace(self, codes=codes, steps=steps, fresh=fresh)

    def write(self, at: Tensor, x: Tensor) -> None:
        place = at.view(x.shape[:3])
        codecs.encode_into(codecs.Coded(self.codes, self.steps), x, self.center, self.codec, place)

    def rows(self, rows: Tensor) -> SlotCodes:
        rows = rows.to(self.device)
        return self.with_parts({name: part.index_select(0, rows) for name, part in self.parts().items()})

    def misfit(self) -> str:
        """What is wrong with one that came out of a file; empty: nothing."""
        rows, slots = tuple(self.center.shape[:2]), tuple(self.steps.shape)  # [B, H, S], or [N] of a flat store
        count = self.exact.shape[2] if self.exact.dim() == 4 else 0
        wanted = {
            "center": ((*rows, self.codec.size), torch.float32),
            "exact": ((*rows, count, self.codec.size), torch.float32),
            "exact_at": ((*rows, count), torch.int32),
            "codes": ((*slots, self.codec.code_bytes), torch.uint8),
            "steps": (slots, codecs.STEP_DTYPE),
        }
        for name, (shape, dtype) in wanted.items():
            part = getattr(self, name)
            if tuple(part.shape) != shape or part.dtype != dtype:
                return f"{name} is {part.dtype} {list(part.shape)} in place of {dtype} {list(shape)}"
        if self.fresh is not None and (self.fresh.dim() != 4 or self.fresh.shape[:2] != rows):
            return f"fresh is {list(self.fresh.shape)} beside {list(rows)} rows and heads"
        if type(self.tail) is not int or not 0 <= self.tail <= slots[-1]:
            return f"tail={self.tail!r} beside {slots[-1]} slots"
        if len(slots) not in (1, 3) or (len(slots) == 3 and slots[:2] != rows):
            return f"steps of the shape {list(slots)} beside {list(rows)} rows and heads"
        if count and not -1 <= int(self.exact_at.min()) <= int(self.exact_at.max()) < slots[-1]:
            return f"exact_at holds numbers outside -1 to {slots[-1] - 1}"
        return ""


Slots: TypeAlias = PlainSlots | SlotCodes  # keys or values of slots
PARTS = ("center", "exact", "exact_at", "codes", "steps", "fresh")


def _alike(slots: Slots, new: Any) -> bool:
    return type(slots) is type(new) and slots.shape == new.shape


def _scattered(slots: Tensor, at: Tensor, new: Tensor) -> Tensor:
    # One slot more takes what is to go nowhere.
    place = torch.where(at < 0, slots.shape[2], at).view(*at.shape, *[1] * (slots.dim() - 3)).expand(new.shape)
    return tensors.filled(slots, 1).scatter(2, place, new)[:, :, :-1]


def has_short_rows(slots: Slots) -> bool:
    """Whether rows may be exact that are too short for codes."""
    return isinstance(slots, SlotCodes) and slots.exact.shape[2] > EXACT


def other_directions(slots: Slots, others: Slots) -> bool:
    """Whether codes of one mean other vectors than those of the other, for they were coded in other directions."""
    if not isinstance(slots, SlotCodes) or not isinstance(others, SlotCodes):
        return False
    own, its = slots.codec, others.codec
    if isinstance(own, LearnedCodec) and isinstance(its, LearnedCodec):
        return not own.basis.same(its.basis)
    return own.learned != its.learned


def of_layers(layers: Sequence[Slots]) -> LearnedCodec | None:
    """The codec of slots whose batch rows are layers, each with the directions of its own; None: they have none."""
    own = [each.codec for each in layers if isinstance(each, SlotCodes) and isinstance(each.codec, LearnedCodec)]
    return own[0].of_layers(own) if own else None


def row_parts(slots: Slots) -> list[Tensor]:
    """What a slot consists of, as tensors [B, H, S, n]: the vector, or codes and step."""
    return [part if part.dim() == 4 else part.unsqueeze(-1) for part in slots.slot_parts().values()]


def of_parts(like: Slots, parts: Sequence[Tensor]) -> Slots:
    """Slots of these parts, with the center and the exact vectors of `like`."""
    held = like.slot_parts().items()
    own = {name: part.view(*part.shape[:3], *was.shape[3:]) for (name, was), part in zip(held, parts, strict=True)}
    return like.with_parts(own)


def arrange(slots: Slots, start: int, source: Tensor) -> None:
    """Puts the slots `source` [B, H, m] into those from `start` on, in place; none of them stays exact."""
    for part in row_parts(slots):
        batch, heads, count, size = part.shape
        head = torch.arange(batch * heads, device=part.device).view(batch, heads, 1)
        rows = part.reshape(-1, size).index_select(0, (head * count + source).flatten())
        part[:, :, start : start + source.shape[2]] = rows.view(*source.shape, size)


def coded(vectors: Tensor, bits: int, padding: Tensor | None, basis: Basis | None = None) -> SlotCodes:
    """A text in order, [B, H, S, D] behind left `padding` [B], in `bits` bits.

    Rows of fewer than MIN_TOKENS_TO_QUANTISE tokens beside others stay exact (`short_rows`).
    """
    size, center = vectors.shape[-1], center_of(vectors, padding)
    codec = Codec(bits, size) if basis is None else LearnedCodec(bits, size, basis=basis)
    slots = vectors.shape[2]
    is_short = padding is not None and slots - left_padding.most_of(padding) < MIN_TOKENS_TO_QUANTISE
    place = at = torch.arange(MIN_TOKENS_TO_QUANTISE if is_short else EXACT, device=vectors.device)
    in_front = padding is None and slots >= EXACT
    if not in_front:
        at = at if padding is None else at + padding.view(-1, 1, 1)
        at = torch.where(at < slots, at, -1)
    if is_short and padding is not None:
        at = torch.where((place < EXACT) | (slots - padding.view(-1, 1, 1) < MIN_TOKENS_TO_QUANTISE), at, -1)
    at = at.expand(*vectors.shape[:2], -1)  # where the first tokens of the text lie, -1: nowhere
    first = vectors[:, :, :EXACT] if in_front else tensors.gather_slots(vectors, at.clamp_min(0))
    exact = codec.rotated(first - center.unsqueeze(2))
    return SlotCodes(codec, center, exact, at.int(), *codecs.encode(vectors, center, codec), dtype=vectors.dtype)


def center_of(x: Tensor, padding: Tensor | None = None) -> Tensor:  # [B, H, D] float32
    """The mean of vectors [B, H, n, D], without the first tokens and left padding; of a short text the mean of all.

    A row of first tokens alone, or none yet, has the center of the other rows: what is common to keys is the model's.
    """
    if padding is None:
        return (x[:, :, EXACT:] if x.shape[2] > EXACT else x).mean(2, dtype=torch.float32)
    position = torch.arange(x.shape[2], device=x.device) - padding.view(-1, 1)  # [B, n]
    counted = torch.where((position >= EXACT).any(), position >= EXACT, position >= 0).view(len(x), 1, -1, 1)
    total, count = torch.where(counted, x, 0.0).sum(2, dtype=torch.float32), counted.sum(2)  # [B, H, D], [B, 1, 1]
    return torch.where(count > 0, total / count.clamp_min(1), total.sum(0) / count.sum(0).clamp_min(1))


def vector_bytes(like: Tensor, bits: int) -> int:
    """Bytes of one vector like these, [..., D], in `bits` bits."""
    plain = like.shape[-1] * like.element_size()
    return plain if bits == UNQUANTISED else Codec(bits, like.shape[-1]).code_bytes + codecs.STEP_DTYPE.itemsize


class NotFinite(ValueError):
    """A model has overflowed: what it makes of a text is nan or infinite."""


class FiniteCheck(NamedTuple):
    """Vectors of a layer that were coded, and may not be finite."""

    worst: Tensor  # the largest step, nan where a vector is not finite
    at: Tensor  # its number among all
    shape: tuple[int, ...]
    bits: int
    what: str
    layer: int

    @classmethod
    def of(cls, slots: SlotCodes, what: str, layer: int) -> FiniteCheck:
        return cls(*slots.steps.flatten().max(0), slots.steps.shape, slots.codec.bits, what, layer)

    def error(self) -> NotFinite:
        """Names the vector (synchronises with the GPU)."""
        _, heads, count = self.shape
        head, slot = divmod(int(self.at), count)
        return NotFinite(
            f"the {self.what} of slot {slot} in layer {self.layer}, batch row {head // heads}, head {head % heads} are "
            f"not finite and cannot be stored in {self.bits} bits; look for an overflow in the model (float16?), or "
            f"use bits={UNQUANTISED}"
        )
