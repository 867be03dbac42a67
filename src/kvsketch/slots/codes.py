"""Keys or values of slots in few bits: how a table makes, moves and writes them (`ops.codec` says what codes are).

The center of a head is the mean of its first prompt, without the first tokens of the text: those have keys unlike all
others, carry most attention, and stay exact. Codes never change when slots move, so nothing is rounded twice. Several
new tokens stay as they came until the method has chosen among them: it scores exact keys, codes are what stays.
Legend: as in `table`; E tokens that stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops import codec as codecs
from kvsketch.ops.codec import BITS, Codec, CodedSlots
from kvsketch.slots import tensors
from kvsketch.slots.layout import Layout

PLAIN = 16  # bits of what is not coded, whatever the dtype of the model
EXACT = 4  # first tokens of a text that stay exact
LEAST = 64  # tokens before which nothing is coded: a center needs some


@dataclass(frozen=True)
class FewBits:
    """How many bits a key and a value have."""

    keys: int = PLAIN
    values: int = PLAIN

    def __bool__(self) -> bool:
        return self.keys != PLAIN or self.values != PLAIN

    @property
    def pair(self) -> tuple[int, int]:
        return self.keys, self.values


@dataclass
class SlotCodes(CodedSlots):
    """The keys or values of a table, coded; behind those that carry both, new ones that are not coded yet."""

    dtype: torch.dtype = torch.float32  # of what they stand for
    fresh: Tensor | None = None  # [B, H, n, D]
    tail: int = 0  # slots behind the new ones: those of a table that carry a key only

    @property
    def coded(self) -> int:
        """Slots before the new ones."""
        return self.steps.shape[2] - self.tail

    @property
    def device(self) -> torch.device:
        return self.steps.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, slots = self.steps.shape
        return batch, heads, slots + (0 if self.fresh is None else self.fresh.shape[2]), self.codec.size

    def parts(self) -> dict[str, Tensor | None]:
        """What it consists of, by name."""
        return {name: getattr(self, name) for name in PARTS}

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
        if not 0 <= self.tail <= slots[-1]:
            return f"tail={self.tail} beside {slots[-1]} slots"
        if len(slots) not in (1, 3) or (len(slots) == 3 and slots[:2] != rows):
            return f"steps of the shape {list(slots)} beside {list(rows)} rows and heads"
        if count and not -1 <= int(self.exact_at.min()) <= int(self.exact_at.max()) < slots[-1]:
            return f"exact_at holds numbers outside -1 to {slots[-1] - 1}"
        return ""

    def plain(self) -> Tensor:  # [B, H, S, D]
        """All vectors, decoded, and the new ones as they are."""
        decoded = self.decoded(self.dtype)
        return decoded if self.fresh is None else tensors.inserted(decoded, self.coded, self.fresh)


PARTS = ("center", "exact", "exact_at", "codes", "steps", "fresh")
Slots: TypeAlias = Tensor | SlotCodes  # keys or values of slots [B, H, S, D]


def plain(slots: Slots) -> Tensor:  # [B, H, S, D]
    return slots if isinstance(slots, Tensor) else slots.plain()


def coded(slots: Slots, bits: int, padding: Tensor | None) -> Slots:
    """The slots in so many bits, whichever they have; slots that have all of theirs hold a text in order, behind left
    `padding` [B].
    """
    if bits == PLAIN:
        return slots
    if isinstance(slots, SlotCodes):
        return _all_coded(slots)
    codec, center = Codec(bits, slots.shape[-1]), center_of(slots, padding)
    at = first_tokens(EXACT, slots, padding)
    first = slots[:, :, :EXACT] if padding is None and slots.shape[2] >= EXACT else None
    first = tensors.gather_slots(slots, at.clamp_min(0)) if first is None else first
    exact = codec.rotated(first - center.unsqueeze(2))
    return SlotCodes(codec, center, exact, at.int(), *codecs.encode(slots, center, codec), dtype=slots.dtype)


def coded_like(slots: Tensor, like: SlotCodes) -> SlotCodes:
    """The slots around the center of another text's, which has one row; none of them stays exact."""
    rows = len(slots)
    center = like.center.expand(rows, -1, -1).contiguous()
    exact = torch.zeros_like(like.exact).expand(rows, -1, -1, -1).contiguous()
    at = torch.full_like(like.exact_at, -1).expand(rows, -1, -1).contiguous()
    return replace(
        like, center=center, exact=exact, exact_at=at, fresh=None, tail=0, dtype=slots.dtype,
        **codecs.encode(slots, center, like.codec)._asdict(),
    )  # fmt: skip


def first_tokens(count: int, slots: Tensor, padding: Tensor | None) -> Tensor:  # [B, H, count] int64
    """Where the first tokens of a text lie in slots [B, H, S, ...] that hold it in order; -1: nowhere."""
    at = torch.arange(count, device=slots.device)
    if padding is not None or slots.shape[2] < count:
        at = at if padding is None else at + padding.view(-1, 1, 1)
        at = torch.where(at < slots.shape[2], at, -1)
    return at.expand(*slots.shape[:2], -1)


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


def _all_coded(slots: SlotCodes) -> SlotCodes:
    if slots.fresh is None:
        return slots
    new = codecs.encode(slots.fresh, slots.center, slots.codec)
    codes, steps = (
        tensors.inserted(held, slots.coded, added)
        for held, added in ((slots.codes, new.codes), (slots.steps, new.steps))
    )
    return replace(slots, codes=codes, steps=steps, fresh=None, tail=0)


def part(slots: Slots, start: int, end: int) -> Tensor:  # [B, H, end - start, D]
    """The vectors of the slots [start, end)."""
    if isinstance(slots, Tensor):
        return slots[:, :, start:end]
    if slots.fresh is not None:
        return slots.plain()[:, :, start:end]
    at = torch.arange(start, end, device=slots.device).expand(*slots.shape[:2], -1)
    return slots.decoded_at(at, slots.dtype)


def plain_at(slots: Slots, at: Tensor) -> Tensor:  # [B, H, m, D]
    """The vectors of the slots `at` [B, H, m]."""
    if isinstance(slots, Tensor):
        return tensors.gather_slots(slots, at)
    if slots.fresh is None:
        return slots.decoded_at(at, slots.dtype)
    new = slots.fresh.shape[2]
    is_fresh = (at >= slots.coded) & (at < slots.coded + new)
    decoded = slots.decoded_at(torch.where(is_fresh, 0, torch.where(at < slots.coded, at, at - new)), slots.dtype)
    fresh = tensors.gather_slots(slots.fresh, (at - slots.coded).clamp(0, new - 1))
    return torch.where(is_fresh.unsqueeze(-1), fresh, decoded)


def gathered(slots: Slots, source: Tensor | None) -> Slots:
    """The slots `source` [B, H, m], in this order; no slot twice. None: all of them."""
    if isinstance(slots, Tensor):
        return slots if source is None else tensors.gather_slots(slots, source)
    slots = _all_coded(slots)
    if source is None:
        return slots
    moved = source.unsqueeze(-1) == slots.exact_at.unsqueeze(2)  # [B, H, m, E]
    at = torch.where(moved.any(2) & (slots.exact_at >= 0), moved.int().argmax(2), -1).int()
    codes, steps = tensors.gather_slots(slots.codes, source), tensors.gather_slots(slots.steps, source)
    return replace(slots, exact_at=at, codes=codes, steps=steps)


def arrange(slots: Slots, start: int, source: Tensor) -> None:
    """Puts the slots `source` [B, H, m] into those from `start` on, in place; none of them stays exact."""
    for part in row_parts(slots):
        batch, heads, count, size = part.shape
        head = torch.arange(batch * heads, device=part.device).view(batch, heads, 1)
        rows = ops.take_rows(part.reshape(-1, size), (head * count + source).flatten())
        part[:, :, start : start + source.shape[2]] = rows.view(*source.shape, size)


def filled(slots: Slots, count: int) -> Slots:
    """With `count` empty slots behind."""
    if isinstance(slots, Tensor):
        return tensors.filled(slots, count)
    return replace(slots, codes=tensors.filled(slots.codes, count), steps=tensors.filled(slots.steps, count))


def inserted(slots: Slots, at: int, new: Tensor) -> Slots:
    """With new vectors [B, H, n, D] from slot `at` on."""
    if isinstance(slots, Tensor):
        return tensors.inserted(slots, at, new)
    # A view would keep what it is a part of, such as the queries, keys and values of one product.
    fresh = tensors.owned(new) if slots.fresh is None else torch.cat([slots.fresh, new], 2)
    return replace(slots, fresh=fresh, tail=slots.shape[2] - at)


def removed(slots: Slots, start: int, end: int) -> Slots:
    """Without the slots [start, end); of coded ones those that are not coded yet."""
    if isinstance(slots, Tensor):
        return tensors.removed(slots, start, end)
    assert slots.fresh is not None and start >= slots.coded
    left = tensors.removed(slots.fresh, start - slots.coded, end - slots.coded)
    return replace(slots, fresh=left) if left.shape[2] else replace(slots, fresh=None, tail=0)


def exact_before(slots: Slots, end: int) -> Slots:
    """The same with exact vectors before slot `end` alone: kernels know one list of them for keys and values."""
    if isinstance(slots, Tensor):
        return slots
    return replace(slots, exact_at=slots.exact_at.masked_fill(slots.exact_at >= end, -1))


def copied(slots: Slots, new: Slots) -> Slots:
    """`slots` with the content of `new`, at the same addresses if it has as many slots; else `new`."""
    if slots.shape != new.shape:
        return new
    if isinstance(slots, Tensor) or isinstance(new, Tensor):
        return slots.copy_(new) if isinstance(slots, Tensor) and isinstance(new, Tensor) else new
    for name in ("codes", "steps", "exact_at"):
        getattr(slots, name).copy_(getattr(new, name))
    return slots


def write(slots: Slots, at: Tensor, x: Tensor) -> None:
    """Writes vectors [B, H, 1, D] into the slots `at` [B, H, 1], in place."""
    if isinstance(slots, Tensor):
        slots.scatter_(2, at.unsqueeze(-1).expand(x.shape), x)
        return
    codecs.encode_into(codecs.Coded(slots.codes, slots.steps), x, slots.center, slots.codec, at)
    slots.exact_at.masked_fill_(slots.exact_at == at, -1)


def write_packed(slots: Slots, slot: Tensor, at: Tensor, x: Tensor) -> None:
    """Writes vectors [B, H, 1, D] into the places `at` [B H] of a flat store, the slots `slot` of their heads."""
    if isinstance(slots, Tensor):
        slots.index_copy_(0, at, x.flatten(0, 2))
        return
    new = codecs.encode(x, slots.center, slots.codec)
    slots.codes.index_copy_(0, at, new.codes.flatten(0, 2))
    slots.steps.index_copy_(0, at, new.steps.flatten())
    slots.exact_at.masked_fill_(slots.exact_at == slot, -1)


def packed(slots: Slots, pack: Callable[[Tensor], Tensor], to: Tensor | None = None) -> Slots:
    """Slots of equal heads in a flat store, into which `pack` brings tensors; `to` [B, H, S]: their new numbers in the
    head, -1 for those that go, None: as they are.
    """
    if isinstance(slots, Tensor):
        return pack(slots)
    slots = _all_coded(slots)
    moved = replace(slots, codes=pack(slots.codes), steps=pack(slots.steps))
    if to is None:
        return moved
    at = to.gather(2, slots.exact_at.clamp_min(0).long()).masked_fill_(slots.exact_at < 0, -1)
    return replace(moved, exact_at=at.int())


def unpacked(slots: Slots, layout: Layout) -> Slots:
    """A flat store as slots of equal heads."""
    if isinstance(slots, Tensor):
        return layout.unpacked(slots)
    return replace(slots, codes=layout.unpacked(slots.codes), steps=layout.unpacked(slots.steps))


def with_vectors(slots: Slots, at: Tensor, x: Tensor) -> Slots:
    """With the vectors x [B, H, m, D] in the slots `at` [B, H, m], negative: none."""
    if isinstance(slots, Tensor):
        return _scattered(slots, at, x.to(slots.dtype))
    coded = slots.steps.shape[2]
    if slots.fresh is not None:
        slots = replace(slots, fresh=_scattered(slots.fresh, at - coded, x.to(slots.fresh.dtype)))
    at = torch.where(at < coded, at, -1)
    new = codecs.encode(x, slots.center, slots.codec)
    return replace(slots, codes=_scattered(slots.codes, at, new.codes), steps=_scattered(slots.steps, at, new.steps))


def _scattered(slots: Tensor, at: Tensor, new: Tensor) -> Tensor:
    # One slot more takes what is to go nowhere.
    place = torch.where(at < 0, slots.shape[2], at).view(*at.shape, *[1] * (slots.dim() - 3)).expand(new.shape)
    return tensors.filled(slots, 1).scatter(2, place, new)[:, :, :-1]


def rows_of(slots: Slots, rows: Tensor) -> Slots:
    """The batch rows `rows`."""
    rows = rows.to(slots.device)
    if isinstance(slots, Tensor):
        return slots.index_select(0, rows)
    parts: dict[str, Any] = {
        name: None if part is None else part.index_select(0, rows) for name, part in slots.parts().items()
    }
    return replace(slots, **parts)


def held(slots: Slots | None) -> list[Tensor]:
    """Every tensor that keys or values consist of."""
    if slots is None or isinstance(slots, Tensor):
        return [] if slots is None else [slots]
    return [part for part in slots.parts().values() if part is not None]


def flat(slots: Slots | None) -> list[Tensor | None]:
    """What follows the slots of a flat store."""
    return [slots] if slots is None or isinstance(slots, Tensor) else [slots.codes, slots.steps]


def vector_bytes(like: Tensor, bits: int) -> int:
    """Bytes of one vector like these, [..., D], in so many bits."""
    plain = like.shape[-1] * like.element_size()
    return plain if bits == PLAIN else Codec(bits, like.shape[-1]).code_bytes + codecs.STEP_DTYPE.itemsize


def row_parts(slots: Slots) -> list[Tensor]:
    """What a slot consists of, as tensors [B, H, S, n]: the vector, or codes and step."""
    return [slots] if isinstance(slots, Tensor) else [slots.codes, slots.steps.unsqueeze(-1)]


def of_parts(like: Slots, parts: list[Tensor]) -> Slots:
    """Slots of these parts, with the center and the exact vectors of `like`."""
    return parts[0] if isinstance(like, Tensor) else replace(like, codes=parts[0], steps=parts[1].squeeze(-1))


class NotFinite(ValueError):
    """A model has overflowed: what it makes of a text is nan or infinite."""


class Doubt(NamedTuple):
    """Vectors of a layer that were coded, and may not be finite."""

    worst: Tensor  # the largest step, nan where a vector is not finite
    at: Tensor  # its number among all
    shape: tuple[int, ...]
    bits: int
    what: str
    layer: int

    @classmethod
    def of(cls, slots: SlotCodes, what: str, layer: int) -> Doubt:
        return cls(*slots.steps.flatten().max(0), slots.steps.shape, slots.codec.bits, what, layer)


def require_finite(doubts: Sequence[Doubt]) -> None:
    """Raises NotFinite that names the first vector that could not be coded (asks the device once)."""
    if not doubts:
        return
    here = doubts[0].worst.device
    is_bad = torch.stack([doubt.worst.to(here) for doubt in doubts]).isnan().tolist()
    if not any(is_bad):
        return
    _, at, (_, heads, count), bits, what, layer = doubts[is_bad.index(True)]
    head, slot = divmod(int(at), count)
    raise NotFinite(
        f"the {what} of slot {slot} in layer {layer}, batch row {head // heads}, head {head % heads} are not finite "
        f"and cannot be stored in {bits} bits; look for an overflow in the model (float16?), or use bits={PLAIN}"
    )


__all__ = ["BITS", "LEAST", "PLAIN", "FewBits", "NotFinite", "SlotCodes", "Slots"]
