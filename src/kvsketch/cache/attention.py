"""Seam 2 into transformers: the attention function that reads a compressed cache.

Models call `AttentionInterface.get_interface` to get their attention function. At the first use of a compressed cache
that method is wrapped, once for the whole process. The wrapped function checks whether the key tensor carries a view
of a compressed layer. If it does, this module computes attention; if not, the model's own function runs unchanged.
`uninstall` removes the wrapper.

While a layer is exact, the model's own kernel reads it: the result is bit-identical. After that,
`ops.weighted_attention` reads the slots. The mask is logical, so it is read at the logical index of each slot
(masks.py). Several tokens for a bounded layer, and streamed prompts, attend chunk by chunk (view.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from kvsketch.cache.patches import Patch
from kvsketch.cache.view import TAG, LayerView


def install() -> None:
    """Wraps `AttentionInterface.get_interface`; does nothing the second time."""
    _INTERFACE.install()


def uninstall() -> None:
    """Puts `AttentionInterface.get_interface` back; compressed caches then no longer work until `install`."""
    _INTERFACE.remove()


def _get_interface(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    return _dispatch(original(*args, **kwargs))


_INTERFACE = Patch(AttentionInterface, "get_interface", _get_interface)


def _dispatch(own: Callable[..., Any]) -> Callable[..., Any]:
    """The model's own attention function, unless the keys came out of a compressed layer.

    A plain function: torch.compile has to read through it, in every model of the process.
    """

    @functools.wraps(own)
    def attend_or_own(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        view = getattr(key, TAG, None)
        if view is None:
            return own(module, query, key, value, *args, **kwargs)
        return _attend_module(own, view, module, query, key, value, *args, **kwargs)

    return attend_or_own


def _attend_module(
    own: Callable[..., Any],
    view: LayerView,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a model calls in place of its own function: [B, Hq, n, D] queries in, [B, n, Hq, Dv] out."""
    refuse_unsupported(module, view, query, value, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    weights = None
    softcap, sink_logits = softcap_of(module, own, kwargs), kwargs.get("s_aux")
    if view.layer.mask_free and not view.exact:
        attention_mask = None
    recalled = view.recall(query, scale, softcap, sink_logits)
    if recalled is not None:
        output = recalled.transpose(1, 2).contiguous()
    elif view.exact:
        if scaling is not None:
            kwargs["scaling"] = scaling
        with _RowSums(view, attention_mask is None) as sums:
            output, weights = own(module, query, key, value, attention_mask, *args, **kwargs)
        sums.leave(query, key, scale)
    else:
        attended = view.attend(query, scale, attention_mask, softcap=softcap, sink_logits=sink_logits)
        output = attended.transpose(1, 2).contiguous()
    view.finish(module, query, scale, attention_mask)
    return output, weights


class _RowSums(TorchDispatchMode):
    """Records the log-sum-exp of each row, which fused attention computes anyway, for methods that use it."""

    def __init__(self, view: LayerView, unmasked: bool) -> None:
        super().__init__()
        self.table = view.layer.table
        self.wanted = unmasked and view.layer.method.wants_row_lse and self.table.new_tokens > 1
        self.row_lse: Tensor | None = None

    def __enter__(self) -> _RowSums:
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
            self.table.note_attention(row_lse)


def _comes_again(view: LayerView, query: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether the new tokens start at position 0 again, although the cache has read tokens before.

    `use_cache=False` alone proves nothing: some models always pass the default of their layers to attention. Where a
    model passes no positions: whether the previous forward brought all tokens and this one brings one more.
    """
    new, positions = query.shape[2], kwargs.get("position_ids")
    before = view.seen - new
    if new == 1 or before == 0:
        return False
    if positions is None:
        return new == before + 1 == view.layer.read_before + 1
    return bool((positions.amin(-1) == 0).all() & (positions[..., -1] < new).all())


def softcap_of(module: nn.Module, own: Callable[..., Any], kwargs: dict[str, Any]) -> float | None:
    """The logit soft-cap the model's own function would apply: sdpa ignores it in older releases, and we follow
    the model.
    """
    softcap = kwargs.get("softcap")
    return None if softcap is None or "sdpa" in getattr(own, "__name__", "") else float(softcap)


def refuse_unsupported(
    module: nn.Module, view: LayerView, query: Tensor, value: Tensor, kwargs: dict[str, Any]
) -> None:
    """Raises for attention that a slot table cannot serve, naming the model's attention class."""
    if kwargs.get("use_cache") is False and view.layer.table.rank == 0 and _comes_again(view, query, kwargs):
        raise ValueError(
            "use_cache=False feeds the whole text at every step into the cache, which has read it already; leave it "
            "out or drop the cache, and call cache.reset() to use it again"
        )
    for name in ("position_bias", "indices", "block_indices"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name!r} to its attention, which kvsketch cannot "
                f"compress; use DynamicCache"
            )
    if value is not view.values and value.shape != view.handed_shape:
        raise ValueError(
            f"{type(module).__name__} changes keys or values between the cache and its attention, "
            "which kvsketch cannot compress; use DynamicCache"
        )
