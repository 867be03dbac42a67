"""Fewer and faster launches per decode step: Llama-like decoder layers through the kernels of `ops.decoder_layer` and
`ops.skinny_matmul`.

The third seam into transformers. `fused(model)` is a context: inside it, and in this thread alone, single-token
forwards of the model use the kernels. The classes of its family are wrapped only while such a context is open. Only
modules with the known plain formula are replaced; all others run unchanged.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2FN

from kvsketch import ops
from kvsketch.cache.patches import Patch

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
LAYER_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
SILU = (nn.SiLU, type(ACT2FN["silu"]))
_local = threading.local()
_patches: dict[str, list[Patch]] = {}  # family -> what is wrapped for it


def can_fuse(model: Any) -> bool:
    """Whether the model's family is known and its device has the kernels."""
    known = getattr(model.config, "model_type", "") in FAMILIES
    return known and ops.kernel_for("decoder_layer", model.device) is not None


@contextmanager
def fused(model: Any) -> Iterator[None]:
    """Inside the block this thread's single-token forwards of `model` use fused kernels, where its family is known."""
    if not can_fuse(model):
        yield
        return
    patches = _patches_of(str(model.config.model_type))
    for patch in patches:
        patch.hold()
    before, _local.products = _active(), Products()
    try:
        with _local.products:
            yield
    finally:
        _local.products = before
        for patch in patches:
            patch.release()


class Products(TorchFunctionMode):
    """Sends linear layers of few rows to the thin kernel. Layers that share an input are computed in one launch, and
    each result is returned when the model calls that layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ready: dict[int, Tensor] = {}
        self.input: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and not kwargs:
            result = self.ready.pop(id(args[1]), None) if args[0] is self.input else None
            if result is not None:
                return result
            kernel = _thin_kernel(args[0], args[1])
            if kernel is not None:
                return kernel.linears(args[0], [args[1]], [args[2] if len(args) > 2 else None])[0]
        return func(*args, **(kwargs or {}))

    def project(self, x: Tensor, layers: list[Any]) -> None:
        """Computes linear layers of one input in one launch, if they are plain ones."""
        weights = [layer.weight for layer in layers]
        kernel = _thin_kernel(x, *weights) if _plain_linears(layers) else None
        if kernel is not None:
            results = kernel.linears(x, weights, [layer.bias for layer in layers])
            self.input = x
            self.ready = {id(weight): result for weight, result in zip(weights, results, strict=True)}


def _thin_kernel(x: Tensor, *weights: Tensor) -> Any:
    """The kernel if it supports these tensors. Other tensor types (quantized, distributed) have their own products."""
    plain = type(x) is Tensor and all(type(weight) is nn.Parameter for weight in weights)
    kernel = ops.kernel_for("skinny_matmul", x.device) if plain and x.dim() > 1 and x.shape[-2] == 1 else None
    return kernel if kernel is not None and kernel.serves(x, *weights) else None


def _patches_of(family: str) -> list[Patch]:
    """Wrappers for the family's layer, norm, MLP and rotary function."""
    if family not in _patches:
        modeling: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        result = [
            Patch(owner, "forward", functools.partial(_forward, replacement))
            for owner in vars(modeling).values()
            if isinstance(owner, type) and issubclass(owner, nn.Module) and owner.__module__ == modeling.__name__
            for ending, replacement in (("RMSNorm", _norm), ("MLP", _mlp), ("DecoderLayer", _layer))
            if owner.__name__.endswith(ending)
        ]
        if hasattr(modeling, "apply_rotary_pos_emb"):
            result.append(Patch(modeling, "apply_rotary_pos_emb", _rotary))
        _patches.setdefault(family, result)
    return _patches[family]


def _active() -> Products | None:
    return getattr(_local, "products", None)


def _forward(
    replacement: Callable[..., Tensor | None], original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    if _active() is not None and len(args) == 1:
        result = replacement(self, *args, **kwargs)
        if result is not None:
            return result
    return original(self, *args, **kwargs)


def _norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    """The norm of x, or x + residual and its norm."""
    kernel = ops.kernel_for("decoder_layer", x.device)
    if kernel is None or x.shape[-2] != 1 or x.dtype != self.weight.dtype:
        return None
    if residual is None:
        return kernel.rms_norm(x.contiguous(), self.weight, self.variance_epsilon)
    return kernel.add_rms_norm(x.contiguous(), residual.contiguous(), self.weight, self.variance_epsilon)


def _layer(self: Any, x: Tensor, **kwargs: Any) -> Tensor | None:
    """y = x + attention(norm(x)), then y + MLP(norm(y)); parts with hooks get the inputs and outputs they expect."""
    products = _active()
    if products is None or x.shape[-2] != 1 or not _known(self):
        return None
    attention = self.self_attn
    normal = self.input_layernorm(x)
    products.project(normal, [attention.q_proj, attention.k_proj, attention.v_proj])
    attended, _ = attention(hidden_states=normal, **kwargs)
    products.ready.clear()
    both = _norm(self.post_attention_layernorm, attended, residual=x)
    if both is None:
        x = x + attended
        normal = self.post_attention_layernorm(x)
    else:
        x, normal = both
    added = _mlp(self.mlp, normal, residual=x)
    return x + self.mlp(normal) if added is None else added


def _known(layer: Any) -> bool:
    """Whether the parts that kernels replace are the family's own classes, without hooks."""
    parts: list[Any] = [getattr(layer, name, None) for name in LAYER_PARTS]
    own = all(type(part).__module__ == type(layer).__module__ for part in parts)
    return own and _untouched(parts[2:])


def _untouched(modules: Iterable[nn.Module]) -> bool:
    return not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in modules)


def _plain_linears(layers: Sequence[Any]) -> bool:
    return all(type(layer) is nn.Linear for layer in layers) and _untouched(layers)


def _mlp(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | None:
    kernel = ops.kernel_for("decoder_layer", x.device)
    activation: Any = getattr(self, "act_fn", None)
    if kernel is None or x.shape[-2] != 1 or not hasattr(self, "gate_proj"):
        return None
    # The module itself: the config may not tell the truth.
    if type(activation) not in SILU or not _untouched([activation]):
        return None
    gate, up, down = self.gate_proj, self.up_proj, self.down_proj
    plain = _plain_linears((gate, up, down))
    thin = _thin_kernel(x, gate.weight, up.weight) if plain and gate.bias is None and up.bias is None else None
    hidden = kernel.gated_silu(gate(x), up(x)) if thin is None else thin.gated_linear(x, gate.weight, up.weight)
    if residual is None:
        return down(hidden)
    thin = _thin_kernel(hidden, down.weight) if plain and residual.is_contiguous() else None
    return residual + down(hidden) if thin is None else thin.linear_onto(residual, hidden, down.weight, down.bias)


def _rotary(
    original: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
) -> Any:
    kernel = ops.kernel_for("decoder_layer", q.device) if _active() is not None else None
    whole = cos.shape[-1] == q.shape[-1] and cos.dtype == q.dtype
    if kernel is None or args or kwargs or q.shape[2] != 1 or not whole:
        return original(q, k, cos, sin, *args, **kwargs)
    return kernel.rotate_both(q, k, cos, sin)
