"""Documents in the batched engine: each lies in the tables once, and a request gets the tokens it would get alone."""

from __future__ import annotations

import copy
import functools
import gc
from typing import Any

import pytest
import torch

import kvsketch
from kvsketch import CompressedCache
from kvsketch.decode import shared as shared_rows
from kvsketch.decode.sampling import Draw
from kvsketch.serve.engine import BatchedEngine
from kvsketch.serve.requests import Request
from kvsketch.slots import documents as shared_documents
from kvsketch.slots import rows as table_rows
from kvsketch.slots.documents import DocumentRows
from tests.helpers import zoo
from tests.helpers.common import also
from tests.helpers.engines import held, starting
from tests.helpers.waiting import LONGEST_WAIT
from tests.serve.test_engine import AsksNothing

METHODS = [
    "rehearse:budget=50%:sinks=2:recent=4:wait=64:chunk=64",
    "rehearse:budget=50%:sinks=2:recent=4:wait=64:chunk=64:bits=16",
    "expected:sinks=2:recent=4:wait=64:key_bits=4",
]
METHOD = METHODS[0]
CHUNK = 32


@functools.cache
def model() -> Any:
    return zoo.build("llama")


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple(zoo.tokens(1, length, seed=number)[0].tolist())


def read(method: str, number: int, length: int) -> CompressedCache:
    document = CompressedCache(model(), method, prefill="stream", chunk=CHUNK)
    kvsketch.prefill(model(), torch.tensor([prompt(number, length)]), document)
    return document


def alone(method: str, ids: tuple[int, ...], count: int, document: CompressedCache | None) -> list[int]:
    cache = CompressedCache(model(), method, prefill="stream", chunk=CHUNK)
    cache = cache if document is None else document.continued()
    whole = torch.ones(1, cache.tokens_seen + len(ids), dtype=torch.int64)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": whole}
    return kvsketch.generate(model(), inputs, cache, max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist()


start = starting(model, method=METHOD, rows=3, longest=400, prefill="stream", chunk=CHUNK, documents=True)


@pytest.mark.parametrize("method", [METHODS[0], *also(*METHODS[1:])])
def test_requests_of_two_documents_and_of_none(method: str, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined and ended in mixed order over few rows; long answers are rehearsed; the clock is turned back; a group has
    two rows.
    """
    monkeypatch.setattr(table_rows, "LATEST", 460)
    monkeypatch.setattr(shared_documents, "TOGETHER", 4)
    one, other = read(method, 90, 150), read(method, 91, 100)
    asked = [(one, 6, 75), (None, 70, 9), (one, 3, 20), (other, 5, 8), (one, 9, 6), (None, 66, 12), (other, 80, 5),
             (one, 4, 3)]  # fmt: skip
    engine = start(method, rows=4)
    tickets = [
        engine.submit(Request(prompt(i, length), count, document=document))
        for i, (document, length, count) in enumerate(asked)
    ]
    for number, (ticket, (document, length, count)) in enumerate(zip(tickets, asked, strict=True)):
        assert list(ticket) == alone(method, prompt(number, length), count, document), f"request {number}"
    assert isinstance(engine._shared.store, DocumentRows) and engine.state().documents_laid == 2
    store = engine._shared.store
    sizes = [sum(layer.table.layout.total for layer in document.slot_layers) for document in (one, other)]
    assert sorted(laid.size for laid in store.laid.values()) == sorted(sizes) and not store.read_by


def joined(shared: Any, row: int, ids: tuple[int, ...], document: CompressedCache | None) -> str:
    cache = CompressedCache(model(), METHOD) if document is None else document.continued()
    draw = Draw(1, shared.device, shared.logits.shape[1])
    token = draw.choose(kvsketch.prefill(model(), torch.tensor([ids]), cache), Draw.GREEDY)
    return str(shared.join(row, cache, token, draw, document))


def slots_used(shared: Any) -> int:
    return sum(each.size for each in shared.store._allocations())


def test_a_document_lies_once_and_a_row_holds_its_tail() -> None:
    shared = shared_rows.SharedRows(model(), METHOD, rows=4, longest=400, documents=True)
    document = read(METHOD, 90, 150)
    size = shared.document_slots(document)
    assert size == sum(layer.table.layout.total for layer in document.slot_layers) > 0
    assert joined(shared, 0, prompt(1, 5), document) == ""
    tail = slots_used(shared) - size
    assert 0 < tail < size
    for row in (1, 2, 3):
        assert joined(shared, row, prompt(1, 5), document) == ""
    assert slots_used(shared) == size + 4 * tail
    assert shared.laid_documents == 1
    for row in range(4):
        shared.leave(row)
    assert slots_used(shared) == size


def three_with_room_for_two() -> tuple[shared_rows.SharedRows, list[CompressedCache]]:
    """Three documents, and room for two of them and two tails."""
    documents = [read(METHOD, 90 + i, 150) for i in range(3)]
    probe, shared = (shared_rows.SharedRows(model(), METHOD, rows=2, longest=400, documents=True) for _ in range(2))
    assert probe.document_slots(documents[0]) and joined(probe, 0, prompt(1, 5), documents[0]) == ""
    shared.store.slots = 2 * slots_used(probe) + 40
    return shared, documents


def test_a_document_goes_when_its_slots_are_needed_and_nobody_reads_it() -> None:
    shared, documents = three_with_room_for_two()
    assert joined(shared, 0, prompt(1, 5), documents[0]) == ""
    assert joined(shared, 1, prompt(1, 5), documents[1]) == ""
    first, second = (shared.store.lying(document) for document in documents[:2])
    shared.leave(1)
    # The second is not read any more: it makes room. The first is read and stays.
    assert joined(shared, 1, prompt(2, 5), documents[2]) == ""
    assert shared.store.lying(documents[0]) is first and shared.store.lying(documents[1]) is None
    assert "slots, and" in joined(shared, 1, prompt(2, 5), documents[1])
    shared.leave(0)
    shared.leave(1)
    # Of two that nobody reads the one whose document has gone goes first, though it was used last.
    assert shared.store.lying(documents[2]) is not None
    documents.pop()
    gc.collect()
    assert joined(shared, 0, prompt(2, 5), documents[1]) == ""
    assert shared.store.lying(documents[0]) is first
    assert second not in shared.store.laid.values()


def test_a_document_is_used_until_its_last_row_leaves() -> None:
    shared, documents = three_with_room_for_two()
    for row in (0, 1):
        assert joined(shared, row, prompt(1, 5), documents[row]) == ""
    shared.leave(1)
    shared.leave(0)
    # The first was read earlier, and for longer.
    assert joined(shared, 0, prompt(1, 5), documents[2]) == ""
    assert [shared.store.lying(each) is not None for each in documents] == [True, False, True]


def test_what_lies_in_the_way_moves() -> None:
    """A stretch before a document is freed, and a longer one does not fit there: the document moves to the front."""
    shared = shared_rows.SharedRows(model(), METHOD, rows=3, longest=400, documents=True)
    document = read(METHOD, 90, 150)
    assert joined(shared, 0, prompt(1, 70), None) == ""
    ids, count = prompt(7, 6), 12
    assert joined(shared, 1, ids, document) == ""
    expected = alone(METHOD, ids, count, document)
    answer = [int(shared.token[1])]
    for number in range(count - 1):
        if number == 4:
            shared.leave(0)
            shared.store._closed_up()
            assert shared.store.lying(document).start == 0
        if number == 8:
            shared.move(1, 0)
        shared.step(2, Draw.GREEDY)
        answer.append(int(shared.token[1 if number < 8 else 0]))
    assert answer == expected


def test_nothing_of_a_former_row_is_read() -> None:
    """Slots that were freed hold NaN; a row without a document has none of the former row's document either."""
    shared = shared_rows.SharedRows(model(), METHOD, rows=2, longest=400, documents=True)
    document = read(METHOD, 90, 150)
    for tensor in shared.store.store.slots.values():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    assert joined(shared, 0, prompt(1, 5), document) == ""
    shared.leave(0)
    laid = shared.store.lying(document)
    del shared.store.laid[id(document)]
    for tensor in shared.store.store.slots.values():
        if tensor.is_floating_point():
            tensor[laid.start : laid.start + laid.size] = float("nan")
    for number, text in enumerate([None, document]):
        ids = prompt(number, 70 if text is None else 6)
        assert joined(shared, 0, ids, text) == ""
        answer = [int(shared.token[0])]
        for _ in range(7):
            shared.step(1, Draw.GREEDY)
            answer.append(int(shared.token[0]))
        assert shared.logits[0].isfinite().all() and answer == alone(METHOD, ids, 8, text)
        shared.leave(0)


def test_no_address_changes_when_documents_come_and_go() -> None:
    shared = shared_rows.SharedRows(model(), METHOD, rows=2, longest=400, documents=True)
    tables = [table for batch in shared.batches for table in batch.tables]

    def addresses() -> list[int]:
        texts = [table.document for table in tables]
        return [t.data_ptr() for table in (*tables, *texts) for t in table.tensors()]

    before, held = addresses(), shared.device_bytes
    for number in range(3):
        document = read(METHOD, 90 + number, 150)
        assert joined(shared, number % 2, prompt(number, 5), document) == ""
        shared.step(2, Draw.GREEDY)
        shared.leave(number % 2)
    assert addresses() == before and shared.device_bytes == held


def test_a_step_asks_the_device_for_nothing() -> None:
    shared = shared_rows.SharedRows(model(), METHOD, rows=2, longest=400, documents=True)
    assert joined(shared, 0, prompt(1, 5), read(METHOD, 90, 150)) == ""
    shared.step(2, Draw.GREEDY)
    with AsksNothing():
        shared.step(2, Draw.GREEDY)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("method", METHODS)
def test_recorded_steps_serve_whichever_document_is_read(method: str) -> None:
    """On a GPU: from graphs that were recorded before the first document came."""
    on_gpu = zoo.build("llama").to("cuda")
    options: dict[str, Any] = {"prefill": "stream", "chunk": CHUNK}
    engine = BatchedEngine(on_gpu, method, rows=4, longest=400, documents=True, **options)
    try:
        graphs = [batch.graph for batch in engine._shared.batches]
        documents = [CompressedCache(on_gpu, method, **options) for _ in range(2)]
        for number, document in enumerate(documents):
            kvsketch.prefill(on_gpu, torch.tensor([prompt(90 + number, 150)], device="cuda"), document)
        asked = [(documents[i % 2], 5 + i, 12 + 20 * (i % 3)) for i in range(7)]
        tickets = [
            engine.submit(Request(prompt(i, n), count, document=text)) for i, (text, n, count) in enumerate(asked)
        ]
        for number, (ticket, (text, length, count)) in enumerate(zip(tickets, asked, strict=True)):
            ids = torch.tensor([prompt(number, length)], device="cuda")
            inputs = {"input_ids": ids, "attention_mask": ids.new_ones(1, 150 + length)}
            result = kvsketch.generate(on_gpu, inputs, text.continued(), max_new_tokens=count, do_sample=False)
            assert list(ticket) == result[0, length:].tolist(), f"request {number}"
        assert graphs == [batch.graph for batch in engine._shared.batches] and engine.state().documents_laid == 2
    finally:
        engine.close(drain=False)


def test_a_request_that_ends_early_leaves_the_others(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, document = start(), read(METHOD, 90, 150)
    catch_up = type(engine.method).catch_up

    def fails_for_one(self: Any, tables: Any) -> None:
        if tables[0].prompt_tokens == 8 and failing.tokens:
            raise ZeroDivisionError("a rehearsal that fails")
        catch_up(self, tables)

    monkeypatch.setattr(type(engine.method), "catch_up", fails_for_one)
    with held(model()):
        kept = engine.submit(Request(prompt(0, 6), 90, document=document))
        cancelled = engine.submit(Request(prompt(1, 7), 200, document=document))
        failing = engine.submit(Request(prompt(2, 8), 90, document=document))
        cancelled.on_token(lambda token: cancelled.cancel())
    with pytest.raises(ZeroDivisionError):
        list(failing)
    assert list(kept) == alone(METHOD, prompt(0, 6), 90, document)
    assert cancelled.wait(LONGEST_WAIT) and cancelled.finish_reason == "cancelled"


def test_requests_wait_for_room_beside_a_document(start: Any) -> None:
    """A document counts once, tails for each; all are answered, whatever the store holds at a time."""
    engine, document = start(rows=4), read(METHOD, 90, 150)
    shared = engine._shared
    size, tail = shared.document_slots(document), shared.slots_for(6 + 10)
    shared.store.slots = size + 2 * tail
    together: list[int] = []

    def count(token: int | None) -> None:
        state = engine.state()
        together.append(state.running + state.reading)

    with held(model()):
        tickets = [engine.submit(Request(prompt(i, 6), 10, document=document)) for i in range(4)]
        for ticket in tickets:
            ticket.on_token(count)
    for ticket in tickets:
        list(ticket)
    assert max(together) == 2
    for number, ticket in enumerate(tickets):
        assert list(ticket) == alone(METHOD, prompt(number, 6), 10, document)


def test_a_document_too_short_for_codes_is_copied(start: Any) -> None:
    engine, document = start(), read(METHOD, 90, 40)
    assert engine._shared.document_slots(document) == 0
    assert len(list(engine.submit(Request(prompt(0, 6), 40, document=document)))) == 40
    assert document.tokens_seen == 40 and engine.state().documents_laid == 0


def test_documents_that_are_kept_whole_are_not_copied(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    document = CompressedCache(model(), "full")
    kvsketch.prefill(model(), torch.tensor([prompt(90, 50)]), document)
    monkeypatch.setattr(CompressedCache, "__deepcopy__", lambda self, memo: 1 / 0)
    tickets = [engine.submit(Request(prompt(i, 6), 10, document=document)) for i in range(2)]
    for number, ticket in enumerate(tickets):
        assert list(ticket) == alone("full", prompt(number, 6), 10, document)


LATENT = "rehearse:budget=50%:sinks=2:recent=4:refit=none"


@pytest.mark.parametrize(
    ("family", "served", "method"),
    [("deepseek_v3", LATENT, LATENT), ("deepseek_v3", LATENT, "full"), ("mpt", "h2o:budget=32", "full")],
)
def test_documents_that_cannot_be_shared_are_copied(family: str, served: str, method: str) -> None:
    """Of the engine's method, whose rows share a store, and kept whole, whose requests take their own steps."""
    other = zoo.build(family)
    document = CompressedCache(other, method, prefill="stream", chunk=CHUNK)
    kvsketch.prefill(other, torch.tensor([prompt(90, 70)]), document)
    engine = BatchedEngine(other, served, rows=2, longest=120, chunk=CHUNK, documents=True)
    tickets = [engine.submit(Request(prompt(number, 6), 5, document=document)) for number in range(2)]
    for ticket in tickets:
        ids, cache = torch.tensor([ticket.request.ids]), copy.deepcopy(document)
        inputs = {"input_ids": ids, "attention_mask": torch.ones(1, 76, dtype=torch.int64)}
        answer = kvsketch.generate(other, inputs, cache, max_new_tokens=5, do_sample=False)
        assert list(ticket) == answer[0, 6:].tolist()
    assert engine.state().documents_laid == 0
    engine.close()
