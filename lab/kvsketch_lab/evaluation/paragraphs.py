"""Paragraphs and questions of SQuAD's and HotpotQA's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Question(NamedTuple):
    """A question, the paragraphs that answer it, and the answers that are right."""

    question: str
    gold: tuple[int, ...]
    answers: tuple[str, ...]


class Paragraphs(NamedTuple):
    texts: list[str]
    rows: list[Question]


def read_paragraphs(path: str | Path) -> tuple[bool, Paragraphs]:
    """Whether questions need several paragraphs (HotpotQA) or one (SQuAD), and the content of the file."""
    try:
        result: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        several = isinstance(result, list)
        return several, (_hotpot(result) if several else _squad(result["data"]))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"--qa-file {path} is neither SQuAD's JSON (data, paragraphs, qas) nor HotpotQA's (a list with context, "
            f"supporting_facts): {type(error).__name__}: {error}"
        ) from error


def _squad(data: Any) -> Paragraphs:
    texts: dict[str, int] = {}
    rows = []
    for paragraph in (paragraph for article in data for paragraph in article["paragraphs"]):
        at = texts.setdefault(paragraph["context"], len(texts))
        for asked in paragraph["qas"]:
            if answers := tuple(dict.fromkeys(answer["text"] for answer in asked["answers"])):
                rows.append(Question(asked["question"], (at,), answers))
    return Paragraphs(list(texts), rows)


def _hotpot(data: Any) -> Paragraphs:
    texts: dict[str, int] = {}
    rows = []
    for asked in data:
        places = {
            title: texts.setdefault(f"{title}\n{''.join(sentences)}", len(texts))
            for title, sentences in asked["context"]
        }
        gold = tuple(dict.fromkeys(places[title] for title, _ in asked["supporting_facts"]))
        rows.append(Question(asked["question"], gold, (asked["answer"],)))
    return Paragraphs(list(texts), rows)
