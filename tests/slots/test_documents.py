"""Documents in the store of rows: whoever joins, leaves or moves, each lies there once, where its rows read it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import kvsketch
from kvsketch import CompressedCache
from kvsketch.decode.sampling import Draw
from kvsketch.decode.shared import SharedRows
from kvsketch.slots import documents as shared_documents
from kvsketch.slots.documents import DocumentRows
from kvsketch.slots.store import row_parts
from tests.helpers import zoo

METHOD = "rehearse:budget=50%:sinks=2:recent=4:wait=64:chunk=64"
ROWS = 5


def read(model: Any, number: int, length: int) -> CompressedCache:
    document = CompressedCache(model, METHOD)
    kvsketch.prefill(model, zoo.tokens(1, length, seed=number), document)
    return document


def check(store: DocumentRows, documents: list[CompressedCache], reads: dict[int, CompressedCache]) -> None:
    store._group(ROWS)
    at, most = store.at.tolist(), store.members.shape[1]
    groups = {row: place // most for row, place in enumerate(at) if place >= 0}
    assert groups.keys() == reads.keys() and len({place for place in at if place >= 0}) == len(reads)
    assert all(store.members.flatten()[at[row]] == row for row in reads)
    # As few groups as can be, and nothing lies in the others.
    needed = sum(-(-[*reads.values()].count(document) // most) for document in documents)
    assert {*groups.values()} == {*range(needed)} and (store.groups.own["capacity"][:, needed:] == 0).all()
    ends = 0
    for allocation in sorted(store._allocations(), key=lambda allocation: allocation.start):
        assert allocation.start >= ends
        ends = allocation.start + allocation.size
    assert ends <= store.slots and store.rows.keys() >= reads.keys()
    for document in documents:
        laid = store.lying(document)
        if laid is None:
            assert document not in reads.values()
            continue
        tables = [layer.table for layer in document.slot_layers]
        parts = [table.parts.named() for table in tables]
        assert all(each.keys() == store.store.slots.keys() for each in parts)
        # The numbers of its tokens are not read there, and the clock of the rows may have changed them.
        for name in parts[0].keys() - {"index"}:
            held = store.store.slots[name][laid.start : laid.start + laid.size]
            assert torch.equal(held, torch.cat([each[name] for each in parts]))
        first = laid.start
        for layer, table in enumerate(tables):
            assert table.layout is not None
            begin = first + table.layout.start[0]
            first += table.layout.total
            for group in {groups[row] for row, each in reads.items() if each is document}:
                own = {"start": begin, "capacity": table.layout.capacity[0]}
                own |= {name: part[0] for name, part in row_parts(table).items()}
                assert own.keys() == store.groups.own.keys()
                assert all(torch.equal(store.groups.own[name][layer, group], part) for name, part in own.items())


@pytest.mark.parametrize(("seed", "together"), [(0, 16), (1, 4), (2, 1)])
def test_documents_stay_whole_while_rows_and_documents_come_and_go(
    seed: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups of eight rows, of two and of one."""
    monkeypatch.setattr(shared_documents, "TOGETHER", together)
    chance, model = random.Random(seed), zoo.build("llama")
    documents = [read(model, 90 + i, length) for i, length in enumerate((150, 90, 120))]
    shared = SharedRows(model, METHOD, rows=ROWS, longest=300, documents=True)
    store = shared.store
    assert isinstance(store, DocumentRows)
    sizes = [shared.document_slots(document) for document in documents]
    # Two documents fit beside some rows, or fewer beside more.
    store.slots = sum(sizes) - min(sizes) // 2
    draw, token = Draw(1, shared.device, shared.logits.shape[1]), torch.zeros(1, 1, dtype=torch.int64)
    reads: dict[int, CompressedCache] = {}
    joined, full, laid = 0, 0, set()
    for _ in range(60):
        free = [row for row in range(ROWS) if row not in shared.padding]
        action = chance.choice(["join", "join", "leave", "move", "close up", "rewind"])
        if action == "join" and free:
            document, row = chance.choice([*documents, None]), chance.choice(free)
            cache = CompressedCache(model, METHOD) if document is None else document.continued()
            kvsketch.prefill(model, zoo.tokens(1, chance.choice([3, 40]) if document else 70, seed=row), cache)
            if shared.join(row, cache, token, draw, document):
                full += 1
                assert row not in store.rows and row not in store.read_by
            else:
                joined += 1
                if document is not None:
                    reads[row] = document
        elif action == "leave" and shared.padding:
            row = chance.choice([*shared.padding])
            shared.leave(row)
            reads.pop(row, None)
        elif action == "move" and free and shared.padding:
            source, row = chance.choice([*shared.padding]), chance.choice(free)
            shared.move(source, row)
            if source in reads:
                reads[row] = reads.pop(source)
        elif action == "close up":
            store._closed_up()
        elif action == "rewind":
            shared.rewind()
        check(store, documents, reads)
        laid.add(frozenset(number for number, document in enumerate(documents) if store.lying(document)))
    assert joined > 5 and full > 0 and len(laid) > 2
