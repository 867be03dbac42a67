"""Requests that share a decode step: throughput, time to first token, time between tokens, the cost of a join.

    kvsketch bench serve --methods full,snapkv:budget=2048 --rows 64 --out results/serve.jsonl

The batched engine serves as many requests at once as it has rows, or as fit. A whole prompt is read three times: into a
document, which the requests continue from a copy, as those that name a document do, each with a question of its own; by
the idle engine, for the time to first token; and after the timed steps of all rows, in the place of one of them, beside
the others: its time to first token, and theirs between tokens. A join is timed by itself: the copy of a row into the
shared tables, from an idle device to an idle one. Timed steps are too few for a rehearsal.

    kvsketch bench serve --methods rehearse:budget=50% --rows 64 --prompt 32768 --tail 128

With `--tail` all requests continue one document that lies in the tables once, each with so many tokens of its own; the
tables have room for that and no more, and no prompt is read beside the others.

    kvsketch bench serve --shape smollm2-135m --methods rehearse --rows 2 --prompt 2048 --turns 4

With `--turns` as many chats as rows say the prompt, and `--new` tokens more in each later turn, and get `--answer`
tokens each time, all chats of a turn at once: in caches that are kept from turn to turn, and with transcripts that are
read anew, turn by turn, which must give the same tokens (`same`), or as one prompt.

First a small float32 model answers requests of mixed lengths; a method whose tokens are not those of
`kvsketch.generate` has no speed.
"""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch import CompressedCache, generate, prefill
from kvsketch.decode.sampling import Draw
from kvsketch.decode.shared import SharedRows, batched, lies_once
from kvsketch.methods import Method, parse_method
from kvsketch.serve.engine import BatchedEngine, usual_prefill
from kvsketch.serve.requests import Request, Ticket
from kvsketch_lab.benchmark import runner
from kvsketch_lab.benchmark.device import Device
from kvsketch_lab.benchmark.runner import FAILED, OUT_OF_MEMORY, Fields
from kvsketch_lab.benchmark.shapes import ShapeBenchmark, build, make_prompt
from kvsketch_lab.options import option

QUESTION = 16  # tokens after the prompt
CHECKED = ((50, 24), (70, 20), (131, 6), (2, 5))  # prompts and answers of the check
DOCUMENT = 150  # tokens of its document
JOINS = 8
HELD = 6  # rows' worth of memory that stays free: the prompt, its copies while they join
PATIENCE = 600.0  # seconds for anything
TURN_PATIENCE = 1800.0  # for all chats of a turn


class Listener:
    """When the tokens of a ticket came."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.times: list[float] = []
        ticket.on_token(lambda token: None if token is None else self.times.append(time.monotonic()))

    def gaps(self, start: float, end: float) -> list[float]:
        """Milliseconds between tokens that came within these times."""
        inside = [each for each in self.times if start <= each <= end]
        return [1e3 * (after - before) for before, after in itertools.pairwise(inside)]

    def count(self, start: float, end: float) -> int:
        return sum(start <= each <= end for each in self.times)


def wait_for(what: str, condition: Callable[[], bool], tickets: Iterable[Ticket], patience: float = PATIENCE) -> None:
    """Raises what ended one of the tickets: the condition would never come."""
    deadline = time.monotonic() + patience
    while not condition():
        for ticket in tickets:
            if ticket.finish_reason in ("error", "cancelled"):
                raise ticket.error or RuntimeError("the engine has stopped")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} takes longer than {patience:.0f} s")
        time.sleep(0.002)


def quantile(values: list[float], share: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def check_tokens(model: Any, method: str, shared: bool = False) -> str | None:
    """What is wrong with the engine's answers; `shared`: to questions about one document that lies in the tables."""
    device, vocabulary = Device(model.device.type), model.config.vocab_size
    engine = BatchedEngine(model, method, rows=2, longest=512, chunk=32, documents=shared)
    document: CompressedCache | None = None
    if shared:
        document = CompressedCache(model, method, prefill=engine.prefill, chunk=32)
        prefill(model, make_prompt(DOCUMENT, device, len(CHECKED), vocabulary), document)
    try:
        prompts = [make_prompt(length, device, i, vocabulary) for i, (length, _) in enumerate(CHECKED)]
        pairs = list(zip(prompts, CHECKED, strict=True))
        tickets = [engine.submit(Request(tuple(ids[0].tolist()), n, document=document)) for ids, (_, n) in pairs]
        for ticket, (ids, (length, count)) in zip(tickets, pairs, strict=True):
            if document is not None:
                cache = document.continued()
            else:
                cache = CompressedCache(model, method, prefill=engine.prefill, chunk=32)
            inputs = {"input_ids": ids, "attention_mask": ids.new_ones(1, length + DOCUMENT * shared)}
            options = {"do_sample": False, "eos_token_id": vocabulary, "pad_token_id": 0}
            expected = generate(model, inputs, cache, max_new_tokens=count, **options)[0, length:].tolist()
            if list(ticket) != expected:
                beside = " beside a shared document" if shared else ""
                return f"the answer to a prompt of {length} tokens{beside} is not that of kvsketch.generate"
        if shared and engine.state().documents_laid != 1:
            return f"one document lies in the tables {engine.state().documents_laid} times"
    finally:
        engine.close(drain=False)
    return None


@dataclass
class Serve(ShapeBenchmark):
    name, kind = "serve", "serve"
    columns = (
        "method | rows:d | tokens/s=tokens_per_s:,.0f | p50 ms=p50_ms:.1f | p99 ms=p99_ms:.1f | "
        "p99 beside a prompt=busy_p99_ms:.0f | first token s=ttft_s:.2f | beside others=busy_ttft_s:.2f | "
        "of a document=document_ttft_s:.2f | join ms=join_ms:.2f | MB a row=row_bytes/1e6:,.0f | "
        "MB shared=document_bytes/1e6:,.0f | chats | first turn s=first_s:.2f | later turns s=later_s:.2f | "
        "at most s=later_most_s:.2f | whole run s=chats_s:.1f | start s=start_s:.0f | all s=all_s:.0f"
    )
    methods: str = option("full,snapkv:budget=2048", "methods, separated by commas")
    rows: int = option(64, "requests at a time, or as many of them as fit", least=2)
    steps: int = option(150, "steps of all rows that are timed", least=2)
    chunk: int = option(2048, "tokens of a prompt that are read between two steps", least=2)
    tail: int = option(0, "tokens that each request adds to one document that they share; 0: each has a copy", least=0)

    turns: int = option(0, "turns behind the first of chats that go on; 0: steps are timed", least=0)
    new: int = option(256, "new tokens of a later turn", least=1)
    answer: int = option(64, "tokens of an answer of a chat", least=2)

    def check_options(self) -> None:
        if self.turns and self.tail:
            raise ValueError(f"--turns {self.turns}: chats share no document; leave out --tail {self.tail}")
        for method in self.texts:
            if (reason := parse_method(method).capabilities.batched.reason) is not None:
                raise ValueError(f"--methods {method} cannot share tables: {reason}")
            parsed = parse_method(method)
            if self.tail and not lies_once(parsed):
                raise ValueError(f"--tail {self.tail}: rows of {method} copy their documents; use rehearse or expected")

    @functools.cached_property
    def checked(self) -> Any:
        return build("tiny", 2, self.seed, self.device).float()

    def cells(self) -> Iterator[Fields]:
        yield from ({"method": method} for method in self.texts)

    def measure(self, method: str) -> Iterator[Fields]:
        self.on.free()
        began = time.monotonic()
        row: Fields = {"shape": self.model, "method": method, "prompt": self.prompt, "chunk": self.chunk, FAILED: None}
        row["layers"] = self.built.config.num_hidden_layers
        row |= {"tail": self.tail} if self.tail else {}
        reason = batched(self.built, method).reason or check_tokens(self.checked, method)
        reason = reason or (check_tokens(self.checked, method, shared=True) if self.tail else None)
        row["check_s"] = time.monotonic() - began
        try:
            if self.turns and not reason:
                yield from self._chats(parse_method(method), row)
                return
            row |= {FAILED: reason} if reason else self._serve(parse_method(method))
        except runner.OutOfMemory:
            row[FAILED] = OUT_OF_MEMORY
        except Exception as error:  # the other methods go on
            traceback.print_exc()
            row[FAILED] = f"{type(error).__name__}: {error}"
        yield row | {"all_s": time.monotonic() - began}

    @property
    def new_tokens(self) -> int:
        """What a request may ask for: all joins, the steps that are timed, and the prompt that is read last."""
        return self.rows + self.steps + 4 * (self.prompt // self.chunk) + 64

    @property
    def longest(self) -> int:
        return self.prompt + self.question + self.new_tokens

    @property
    def question(self) -> int:
        """Tokens of a request's own."""
        return self.tail or QUESTION

    def _rows(self, method: Method) -> int:
        """As many rows as fit beside the weights, and beside what a prompt and its copies take while they join."""
        if not self.on.is_gpu:
            return self.rows
        row = SharedRows(self.built, method, 1, self.longest).device_bytes
        self.on.free()
        return max(2, min(self.rows, int(0.95 * torch.cuda.mem_get_info()[0] / row) - HELD))

    def _serve(self, method: Method) -> Fields:
        # This also compiles what reading needs.
        document = CompressedCache(self.built, method, prefill=usual_prefill(self.built, method), chunk=self.chunk)
        prefill(self.built, self.tokens, document)
        began = time.monotonic()
        if self.tail:
            rows, memory = self._shared_size(method, document)
            own: dict[str, Any] = {"memory": memory, "documents": True}
        else:
            rows, own = self._rows(method), {"readers": 1 if method.keeps_all else 4}
        options: dict[str, Any] = {"rows": rows, "longest": self.longest, "queue": rows, "chunk": self.chunk}
        engine = BatchedEngine(self.built, method, **options, **own)
        result: Fields = {"rows": rows, "start_s": time.monotonic() - began, "prefill": engine.prefill}
        if self.tail:
            shared = engine._shared
            assert shared is not None
            once, row = self._sizes(shared, document)
            result |= {"document_bytes": once, "row_bytes": row, "device_bytes": shared.device_bytes}
        else:
            result["row_bytes"] = engine.bytes_per_row
        try:
            if not self.tail:
                result["ttft_s"] = self._first_token(engine)
            result["join_ms"] = self._join_ms(engine, document)
            timed = self._filled(engine, document, rows)[0] if self.tail else self._together(engine, document, rows)
            return result | timed | {"peak_bytes": self.on.peak}
        finally:
            engine.close(drain=False)

    def _chats(self, method: Method, row: Fields) -> Iterator[Fields]:
        """Chats in caches that are kept, and with transcripts that are read anew, turn by turn and as one prompt."""
        row |= {"rows": self.rows, "turns": self.turns, "new": self.new, "answer": self.answer}
        said = None
        for name, kept in (("kept", float("inf")), ("turn by turn", 1.0), ("one prompt", 0.0)):
            began = time.monotonic()
            longest = self.prompt + self.turns * (self.new + self.answer) + self.answer + 8
            engine = BatchedEngine(
                self.built, method, rows=self.rows, longest=longest, queue=self.rows, chunk=self.chunk, chat_bytes=kept
            )
            try:
                times, answers, seconds = self._talk(engine)
                read = engine.state().prompt_tokens
            finally:
                engine.close(drain=False)
            said = answers if said is None else said
            later = [each for turn in times[1:] for each in turn]
            yield row | {
                "chats": name, "chats_s": seconds, "first_s": statistics.median(times[0]),
                "later_s": statistics.median(later), "later_most_s": max(later),
                "turns_s": [statistics.median(turn) for turn in times],
                "read_tokens": read, "same": answers == said, "all_s": time.monotonic() - began,
            }  # fmt: skip

    def _talk(self, engine: BatchedEngine) -> tuple[list[list[float]], list[list[list[int]]], float]:
        """All chats, turn by turn: seconds to the first tokens, answers, and seconds of the whole run."""
        chats: list[tuple[int, ...]] = [() for _ in range(self.rows)]
        ends: tuple[int, ...] = ()
        times, answers, began = [], [], time.monotonic()
        for turn in range(self.turns + 1):
            new = self.new if turn else self.prompt
            vocabulary = min(10000, self.built.config.vocab_size)
            for number, ids in enumerate(chats):
                drawn = make_prompt(new, self.on, 1000 * turn + number, vocabulary)
                chats[number] = (*ids, *drawn[0].tolist())
            ends = (*ends, len(chats[0]) - min(4, max(1, new - 1)))
            tickets = [engine.submit(Request(ids, self.answer, turns=ends)) for ids in chats]
            wait_for("a turn", lambda: all(each.done for each in tickets), tickets, TURN_PATIENCE)  # noqa: B023
            times.append([_first(ticket) for ticket in tickets])
            answers.append([ticket.tokens for ticket in tickets])
            chats = [(*ids, *ticket.tokens) for ids, ticket in zip(chats, tickets, strict=True)]
        return times, answers, time.monotonic() - began

    def _sizes(self, shared: SharedRows, document: CompressedCache) -> tuple[int, int]:
        """Bytes of the document in the tables, and of a row's own tail."""
        slot, tail = shared.store.bytes_per_slot, shared.slots_for(self.question + self.new_tokens)
        return slot * shared.document_slots(document), slot * tail + shared.bytes_beside

    def _shared_size(self, method: Method, document: CompressedCache) -> tuple[int, int]:
        """Rows that fit, and the bytes of tables for the document and a tail for each of them."""
        once, row = self._sizes(SharedRows(self.built, method, 1, self.longest, documents=True), document)
        rows = self.rows
        if self.on.is_gpu:
            self.on.free()
            rows = max(2, min(rows, int((0.9 * torch.cuda.mem_get_info()[0] - once) / row)))
        return rows, once + rows * row

    def _ids(self, number: int) -> tuple[int, ...]:
        """A question of a request's own."""
        ids = make_prompt(self.question, self.on, 1000 + number, min(10000, self.built.config.vocab_size))
        return tuple(ids[0].tolist())

    def _first_token(self, engine: BatchedEngine) -> float:
        ticket = engine.submit(Request(tuple(self.tokens[0].tolist()), 2))
        wait_for("the first prompt", lambda: ticket.done, [ticket])
        return _first(ticket)

    def _join_ms(self, engine: BatchedEngine, document: CompressedCache) -> float:
        """The engine is idle, so its tables may be used from here."""
        shared, draw = engine._shared, Draw(1, self.built.device, self.built.config.vocab_size)
        assert shared is not None
        token: Tensor = torch.zeros(1, 1, dtype=torch.int64, device=self.built.device)
        times = []
        for number in range(JOINS):
            cache = document.continued() if self.tail else copy.deepcopy(document)
            if self.tail:
                prefill(self.built, torch.tensor([self._ids(number)], device=self.built.device), cache)
            self.on.synchronize()
            start = time.perf_counter()
            if reason := shared.join(0, cache, token, draw, document if self.tail else None):
                raise RuntimeError(f"a row does not fit: {reason}")
            self.on.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
            shared.leave(0)
            del cache
        return statistics.median(times[1:])

    def _filled(self, engine: BatchedEngine, document: CompressedCache, rows: int) -> tuple[Fields, list[Listener]]:
        """Steps of all rows, and who goes on after them."""
        requests = [Request(self._ids(i), self.new_tokens, document=document) for i in range(rows)]
        listeners = [Listener(engine.submit(request)) for request in requests]
        tickets = [each.ticket for each in listeners]
        began = time.monotonic()
        wait_for("filling the rows", lambda: all(each.times for each in listeners), tickets)
        # From the last first token, whenever this thread hears of it: the answers have few tokens more than are timed.
        start = max(each.times[0] for each in listeners)
        filled, first = start - began, listeners[-1].count(began, start)
        wait_for("the timed steps", lambda: len(listeners[-1].times) >= first + self.steps, tickets)
        end = time.monotonic()
        gaps = [gap for each in listeners for gap in each.gaps(start, end)]
        result: Fields = {
            "tokens_per_s": sum(each.count(start, end) for each in listeners) / (end - start),
            "p50_ms": quantile(gaps, 0.5),
            "p99_ms": quantile(gaps, 0.99),
            "document_ttft_s": _first(tickets[0]),
            "fill_s": filled,
        }
        return result, listeners

    def _together(self, engine: BatchedEngine, document: CompressedCache, rows: int) -> Fields:
        result, listeners = self._filled(engine, document, rows)
        tickets = [each.ticket for each in listeners]
        tickets[-1].cancel()
        tickets[-1].wait(PATIENCE)
        start = time.monotonic()
        late = engine.submit(Request(tuple(self.tokens[0].tolist()), 2))
        wait_for("a prompt beside the others", lambda: late.timings.first_token is not None, [late])
        # The gaps that end after it count too: while a whole prompt is rehearsed the others wait.
        end, others = time.monotonic(), listeners[:-1]
        wait_for(
            "a step after it", lambda: all(each.ticket.done or each.times[-1] > end for each in others), tickets[:-1]
        )
        busy = [gap for each in others for gap in each.gaps(start, time.monotonic())]
        return result | {
            "busy_ttft_s": _first(late),
            "busy_p50_ms": quantile(busy, 0.5),
            "busy_p99_ms": quantile(busy, 0.99),
        }


def _first(ticket: Ticket) -> float:
    """Seconds to the first token."""
    assert ticket.timings.first_token is not None
    return ticket.timings.first_token - ticket.timings.submitted
