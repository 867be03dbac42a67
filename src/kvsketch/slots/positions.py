"""How far a query finds itself from a slot: as far as in the text, or as far as in the cache.

With rotary embeddings a logit depends on the distance between query and key alone. `positions=text` reads keys as they
came: distances grow with the text and leave, at the length the model was trained on, what it has learned. With
`positions=cache` slot i lies r_q - r_i away, r its place among the stored tokens of its row and head: the key is turned
by the number of tokens that are gone after it (`ops.turn_keys`). Stored keys stay as they are, a read makes a turned
copy, and so nothing is rounded twice. The tokens of one forward have no holes among them, so that one turn of a slot
serves all their queries.

This module knows neither transformers nor any method; `cache/rotary.py` says what a config tells.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kvsketch import ops
from kvsketch.ops.turn_keys import whole_turns

if TYPE_CHECKING:
    from kvsketch.slots.table import SlotTable

TEXT, CACHE = POSITIONS = ("text", "cache")


@dataclass
class Positions:
    """What the layers of one cache share: how keys are read, and where the positions of the model end."""

    model_name: str = "the model"
    trained: int | None = None  # positions the model was trained on; None: not known, or no limit
    turned_by: tuple[float, ...] = ()  # radians per position of pairs (i, i + half) with positions=cache, else empty
    advice: str = ""  # what helps when the text grows longer than that
    warned: bool = False

    def keys_of(self, table: SlotTable, coming: int = 0) -> Tensor:  # [B, H, S, D]
        """The keys of a table as attention reads them, beside `coming` new tokens that are not in it yet."""
        self.note(table, coming)
        keys = table.key_slots()
        if not self.turned_by:
            return keys
        # Made while the table is still exact: no step that is recorded may have to wait for the host.
        turns = whole_turns(self.turned_by, keys.device)
        if table.exact:
            return keys
        assert table.index is not None and table.clock is not None
        return ops.turn_keys(keys, table.index, table.clock, turns)

    def note(self, table: SlotTable, coming: int = 0) -> None:
        """Warns, once, when a query finds a token farther away than the model was trained on; asks no device."""
        if self.warned or self.trained is None:
            return
        if not self.turned_by:
            reach, what = table.seen + coming, f"tokens_seen={table.seen + coming:,} passes"
        else:
            # A bounded table keeps one slot free for a single token to come.
            held = table.length - (coming > 0 and not table.exact)
            reach = held + coming
            what = f"positions=cache reads {held:,} slots and {coming:,} new tokens together, beyond"
        if reach > self.trained:
            self.warned = True
            message = (
                f"{what} the {self.trained:,} positions that {self.model_name} was trained on; what it says from here "
                f"on may be nonsense. {self.advice}"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
