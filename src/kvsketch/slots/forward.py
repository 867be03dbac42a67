"""What one forward knows of a layer, beside the slots: for the method that compresses after it, and for attention."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvsketch import ops
from kvsketch.slots.codes import FiniteCheck

if TYPE_CHECKING:
    from kvsketch.slots.table import SlotTable


@dataclass
class LayerForward:
    """The forward that a layer is in, or the last one."""

    appended: int = 0  # tokens that it brought
    scale: float = 1.0  # by which attention multiplies logits
    previous: SlotTable | None = None  # the table of the layer before
    row_lse: Tensor | None = None  # [B, Hq, n], log-sums of the queries' rows
    row_logits: ops.RowLogits | None = None  # of a single query
    rounding: Tensor | None = None  # what quantisation costs, for the choice of bits
    finite_checks: list[FiniteCheck] = field(
        default_factory=list
    )  # vectors that may not be finite, for `require_finite`
    # Tables of this step that wait until all of them can advance together; None: `advance` does not wait.
    advancing: list[SlotTable] | None = None

    # The method, the length of the prompt and what the method may hold of it (`BudgetedMethod.row_budget`).
    allotted: tuple[Any, int, Any] | None = None

    def copied(self, **changed: Any) -> LayerForward:
        """One for a table like this."""
        return replace(self, **{"finite_checks": [], "allotted": None, **changed})

    def note_attention(self, row_lse: Tensor | None = None, row_logits: ops.RowLogits | None = None) -> None:
        """What attention has computed for the new queries and a method may use; cleared after `compress`."""
        self.row_lse, self.row_logits = row_lse, row_logits
