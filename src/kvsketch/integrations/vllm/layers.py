"""Models whose layers differ: which of them are kvsketch's, and how the cache of the others lies beside theirs.

A layer of full attention is kvsketch's. One with a sliding window is vLLM's own: it gets the backend that vLLM would
have chosen. Linear attention never asks for an attention backend, and its state is vLLM's as well.

All layers of vLLM take blocks from one pool, and all blocks have one size: that of a few tokens. A page is much larger,
so beside such layers pages lie in a pool of their own (`page_map`), and the block that a request has for kvsketch's
layers only stands for its page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.core.kv_cache_utils import unify_kv_cache_spec_page_size
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, KVCacheSpec

from kvsketch.integrations.vllm.settings import Share


@dataclass(frozen=True, kw_only=True)
class RequestSpec(CircularBufferSpec):
    """One block per request, which stands for a page elsewhere.

    Prefix caching asks these layers too, and their manager always answers that it holds nothing. Otherwise vLLM would
    skip the tokens that it finds in the other layers, which a page does not hold.
    """

    @classmethod
    def beside(cls, spec: AttentionSpec, nbytes: int) -> RequestSpec:
        """A block of so many bytes, the same for all layers, whatever their heads."""
        return cls(
            block_size=spec.block_size, tokens_per_state=spec.block_size, num_kv_heads=1, head_size=1, dtype=spec.dtype,
            num_head_slots=1, state_content_bytes=nbytes,
        )  # fmt: skip

    @property
    def prefix_cacheable(self) -> bool:
        return True


def own_backend(config: VllmConfig, **asked: Any) -> type[AttentionBackend]:
    """The attention backend that vLLM chooses for a layer where none is named."""
    attention = config.attention_config
    named, attention.backend = attention.backend, None
    try:
        chosen: type[AttentionBackend] = get_attn_backend(use_mm_prefix=config.model_config.is_mm_prefix_lm, **asked)
    finally:
        attention.backend = named
    return chosen


def hand_over(config: VllmConfig, backend: type[AttentionBackend]) -> bool:
    """Gives the layers with a window, made under `backend`, that of vLLM; returns whether layers differ."""
    context = config.compilation_config.static_forward_context
    windows = [layer for layer in context.values() if getattr(layer, "sliding_window", None) is not None]
    for layer in windows:
        if issubclass(layer.attn_backend, backend):
            layer.attn_backend = own_backend(
                config, head_size=layer.head_size, dtype=layer.dtype, kv_cache_dtype=layer.kv_cache_dtype,
                has_sink=layer.has_sink, attn_type=layer.attn_type, has_sliding_window=True,
            )  # fmt: skip
    return bool(windows) or config.model_config.is_hybrid


def beside(config: VllmConfig, ours: Mapping[str, Any]) -> tuple[int, bool]:
    """Bytes of a block of the layers that are not `ours`, and whether vLLM keeps ours in one group.

    It does where they are alike and there are no fewer of each other kind.
    """
    every = get_layers_from_vllm_config(config, AttentionLayerBase)
    others = Counter(spec for name, spec in _specs(config, every) if name not in ours)
    return max(spec.page_size_bytes for spec in others), min(others.values()) >= len(ours)


def shares(config: VllmConfig, outside: int = 0) -> tuple[Share, Share]:
    """Layers and bytes of one request as long as the model allows: in kvsketch's layers, in the others.

    `outside`: bytes of a request that do not lie in vLLM's pool.
    """
    every = get_layers_from_vllm_config(config, AttentionLayerBase)
    specs = dict(_specs(config, every))
    if outside:
        specs = unify_kv_cache_spec_page_size(specs)
    ours = {name for name, spec in specs.items() if isinstance(spec, CircularBufferSpec)}
    taken = {name: spec.max_memory_usage_bytes(config) for name, spec in specs.items()}
    sharing = sum(getattr(layer, "kv_sharing_target_layer_name", None) in ours for layer in every.values())
    return (
        Share(len(ours) + sharing, sum(taken[name] for name in ours) + outside),
        Share(len(specs) - len(ours), sum(size for name, size in taken.items() if name not in ours)),
    )


def _specs(config: VllmConfig, every: Mapping[str, Any]) -> Iterator[tuple[str, KVCacheSpec]]:
    for name, layer in every.items():
        if getattr(layer, "kv_sharing_target_layer_name", None) is None:
            spec = layer.get_kv_cache_spec(config)
            if isinstance(spec, AttentionSpec):
                spec = layer.get_attn_backend().customize_spec(spec)
            if spec is not None:
                yield name, spec
