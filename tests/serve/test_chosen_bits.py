"""Bits that are chosen (`bits=auto`) in the batched engine: once for all rows, by a sample text."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoTokenizer

import kvsketch
from kvsketch import CompressedCache
from kvsketch.decode import shared
from kvsketch.decode.shared import SAMPLED, SharedRows, with_bits
from kvsketch.methods import parse_method
from kvsketch.methods.base import Method
from kvsketch.serve.requests import Request
from kvsketch.slots.codes import FEW, MANY
from kvsketch.slots.documents import DocumentRows
from kvsketch.slots.rows import EqualRows, MixedRows
from tests.cache.test_chosen_bits import LOUD, bits_of, loud
from tests.helpers import zoo
from tests.helpers.engines import starting
from tests.helpers.tiny import save_tiny_model

REHEARSE = "rehearse:budget=50%:sinks=2:recent=4:chunk=64:bits=auto"
METHODS = {REHEARSE: MixedRows, "snapkv:budget=24:window=4:bits=auto": EqualRows, "kvzip:chunk=64:bits=auto": MixedRows}
CHOSEN = tuple(MANY if layer == LOUD else FEW for layer in range(16))
LENGTHS = [(80, 14), (70, 9), (90, 12), (66, 3), (5, 4)]  # tokens of the prompt and of the answer
REHEARSED = [(80, 70), *LENGTHS[1:]]  # the first is longer than what waits for a rehearsal


@functools.cache
def model() -> Any:
    return loud()


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple(zoo.tokens(1, length, seed=number)[0].tolist())


def answer_alone(method: Method, ids: tuple[int, ...], count: int) -> list[int]:
    cache = CompressedCache(model(), method)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    return kvsketch.generate(model(), inputs, cache, max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist()


start = starting(model, rows=3, longest=300, prefill="exact")


@pytest.mark.parametrize("method", METHODS)
def test_requests_share_tables_and_get_the_tokens_of_such_bits(method: str, start: Any) -> None:
    """Rows come and go; with rehearse, one is rehearsed among the others."""
    engine, lengths = start(method), REHEARSED if method == REHEARSE else LENGTHS
    assert not engine.alone and engine.method.chosen_keys == CHOSEN and engine.method == parse_method(method)
    assert isinstance(engine._shared.store, METHODS[method])
    tickets = [engine.submit(Request(prompt(i, n), count)) for i, (n, count) in enumerate(lengths)]
    for number, (ticket, (length, count)) in enumerate(zip(tickets, lengths, strict=True)):
        assert list(ticket) == answer_alone(engine.method, prompt(number, length), count), f"request {number}"
    assert [table.stored_bits.pair for table in engine._shared.tables] == [(keys, FEW) for keys in CHOSEN]
    assert all(not store.rows for store in getattr(engine._shared.store, "stores", ())), "rows have given slots back"


def test_rows_really_join_the_shared_tables(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, put = start(REHEARSE), MixedRows.put
    joined: list[int] = []
    monkeypatch.setattr(MixedRows, "put", lambda store, row, own: (joined.append(row), put(store, row, own))[1])
    tickets = [engine.submit(Request(prompt(i, 80), 4)) for i in range(3)]
    assert all(len(list(ticket)) == 4 for ticket in tickets)
    assert len(joined) == 3


def test_a_row_of_other_bits_takes_its_own_steps(start: Any) -> None:
    others = parse_method(REHEARSE).with_keys([FEW] * 16)
    document = CompressedCache(model(), others)
    kvsketch.prefill(model(), torch.tensor([prompt(0, 80)]), document)
    engine = start(REHEARSE)
    asked = Request(prompt(1, 9), 5, document=document)
    ticket = engine.submit(asked)
    cache = CompressedCache(model(), others)
    kvsketch.prefill(model(), torch.tensor([prompt(0, 80)]), cache)
    inputs = {"input_ids": torch.tensor([asked.ids]), "attention_mask": torch.ones(1, 89, dtype=torch.int64)}
    expected = kvsketch.generate(model(), inputs, cache, max_new_tokens=5, do_sample=False)[0, 9:].tolist()
    assert list(ticket) == expected


def test_the_sample_chooses_and_one_choice_stays() -> None:
    method = with_bits(model(), "full:bits=auto", zoo.tokens(1, 2 * SAMPLED))
    assert method.chosen_keys == CHOSEN and with_bits(model(), method) is method
    cache = CompressedCache(model(), method)
    assert bits_of(cache) == [(keys, FEW) for keys in CHOSEN]
    with torch.no_grad():
        model()(zoo.tokens(1, 70), past_key_values=cache)
    assert bits_of(cache) == [(keys, FEW) for keys in CHOSEN]
    cache.reset()
    assert bits_of(cache) == [(keys, FEW) for keys in CHOSEN]
    # Too short to choose by.
    assert with_bits(model(), "full:bits=auto", zoo.tokens(1, 9)).chosen_keys == (FEW,) * 16
    assert with_bits(model(), "full:bits=4").chosen_keys == ()


def test_documents_lie_in_the_tables_where_all_layers_are_alike() -> None:
    alike = parse_method(REHEARSE).with_keys([FEW] * 16)
    assert isinstance(SharedRows(model(), alike, 2, 200, documents=True).store, DocumentRows)
    mixed = SharedRows(model(), REHEARSE, 2, 200, documents=True)
    assert isinstance(mixed.store, MixedRows) and not mixed.documents
    assert mixed.store.slots >= mixed.slots_for(200) and mixed.store.bytes_per_slot > 0


def test_memory_bounds_the_stores_of_all_formats() -> None:
    least = SharedRows(model(), REHEARSE, 8, 300, memory=1)
    whole = SharedRows(model(), REHEARSE, 8, 300)
    assert (
        least.store.slots == pytest.approx(least.slots_for(300), abs=16) and whole.store.slots > 7 * least.store.slots
    )
    within = (least.device_bytes + whole.device_bytes) // 2
    assert SharedRows(model(), REHEARSE, 8, 300, memory=within).device_bytes <= 1.05 * within


def test_a_server_chooses_by_a_text_of_its_own_unless_it_has_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette", reason="not installed: pip install 'kvsketch[serve]'")
    pytest.importorskip("prometheus_client", reason="not installed: pip install 'kvsketch[serve]'")
    from kvsketch.serve.sample_text import SAMPLE_TEXT
    from kvsketch.serve.server import start_service

    tokenizer = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path / "tiny"))
    served = loud(vocab_size=len(tokenizer), max_position_embeddings=2 * SAMPLED)
    reading = Mock(wraps=shared.prefill)
    monkeypatch.setattr(shared, "prefill", reading)
    services = [
        start_service(served, tokenizer, "loud", "full:bits=auto", folder=tmp_path / f"{rows}", rows=rows)
        for rows in (2, 1)
    ]
    try:
        several, single = (service.engine for service in services)
        assert not several.alone and several.method.chosen_keys == services[0].method.chosen_keys == CHOSEN
        _, (ids,), _ = reading.call_args_list[0].args
        assert tokenizer.decode(ids) == SAMPLE_TEXT[:SAMPLED]  # a token is a byte
        # One row shares nothing: each prompt chooses.
        assert single.alone and single.method.chosen_keys == ()
    finally:
        for service in services:
            service.engine.close(drain=False)
