"""The attention that slots received: what h2o, keyformer, snapkv and pyramidkv score them by."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvsketch import ops
from kvsketch.ops.attention_mass import is_plain
from kvsketch.slots.state import TableState, per_slot
from kvsketch.slots.table import SlotTable


@dataclass
class Scores(TableState):
    """What each slot has received so far."""

    score: Tensor | None = per_slot()  # [B, H, S] float32

    def of_slots(self) -> Tensor:
        assert self.score is not None
        return self.score


def add_attention(
    table: SlotTable,
    queries: Tensor,
    into: Tensor,
    *,
    reduce: str,
    fade: float = 1.0,
    temperature: ops.Temperature | None = None,
    noise: ops.Noise | None = None,
    row_lse: Tensor | None = None,
) -> Tensor:
    """Makes `into` [B, H, S] fade * into + the attention of `queries` to each slot (`ops.attention_mass`), in place.

    A decode step whose attention has left its logits does not read the keys a second time.
    """
    temperature = temperature or ops.Temperature()
    left = table.row_logits
    if left is not None:
        assert table.index is not None and table.clock is not None
        return ops.mass_from_logits(
            left.logits, table.index, table.clock,
            row_lse=left.row_lse if is_plain(temperature, noise) else None, padding=table.padding,
            temperature=temperature, noise=noise, reduce=reduce, into=into, fade=fade,
        )  # fmt: skip
    return ops.attention_mass(
        queries, table.read_keys(), table.scale,
        seen=table.clock, index=table.index, padding=table.padding, temperature=temperature, noise=noise,
        row_lse=row_lse, reduce=reduce, into=into, fade=fade,
    )  # fmt: skip
