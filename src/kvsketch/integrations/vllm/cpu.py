"""The attention backend of vLLM on a CPU: kvsketch's where CUSTOM was chosen, else vLLM's own."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum


def __getattr__(name: str) -> Any:
    """`Backend`, which vLLM looks up whenever it chooses a backend."""
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if get_current_vllm_config().attention_config.backend is AttentionBackendEnum.CUSTOM:
        from kvsketch.integrations.vllm.chosen import ChosenBackend

        return ChosenBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend
