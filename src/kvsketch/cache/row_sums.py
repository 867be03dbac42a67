"""The log-sum-exp of each query's row, which fused attention computes anyway, for methods that score by attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvsketch.cache.layer import LayerView


class RowSums(TorchDispatchMode):
    """Inside the block, what torch's kernels return beside the output is looked at, if the method wants it."""

    def __init__(self, view: LayerView, unmasked: bool) -> None:
        super().__init__()
        self.table = view.layer.table
        self.wanted = unmasked and view.layer.method.wants_sums_of(self.table) and self.table.new_tokens > 1
        self.row_lse: Tensor | None = None

    def __enter__(self) -> RowSums:
        return super().__enter__() if self.wanted else self

    def __exit__(self, *error: Any) -> None:
        if self.wanted:
            super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "aten::_scaled_dot_product_cudnn_attention":
            # The fifth argument asks for the sums, which inference leaves out; the output does not depend on it.
            args = (*args[:4], True, *args[5:])
        result = func(*args, **(kwargs or {}))
        if name.startswith(("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_cudnn_attention")):
            self.row_lse = result[1]
        return result

    def leave(self, query: Tensor, key: Tensor, scale: float) -> None:
        """Gives the sums to the method if they are right for the last query: kernels differ in what they return."""
        if self.row_lse is None or self.row_lse.numel() != query.shape[:3].numel():
            return
        row_lse = self.row_lse.view(query.shape[:3]).float()
        group = query.shape[1] // key.shape[1]
        last = (query[:, :group, -1].float() @ key[:, 0].float().mT * scale).logsumexp(-1)  # [B, G]
        if torch.allclose(row_lse[:, :group, -1], last, atol=0.05, rtol=1e-3):
            self.table.forward.note_attention(row_lse)
