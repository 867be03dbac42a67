"""Documents that requests share, as a KV connector of vLLM (`KVSketchDocuments`).

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"kvsketch": "rehearse:budget=2048"}' \\
        --kv-transfer-config '{"kv_connector": "KVSketchDocuments", "kv_role": "kv_both",
                               "kv_connector_extra_config": {"budget": 16384, "count": 8}}'

vLLM asks a connector how many tokens of a prompt are there already, and tells its workers before each forward what the
scheduler's side has decided. Nothing is moved: the workers' side notes in a request's page which document it continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import CircularBufferSpec

from kvsketch.integrations.vllm.backend import pool_of
from kvsketch.integrations.vllm.files import Filed, listed, path_of
from kvsketch.integrations.vllm.library import NAME, STORE, Library, Stored, Use
from kvsketch.integrations.vllm.settings import chosen_method, document_method, documents_asked
from kvsketch.integrations.vllm.together import Together

logger = init_logger(f"vllm.{__name__}")


@dataclass
class Told(KVConnectorMetadata):
    """What the workers are told before a forward, by page."""

    uses: dict[int, Use] = field(default_factory=dict)  # of requests that begin
    stores: dict[int, Stored] = field(default_factory=dict)  # prompts that are read as documents
    loads: dict[int, Path] = field(default_factory=dict)  # by place, files that are read before
    failed: set[int] = field(default_factory=set)  # of requests that name a document that is not there


@dataclass
class Asked:
    """A request that has not ended."""

    use: Use = field(default_factory=Use)
    stores: str | None = None
    answer: dict[str, Any] = field(default_factory=dict)  # what its response says
    page: int | None = None
    failed: bool = False


class KVSketchDocuments(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side and the workers' side, one object each."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        asked = documents_asked(vllm_config)
        assert asked is not None
        method = document_method(chosen_method(vllm_config.additional_config), asked)
        files, self.folder = {}, asked.path
        if role == KVConnectorRole.SCHEDULER and self.folder is not None:
            files = listed(self.folder, vllm_config.model_config.hf_text_config, method)
        self.library = Library(asked.count, files)
        self.requests: dict[str, Asked] = {}
        self.group = next(
            (n for n, each in enumerate(kv_cache_config.kv_cache_groups) if _is_ours(each.kv_cache_spec)), None
        )
        if role == KVConnectorRole.SCHEDULER and self.group is None:
            raise ValueError("KVSketchDocuments needs --attention-backend CUSTOM and a method of kvsketch's")
        self.failed: set[int] = set()
        self.pool: torch.Tensor | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # the scheduler's side

    def on_new_request(self, request: Any) -> None:
        self.requests[request.request_id] = Asked()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        asked = self.requests.setdefault(request.request_id, Asked())
        given = request.kv_transfer_params or {}
        prompt = request.prompt_token_ids or []
        try:
            asked.use = self.library.use(request.request_id, prompt, given.get(NAME))
        except (KeyError, ValueError) as error:
            asked.failed, asked.answer = True, {"kvsketch_error": str(error.args[0])}
            logger.warning("kvsketch: request %s: %s", request.request_id, error.args[0])
            # Tokens that fail to load are how a connector ends a request with an error.
            return len(prompt) - 1, False
        asked.stores = given.get(STORE) if not asked.use.place else None
        return asked.use.before, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self.group is not None
        self.requests[request.request_id].page = blocks.get_block_ids()[self.group][0]

    def build_connector_meta(self, scheduler_output: Any) -> Told:
        told, self.library.loads = Told(loads=self.library.loads), {}
        for new in scheduler_output.scheduled_new_reqs:
            scheduled = scheduler_output.num_scheduled_tokens[new.req_id]
            self._tell(told, new.req_id, new.prompt_token_ids or [], scheduled)
        return told

    def _tell(self, told: Told, request: str, prompt: Sequence[int], scheduled: int) -> None:
        """A request begins, with so many tokens of its prompt."""
        asked = self.requests.get(request)
        if asked is None or asked.page is None:
            return
        told.uses[asked.page] = asked.use
        if asked.failed:
            told.failed.add(asked.page)
        if asked.stores is None:
            return
        try:
            if scheduled < len(prompt):
                raise ValueError(
                    f"a document of {len(prompt)} tokens is read in pieces of {scheduled}; use "
                    f"--no-enable-chunked-prefill and --max-num-batched-tokens of {len(prompt)} or more"
                )
            path = None if self.folder is None else path_of(self.folder, asked.stores)
            document = self.library.store(request, asked.stores, prompt)
        except ValueError as error:
            asked.answer = {"kvsketch_error": str(error)}
            logger.warning("kvsketch: request %s: %s", request, error)
            return
        told.stores[asked.page] = Stored(document.place, path, document.digest or "")
        if path is not None:
            self.library.files[document.name] = Filed(path, document.tokens, document.digest)
        asked.answer = {NAME: document.name, "kvsketch_tokens": document.tokens}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        asked = self.requests.pop(request.request_id, None)
        self.library.release(request.request_id)
        return False, asked.answer or None if asked else None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # the workers' side

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Told)
        self.failed |= connector_metadata.failed
        together = self._together()
        if together is not None and self.pool is not None:
            told = connector_metadata
            self.failed |= together.begin_requests(self.pool, told.uses, told.stores, told.loads)

    def _together(self) -> Together | None:
        result = (getattr(layer.impl, "together", None) for layer in self._layers().values())
        return next((each for each in result if each is not None), None)

    def _layers(self) -> dict[str, Any]:
        every = self._vllm_config.compilation_config.static_forward_context
        return {name: layer for name, layer in every.items() if getattr(layer, "impl", None) is not None}

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Pages are written by the layers themselves, but for the document that a request continues."""
        first = next(name for name, layer in self._layers().items() if getattr(layer.impl, "together", None))
        self.pool = pool_of(kv_caches[first])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is moved."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is moved."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is moved."""

    def wait_for_save(self) -> None:
        """Nothing is moved."""


def _is_ours(spec: Any) -> bool:
    return isinstance(spec, CircularBufferSpec) or isinstance(getattr(spec, "first_spec", None), CircularBufferSpec)
