"""Documents that requests share, without vLLM: who finds which, and which makes room."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvsketch.integrations.vllm.document_index import MIN_DOCUMENT_TOKENS, DocumentIndex, Use, digest
from kvsketch.integrations.vllm.files import Filed
from kvsketch.integrations.vllm.settings import (
    DocumentsRequest,
    document_method,
    documents_asked,
    refuse_config,
    refuse_shelf,
)
from kvsketch.methods import parse_method

HANDBOOK, NOVEL = [*range(100)], [*range(500, 700)]


def document_index(count: int = 2) -> DocumentIndex:
    result = DocumentIndex(count)
    result.store("a", "handbook", HANDBOOK)
    result.store("b", "novel", NOVEL)
    for request in "ab":
        result.release(request)
    return result


def test_a_prompt_that_begins_with_a_document_continues_it() -> None:
    books = document_index()
    assert books.use("c", [*HANDBOOK, 7, 8], None) == Use(place=1, before=100)
    assert books.use("d", [*NOVEL, 7], None) == Use(place=2, before=200)
    assert books.use("e", HANDBOOK, None) == Use(), "nothing would be left to read"
    assert books.use("f", [*HANDBOOK[:-1], 3, 3, 3], None) == Use()


def test_a_prompt_may_name_what_it_follows() -> None:
    books = document_index()
    assert books.use("c", [1, 2, 3], "novel") == Use(place=2, ahead=200)
    assert books.use("d", [*NOVEL, 4], "novel") == Use(place=2, before=200)
    with pytest.raises(KeyError, match="no document 'plan' is stored; documents: handbook, novel"):
        books.use("e", [1, 2], "plan")


def test_documents_are_named_in_the_order_in_which_they_came() -> None:
    books = document_index()
    books.use("c", [1], "handbook")
    with pytest.raises(KeyError, match="documents: handbook, novel"):
        books.use("d", [1], "plan")
    assert books.clear({"d"}) == ["handbook", "novel"]


def test_a_document_is_told_from_the_last_one_in_its_place() -> None:
    books = document_index()
    versions = books.version(1), books.version(2)
    assert None not in versions and versions[0] != versions[1] and books.version(3) is None
    books.use("c", [1], "handbook")
    assert (books.version(1), books.version(2)) == versions, "to be used is no change"
    assert books.store("d", "novel", NOVEL).place == 2 and books.version(2) not in versions


def test_the_longest_document_counts() -> None:
    books = DocumentIndex(2)
    books.store("a", "part", HANDBOOK[:MIN_DOCUMENT_TOKENS])
    books.store("b", "whole", HANDBOOK)
    assert books.use("c", [*HANDBOOK, 1], None).before == 100


def test_who_was_used_longest_ago_makes_room() -> None:
    books = document_index()
    books.use("c", [*HANDBOOK, 1], None)
    books.release("c")
    document = books.store("d", "third", NOVEL[:80])
    assert document.place == 2 and {*books.documents} == {"handbook", "third"}


def test_who_continues_a_document_waits_until_it_is_read() -> None:
    books = DocumentIndex(2)
    books.store("a", "handbook", HANDBOOK)
    assert books.is_reading([*HANDBOOK, 7], None) and books.is_reading([7], "handbook")
    assert not books.is_reading([*NOVEL, 7], None) and not books.is_reading([7], "novel")
    books.stored("handbook")
    assert not books.is_reading([*HANDBOOK, 7], None) and not books.is_reading([7], "handbook")
    books.drop("handbook")
    assert books.use("b", [*HANDBOOK, 7], None) == Use()


def test_a_reset_forgets_the_documents_that_nobody_reads() -> None:
    books = document_index()
    books.files = {"novel": Filed(Path("novel.kvs"), 200, digest(NOVEL))}
    books.use("c", [1, 2], "handbook")
    assert books.clear({"c"}) == [] and {*books.documents} == {"handbook"}
    assert books.clear(set()) == ["handbook"] and not books.documents
    assert books.use("d", [*NOVEL, 4], None).before == 200, "it is read from its file"


def test_a_document_in_use_stays() -> None:
    books = document_index()
    books.use("c", [1], "handbook")
    books.use("d", [1], "novel")
    with pytest.raises(ValueError, match="all 2 documents are in use"):
        books.store("e", "third", NOVEL)
    with pytest.raises(ValueError, match="'novel' is in use by 1 request;"):
        books.store("e", "novel", NOVEL)
    books.release("d")
    assert books.store("e", "novel", NOVEL[:90]).place == 2
    assert books.use("f", [*NOVEL[:90], 1], None).before == 90, "it has replaced the one of its name"


def test_a_document_in_a_file_is_read_when_it_is_asked_for() -> None:
    books = document_index()
    books.files = {
        "plan": Filed(Path("plan.kvs"), 80, digest(NOVEL[:80])),
        "read at home": Filed(Path("home.kvs"), 90, None),
    }
    assert books.use("c", [1, 2], "plan") == Use(place=1, ahead=80) and books.loads == {1: Path("plan.kvs")}
    assert {*books.documents} == {"novel", "plan"}
    books.loads = {}
    assert books.use("d", [*NOVEL[:80], 5], None) == Use(place=1, before=80) and not books.loads, "it is there"
    assert books.use("e", [7], "read at home").ahead == 90 and books.loads == {2: Path("home.kvs")}
    with pytest.raises(ValueError, match="all 2 documents are in use"):
        books.store("f", "third", NOVEL)
    with pytest.raises(KeyError, match="documents: plan, read at home"):
        books.use("g", [7], "novel")


def test_a_short_text_is_no_document() -> None:
    with pytest.raises(ValueError, match="a document of 10 tokens is too short; 64 or more"):
        DocumentIndex(1).store("a", "note", [*range(10)])


def config(connector: str | None, **extra: Any) -> Any:
    transfer = None if connector is None else SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
    parallel = SimpleNamespace(decode_context_parallel_size=1)
    model = SimpleNamespace(use_mla=False, is_hybrid=False, hf_text_config=None)
    return SimpleNamespace(
        kv_transfer_config=transfer, speculative_config=None, parallel_config=parallel, model_config=model
    )


def test_settings_of_the_connector() -> None:
    assert documents_asked(config(None)) is None
    assert documents_asked(config("KVSketchDocuments", budget=16384, count=8)) == DocumentsRequest(16384, 8)
    assert documents_asked(config("KVSketchDocuments", budget=512)).count == 4  # type: ignore[union-attr]
    assert documents_asked(config("KVSketchDocuments")) is None  # turns alone
    with pytest.raises(ValueError, match="budget=None is no whole number"):
        documents_asked(config("KVSketchDocuments", count=2))
    with pytest.raises(ValueError, match="knows no 'budgets'; use budget, count, folder"):
        documents_asked(config("KVSketchDocuments", budget=5, budgets=6))
    with pytest.raises(ValueError, match="another KV connector than its own"):
        refuse_config(config("NixlConnector"))
    refuse_config(config("KVSketchDocuments", budget=5))
    refuse_shelf(config(None))
    with pytest.raises(ValueError, match="layers are all of full attention"):
        refuse_shelf(config("KVSketchDocuments", budget=5))


def test_documents_are_read_by_the_method_with_their_budget() -> None:
    asked = DocumentsRequest(16384, 8)
    method = document_method(parse_method("rehearse:budget=2048:wait=128"), asked)  # type: ignore[arg-type]
    assert str(method) == "rehearse:budget=16384:wait=128"
    with pytest.raises(ValueError, match="shares documents of rehearse, and snapkv was named"):
        document_method(parse_method("snapkv:budget=2048"), asked)  # type: ignore[arg-type]
