"""The attention backend CUSTOM: token blocks for quantised `full`, pages of one request for every other method."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config

from kvsketch.integrations.vllm.backend import KVSketchBackend, KVSketchImpl
from kvsketch.integrations.vllm.block_backend import BlockImpl
from kvsketch.integrations.vllm.settings import keeps_all


class ChosenBackend(KVSketchBackend):
    """Until a layer says what it stores."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return BlockImpl if keeps_all(get_current_vllm_config().additional_config) else KVSketchImpl
