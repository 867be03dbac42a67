"""Turns that go on where another ended, and documents that requests share: a KV connector of vLLM.

Where vLLM runs in one process, the plugin adds it by itself for turns (`backend.connect`). Elsewhere, and for
documents, it is named:

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"kvsketch": "rehearse:budget=2048"}' \\
        --kv-transfer-config '{"kv_connector": "KVSketchDocuments", "kv_role": "kv_both",
                               "kv_connector_extra_config": {"budget": 16384, "count": 8}}'

Without `budget` there are no documents. vLLM asks a connector how many tokens of a prompt are there already, and tells
its workers before each forward what the scheduler's side has decided. Nothing leaves the GPU: the workers' side notes
in a request's page which document it continues, or copies the page that a turn goes on from.

When a request ends and vLLM has let its page go, the page moves to the end of the queue of free pages: it costs nobody
memory, and is forgotten when vLLM gives it away. With `kvsketch_host_gb` it is copied to the host then (`host_pages`).

The connector also says how long a prompt is, which vLLM does not tell an attention backend: a prompt that is divided
stays whole until its last chunk has come (`divided`), and a budget may be a share of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import CircularBufferSpec

from kvsketch.integrations.vllm.backend import pool_of
from kvsketch.integrations.vllm.counts import FETCHED, REUSED, Counts
from kvsketch.integrations.vllm.document_index import NAME, STORE, DocumentIndex, Stored, Use
from kvsketch.integrations.vllm.files import Filed, listed, path_of
from kvsketch.integrations.vllm.host_pages import HostIndex, HostPool, LeavingPage
from kvsketch.integrations.vllm.joint_layers import JointLayers
from kvsketch.integrations.vllm.kept_pages import WAIT, LivePage, Turn
from kvsketch.integrations.vllm.metrics import PromMetrics, Stats
from kvsketch.integrations.vllm.settings import (
    AUTOMATIC,
    chosen_method,
    document_method,
    documents_asked,
    host_places,
    turns_asked,
)

logger = init_logger(f"vllm.{__name__}")


@dataclass
class Told(KVConnectorMetadata):
    """What the workers are told before a forward, by page."""

    number: int = 0  # of the forward
    saves: dict[int, int] = field(default_factory=dict)  # places on the host, for pages that others have got
    ended: set[int] = field(default_factory=set)  # of requests that have ended, or were preempted
    prompts: dict[int, int] = field(default_factory=dict)  # tokens of the prompts of requests that begin
    copies: dict[int, int] = field(default_factory=dict)  # by new page, that of a request that runs
    turns: dict[int, Turn] = field(default_factory=dict)  # of requests that go on, in the order in which they got pages
    uses: dict[int, Use] = field(default_factory=dict)  # of the other requests that begin
    stores: dict[int, Stored] = field(default_factory=dict)  # prompts that are read as documents
    loads: dict[int, Path] = field(default_factory=dict)  # by place, files that are read before
    failed: set[int] = field(default_factory=set)  # of requests that name a document that is not there


@dataclass
class Settled(KVConnectorWorkerMetadata):
    """What the scheduler is told after a forward: the tokens of pages when it was last decided what stays there."""

    pages: dict[int, int]
    number: int = 0  # of the forward

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Settled:
        assert isinstance(other, Settled)
        return Settled(self.pages | other.pages, min(self.number, other.number))


@dataclass
class OpenRequest:
    """A request that has not ended."""

    use: Use = field(default_factory=Use)
    turn: Turn | None = None
    begun: bool = False  # whether the workers know it
    prompt: Sequence[int] = ()
    tokens: int = 0  # that are to be read before the first new one
    told: int = 0  # those that the workers know of
    request: Any = None  # vLLM's
    array: np.ndarray | None = None  # its prompt
    copied: bool = False  # whether its page was copied before the first decision about its answer
    stores: str | None = None
    answer: dict[str, Any] = field(default_factory=dict)  # what its response says
    page: int | None = None
    failed: bool = False


class KVSketchDocuments(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side and the workers' side, one object each."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = vllm_config.model_config.hf_config
        asked, method = documents_asked(vllm_config), chosen_method(vllm_config.additional_config, config)
        files, self.folder = {}, None if asked is None else asked.path
        if asked is not None and role == KVConnectorRole.SCHEDULER and self.folder is not None:
            files = listed(self.folder, vllm_config.model_config.hf_text_config, document_method(method, asked))
        self.document_index = DocumentIndex(0 if asked is None else asked.count, files)
        self.kept = turns_asked(vllm_config, method)
        self.host: HostIndex | None = None
        self.leaving: dict[int, LeavingPage] = {}  # pages that vLLM gives away in this step
        self.saves: dict[int, LeavingPage] = {}  # those that another request has got
        self.blocks: Any = None  # vLLM's pool of blocks
        self.held: list[Any] = []  # blocks of kept pages that vLLM has not let go yet, or only just
        self.ended: set[int] = set()
        self.number = 0  # of the last forward that was told, on either side
        self.since: dict[int, int] = {}  # by page, the forward in which its request begins
        self.told: dict[int, int] = {}  # the workers' side: what the scheduler knows of `JointLayers.settled`
        self.requests: dict[str, OpenRequest] = {}
        self.group = next(
            (n for n, each in enumerate(kv_cache_config.kv_cache_groups) if _is_ours(each.kv_cache_spec)), None
        )
        if role == KVConnectorRole.SCHEDULER and self.group is None:
            raise ValueError("KVSketchDocuments needs --attention-backend CUSTOM and a method of kvsketch's")
        self.places_on_host = 0
        if self.kept is not None and self.group is not None:
            page = kv_cache_config.kv_cache_groups[self.group].kv_cache_spec.page_size_bytes
            self.places_on_host = host_places(vllm_config.additional_config, page)
        if self.places_on_host and role == KVConnectorRole.SCHEDULER:
            self.host = HostIndex(self.places_on_host)
        self.failed: set[int] = set()
        self.counts = Counts()
        # Who prints them knows only a connector that was named when vLLM started.
        self.reports = vllm_config.kv_transfer_config.kv_connector_extra_config != AUTOMATIC
        self.pool: torch.Tensor | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # the scheduler's side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.blocks = gpu_block_pool
        if not hasattr(gpu_block_pool, "unpin_blocks"):
            self.kept = None  # a vLLM that cannot keep a block until it is needed

    def on_new_request(self, request: Any) -> None:
        self.requests[request.request_id] = OpenRequest()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        asked = self.requests.setdefault(request.request_id, OpenRequest())
        self._preempted(asked)
        asked.request = request
        given = request.kv_transfer_params or {}
        prompt = request.prompt_token_ids or []
        if self.document_index.is_reading(prompt, given.get(NAME)) and not request.skip_reading_prefix_cache:
            return None, False
        try:
            asked.use = self.document_index.use(request.request_id, prompt, given.get(NAME))
        except (KeyError, ValueError) as error:
            asked.failed, asked.answer = True, {"kvsketch_error": str(error.args[0])}
            logger.warning("kvsketch: request %s: %s", request.request_id, error.args[0])
            # Tokens that fail to load are how a connector ends a request with an error.
            return len(prompt) - 1, False
        asked.stores = given.get(STORE) if not asked.use.place else None
        asked.turn = self._turn(request, asked)
        if asked.turn is WAIT:
            asked.turn = None
            return None, False
        return asked.use.before if asked.turn is None else asked.turn.tokens, False

    def _turn(self, request: Any, asked: OpenRequest) -> Turn | None:
        """The page of an earlier request that this one goes on from. It is not taken yet: vLLM may ask again."""
        self._let_go()
        if self.kept is None or asked.stores is not None or not _only_tokens(request):
            return None
        if asked.array is None or len(asked.array) != request.num_tokens:
            asked.array = np.fromiter(request.all_token_ids, np.int64, request.num_tokens)
        key = self._key(request, asked.use)
        turn = self.kept.found(asked.array, key, self._live(asked))
        if self.host is not None and turn is not WAIT:
            far = self.host.longest(self.kept, asked.array, key)
            # Of two as good the near one.
            turn = max(filter(None, (turn, far)), key=lambda each: each.tokens, default=None)
        if turn is None or turn is WAIT or turn.tokens <= asked.use.before:
            return turn if turn is WAIT else None
        if turn.on_host:
            return turn
        block = self.blocks.blocks[turn.source]
        if block.ref_cnt == 0 and turn.tokens == len(self.kept.pages[turn.source].tokens):
            # All of the page is wanted: the request gets the page itself, the next that vLLM gives away.
            self.blocks.free_block_queue.remove(block)
            self.blocks.free_block_queue.prepend_n([block])
        return turn

    def _live(self, but: OpenRequest) -> Iterator[LivePage]:
        """Pages of requests that run."""
        for asked in self.requests.values():
            if asked is but or asked.page is None or asked.array is None or asked.failed or asked.stores is not None:
                continue
            if self.blocks.blocks[asked.page].ref_cnt:
                key = self._key(asked.request, asked.use)
                yield LivePage(asked.page, asked.array, key, asked.use.before, asked.request.num_computed_tokens)

    def _key(self, request: Any, use: Use) -> tuple[Any, ...]:
        """What a page depends on beside the tokens."""
        adapter = request.lora_request
        return adapter and adapter.lora_int_id, request.cache_salt, use, self.document_index.version(use.place)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self.group is not None
        asked = self.requests[request.request_id]
        asked.prompt, asked.tokens = request.prompt_token_ids or (), request.num_tokens
        if asked.begun:
            return  # streaming input: the page goes on as it is
        asked.page, asked.copied = blocks.get_block_ids()[self.group][0], False
        for other in self.requests.values():
            if other is not asked and other.page == asked.page:
                other.page = None  # it was preempted
        if num_external_tokens == 0 and not asked.failed:
            # vLLM reads the whole prompt, for example because its own likelihood is asked for.
            asked.turn = None
            if asked.use.before:
                asked.use = Use()
        left = self.leaving.pop(asked.page, None)
        if self.kept is not None and (asked.turn is None or not asked.turn.stays_in(asked.page)):
            self.kept.forget(asked.page)
            self.since[asked.page] = self.number + 1
            if left is not None:
                self.saves[asked.page] = left

    def build_connector_meta(self, scheduler_output: Any) -> Told:
        self._let_go()
        for request in scheduler_output.preempted_req_ids or ():
            self._preempted(self.requests.get(request))
        self.number += 1
        told = Told(self.number, ended=self.ended, loads=self.document_index.loads)
        self.ended, self.document_index.loads = set(), {}
        counts = scheduler_output.num_scheduled_tokens
        for request, scheduled in counts.items():
            asked = self.requests.get(request)
            if asked is None or asked.page is None:
                continue
            if not asked.begun or asked.told != asked.tokens:
                told.prompts[asked.page] = asked.told = asked.tokens
            if not asked.begun:
                self._tell(told, request, asked, scheduled)
                found = 0 if asked.failed else asked.use.before if asked.turn is None else asked.turn.tokens
                if found and asked.stores is None:
                    self.counts.add(REUSED, found)
                if asked.turn is not None and asked.turn.on_host:
                    self.counts.add(FETCHED, found)
                continue
            if asked.failed:
                # vLLM has discarded the tokens that would have failed to load; these it has not.
                told.failed.add(asked.page)
            if (
                asked.request.num_computed_tokens + 1 == asked.tokens
                and NAME in asked.answer
                and max(counts.values()) == 1
            ):
                self._unstore(request, asked)
            elif asked.request.num_computed_tokens >= asked.tokens and asked.stores is not None:
                self.document_index.stored(asked.stores)
            self._copy(told, asked)
        self._save(told)
        return told

    def _save(self, told: Told) -> None:
        """Pages that others have got in this step go to the host."""
        if self.host is not None:
            sources = {turn.source for turn in told.turns.values() if turn.on_host}
            for place in sources:
                self.host.places.use(place)
            told.saves = self.host.save(self.saves, sources)
        self.leaving, self.saves = {}, {}

    def _copy(self, told: Told, asked: OpenRequest) -> None:
        """Keeps a copy of a page that is about to be decided about, where a page is free that nobody goes on in."""
        page = asked.page
        if self.kept is None or page is None or asked.copied or asked.stores is not None:
            return
        if not self.kept.soon_decided(page, asked.request.num_computed_tokens, asked.use.before):
            return
        asked.copied, settled, free = True, self.kept.settled[page], self.blocks.free_block_queue
        is_free = free.num_free_blocks and free.fake_free_list_head.next_free_block.block_id not in self.kept.pages
        if not is_free or asked.tokens - asked.use.before < settled or not _only_tokens(asked.request):
            return
        tokens, key = asked.request.all_token_ids[: _read(asked.request)], self._key(asked.request, asked.use)
        (block,) = self.blocks.get_new_blocks(1)
        if self.kept.keep(block.block_id, tokens, key, asked.use.before):
            self.kept.settled[block.block_id] = settled
            told.copies[block.block_id] = page
        self.blocks.unpin_blocks([block], self._given_away)

    def _preempted(self, asked: OpenRequest | None) -> None:
        """A request has no page any more; one that has not begun since it got its page has that."""
        if asked is not None and asked.begun and asked.page is not None:
            self.ended.add(asked.page)
            asked.begun, asked.page = False, None

    def _tell(self, told: Told, request: str, asked: OpenRequest, scheduled: int) -> None:
        """A request begins, with so many tokens of its prompt."""
        assert asked.page is not None
        asked.begun, prompt = True, asked.prompt
        if asked.turn is not None:
            told.turns[asked.page] = asked.turn
            return
        told.uses[asked.page] = asked.use
        if asked.failed:
            told.failed.add(asked.page)
        if asked.stores is None:
            return
        try:
            joint = self._joint()
            if scheduled < len(prompt) and (joint is None or len(prompt) > joint.most_whole):
                raise ValueError(
                    f"a document of {len(prompt)} tokens is read in pieces of {scheduled}; use "
                    f"--no-enable-chunked-prefill and --max-num-batched-tokens of {len(prompt)} or more"
                )
            path = None if self.folder is None else path_of(self.folder, asked.stores)
            document = self.document_index.store(request, asked.stores, prompt)
        except ValueError as error:
            asked.answer = {"kvsketch_error": str(error)}
            logger.warning("kvsketch: request %s: %s", request, error)
            return
        told.stores[asked.page] = Stored(document.place, path, document.digest or "")
        asked.use = Use(document.place, document.tokens)
        if path is not None:
            self.document_index.files[document.name] = Filed(path, document.tokens, document.digest)
        asked.answer = {NAME: document.name, "kvsketch_tokens": document.tokens}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        asked = self.requests.pop(request.request_id, None)
        self.document_index.release(request.request_id)
        if asked is None:
            return False, None
        if asked.page is not None:
            self.ended.add(asked.page)
        if asked.stores is not None and NAME in asked.answer:
            is_whole = request.num_computed_tokens >= asked.tokens
            (self.document_index.stored if is_whole else self.document_index.drop)(asked.stores)
        self._keep(request, asked)
        return False, asked.answer or None

    def _keep(self, request: Any, asked: OpenRequest) -> None:
        """The page of a request that has ended stays as it is until vLLM needs it."""
        if self.kept is None or not asked.page or asked.failed or not request.num_output_tokens:
            return
        tokens = request.all_token_ids[: _read(request)]
        if _only_tokens(request) and self.kept.keep(
            asked.page, tokens, self._key(request, asked.use), asked.use.before
        ):
            self.held.append(self.blocks.blocks[asked.page])

    def _let_go(self) -> None:
        """Pages that vLLM has let go stand behind all other free ones, and are forgotten when they are given away.

        Nothing is pinned until then: one that was given away meanwhile was forgotten (`update_state_after_alloc`).
        """
        assert self.kept is not None or not self.held
        held = [block for block in self.held if self.kept is not None and block.block_id in self.kept.pages]
        free, self.held = [b for b in held if b.ref_cnt == 0], [b for b in held if b.ref_cnt > 0]
        if free:
            self.blocks.touch(free)
            self.blocks.unpin_blocks(free, self._given_away)

    def _given_away(self, block: Any) -> None:
        assert self.kept is not None
        page, settled = self.kept.pages.pop(block.block_id, None), self.kept.settled.get(block.block_id)
        # One that stands in the queue is not given away: vLLM resets its caches.
        if self.host is not None and page is not None and settled is not None and block.prev_free_block is None:
            self.leaving[block.block_id] = LeavingPage(page, settled)

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if self.kept is not None and isinstance(told, Settled):
            # What is told of a page may be of the request before, where the next has begun meanwhile.
            own = {page: count for page, count in told.pages.items() if told.number >= self.since.get(page, 0)}
            self.kept.settled.update(own)

    def _unstore(self, request: str, asked: OpenRequest) -> None:
        """A prompt whose last token comes in a step of single tokens is no document (`JointLayers.close`)."""
        self.document_index.drop(str(asked.stores))
        error = f"the last token of document {asked.stores!r} was read alone; store it again"
        asked.answer, asked.use = {"kvsketch_error": error}, Use()
        logger.warning("kvsketch: request %s: %s", request, error)

    def get_kv_connector_stats(self) -> Stats | None:
        """Both sides are asked after each step; the scheduler's when vLLM has let go pages of requests that ended."""
        joint = None
        if self.role == KVConnectorRole.SCHEDULER:
            self._let_go()
        else:
            joint = self._joint()
        told = (self.counts if joint is None else joint.counts).take()
        return Stats(told) if told and self.reports else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any, **named: Any) -> PromMetrics:
        return PromMetrics(*given, **named)

    def reset_cache(self) -> bool:
        """Nothing that was read is used again: memory is given away (sleep), or weights are others.

        Documents in files are read again.
        """
        if self.kept is not None:
            self.kept.pages.clear()
        if self.host is not None:
            self.host.places.clear()
        self._let_go()
        running = {
            name for name, asked in self.requests.items()
            if asked.page is not None and self.blocks.blocks[asked.page].ref_cnt
        }  # fmt: skip
        lost = self.document_index.clear(running)
        if lost:
            logger.warning(
                "kvsketch: vLLM resets its caches, as before sleep and for new weights, and documents are gone: %s; "
                "store them again", ", ".join(lost),
            )  # fmt: skip
        return True

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # the workers' side

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Told)
        self.failed |= connector_metadata.failed
        joint = self._joint()
        if joint is not None and self.pool is not None:
            told, self.number = connector_metadata, connector_metadata.number
            if joint.host is not None and told.saves:
                # First of all: others write to these pages in this step.
                joint.host.save(joint.pages(self.pool), told.saves, joint.settled, joint.uses)
            joint.forget(told.ended)
            joint.prompts |= told.prompts
            for page in (*told.uses, *told.turns):
                self.told.pop(page, None)  # the scheduler has forgotten it
            for page, source in told.copies.items():
                joint.copy(self.pool, source, page)
                self.told[page] = joint.settled[page]
            # First: a page that a turn is copied from may be another's in this very step.
            for page, turn in told.turns.items():
                joint.go_on(self.pool, page, turn)
            self.failed |= joint.begin_requests(self.pool, told.uses, told.stores, told.loads)

    def _joint(self) -> JointLayers | None:
        result = (getattr(layer.impl, "joint", None) for layer in self._layers().values())
        return next((each for each in result if each is not None), None)

    def _layers(self) -> dict[str, Any]:
        every = self._vllm_config.compilation_config.static_forward_context
        return {name: layer for name, layer in every.items() if getattr(layer, "impl", None) is not None}

    def build_connector_worker_meta(self) -> Settled | None:
        joint = self._joint()
        if joint is None:
            return None
        new = {page: count for page, count in joint.settled.items() if self.told.get(page) != count}
        self.told.update(new)
        return Settled(new, self.number) if new else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Pages are written by the layers themselves, but for the document that a request continues."""
        first = next(name for name, layer in self._layers().items() if getattr(layer.impl, "joint", None))
        self.pool = pool_of(kv_caches[first])
        if self.places_on_host and (joint := self._joint()) is not None and joint.page is not None:
            joint.host = HostPool.of(self.places_on_host, joint.page.nbytes, joint.pages)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is moved."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is moved."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is moved."""

    def wait_for_save(self) -> None:
        """Nothing is moved."""


def _only_tokens(request: Any) -> bool:
    """Whether a prompt is tokens and nothing else, such as pictures."""
    return bool(request.prompt_token_ids) and not request.mm_features


def _read(request: Any) -> int:
    """Tokens in a request's page: those of steps under way, and the last one, may not be there."""
    return min(request.num_computed_tokens - request.num_output_placeholders, request.num_tokens)


def _is_ours(spec: Any) -> bool:
    return isinstance(spec, CircularBufferSpec) or isinstance(getattr(spec, "first_spec", None), CircularBufferSpec)
