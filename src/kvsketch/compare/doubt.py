"""Questions with known answers, from which a model's threshold of doubt is chosen (`kvsketch fit`).

Texts are cut into pieces. Ten codes are hidden in each piece, and each code is asked for: of the full cache, and of
compressed caches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvsketch.compare.questions import Question, answers_with_doubt
from kvsketch.compare.shared_prefill import shared_prefill
from kvsketch.decode.asking import document_ids, repeat_instruction
from kvsketch.doubt_threshold import Told
from kvsketch.methods import parse_method
from kvsketch.models import texts
from kvsketch.models.texts import DOORS

PIECE = 768  # tokens of a text that ten codes are hidden in
NEW_TOKENS = 24  # of an answer at most
ASKED = "What is the code of the {door} door?"
METHODS = ("rehearse:bytes=1/8", "rehearse:bytes=1/12", "rehearse:bytes=1/16")


def pieces(tokenizer: Any, whole: Sequence[str], count: int) -> list[str]:
    """Up to `count` pieces of texts, by turns from each text, from its beginning."""
    waiting = deque(_cut(tokenizer, text) for text in whole)
    result: list[str] = []
    while waiting and len(result) < count:
        own = waiting.popleft()
        if (piece := next(own, None)) is not None:
            result.append(piece)
            waiting.append(own)
    return result


def _cut(tokenizer: Any, text: str) -> Iterator[str]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for at in range(0, len(ids) - PIECE // 2, PIECE):
        yield tokenizer.decode(ids[at : at + PIECE])


def ask(
    model: Any,
    tokenizer: Any,
    some: Sequence[str],
    *,
    methods: Sequence[str] = METHODS,
    first: int | None = None,
    fewest_lost: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Told]:
    """What compressed caches of pieces of text say of the codes that are hidden in them.

    first: after so many pieces it ends as soon as `fewest_lost` answers are lost; None: all are asked about.
    progress(pieces, of how many) is called after each.
    """
    result: list[Told] = []
    first = len(some) if first is None else first
    for number, piece in enumerate(some):
        if number >= first and sum(each.lost for each in result) >= fewest_lost:
            break
        result += _of_piece(model, tokenizer, piece, number, methods)
        if progress is not None:
            progress(number + 1, first if number < first else len(some))
    return result


def _of_piece(model: Any, tokenizer: Any, piece: str, number: int, methods: Sequence[str]) -> Iterator[Told]:
    try:
        hidden = texts.codes_document(tokenizer, PIECE, number, piece)
    except ValueError:  # fewer sentences than codes
        return
    prefilled = shared_prefill(model, document_ids(tokenizer, hidden.text).to(model.device))
    prefilled.instruction = repeat_instruction(tokenizer).to(model.device)
    asked = [Question(ASKED.format(door=door), expected=hidden.codes[door]) for door in DOORS]
    answers: dict[str, list[tuple[float, bool]]] = {}
    for method in ("full", *methods):
        said = answers_with_doubt(tokenizer, prefilled, prefilled.cache(parse_method(method)), asked, NEW_TOKENS)
        answers[method] = [
            (doubt, question.expected in answer) for question, (answer, doubt) in zip(asked, said, strict=True)
        ]
    for method in methods:
        for (doubt, right), (_, full_right) in zip(answers[method], answers["full"], strict=True):
            yield Told(doubt, right, full_right)
