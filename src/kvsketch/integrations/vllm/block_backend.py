"""What vLLM asks of an attention backend, answered with vLLM's own token blocks, quantised.

vLLM counts and shares blocks of tokens as it always does, so that prefix caching, chunked prefill, preemption and
scheduling are its own. Only what lies in a block is ours (`ops.token_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from kvsketch.integrations.vllm.backend import KVSketchBackend, KVSketchImpl
from kvsketch.integrations.vllm.blocks import BlockLayer, Chunks
from kvsketch.integrations.vllm.causal import flash_attention
from kvsketch.integrations.vllm.settings import (
    block_codecs,
    chosen_full,
    refuse_block_size,
    refuse_drafts,
    refuse_host,
    refuse_layer,
)
from kvsketch.ops.token_blocks import TOKENS, BlockShape, Reading

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own logger, whose level and form it takes


class BlockBackend(KVSketchBackend):
    """The backend of layers whose blocks have this shape."""

    shape: ClassVar[BlockShape]

    @classmethod
    def of_shape(cls, shape: BlockShape) -> type[BlockBackend]:
        return type(f"{cls.__name__}{shape.nbytes}", (cls,), {"shape": shape})

    @staticmethod
    def get_impl_cls() -> type[KVSketchImpl]:
        return BlockImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return BlockStepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [TOKENS]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """A block is bytes, of which vLLM counts an equal part to each token."""
        return replace(spec, num_head_slots=1, state_content_bytes=cls.shape.nbytes // TOKENS)


@dataclass
class BlockStep(AttentionMetadata):
    """Which requests a forward of the model serves, the same for all layers."""

    table: Tensor  # [requests, blocks] int32
    lengths: Tensor  # [requests] int32, tokens of each with those of this forward
    slots: Tensor  # [tokens] int64, where each goes; -1: nowhere
    singles: int  # the first so many requests have one token each
    chunks: Chunks | None = None  # of the others, behind the single tokens
    readings: dict[BlockShape, Reading] = field(default_factory=dict)  # of the single tokens

    def reading(self, shape: BlockShape) -> Reading:
        """What single tokens read; the first layer of a step makes it for all, in a captured step on the device."""
        if shape not in self.readings:
            self.readings[shape] = Reading.of(self.table[: self.singles], self.lengths[: self.singles], shape)
        return self.readings[shape]


class BlockStepBuilder(AttentionMetadataBuilder[BlockStep]):
    """Makes the `BlockStep` of a forward, of tensors that vLLM keeps in place for captured steps."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        common, count = common_attn_metadata, common_attn_metadata.num_reqs
        starts = common.query_start_loc_cpu[: count + 1].tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        # A captured step has a row for each request, also for those that nobody stands behind.
        singles, chunks = count, None
        if common.max_query_len > 1:
            singles = next((i for i, length in enumerate(lengths) if length != 1), count)
            known = common.seq_lens_cpu_upper_bound
            ends = (common.seq_lens if known is None else known)[:count].tolist()
            there = [i for i in range(singles, count) if lengths[i]]
            if there:
                begin = [0, *accumulate(lengths[i] for i in there)]
                chunks = Chunks.of(begin, [ends[i] - lengths[i] for i in there], common.block_table_tensor, there)
        slots = common.slot_mapping[: common.num_actual_tokens]
        return BlockStep(common.block_table_tensor[:count], common.seq_lens[:count], slots, singles, chunks)


class BlockImpl(KVSketchImpl):
    """Attention of one layer over token blocks."""

    def __new__(cls, *given: Any, **named: Any) -> Any:
        """Blocks of layers that differ are not tried: windows are refused as well."""
        asked = signature(cls.__init__).bind(None, *given, **named).arguments
        refuse_layer(sliding_window=asked.get("sliding_window"))
        return super().__new__(cls, *given, **named)

    def _begin(self) -> None:
        self.full = chosen_full(self.config.additional_config)
        refuse_drafts(self.config, self.full, connected=False)
        refuse_host(self.config, self.full, connected=False)
        refuse_layer(
            logits_soft_cap=self.options["softcap"], sinks=self.options["sink_logits"],
            linear_attention=True if self.config.model_config.is_hybrid else None,
        )  # fmt: skip
        refuse_block_size(self.config.cache_config, TOKENS)
        self.blocks: BlockLayer | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Tells vLLM what lies in a block."""
        layers = self.config.compilation_config.static_forward_context.items()
        name, layer = next((name, layer) for name, layer in layers if getattr(layer, "impl", None) is self)
        key, value = block_codecs(self.full, extract_layer_index(name), self.head_size, layer.head_size_v)
        shape = BlockShape(self.num_kv_heads, key, value)
        flash = flash_attention(self.head_size, layer.head_size_v, act_dtype)
        self.blocks = BlockLayer.of(shape, self.scale, torch.device(self.config.device_config.device), flash)
        # vLLM keeps buffers of the model through a sleep of level 2.
        layer.register_buffer("kvsketch_key_center", self.blocks.key_center, persistent=False)
        layer.register_buffer("kvsketch_value_center", self.blocks.value_center, persistent=False)
        layer.attn_backend = BlockBackend.of_shape(shape)
        plain = (self.head_size + layer.head_size_v) * act_dtype.itemsize * self.num_kv_heads * TOKENS
        logger.info_once(
            "kvsketch: %s, %d-bit keys and %d-bit values, %d bytes per token and layer, %.2f times fewer than in %s",
            str(self.full), key.bits, value.bits, shape.nbytes // TOKENS, plain / shape.nbytes,
            str(act_dtype).removeprefix("torch."),
        )  # fmt: skip

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes the attention of all new tokens [tokens, Hq, D] to `output` [tokens, Hq, Dv]."""
        own, step = self.blocks, attn_metadata
        assert own is not None
        if step is None:
            # vLLM measures memory, that of a GPU.
            if query.is_cuda and len(query) == self.config.scheduler_config.max_num_batched_tokens:
                own.measure(query, key, value)
            return output.fill_(0)
        blocks = own.blocks(bytes_of(kv_cache))
        count = len(step.slots)
        key, value = key[:count], value[:count]
        chunks, behind = step.chunks, slice(step.singles, count)
        if chunks is not None:
            which = max(range(len(chunks.seen)), key=lambda i: chunks.starts[i + 1] - chunks.starts[i])
            most = slice(step.singles + chunks.starts[which], step.singles + chunks.starts[which + 1])
            own.learn(blocks, chunks.seen[which], key[most], value[most], step.slots[most])
        own.write(blocks, key, value, step.slots)
        if step.singles:
            new = slice(0, step.singles)
            output[new] = own.decode(blocks, step.reading(blocks.shape), query[new])
        if chunks is not None:
            output[behind] = own.read_chunks(blocks, chunks, query[behind], key[behind], value[behind])
        return output


def bytes_of(kv_cache: Any) -> Tensor:  # [P, bytes of a block] uint8
    """The blocks of a layer."""
    cache: Tensor = kv_cache[0] if isinstance(kv_cache, list) else kv_cache
    return cache.view(len(cache), -1).view(torch.uint8)
