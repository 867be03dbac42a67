"""Seam 2 into transformers: the attention function that reads a compressed cache.

Models call `AttentionInterface.get_interface` to get their attention function. At the first use of a compressed cache
that method is wrapped, once for the whole process. If the key tensor carries a view of a compressed layer, this module
computes attention; if not, the model's own function runs unchanged. `uninstall` removes the wrapper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from kvsketch.cache import chunks
from kvsketch.cache.checks import UNSUPPORTED, require_supported
from kvsketch.cache.latent import Absorbed, LatentLayer, expands
from kvsketch.cache.layer import TAG, LayerView
from kvsketch.cache.patches import Patch
from kvsketch.cache.row_sums import RowSums
from kvsketch.slots.tensors import plain


def _get_interface(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The model's own attention function, unless the keys came out of a compressed layer."""
    own = original(*args, **kwargs)

    # A plain function: torch.compile has to read through it, in every model of the process.
    @functools.wraps(own)
    def attend_or_own(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        view = getattr(key, TAG, None)
        if view is None:
            return own(module, query, key, value, *args, **kwargs)
        return _attend_module(own, view, module, query, key, value, *args, **kwargs)

    return attend_or_own


_INTERFACE = Patch(AttentionInterface, "get_interface", _get_interface)
install, uninstall = _INTERFACE.install, _INTERFACE.remove


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
    changed = value is not view.values and value.shape != view.handed_shape
    if changed or kwargs.get("use_cache") is False or not UNSUPPORTED.isdisjoint(kwargs):
        require_supported(module, view, query, value, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    options = {"softcap": kwargs.get("softcap"), "sink_logits": kwargs.get("s_aux")}
    if "sdpa" in getattr(own, "__name__", ""):
        options["softcap"] = None  # sdpa ignores it in older releases, and we follow the model

    def read_exactly() -> tuple[Tensor, Tensor | None]:
        scaled = kwargs if scaling is None else {**kwargs, "scaling": scaling}
        with RowSums(view, attention_mask is None) as sums:
            output, weights = own(module, query, key, value, attention_mask, *args, **scaled)
        sums.leave(query, key, scale)
        return output, weights

    read = _attend_latents if isinstance(view.layer, LatentLayer) else attend
    return read(view, module, query, scale, attention_mask, read_exactly, **options)


def _attend_latents(
    view: LayerView,
    module: nn.Module,
    query: Tensor,
    scale: float,
    mask: Any,
    own: Callable[[], tuple[Tensor, Tensor | None]],
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`attend` where a view holds latents: they are read with absorbed queries, or expanded and read by `own`."""
    assert isinstance(view.layer, LatentLayer)
    form = Absorbed(module, view.layer)
    if expands(view):
        return attend(view, module, form.queries(query[:, :, -view.layer.asked :]), scale, mask, own, **options)
    absorbed = form.queries(query)

    def read_exactly() -> tuple[Tensor, None]:
        with plain():
            return view.attend(absorbed, scale, mask, **options).transpose(1, 2), None

    return form.heads(attend(view, module, absorbed, scale, mask, read_exactly, **options)[0]), None


def attend(
    view: LayerView,
    module: nn.Module,
    query: Tensor,
    scale: float,
    mask: Any,
    own: Callable[[], tuple[Tensor, Tensor | None]],
    bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of [B, Hq, n, D] queries over a view, [B, n, Hq, Dv], and its weights where `own` tells them.

    own: the model's own attention. It reads a layer while that is exact, so that the result is bit-identical. `bias` is
    logical like the mask: both are read at the logical index of each slot (masks.py). options: softcap, sink_logits.
    """
    layer, attended, weights = view.layer, None, None
    layer.is_read = True
    if layer.forward.mask_free and not view.exact:
        mask = None
    if not view.appended:
        attended = chunks.attend(view, module, query, scale, mask, bias, **options)
        return attended.transpose(1, 2).contiguous(), None
    table, exact = layer.table, view.exact and layer.table.document is None
    with plain():
        if layer.attends and query.shape[2] == 1 and bias is None:
            # A recall method lets a single query read a part of the slots; None: it reads all.
            table.forward.scale = scale
            attended = layer.method.attend(table, query, **options)
        if attended is None and not exact:
            attended = view.attend(query, scale, mask, bias, **options)
        if attended is not None:
            output = attended.transpose(1, 2).contiguous()
            view.finish(module, query, scale, mask)
            return output, None
    # The model's own attention may need gradients.
    output, weights = own()
    with plain():
        view.finish(module, query, scale, mask)
    return output, weights
