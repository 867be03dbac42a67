"""The metrics of LongBench: each takes an answer, a reference and the classes, and gives a score in [0, 1].

qa_f1, qa_f1_zh        F1 of the words two answers share, case, punctuation and English articles removed
rouge_l, rouge_l_zh    ROUGE-L F of the package `rouge`, as published scores use it (it counts different words)
classification         1 / number of classes named, if the right one is among them
retrieval, count       share of the whole numbers in an answer that are the right one
code_similarity        similarity of the first line that is code

A row counts the best score over its references. Chinese text is cut into words by jieba.
"""

from __future__ import annotations

import importlib
import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

INSTALL = "pip install 'kvsketch[eval]'"
CLEANINGS = ("longbench", "first-line")
ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
DEEP_ENOUGH = 20_000


def optional(module: str, package: str) -> Any:
    """A module of a package that only evaluations need; one line that says how to get it where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(f"this needs the package {package}: {INSTALL}") from None


def score(metric: str, answer: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The best score of an answer over its references."""
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; choose one of: {', '.join(METRICS)}")
    return max((METRICS[metric](answer, reference, classes) for reference in references), default=0.0)


def require(metrics: Iterable[str]) -> None:
    """Raises ImportError for a package that one of the metrics needs and that is not installed."""
    for metric in metrics:
        score(metric, "1", ["1"])


def clean(answer: str, first_line: bool, cleaning: str = "longbench") -> str:
    """What of an answer is scored.

    longbench: of the few-shot tasks (`first_line`) the first line that is not empty, of all others everything;
    first-line: of all tasks the text up to the first line break or double space, as BalanceKV's numbers use.
    """
    if cleaning == "first-line":
        return re.split(r"\n|  ", answer.strip(), maxsplit=1)[0]
    return answer.lstrip("\n").split("\n")[0] if first_line else answer


def qa_f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    return _f1(_words(answer), _words(reference))


def qa_f1_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    return _f1(_chinese_words(answer), _chinese_words(reference))


def rouge_l(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L F; 0 for an answer without words.

    The package walks its tables by recursion; the limit is raised so that a long answer gets its score.
    """
    scorer = optional("rouge", "rouge").Rouge(metrics=["rouge-l"], stats=["f"])
    try:
        with _deep_recursion():
            return float(scorer.get_scores([answer], [reference], avg=True)["rouge-l"]["f"])
    except ValueError:  # no sentence in one of them
        return 0.0


def rouge_l_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    return rouge_l(" ".join(_jieba().cut(answer)), " ".join(_jieba().cut(reference)))


def classification(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """1 / number of classes that the answer names, if the right one is named; parts of the right name do not count."""
    named = [name for name in classes if name in answer and (name == reference or name not in reference)]
    return 1 / len(named) if reference in named else 0.0


def count(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    numbers = re.findall(r"\d+", answer)
    return numbers.count(reference.strip()) / len(numbers) if numbers else 0.0


def retrieval(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """`count` of the number in the reference, such as 7 in `Paragraph 7`."""
    number = re.search(r"\d+", reference)
    if number is None:
        raise ValueError(f"the reference {reference!r} of a retrieval task has no number, such as `Paragraph 7`")
    return count(answer, number[0])


def code_similarity(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of characters in common, in whole percent, of the first line without a backtick or a comment sign."""
    signs = ("`", "#", "//")
    lines = (line for line in answer.split("\n") if line.strip() and not any(sign in line for sign in signs))
    ratio = optional("rapidfuzz.fuzz", "rapidfuzz").ratio
    return round(float(ratio(next(lines, ""), reference))) / 100


METRICS: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    metric.__name__: metric
    for metric in (qa_f1, qa_f1_zh, rouge_l, rouge_l_zh, classification, retrieval, count, code_similarity)
}


def _f1(answer: list[str], reference: list[str]) -> float:
    shared = (Counter(answer) & Counter(reference)).total()
    return 2 * shared / (len(answer) + len(reference)) if shared else 0.0


def _words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split()


def _chinese_words(text: str) -> list[str]:
    words = ("".join(sign for sign in word.lower() if not _is_punctuation(sign)) for word in _jieba().cut(text))
    return [word for word in words if word]


def _is_punctuation(sign: str) -> bool:
    """White space, punctuation of any script, and the wide forms of ASCII's."""
    return (
        sign.isspace()
        or unicodedata.category(sign)[0] == "P"
        or unicodedata.normalize("NFKC", sign) in string.punctuation
    )


@cache
def _jieba() -> Any:
    found = optional("jieba", "jieba")
    found.setLogLevel("WARNING")
    return found


@contextmanager
def _deep_recursion() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, DEEP_ENOUGH))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
