"""Decode steps of requests that share tables: rows join and leave between steps, and nothing is recorded anew.

    shared = SharedRows(model, "snapkv:budget=2048", rows=64, longest=32768)
    shared.join(0, cache, token, draw)      the row of a cache that has read its prompt alone, copied in place
    tokens = shared.step(used=1, mode=0)    one token for each of the first rows

The tables are those of `slots.rows`: one clock for all rows, left padding for those that joined late. Positions that
the model sees are each row's own. There is a batch, and on a GPU a graph, for the first 1, 2, 4, ... rows of the same
tables, so few requests pay for few rows. The rows in use should be the first ones: `move` closes a gap.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.memory import in_tokens
from kvsketch.cache.streaming import prefill
from kvsketch.decode.captured import WARM_UP_STEPS, read_token, recording, side_stream, turn_of
from kvsketch.decode.sampling import Draw
from kvsketch.defaults import SEED
from kvsketch.methods import parse_method
from kvsketch.methods.base import BudgetedMethod, Method
from kvsketch.methods.capabilities import SUPPORTED, Support, no
from kvsketch.methods.replay import sink_keys
from kvsketch.methods.waiting import WaitingMethod
from kvsketch.slots import coding, packing
from kvsketch.slots import rows as table_rows
from kvsketch.slots.codes import MIN_TOKENS_TO_QUANTISE, PlainSlots
from kvsketch.slots.documents import DocumentRows, LaidDocument
from kvsketch.slots.heads import spread_over
from kvsketch.slots.rows import EqualRows, RaggedRows, RowNeeds, Rows, bytes_of_row, slots_within
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import plain

LONGEST = 1 << 28  # tokens of a row: the clock starts there and has as many again before it is turned back
# The largest head of a row that joins, in equal parts, where heads share a budget: kernels write a number per slot.
MOST_OF_EQUAL = 4
# Rotary embeddings whose angles depend on the longest row of a batch.
OF_THE_BATCH = ("dynamic", "longrope")


def batched(model: Any, method: str | Method) -> Support:
    """Whether requests to this model with this method can share tables.

    They can if `bound` always gives a fixed shape, and from then on a single token changes each row in place, by what
    that row holds alone: `seen` and `prompt_tokens` of a shared table count for none of its rows.
    """
    method = parse_method(method)
    if (reason := method.capabilities.batched.reason) is not None:
        return no(f"{method.name} is served one request at a time: {reason}")
    cache = CompressedCache(model, method)
    if isinstance(method, WaitingMethod) and not cache.slot_layers[0].table.context.rotary:
        return no(f"new tokens are not rehearsed without the rotary angles of {cache.model_name}, and rows grow")
    if method.ragged and isinstance(getattr(model.config, "num_key_value_heads", 1), list):
        return no(f"the layers of {cache.model_name} differ in their heads")
    if len(cache.slot_layers) < len(cache.layers):
        return no(f"{cache.model_name} has sliding-window or linear layers, whose native caches have no rows to join")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return no(f"{cache.model_name} takes no position_ids, so rows cannot have positions of their own")
    if (spread := spread_over(model)) is not None:
        return no(f"the model is spread over {spread}")
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if kinds & {*OF_THE_BATCH}:
        return no(f"{cache.model_name} rotates keys by angles that depend on the longest row of a batch")
    return SUPPORTED


def lies_once(method: Method) -> bool:
    """Whether a document lies once in tables of many rows that continue it: their heads are in one store."""
    return method.ragged and bool(method.capabilities.documents)


class RowFailed(Exception):
    """What a method does for one row alone has failed; the other rows are as they were."""

    def __init__(self, row: int, error: Exception) -> None:
        super().__init__(f"row {row}: {error}")
        self.row, self.error = row, error


class SharedRows:
    """Tables of `rows` rows, and the decode step over the first of them."""

    def __init__(
        self,
        model: Any,
        method: str | Method,
        rows: int,
        longest: int,
        *,
        memory: int | None = None,
        seed: int = SEED,
        fused: bool = True,
        documents: bool = False,
    ) -> None:
        """`longest`: the most tokens that a row will ever have seen; shares of a prompt get room for that.

        `memory`: bytes of the tables where rows differ in size. Then all rows may be in use only while some are short;
        at least one of the longest fits in any case. `documents`: rows may continue documents, which then lie in the
        tables once; a step has four more launches a layer for it.
        """
        if (reason := batched(model, method).reason) is not None:
            raise ValueError(reason)
        self.model, self.method, self.seed = model, in_tokens(method, model), seed
        self.longest = min(longest, LONGEST)
        self.memory, self.documents = memory, documents and lies_once(self.method)
        self._slots_for: dict[int, int] = {}
        # With the tokens that it had then: asked for at every step while requests wait.
        self._document_slots: WeakKeyDictionary[CompressedCache, tuple[int, int]] = WeakKeyDictionary()
        self.device: torch.device = model.device
        self.fused = fused and self.device.type == "cuda"
        with torch.no_grad():
            self.store, vocabulary = self._rows_of_one(rows)
        self.seen = self.tables[0].seen
        self.token = torch.zeros(rows, 1, dtype=torch.int64, device=self.device)
        self.position, self.live = torch.zeros_like(self.token), torch.zeros_like(self.token)
        self.draw = Draw(rows, self.device, vocabulary)
        self.logits = torch.zeros(rows, vocabulary, device=self.device)
        self.padding: dict[int, int] = {}  # of the rows in use
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        sizes = [1 << bit for bit in range(rows.bit_length()) if 1 << bit < rows] + [rows]
        self.batches = [Batch(self, size) for size in sizes]

    @property
    def rows(self) -> int:
        return len(self.token)

    @property
    def tables(self) -> list[SlotTable]:
        return self.store.tables

    @property
    def device_bytes(self) -> int:
        """Bytes of the tables."""
        held = [t for table in self.tables for t in table.tensors()]
        held += self._documents.document_tensors() if self._documents is not None else []
        tensors = {t.data_ptr(): t for t in held if t.device == self.device}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    @property
    def _documents(self) -> DocumentRows | None:
        """The store, where documents may lie in it."""
        return self.store if isinstance(self.store, DocumentRows) else None

    @property
    def bytes_beside(self) -> int:
        """Bytes of the tables that a row has for itself, beside its part of the store where rows differ in size."""
        return (self.device_bytes - self.store.slot_bytes) // self.rows

    def _rows_of_one(self, rows: int) -> tuple[Rows, int]:
        """Shared tables like those of a short text, and the size of the vocabulary."""
        cache = CompressedCache(self.model, self.method, seed=self.seed)
        # Heads get their sizes after a prompt, and what waits for the next time comes token by token.
        for count in (MIN_TOKENS_TO_QUANTISE, 1) if self.method.ragged else (1,):
            logits = prefill(self.model, torch.zeros(1, count, dtype=torch.int64, device=self.device), cache)
        singles = [layer.table for layer in cache.slot_layers]
        self.documents = self.documents and singles[0].can_be_document
        slots, clock = [self.method.most_slots(table, self.longest) for table in singles], self.longest + 1
        if self.method.ragged:
            packed = [self._bounded(table) for table in singles]
            needs = self.method.row_needs if isinstance(self.method, WaitingMethod) else lambda table: RowNeeds()
            one = sum(singles[0].shape[1] * each for each in slots)
            room = rows * one
            if self.memory is not None:
                memory = self.memory - (rows * bytes_of_row(packed) if self.documents else 0)
                room = min(room, max(one, slots_within(packed, rows, needs(singles[0]).room, memory)))
            most = self.longest + max(slots) if needs(singles[0]).room else MOST_OF_EQUAL * max(slots)
            if self.documents:
                query_heads = self.model.config.get_text_config(decoder=True).num_attention_heads
                return DocumentRows(packed, rows, room, clock, most, needs, query_heads), logits.shape[1]
            return RaggedRows(packed, rows, room, clock, most, needs), logits.shape[1]
        for table in singles:
            table.count(prompt_tokens=self.longest)
            self.method.bound(table, self.longest)
            table.count(prompt_tokens=1)
        return EqualRows(singles, rows, slots, clock), logits.shape[1]

    def slots_for(self, tokens: int) -> int:
        """The most slots of the store that a row takes until it has seen `tokens` tokens; 0 where rows are equal."""
        if not self.store.slots:
            return 0
        if tokens not in self._slots_for:
            each = [self.method.most_slots(table, tokens) for table in self.tables]
            self._slots_for[tokens] = self.tables[0].shape[1] * sum(each)
        return self._slots_for[tokens]

    def document_slots(self, document: CompressedCache) -> int:
        """Slots that a document takes in the store, however many rows continue it; 0: it cannot lie there."""
        tokens, size = self._document_slots.get(document, (-1, 0))
        if tokens != document.tokens_seen:
            tokens, size = document.tokens_seen, self._slots_of(document)
            self._document_slots[document] = tokens, size
        return size

    def _slots_of(self, document: CompressedCache) -> int:
        tables = [layer.table for layer in document.slot_layers]
        store = self._documents
        if store is None or document.tokens_before or tables[0].empty:
            return 0
        if document.method != self.method or store.misfit_of_document(tables):
            return 0
        return sum(table.layout.total for table in tables if table.layout is not None)

    @property
    def laid_documents(self) -> int:
        """Documents that lie in the store."""
        return 0 if self._documents is None else len(self._documents.laid)

    def _laid(self, store: DocumentRows, document: CompressedCache) -> LaidDocument:
        """A document as it lies in the store; it is laid there if it does not."""
        if (result := store.lying(document)) is not None:
            return result
        tables = [layer.table for layer in document.slot_layers]
        assert isinstance(self.method, BudgetedMethod)
        first = torch.cat([sink_keys(table, self.method.sinks) for table in tables])  # [L, H, sinks, D]
        held, seen = PlainSlots(first), tables[0].seen
        parts = {"keys": held, "values": held}
        text = tables[0].cleared().like(parts, length=first.shape[2], seen=seen)
        return store.lay(document, tables, text)

    def _bounded(self, table: SlotTable) -> SlotTable:
        """A text within its budget gets its fixed shape; where heads differ, it lies in a flat store like others."""
        if table.exact:
            self.method.bound(table, table.seen + 1)
        if self.method.ragged and table.layout is None:
            packing.pack(table, torch.full(table.shape[:2], table.length, device=table.device))
        return table

    def ready(self, cache: CompressedCache) -> bool:
        """Whether the row of a cache can join as it is: codes need some tokens to find their center."""
        return not coding.waits(cache.slot_layers[0].table)

    def join(
        self, row: int, cache: CompressedCache, token: Tensor, draw: Draw, document: CompressedCache | None = None
    ) -> str:
        """Copies the only row of `cache` into `row`, to go on with `token` [1, 1] as `draw` says.

        `document`: what the cache continues, for which `document_slots` are known; only the first row copies it.
        Returns why it does not fit, or nothing. The cache is bounded by this and may be reused after a reset.
        """
        assert bool(cache.tokens_before) == (document is not None), "a row joins with the document that it continues"
        with torch.no_grad(), plain():
            tables = [self._bounded(layer.table) for layer in cache.slot_layers]
            table_rows.count_to(self.tables, self.seen)
            if reason := self._misfit(tables, document):
                return reason
            if document is not None and self._documents is not None:
                self._documents.read(row, self._laid(self._documents, document))
            self.store.put(row, tables)
            self.padding[row] = self.seen - tables[0].seen
            self.token[row].copy_(token[0])
            self.position[row].fill_(cache.tokens_seen)
            self.live[row].fill_(1)
            for own, new in zip(self.draw.tensors(), draw.tensors(), strict=True):
                own[row].copy_(new[0])
        return ""

    def _misfit(self, tables: Sequence[SlotTable], document: CompressedCache | None) -> str:
        """Why a row cannot join; empty: it can."""
        store = self._documents
        if document is None or store is None:
            return self.store.misfit(tables)
        laid = store.lying(document)
        # One that lies there and is not read counts as free.
        more = 0 if laid is not None and store.is_read(laid) else self.document_slots(document)
        return store.misfit(tables, more)

    def leave(self, row: int) -> None:
        """Nobody reads the row any more."""
        self.store.retire(row)
        self.live[row].fill_(0)
        del self.padding[row]

    def move(self, source: int, row: int) -> None:
        """Row `source` goes on as row `row`, which is free."""
        table_rows.count_to(self.tables, self.seen)
        with torch.no_grad():
            self.store.move(source, row)
            for tensor in (self.token, self.position, self.live, *self.draw.tensors()):
                tensor[row].copy_(tensor[source])
            self.live[source].fill_(0)
        self.padding[row] = self.padding.pop(source)

    def step(self, used: int, mode: int, before_choice: Callable[[], None] | None = None) -> Tensor:  # [used, 1]
        """One token for each of the first `used` rows; `mode`: see `Draw.choose`. Overwritten by the next step.

        `before_choice` is called when the model has been told to run, and may change `draw`.

        Raises RowFailed before anything is done where the periodic work of a row fails: once that row has left, the
        others can go on.
        """
        batch = next(batch for batch in self.batches if batch.rows >= used)
        if self.seen >= table_rows.LATEST:
            self.rewind()
        with turn_of(self.device), torch.no_grad():
            self._catch_up()
            batch.run(self.seen, mode, before_choice=before_choice)
        self.seen += 1
        return self.token[:used]

    def _catch_up(self) -> None:
        """Rows whose method has periodic work to do are taken out for it, one by one, and put back."""
        for row in self.store.due():
            table_rows.count_to(self.tables, self.seen)
            with plain():
                taken = self.store.take(row, self.seen - self.padding[row])
                assert isinstance(self.method, WaitingMethod)
                try:
                    self.method.catch_up(taken)
                except Exception as error:
                    raise RowFailed(row, error) from error
                self.store.put(row, taken)

    def rewind(self) -> None:
        """Turns the clock back as far as the rows in use allow, and the longest that may still join."""
        count = min([*self.padding.values(), self.seen - self.longest - 1])
        table_rows.count_to(self.tables, self.seen)
        with torch.no_grad():
            self.store.rewind(count)
        self.seen -= count
        self.padding = {row: padding - count for row, padding in self.padding.items()}

    def release(self) -> None:
        """Gives the memory of the tables back; no step can follow."""
        self.store.release()
        self.batches = []

    def warm_up(self) -> None:
        """Compiles and records the step of every batch, so that no request has to wait for it. No row is in use."""
        for batch in self.batches if self.device.type == "cuda" else ():
            with turn_of(self.device), torch.no_grad():
                for _ in range(WARM_UP_STEPS):
                    batch.run(self.seen, Draw.ALL, eager=True)
                    self.seen += 1
                batch.record(self.seen)


class Batch:
    """The step over the first rows."""

    def __init__(self, shared: SharedRows, rows: int) -> None:
        self.shared, self.rows = shared, rows
        self.cache = CompressedCache(shared.model, shared.method, seed=shared.seed)
        for layer, table in zip(self.cache.slot_layers, shared.store.first(rows), strict=True):
            layer.table, layer.is_initialized = table, True
        self.tables = [layer.table for layer in self.cache.slot_layers]
        whole = (shared.token, shared.position, shared.live, shared.logits)
        self.token, self.position, self.live, self.logits = (tensor[:rows] for tensor in whole)
        self.draw = shared.draw.first(rows)
        self.graph: Any = None
        self.choosing: list[Any] = []  # graphs, by mode

    def run(self, seen: int, mode: int, eager: bool = False, before_choice: Callable[[], None] | None = None) -> None:
        table_rows.count_to(self.tables, seen)
        self.shared.store.before_step(self.tables)
        if self.graph is None or eager or any(self.shared.method.maintenance_due(table) for table in self.tables):
            with side_stream(self.cache.slot_layers) if eager else contextlib.nullcontext():
                self._forward()
        else:
            self.graph.replay()
        if before_choice is not None:
            before_choice()
        if self.choosing and not eager:
            self.choosing[mode].replay()
        else:
            self._choose(mode)

    def _forward(self) -> None:
        self.logits.copy_(read_token(self.shared.model, self.cache, self.token, self.position, self.shared.fused))
        # A row that has left must not run out of positions.
        self.position.add_(1).mul_(self.live)

    def _choose(self, mode: int) -> None:
        self.token.copy_(self.draw.choose(self.logits, mode))

    def record(self, seen: int) -> None:
        """Captures the step and the choices; nothing of it runs."""
        table_rows.count_to(self.tables, seen)
        with recording(self.shared.device, self.shared.pool) as self.graph, side_stream(self.cache.slot_layers):
            self._forward()
        self.choosing = []
        for mode in range(3):
            with recording(self.shared.device, self.shared.pool) as graph:
                self._choose(mode)
            self.choosing.append(graph)
