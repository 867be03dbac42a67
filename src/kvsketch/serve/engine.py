"""The batched engine: many requests over one set of tables, one decode step for all of them.

The life of a request:

    waiting     in the queue, until a row is free for it
    reading     its prompt is read into a cache of its own, a chunk between two decode steps
    running     its row lies in the shared tables (`decode.shared`) and gets a token with every step
    ended       its row is free; nothing was allocated for it that stays

One thread does all work with the model. Between two steps one chunk of one prompt is read: in turn the prompt that came
first, so that none waits for ever, and the one with the least left, so that a short one does not wait for a long one.
The others take a step between its layers too, as often as they would wait too long for the next one (`pace`).
The tokens of a step are read while the next one runs on the device; what a row does after its end is thrown away.

A chat goes on in a copy of the cache that an earlier turn has left (`chats`), and its row joins as others do.

Requests that name a document continue it (`CompressedCache.continued`): it lies in the tables once, and their rows hold
what they have read and said themselves.

A request whose row cannot join yet, or not at all, takes its steps by itself, in turn with the others: texts too short
for codes, rows of a document that was read by another method or is kept whole, all requests of a method whose rows
share no tables (`decode.shared.batched`), and those of an engine of one row, which needs no tables beside its cache.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.memory import in_tokens
from kvsketch.cache.streaming import read_chunks
from kvsketch.decode.captured import turn_of
from kvsketch.decode.sampling import NO_TOKEN, Draw
from kvsketch.decode.shared import LONGEST, RowFailed, SharedRows, batched
from kvsketch.defaults import CHUNK, SEED
from kvsketch.methods import parse_method
from kvsketch.methods.base import Method
from kvsketch.methods.capabilities import SUPPORTED, no
from kvsketch.serve.caches import Caches, GivenUp, WatchedCache
from kvsketch.serve.chats import CHAT, Chats, Chunks, Prefix, read_spans, read_turns
from kvsketch.serve.grammar import STUCK, Unsatisfiable
from kvsketch.serve.pace import PART, PAUSE_CPU, PAUSE_GPU, READ, Pace
from kvsketch.serve.requests import EngineState, FinishReason, Request, Ticket, not_finite
from kvsketch.serve.schedule import Run, Schedule
from kvsketch.serve.summary import FullCache
from kvsketch.serve.tokens import Tokens, guide_rows
from kvsketch.serve.unbatched import UnbatchedSteps
from kvsketch.slots import coding
from kvsketch.slots.codes import NotFinite
from kvsketch.slots.pauses import letting


def usual_prefill(model: Any, method: str | Method) -> str:
    """How prompts are read: as a stream between the steps of the others; whole where requests share no step, and by
    methods whose heads share a budget, so that all of it is divided at once.
    """
    return "exact" if parse_method(method).ragged or not batched(model, method) else "stream"


@dataclass
class Counts:
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)


def close_gap(shared: SharedRows, runs: list[Run]) -> None:
    """Moves the last row forward while fewer rows would do for a smaller batch."""
    while True:
        last = max(runs, key=lambda run: run.row or 0)
        assert last.row is not None
        needed = next(batch.rows for batch in shared.batches if batch.rows >= len(runs))
        if last.row < needed:
            return
        row = min({*range(needed)} - {run.row for run in runs})
        shared.move(last.row, row)
        last.row = row


class BatchedEngine:
    """Serves requests to one model with one method, `rows` of them at a time.

    `longest`: the most tokens of a prompt and its answer together. `queue`: how many requests may wait. `memory`: bytes
    of the tables where rows differ in size, so that fewer long requests run at a time, and more short ones. `prefill`,
    that of `usual_prefill` unless given, `chunk` and `seed` are those of `CompressedCache`: a greedy request gets the
    tokens of `kvsketch.generate` with such a cache. `documents`: those that requests name lie in the tables once for
    all of them, and a greedy request gets the tokens of `kvsketch.generate` with `document.continued()`; without it a
    step has fewer launches and every row holds a copy. `chat_bytes`: of the caches of chats that wait for their next
    turn; 0: every turn reads its transcript anew, as one prompt. Chats whose spans grow small have caches of their own
    (`CHAT`) and take their steps by themselves. `chats_go_on`: whether others go on in the caches of earlier turns.
    `pause`: the seconds that running requests wait for their next token while prompts are read, as far as a layer or a
    part of a rehearsal takes no longer. `batched`: whether one step serves them all; its reason says why requests share
    no tables and take turns.
    """

    def __init__(
        self,
        model: Any,
        method: str | Method,
        *,
        rows: int = 8,
        longest: int = 32768,
        queue: int = 64,
        prefill: str | None = None,
        chunk: int = CHUNK,
        readers: int = 4,
        memory: int | None = None,
        seed: int = SEED,
        fused: bool = True,
        documents: bool = False,
        chat_bytes: float = float("inf"),
        pause: float | None = None,
    ) -> None:
        for name, value in (("rows", rows), ("longest", longest), ("readers", readers)):
            if value < 1:
                raise ValueError(f"{name}={value} is too small; use 1 or more")
        self.model, self.method = model, in_tokens(method, model)
        self.queue, self.readers = queue, readers
        self.prefill = prefill or usual_prefill(model, self.method)
        self._shared_options: dict[str, Any] = {
            "rows": rows, "longest": longest, "memory": memory, "seed": seed, "fused": fused,
            "documents": documents,
        }  # fmt: skip
        self.batched = batched(model, self.method) and (SUPPORTED if rows > 1 else no("one request at a time: rows=1"))
        self.rows, self.device = rows, torch.device(model.device)
        self.longest = min(longest, LONGEST) if self.batched else longest
        self._vocabulary = model.get_output_embeddings().weight.shape[0]
        self._shared = self._new_shared()
        self.bytes_per_row = None if self._shared is None else self._shared.device_bytes // rows
        self._schedule = Schedule(rows, queue, readers)
        self._on_the_way: deque[Tokens] = deque()
        self._caches = Caches(model, self.method, readers, seed=seed, prefill=self.prefill, chunk=chunk)
        self._chats = Chats(lambda: WatchedCache(model, CHAT, seed=seed, chunk=chunk), chat_bytes)
        # What stays for one question is no measure for the next.
        self.chats_go_on = chat_bytes > 0 and not self.method.looks_at_question
        on_gpu = self.device.type == "cuda"
        self._pace = Pace(pause or (PAUSE_GPU if on_gpu else PAUSE_CPU), behind=on_gpu)
        self._unbatched = UnbatchedSteps(model, fused)
        self._full_cache = FullCache(model)
        self._counts = Counts()
        self._thread = threading.Thread(target=self._work, name="kvsketch engine", daemon=True)
        self._thread.start()

    # what any thread may call

    def submit(self, request: Request) -> Ticket:
        """Queues a request. Raises Full when the queue is full, Closed after close, ValueError for what cannot run."""
        ticket = Ticket(request)
        self._require(ticket)
        self._drop_waiting()
        self._schedule.put(ticket)
        return ticket

    def state(self) -> EngineState:
        here = self._schedule
        with here.lock:
            self._drop_waiting()
            seen = [run.ticket.prompt_tokens + run.launched for run in here.running]
            stored = [
                min(tokens, run.ticket.tokens_stored or tokens) for tokens, run in zip(seen, here.running, strict=True)
            ]
            own = [run.cache for run in here.runs if run.row is None]
            counts, shared = self._counts, 0 if self._shared is None else self._shared.device_bytes
            return EngineState(
                running=len(here.running), reading=len(here.reading), waiting=len(here.waiting),
                rows=self.rows, queue=self.queue,
                tokens_seen=sum(seen), tokens_stored=sum(stored),
                device_bytes=shared + sum(cache.device_bytes for cache in own) + self._chats.device_bytes,
                chats=len(self._chats), chat_bytes=self._chats.device_bytes,
                bytes_per_row=self.bytes_per_row,
                documents_laid=0 if self._shared is None else self._shared.laid_documents,
                steps=counts.steps, prompt_tokens=counts.prompt_tokens, cached_tokens=counts.cached_tokens,
                generated_tokens=counts.generated_tokens,
                finished=dict(counts.finished),
            )  # fmt: skip

    def close(self, drain: bool = True) -> None:
        """Ends the engine: after all accepted requests with `drain`, else they end as "cancelled". Waits for it."""
        self._schedule.end(drain)
        self._thread.join()

    def _require(self, ticket: Ticket) -> None:
        request = ticket.request
        most = ticket.prompt_tokens + request.max_new_tokens
        if most > self.longest:
            raise ValueError(
                f"a prompt of {ticket.prompt_tokens} tokens and max_new_tokens={request.max_new_tokens} are {most} "
                f"together; this engine takes up to {self.longest}: shorten one of them"
            )
        size = self.model.get_input_embeddings().num_embeddings
        if not 0 <= min(request.ids) <= max(request.ids) < size:
            raise ValueError(f"ids must be token numbers from 0 to {size - 1}")
        document = request.document
        if document is not None and not document.slot_layers[0].table.empty:
            rows = document.slot_layers[0].table.shape[0]
            if rows != 1:
                raise ValueError(f"the document has {rows} rows; a request continues one text")

    # the thread that works

    def _work(self) -> None:
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        died: BaseException | None = None
        try:
            with torch.no_grad(), on_device:
                while self._schedule.wait_for_work(lambda: self._on_the_way):
                    self._drop_cancelled()
                    self._admit()
                    self._decode()
                    self._read_chunk()
        except BaseException as error:
            # Whoever waits would wait for ever.
            died = error
        self._schedule.end()
        tickets = [*self._schedule.clear(), *(run.ticket for tokens in self._on_the_way for run in tokens.runs)]
        self._on_the_way.clear()
        for ticket in tickets:
            self._finish(ticket, "cancelled" if died is None else "error", died)

    def _decode(self) -> None:
        """One token for every request that runs."""
        waited = bool(self._schedule.running)
        with letting(None):
            try:
                self._step()
                self._deliver(keep=1 if self._schedule.running and self.device.type == "cuda" else 0)
            except Exception as error:
                self._start_over(error)
            self._step_alone()
        self._pace.stepped(waited)

    def _drop_cancelled(self) -> None:
        for run in [run for run in self._schedule.runs if run.ticket.cancelled]:
            self._end(run, "cancelled")
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        for ticket in self._schedule.drop_cancelled():
            self._finish(ticket, "cancelled")

    def _admit(self) -> None:
        """Starts to read prompts while there are rows for them."""
        while (taken := self._schedule.take(self._slots_for)) is not None:
            ticket, needs = taken
            try:
                self._start(ticket, *needs)
            except Exception as error:
                self._finish(ticket, "error", error)

    def _slots_for(self, ticket: Ticket) -> tuple[int, bool] | None:
        """Slots of the shared store that a request may need, and whether it shares its document; None while the others
        leave too few.
        """
        request, document = ticket.request, ticket.request.document
        if self._shared is None or request.compaction is not None:
            return 0, False
        if document is not None and self._caches.differ(document):
            return 0, False
        runs = self._schedule.runs
        shared = {id(each): each for each in (run.ticket.request.document for run in runs if run.shares) if each}
        taken = sum(run.slots for run in runs) + sum(map(self._shared.document_slots, shared.values()))
        if document is not None and (size := self._shared.document_slots(document)):
            slots = self._shared.slots_for(len(request.ids) + request.max_new_tokens)
            if size + slots <= self._shared.store.slots:
                more = 0 if id(document) in shared else size
                return None if taken + more + slots > self._shared.store.slots else (slots, True)
        slots = self._shared.slots_for(ticket.prompt_tokens + request.max_new_tokens)
        return None if taken + slots > self._shared.store.slots else (slots, False)

    def _start(self, ticket: Ticket, slots: int, shares: bool) -> None:
        request = ticket.request
        draw = Draw(1, self.device, self._vocabulary)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        taste = (request.top_k, request.min_p, request.repetition_penalty)
        draw.set(0, request.temperature, request.top_p, seed, *taste, request.ids)
        ids = torch.tensor([request.ids], device=self.device)
        guide = None if request.guide is None else request.guide()
        if guide is not None:
            draw.allowed[0].copy_(guide.allowed())
        mode = Draw.mode(request.temperature, request.top_p, *taste, guided=guide is not None)
        cache, known, chunks = self._begin(ticket, ids, shares)
        run = Run(ticket, cache, draw, mode, guide, slots, shares, chunks, known)
        if isinstance(cache, WatchedCache):
            cache.watch = functools.partial(self._between_layers, run)
        self._schedule.read(run)

    def _begin(self, ticket: Ticket, ids: Tensor, shares: bool) -> tuple[CompressedCache, int, Chunks]:
        """A cache for a prompt `ids` [1, n], how many of its tokens it has read, and the reading of the rest."""
        request, known = ticket.request, 0
        cache: CompressedCache
        if (chat := request.compaction) is not None:
            cache, known = self._chats.open(request.ids, chat.shares, chat.spans, chat.end)
            chunks = read_spans(self.model, ids, known, cache, chat, ticket.note_repeated)
        elif request.document is not None or not (request.turns and self.chats_go_on):
            cache = self._caches.take(request.document, shares)
            return cache, known, read_chunks(self.model, ids, cache)
        elif (found := self._chats.copied(request.ids, request.turns)) is not None:
            cache, prefix = found
            known = cache.tokens_seen
            chunks = read_turns(self.model, ids, known, cache, request.turns, self._keeping(request, cache, prefix))
        else:
            cache = self._caches.take(None, shares)
            chunks = read_turns(self.model, ids, known, cache, request.turns, self._keeping(request, cache))
        ticket.cached_tokens = known
        self._counts.cached_tokens += known
        return cache, known, chunks

    def _keeping(self, request: Request, cache: CompressedCache, prefix: Prefix | None = None) -> Callable[[int], None]:
        """What keeps a cache for later turns where its reading stops: at the end of the first turn, such as a system
        prompt that other chats begin with too, and of the last.
        """
        ends = request.turns

        def keep(end: int) -> None:
            if end in (ends[0], ends[-1]):
                here = tuple(each for each in ends if each <= end)
                self._chats.keep_prefix(request.ids[:end], here, cache, prefix, goes_on=end < ends[-1])

        return keep

    # reading

    def _read_chunk(self) -> None:
        if not self._schedule.reading:
            return
        run = self._schedule.next_to_read()
        assert run.chunks is not None
        try:
            # While the prompt is rehearsed, others take steps too; not while one of them is.
            with turn_of(self.device), letting(functools.partial(self._let_step, PART, 1)):
                read, logits = next(run.chunks)
                self._counts.prompt_tokens += read - run.read
                run.read = run.ticket.tokens_read = read
                run.begun = 0
                # What comes after the last chunk.
                for _ in run.chunks if run.left == 0 else ():
                    raise AssertionError("a prompt that has been read goes on")
            if run.left == 0:
                self._start_answer(run, logits)
        except GivenUp:
            self._end(run, "cancelled")
        except Exception as error:
            self._end(run, "error", error)

    def _between_layers(self, run: Run, tokens: int) -> None:
        """A layer is about to read more tokens of the prompt of a run."""
        if run.chunks is None:
            return
        if run.ticket.cancelled:
            raise GivenUp
        done = tokens * run.begun // len(run.cache.layers)
        run.ticket.tokens_read = run.read + min(tokens, done, run.left)  # a repetition is read too
        run.begun += 1
        self._let_step(READ, tokens)

    def _let_step(self, kind: str, amount: int) -> None:
        """So much work of a kind comes next: those that run take a step before it, if they would wait too long."""
        if self._schedule.running and self._pace.due(kind, amount):
            self._decode()
        self._pace.work(kind, amount)

    def _start_answer(self, run: Run, logits: Tensor) -> None:
        run.chunks, run.token = None, run.draw.choose(logits, run.mode)
        ticket = run.ticket
        if ticket.request.compaction is not None:
            ticket.tokens_stored = run.cache.tokens_stored
        else:
            tables = [layer.table for layer in run.cache.slot_layers]
            budgets = [run.cache.method.budget_tokens(table) for table in tables]
            ticket.tokens_stored = None if None in budgets else max(budget for budget in budgets if budget is not None)
        ticket.device_bytes = run.cache.device_bytes
        held = [run.cache] if not run.cache.tokens_before else [run.cache, ticket.request.document]
        ticket.cache_bytes = sum(cache.device_bytes + cache.host_bytes for cache in held if cache is not None)
        ticket.full_bytes = self._full_cache.bytes(ticket.prompt_tokens)
        self._schedule.answer(run)
        self._send(Tokens.of([run], run.token, [0], logits))
        if run in self._schedule.running:
            self._try_to_join(run)
            if run.row is not None:
                ticket.device_bytes = self.bytes_per_row

    def _try_to_join(self, run: Run) -> None:
        """Puts a row into the shared tables if it fits."""
        if self._shared is None or self._caches.differ(run.cache) or not self._shared.ready(run.cache):
            return
        if run.cache.tokens_before and not run.shares:
            return
        assert run.token is not None
        row = min({*range(self.rows)} - {other.row for other in self._schedule.running})
        document = run.ticket.request.document if run.shares else None
        if self._shared.join(row, run.cache, run.token, run.draw, document):
            return
        run.row, run.token, run.step, run.logits = row, None, None, None
        self._caches.give_back(run)

    # decode steps

    def _step(self) -> None:
        runs = [run for run in self._schedule.running if run.row is not None]
        if not runs or self._shared is None:
            return
        close_gap(self._shared, runs)
        rows = [run.row for run in runs if run.row is not None]
        try:
            guide = functools.partial(guide_rows, runs, self._on_the_way, self._shared.draw)
            tokens = self._shared.step(max(rows) + 1, max(run.mode for run in runs), guide)
        except RowFailed as failed:
            # The others take their step in the next turn.
            self._end(next(run for run in runs if run.row == failed.row), "error", failed.error)
            return
        self._counts.steps += 1
        self._send(Tokens.of(runs, tokens, rows, self._shared.logits))

    def _step_alone(self) -> None:
        """One token for each request that takes its steps by itself; it joins the others as soon as it can."""
        for run in [run for run in self._schedule.running if run.row is None]:
            try:
                self._try_to_join(run)
                if run.row is None:
                    guide_rows([run], self._on_the_way, run.draw)
                    # A row that is too short for codes joins before its step is recorded, and is fused until then.
                    short = coding.waits(run.cache.slot_layers[0].table)
                    capture = not self.batched or short or self._caches.differ(run.cache)
                    tokens = self._unbatched.take(run, capture)
                    self._counts.steps += 1
                    self._send(tokens)
            except Exception as error:
                self._end(run, "error", error)

    def _send(self, tokens: Tokens) -> None:
        """Tokens are on their way; a run that has all it asked for leaves its row at once."""
        self._on_the_way.append(tokens)
        for run in tokens.runs:
            run.launched += 1
            if run.launched >= run.ticket.request.max_new_tokens:
                self._leave(run)

    def _deliver(self, keep: int) -> None:
        """Hands out tokens that have arrived, but for those of the last `keep` steps."""
        while len(self._on_the_way) > keep:
            tokens = self._on_the_way.popleft()
            tokens.tell()
            for run, token, likely in tokens.read():
                ticket = run.ticket
                if ticket.done:
                    continue
                if ticket.cancelled:
                    self._end(run, "cancelled")
                elif token == NO_TOKEN:
                    self._end(run, "error", not_finite(f"request {ticket.request.id}", self.model))
                elif run.guide is not None and run.guide.error:
                    kind = Unsatisfiable if run.guide.error == STUCK else ValueError
                    self._end(run, "error", kind(f"the answer does not follow its grammar: {run.guide.error}"))
                elif token in ticket.request.stop_ids:
                    self._end(run, "stop")
                else:
                    self._counts.generated_tokens += 1
                    run.delivered += 1
                    ticket.put(token, likely)
                    if run.guide is not None and run.guide.ended and run.delivered == run.guide.tokens:
                        self._end(run, "stop")
                    elif run.delivered >= ticket.request.max_new_tokens:
                        self._end(run, "length")

    # ends

    def _leave(self, run: Run) -> None:
        """The request takes no more steps."""
        self._schedule.leave(run)
        if run.chunks is not None:
            run.chunks.close()
            run.chunks = None
        if run.row is not None:
            assert self._shared is not None
            self._shared.leave(run.row)
            run.row = None
        run.step = None
        self._caches.give_back(run)

    def _end(self, run: Run, reason: FinishReason, error: BaseException | None = None) -> None:
        self._leave(run)
        self._chats.keep(run, error is not None)
        if isinstance(error, NotFinite) and run.ticket.request.id not in str(error):
            error = not_finite(f"request {run.ticket.request.id}", self.model, error)
        self._finish(run.ticket, reason, error)

    def _finish(self, ticket: Ticket, reason: FinishReason, error: BaseException | None = None) -> None:
        if not ticket.done:
            self._counts.finished[reason] += 1
            ticket.finish(reason, error)

    def _start_over(self, error: Exception) -> None:
        """A step of all rows has failed: their requests end with the error, and the tables are made anew."""
        for run in [run for run in self._schedule.running if run.row is not None]:
            run.row = None
            self._end(run, "error", error)
        for tokens in self._on_the_way:
            for run in tokens.runs:
                self._finish(run.ticket, "error", error)
        self._on_the_way.clear()
        if self._shared is not None:
            self._shared.release()
        try:
            self._shared = self._new_shared()
        except Exception:
            self._schedule.end()

    def _new_shared(self) -> SharedRows | None:
        if not self.batched:
            return None
        shared = SharedRows(self.model, self.method, **self._shared_options)
        shared.warm_up()
        return shared
