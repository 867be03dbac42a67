"""The distance between a query and a slot: as in the text, or as in the cache.

With rotary embeddings a logit depends on the distance between query and key alone. `positions=text` reads keys as they
came: distances grow with the text, and beyond the trained length the model has never seen them. With `positions=cache`
slot i is r_q - r_i away, where r is the place among the stored tokens of its row and head: the key is rotated by the
number of tokens dropped after it (`ops.rotate_keys`). Stored keys stay unchanged and a read makes a rotated copy, so
nothing is rounded twice. No token between the tokens of one forward is dropped, so one rotation of a slot serves all
their queries.

This module knows neither transformers nor any method; `cache/rotary.py` says what a config tells.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import Tensor

from kvsketch import ops
from kvsketch.ops.rotate_keys import whole_turns

TEXT, CACHE = POSITIONS = ("text", "cache")


@dataclass
class Positions:
    """What the layers of one cache share: how keys are read, and where the positions of the model end."""

    model_name: str = "the model"
    trained: int | None = None  # positions the model was trained on; None: not known, or no limit
    rotated_by: tuple[float, ...] = ()  # radians per position of pairs (i, i + half) with positions=cache, else empty
    advice: str = ""  # what helps when the text grows longer than that
    warned: bool = False

    def rotated(self, keys: Tensor, index: Tensor | None = None, clock: Tensor | None = None) -> Tensor:  # [B, H, S, D]
        """The keys as attention reads them; `index` [B, H, S] and `clock` [1] of a table that is not exact."""
        if not self.rotated_by:
            return keys
        # Made while the table is still exact: a captured step must not wait for the host.
        turns = whole_turns(self.rotated_by, keys.device)
        if index is None or clock is None:
            return keys
        return ops.rotate_keys(keys, index, clock, turns)

    def note(self, seen: int, held: int, coming: int) -> None:
        """Warns once when a token is farther from a query than the model was trained on; never synchronises.

        `held` slots are read after `seen` tokens, beside `coming` new tokens that are not in the table yet.
        """
        if self.warned or self.trained is None:
            return
        if not self.rotated_by:
            reach, what = seen + coming, f"tokens_seen={seen + coming:,} passes"
        else:
            reach = held + coming
            what = f"positions=cache reads {held:,} slots and {coming:,} new tokens together, beyond"
        if reach > self.trained:
            self.warned = True
            message = (
                f"{what} the {self.trained:,} positions that {self.model_name} was trained on; what it says from here "
                f"on may be nonsense. {self.advice}"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
