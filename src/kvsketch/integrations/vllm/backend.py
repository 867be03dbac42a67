"""What vLLM asks of an attention backend, answered with pages that hold one request each.

vLLM keeps one block per request for its whole life (`CircularBufferSpec`) and does not look into it. Batching, chunked
prefill, scheduling, tensor and pipeline parallel stay vLLM's. A page holds one layer of a request or, where layers
decide together what stays, all of them: the layers then share the cache of the first, which vLLM can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import KVTransferConfig, VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec

from kvsketch.integrations.vllm import CONNECTOR, layers, settings
from kvsketch.integrations.vllm.behind import Prompt
from kvsketch.integrations.vllm.causal import flash_attention
from kvsketch.integrations.vllm.joint_layers import JointLayers
from kvsketch.integrations.vllm.page_map import PageMap
from kvsketch.integrations.vllm.paged import PagedLayer
from kvsketch.integrations.vllm.recorded import RecordedSteps
from kvsketch.methods.waiting import WaitingMethod
from kvsketch.slots.context import LayerContext
from kvsketch.slots.pages import CLOCK, Pages, Planes

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own logger, whose level and form it takes


class KVSketchBackend(AttentionBackend):
    """kvsketch as vLLM's attention backend CUSTOM."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    page: ClassVar[Planes | None] = None  # set in a subclass for each shape of a layer
    block_size: ClassVar[int] = 0
    outside: ClassVar[int] = 0  # bytes of a block that stands for a page in a pool of its own; 0: pages are blocks

    @classmethod
    def of(cls, page: Planes, block_size: int, builder: type[AttentionMetadataBuilder[Any]]) -> type[KVSketchBackend]:
        """The backend of layers with that page; `block_size` is the same for all layers, or vLLM would divide them."""
        members = {"page": page, "block_size": block_size, "get_builder_cls": staticmethod(lambda: builder)}
        return type(f"{cls.__name__}{page.nbytes}", (cls,), members)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[KVSketchImpl]:
        return KVSketchImpl

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True  # its own; others are refused in one line

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True  # a layer that has one is handed over to vLLM

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """One block per request, which vLLM sees as a single vector of bytes."""
        if cls.page is None or spec.block_size == 1:
            return spec  # before the layers are there, or asked what a token takes
        if cls.outside:
            return layers.RequestSpec.beside(spec, cls.outside)
        return CircularBufferSpec(
            block_size=cls.block_size,
            tokens_per_state=cls.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            dtype=spec.dtype,
            num_head_slots=1,
            state_content_bytes=cls.page.nbytes,
        )


@dataclass
class Step(AttentionMetadata):
    """Which requests a forward of the model serves, the same for all layers."""

    pages: Tensor  # [requests] int64
    seen: Tensor  # [requests] int64, tokens before this forward; negative: padding of a captured step
    singles: int  # the first so many requests have one token each
    spans: list[tuple[int, int, int, int]]  # of the others: number, first token, the one behind its last, tokens seen


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Makes the `Step` of a forward. A captured step reads its tensors, so that they stay where they are."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        most = max(vllm_config.scheduler_config.max_num_seqs, vllm_config.scheduler_config.max_num_batched_tokens)
        self.pages = torch.zeros(most, dtype=torch.int64, device=device)
        self.seen = torch.zeros(most, dtype=torch.int64, device=device)
        self.layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.page_map: PageMap | None = self.layer.impl.page_map
        on_gpu = device.type == "cuda"
        self.copied = torch.zeros(most, dtype=torch.int64, pin_memory=on_gpu)
        self.event = torch.cuda.Event() if on_gpu else None
        self.ends: list[int] = []  # of the last step, tokens of each request after it
        self.lengths: list[int] = []  # of the last step, its tokens of each request

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        common, count = common_attn_metadata, common_attn_metadata.num_reqs
        starts = common.query_start_loc_cpu[: count + 1].tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        singles = next((i for i, length in enumerate(lengths) if length != 1), count)
        last = [] if self.page_map is None else self._last_pages()
        if self.page_map is not None or singles < count:
            self.ends = self._ends(common)
        pages, seen = self._requests(common, lengths, last)
        spans = []
        if singles < count:
            ends = self.ends
            spans = [(i, starts[i], starts[i + 1], ends[i] - lengths[i]) for i in range(singles, count) if lengths[i]]
        return Step(pages, seen, singles, spans)

    @staticmethod
    def _ends(common: CommonAttentionMetadata) -> list[int]:
        known = common.seq_lens_cpu_upper_bound
        return (common.seq_lens if known is None else known)[: common.num_reqs].tolist()

    def _requests(self, common: CommonAttentionMetadata, lengths: list[int], last: list[int]) -> tuple[Tensor, Tensor]:
        """`pages` and `seen` of a step; `last`: the pages of the one before."""
        count = common.num_reqs
        pages, seen = self.pages[:count], self.seen[:count]
        pages.copy_(common.block_table_tensor[:count, 0])
        if self.page_map is not None:
            self._look_up(self.page_map, pages, lengths, last)
            self._copy(pages)
        # One token for each row of a captured step, also for those that no request stands behind.
        new = common.query_start_loc[1 : count + 1] - common.query_start_loc[:count]
        seen.copy_(common.seq_lens[:count] - new.clamp_min(1))
        return pages, seen

    def _look_up(self, page_map: PageMap, blocks: Tensor, lengths: list[int], last: list[int]) -> None:
        """Pages instead of `blocks`, in place; new requests get one (synchronises with the GPU)."""
        page_map.cover(len(pool_of(self.layer.kv_cache)))
        page_map.use(last)
        new = [i for i, (end, length) in enumerate(zip(self.ends, lengths, strict=True)) if 0 < end == length]
        if new:
            running = blocks.tolist()
            page_map.begin([running[i] for i in new if running[i]], running)
        blocks.copy_(page_map.pages(blocks))

    def _copy(self, pages: Tensor) -> None:
        """Brings the pages to the host while the step runs."""
        self.copied[: len(pages)].copy_(pages, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def _last_pages(self) -> list[int]:
        """The pages of the last step that was built."""
        if self.event is not None:
            self.event.synchronize()
        return self.copied[: len(self.ends)].tolist()


@dataclass
class JointStep(AttentionMetadata):
    """Which requests a forward of the model serves, where layers decide together."""

    singles: slice | Tensor  # tokens of the forward that come alone
    pages: Tensor  # [singles] int64
    seen: Tensor  # [singles] int64, tokens before each; negative: padding of a captured step
    prompts: list[Prompt]


class JointBuilder(StepBuilder):
    """Makes the `JointStep` of a forward, and settles the requests that are due before it.

    The host has to know in which pages those lie. It learns that from the step before, whose pages were copied to it
    meanwhile: it waits for nothing, and a request is settled as soon as its room is full.
    """

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        common, count = common_attn_metadata, common_attn_metadata.num_reqs
        impl: KVSketchImpl = self.layer.impl
        joint, pool, last = impl.joint, impl.pool(self.layer.kv_cache), self._last_pages()
        assert joint is not None
        accepted = map(joint.accepted, last, self.ends, self.lengths)
        joint.catch_up(pool, zip(last, accepted, strict=True))
        starts = common.query_start_loc_cpu[: count + 1].tolist()
        lengths = self.lengths = [end - start for start, end in pairwise(starts)]
        self.ends = self._ends(common)
        pages, seen = self._requests(common, lengths, last)
        if self.page_map is None:
            self._copy(pages)
        single = [i for i, length in enumerate(lengths) if length == 1]
        if single and joint.divided:
            single = self._close(joint, pool, single, max(lengths) > 1)
        if any(self.ends[i] == 1 for i in single):
            numbers = self._last_pages()
            # Page 0 is vLLM's null block: no request.
            joint.start(pool, [numbers[i] for i in single if self.ends[i] == 1 and numbers[i]])
        if max(lengths) > 1:
            return self._mixed(starts, lengths, single)
        # Rows behind these fill up a captured step, which reads the tensors as they are.
        front = slice(0, len(single))
        return JointStep(front, pages[front], seen[front], [])

    def _close(self, joint: JointLayers, pool: Tensor, single: list[int], mixed: bool) -> list[int]:
        """Of the requests with one token those that generate; the others have read a part of their prompt.

        Where nothing but single tokens comes, the step may be captured, and their prompts end here (synchronises
        with the GPU).
        """
        pages = self._last_pages()
        if mixed:
            return [i for i in single if pages[i] not in joint.divided]
        joint.close(pool, [pages[i] for i in single])
        return single

    def _mixed(self, starts: list[int], lengths: list[int], single: list[int]) -> JointStep:
        """A step with prompts; `single`: requests that generate (synchronises with the GPU)."""
        generate = {*single}
        prompts = [
            Prompt(page, starts[i], starts[i + 1], self.ends[i] - lengths[i])
            for i, page in enumerate(self._last_pages())
            if page and lengths[i] and i not in generate
        ]
        if single == [*range(len(single))]:
            front = slice(0, len(single))
            return JointStep(front, self.pages[front], self.seen[front], prompts)
        rows, at = (torch.tensor(each, device=self.device) for each in (single, [starts[i] for i in single]))
        return JointStep(at, self.pages[rows], self.seen[rows], prompts)


class KVSketchImpl(AttentionImpl[Any]):
    """Attention of one layer."""

    def __new__(cls, *given: Any, **named: Any) -> Any:
        """Where the layer has a sliding window, what vLLM's own backend computes it with."""
        asked = signature(cls.__init__).bind(None, *given, **named).arguments
        if asked.get("sliding_window") is None:
            return super().__new__(cls, *given, **named)
        config = get_current_vllm_config()
        settings.refuse_config(config)
        settings.refuse_windows(config)
        own = layers.own_backend(
            config, head_size=asked["head_size"], dtype=torch.get_default_dtype(),
            kv_cache_dtype=asked["kv_cache_dtype"], has_sink=asked.get("sinks") is not None,
            attn_type=asked["attn_type"], has_sliding_window=True,
        )  # fmt: skip
        return own.get_impl_cls()(*given, **named)

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.config = get_current_vllm_config()
        self.options = {"softcap": logits_soft_cap, "sink_logits": sinks}  # the weights of sinks are loaded later
        self._begin()
        settings.refuse_config(self.config)
        model_dtype = str(torch.get_default_dtype()).removeprefix("torch.")
        settings.refuse_layer(
            alibi_slopes=alibi_slopes,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            attn_type=None if attn_type == AttentionType.DECODER else attn_type,
            kv_cache_dtype=None if kv_cache_dtype in ("auto", model_dtype) else kv_cache_dtype,
            **others,
        )  # fmt: skip

    def _begin(self) -> None:
        """Reads the method."""
        self.method = settings.chosen_method(self.config.additional_config, self.config.model_config.hf_config)
        settings.refuse_bits(self.method, self.head_size)
        settings.refuse_maps(self.method, self.config.parallel_config)
        if self.config.cache_config.enable_prefix_caching and not isinstance(self.method, WaitingMethod):
            logger.warning_once(
                "kvsketch: prefix caching finds nothing, for pages of %s are not used again; rehearse has such pages. "
                "--no-enable-prefix-caching saves its bookkeeping.", self.method.name,
            )  # fmt: skip
        self.layer: PagedLayer | None = None
        self.joint: JointLayers | None = None
        self.recorded: RecordedSteps | None = None  # of all layers that decide together
        self.number = 0  # of this layer among those
        self.page_map: PageMap | None = None  # where pages lie in a pool of their own
        self.inside = 0  # where the part of this layer begins in such a page

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Learns which layer this is, and tells vLLM its page."""
        ours = {
            name: layer
            for name, layer in self.config.compilation_config.static_forward_context.items()
            if isinstance(getattr(layer, "impl", None), KVSketchImpl)
        }
        name, layer = next((name, layer) for name, layer in ours.items() if layer.impl is self)
        model, parallel = self.config.model_config, self.config.parallel_config
        heads = model.get_total_num_kv_heads() * get_tensor_model_parallel_rank() // parallel.tensor_parallel_size
        index, total = extract_layer_index(name), model.get_total_num_hidden_layers()
        rank, compressed = settings.rank_of(index, total, getattr(model.hf_text_config, "layer_types", None))
        waits = isinstance(self.method, WaitingMethod)
        angles = settings.rotary_angles(self.method, model.hf_text_config) if waits else ()
        place = LayerContext(
            index, total, 0, rank, compressed, angles, bits=self.method.stored_bits, first_head=heads
        )  # fmt: skip
        whole = CLOCK if self.method.budget_size.share is None else model.max_model_len
        block_size = self.method.budget_size.of(whole) + 1
        if isinstance(self.method, WaitingMethod):
            self._join(self.method, layer, ours, place, block_size)
        else:
            sizes = self.head_size, layer.head_size_v
            flash = flash_attention(*sizes, layer.kv_cache_torch_dtype)
            self.layer = PagedLayer(self.method, place, self.scale, self.options, flash)
            shape = self.layer.page_shape(self.num_kv_heads, *sizes, layer.kv_cache_torch_dtype)
            layer.attn_backend = KVSketchBackend.of(shape, block_size, StepBuilder)
        slots = block_size if self.layer is None else self.layer.slots
        if slots > model.max_model_len:
            logger.warning_once(
                "kvsketch: %s keeps more than max_model_len=%d: nothing is ever dropped, and every request has a page "
                "of %d slots; use a smaller budget.", str(self.method), model.max_model_len, slots,
            )  # fmt: skip
        if self.layer is not None:
            logger.info_once("kvsketch: %s, at most %d slots per request, KV head and layer", str(self.method), slots)
        if layer is [*ours.values()][-1]:
            self._all_are_known(ours)

    def _all_are_known(self, ours: dict[str, Any]) -> None:
        """The last layer has its page: vLLM's own layers come beside them."""
        free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
        sizes = [layer.attn_backend.page.nbytes for layer in ours.values()]
        size, outside = sizes[0] if self.joint else sum(sizes), 0
        if layers.hand_over(self.config, KVSketchBackend):
            outside, requests = size, self.config.scheduler_config.max_num_seqs
            settings.refuse_pages(str(self.method), requests, size, free)
            settings.refuse_shelf(self.config)
            page_map = PageMap(requests, size, torch.device(self.config.device_config.device_type))
            block, one_group = layers.beside(self.config, ours)
            first = None if one_group else next(iter(ours))
            for (name, layer), begin in zip(ours.items(), accumulate(sizes, initial=0), strict=False):
                layer.impl.page_map, layer.impl.inside = page_map, 0 if self.joint else begin
                layer.attn_backend.outside = block
                # All have one block of a request, in one group of vLLM or that of the first.
                layer.kv_sharing_target_layer_name = None if name == first else first
        if self.joint is not None:
            connected = connect(self.config, beside=bool(outside))
            settings.refuse_share(self.method, connected)
            settings.refuse_drafts(self.config, self.method, connected)
            settings.refuse_host(self.config, self.method, connected)
            divides = connected and self.config.scheduler_config.enable_chunked_prefill
            longest = self.config.model_config.max_model_len if divides else 0
            self.joint.most_whole = most = settings.most_whole(longest, self.joint.token_bytes, free)
            self.joint.most_held = max(most, self.config.scheduler_config.max_num_batched_tokens)
            if torch.cuda.is_available() and not self.config.model_config.enforce_eager:
                recorded = RecordedSteps(self.joint, self.config.scheduler_config.max_num_seqs)
                for layer in ours.values():
                    layer.impl.recorded = recorded
            if most:
                logger.info_once(
                    "kvsketch: prompts that vLLM reads in several forwards are held whole until the last, up to %d "
                    "tokens (%.1f MB) of them at a time; others are rehearsed in parts", most,
                    most * self.joint.token_bytes / 1e6,
                )  # fmt: skip
        else:
            forget_connectors()
            settings.refuse_drafts(self.config, self.method, connected=False)
            settings.refuse_host(self.config, self.method, connected=False)
        if self.joint is not None and (asked := settings.documents_asked(self.config)) is not None:
            settings.refuse_files(self.config, asked)
            self.joint.config = self.config.model_config.hf_text_config
            free = self.joint.open_documents(settings.document_method(self.method, asked), asked.count, free)
        pages, others = layers.shares(self.config, outside)
        logger.info_once(settings.one_request(str(self.method), self.config.model_config.max_model_len, pages, others))
        settings.bound_captures(self.config.compilation_config, pages.nbytes + others.nbytes - outside, free)

    def _join(
        self, method: WaitingMethod, layer: Any, ours: dict[str, Any], place: LayerContext, block_size: int
    ) -> None:
        """The first layer has the pages, the others share them."""
        name, first = next(iter(ours.items()))
        if layer is first:
            flash = flash_attention(self.head_size, layer.head_size_v, layer.kv_cache_torch_dtype)
            shares = settings.documents_asked(self.config) is not None
            self.joint = JointLayers(method, shares=shares, flash=flash)
            shape = self.joint.shape(
                len(ours), self.num_kv_heads, self.num_heads, self.head_size, layer.head_size_v,
                layer.kv_cache_torch_dtype, self.config.model_config.max_model_len,
            )  # fmt: skip
            layer.attn_backend = KVSketchBackend.of(shape, block_size, JointBuilder)
        else:
            self.joint, layer.attn_backend = first.impl.joint, first.attn_backend
            layer.kv_sharing_target_layer_name = name
        assert self.joint is not None
        mine, leads = (
            (each.num_kv_heads, each.num_heads, each.head_size, each.head_size_v, each.impl.scale)
            for each in (layer, first)
        )  # fmt: skip
        if mine != leads:
            raise ValueError(
                f"kvsketch cannot serve {method.name} in vLLM for layers of different heads or scales, {mine} beside "
                f"{leads}; use a method such as snapkv"
            )
        self.number = self.joint.join(place, self.scale, self.options)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | JointStep | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes the attention of all new tokens [tokens, Hq, D] to `output` [tokens, Hq, Dv]."""
        # The pool is vLLM's, which gives it back after its test forwards: no view of it outlives this call.
        if isinstance(attn_metadata, Step):
            pages = Pages(layer.attn_backend.page, self.pool(kv_cache))
            self._forward(attn_metadata, pages, query, key, value, output)
        elif attn_metadata is not None:
            self._forward_together(attn_metadata, kv_cache, query, key, value, output)
        else:
            output.fill_(0)  # vLLM measures memory, that of a GPU
            if query.is_cuda and len(query) == self.config.scheduler_config.max_num_batched_tokens:
                self._measure(layer, query, key, value)
        return output

    def _measure(self, layer: Any, query: Tensor, key: Tensor, value: Tensor) -> None:
        """The most tokens that are read at once pass this layer."""
        if self.layer is not None:
            self.layer.measure(layer.attn_backend.page, query, key, value)
        elif self.joint is not None:
            if self.number == 0:
                self.joint.begin(None)
            self.joint.measure(self.number, query, key, value)
            self._finish(self.joint)

    def pool(self, kv_cache: Any) -> Tensor:  # [P, bytes of a page] uint8
        """The pages of this layer, or of all that share it."""
        return pool_of(kv_cache) if self.page_map is None else self.page_map.pool[:, self.inside :]

    def _forward(self, step: Step, pages: Pages, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        assert self.layer is not None
        if step.singles:
            new = slice(0, step.singles)
            output[new] = self.layer.decode(
                pages, step.pages[new], step.seen[new], query[new], key[new], value[new]
            )  # fmt: skip
        for request, start, end, seen in step.spans:
            page, new = step.pages[request : request + 1], slice(start, end)
            tokens = query[new], key[new], value[new]
            if end - start == 1:
                output[new] = self.layer.decode(pages, page, step.seen[request : request + 1], *tokens)
            else:
                output[new] = self.layer.prefill(pages, page, seen, *tokens)

    def _forward_together(
        self, step: JointStep, kv_cache: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> None:
        joint, at = self.joint, step.singles
        assert joint is not None
        if self.number == 0:
            joint.begin(self.pool(kv_cache))
        if len(step.pages):
            output[at] = self._singles(step, kv_cache, query[at], key[at], value[at])
        if step.prompts:
            joint.read_prompts(self.number, step.prompts, query, key, value, output)
        self._finish(joint)

    def _singles(self, step: JointStep, kv_cache: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of tokens that come alone."""
        joint, recorded = self.joint, self.recorded
        assert joint is not None
        call = self.number, step.pages, step.seen, query, key, value
        if recorded is None or torch.cuda.is_current_stream_capturing():
            return joint.decode(*call)
        if self.number == 0:
            # The first forwards are vLLM's own, before it captures steps of single tokens.
            recorded.prepare(self.pool(kv_cache), query, key, value)
        return recorded.decode(*call) if step.prompts else joint.decode(*call)

    def _finish(self, joint: JointLayers) -> None:
        if self.number == len(joint.places) - 1:
            joint.finish()


def connect(config: VllmConfig, beside: bool) -> bool:
    """Whether there is a connector, which knows prompts and turns; without a word of the user in one process.

    vLLM makes both ends of a connector after the model is loaded. A worker in a process of its own cannot tell the
    scheduler that it has one. `beside` layers of vLLM's own there is none.
    """
    in_one = config.parallel_config.distributed_executor_backend == "uni"
    if in_one and not beside and config.kv_transfer_config is None:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=CONNECTOR, kv_role="kv_both", kv_connector_extra_config=dict(settings.AUTOMATIC)
        )
    forget_connectors()
    return config.kv_transfer_config is not None


def forget_connectors() -> None:
    """A process has one connector at a time. That of an earlier engine would be taken for this one's."""
    ensure_kv_transfer_shutdown()


def pool_of(kv_cache: Any) -> Tensor:  # [P, bytes of a block] uint8
    """What vLLM holds for a layer, or for all that share it."""
    cache: Tensor = kv_cache[0] if isinstance(kv_cache, list) else kv_cache
    return cache[:, 0, 0].view(torch.uint8)
