"""Tickets: one writer, any readers."""

from __future__ import annotations

import threading

import pytest

from kvsketch.serve.requests import Request, Ticket
from tests.helpers.waiting import join_all


def test_readers_that_come_early_and_late_see_the_same_tokens() -> None:
    ticket = Ticket(Request(ids=(1, 2), max_new_tokens=3))
    early: list[int] = []
    reader = threading.Thread(target=lambda: early.extend(ticket))
    reader.start()
    heard: list[int | None] = []
    ticket.put(5)
    ticket.on_token(heard.append)
    ticket.put(6)
    ticket.finish("length")
    ticket.finish("error", RuntimeError("too late to count"))
    ticket.put(7)
    join_all([reader])
    assert early == list(ticket) == ticket.tokens == [5, 6] and heard == [5, 6, None]
    assert ticket.finish_reason == "length" and ticket.error is None
    submitted, first, last = vars(ticket.timings).values()
    assert submitted <= first <= last


def test_a_failed_answer_raises_after_its_tokens() -> None:
    ticket = Ticket(Request(ids=(1,), max_new_tokens=3))
    ticket.put(5)
    ticket.finish("error", MemoryError("no room"))
    tokens = iter(ticket)
    assert next(tokens) == 5
    with pytest.raises(MemoryError, match="no room"):
        next(tokens)


@pytest.mark.parametrize(
    "bad",
    [
        dict(ids=()),
        dict(max_new_tokens=0),
        dict(temperature=-1.0),
        dict(temperature=float("nan")),
        dict(top_p=0),
        dict(top_k=2**63),
    ],
)
def test_a_request_that_cannot_mean_anything_is_refused_by_name(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Request(**{"ids": (1,), "max_new_tokens": 1, **bad})
