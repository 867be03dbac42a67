"""A measurement has one number and one interval, on whichever page it stands.

The tables of the committed pages are read back and joined on model, way to measure, task, method and budget.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

from kvsketch_lab.records import budget_value
from kvsketch_lab.report import docs
from tests.report.test_papers import PAGES as PAPERS

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"[+-]?\d+\.\d+(?: \[[^]]+\])?")
BYTES, UNSEEN = "budgets of equal bytes", "question unseen"
# How each task is asked at equal bytes, besides.
WAYS = {"lines": "answer begun", "needle": "11 needles"}
KINDS = ("Line retrieval", "Needle", "RULER", "Perplexity")  # of the report
SHARES = {"an eighth": "1/8", "the same, and": "1/8", "a sixteenth": "1/16"}  # words of docs/choosing.md


class Cell(NamedTuple):
    """What a number is of."""

    model: str
    ways: frozenset[str]
    task: str
    method: str
    budget: float


class Line(NamedTuple):
    """A line of a table by its column heads, and the headings above it by their level; level 0 is bold text."""

    headings: dict[int, str]
    cells: dict[str, str]


def lines(page: Path) -> Iterator[Line]:
    headings: dict[int, str] = {}
    head: list[str] = []
    for text in page.read_text(encoding="utf-8").splitlines():
        if result := re.match(r"(#+) (.*)|\*\*(.*)\*\*$", text):
            level = len(result[1] or "")
            headings = {at: name for at, name in headings.items() if 0 < at < level or level == 0}
            headings[level] = result[2] or result[3]
        if not text.startswith("| "):
            head = []
            continue
        cells = [cell.replace("`", "").strip() for cell in text.strip("|").split(" | ")]
        if head and not cells[0].startswith("---"):
            yield Line(dict(headings), dict(zip(head, cells, strict=True)))
        head = head or cells


def task_of(setting: str) -> str:
    """A setting of the report in the words of the other pages: `lines 200`, `RULER 4,000`, `needle 4,000`."""
    setting = setting.removesuffix(" tokens").replace("average of the tasks, ", "RULER ").replace("length ", "needle ")
    return setting.replace("perplexity 4,096", "prefill, 64 steps")


def of_report() -> Iterator[tuple[Cell, str]]:
    for line in lines(ROOT / "docs" / "report" / "report.md"):
        for setting, text in line.cells.items() if line.headings.get(2) in KINDS else ():
            model, *ways = line.headings[3].split(", ")
            cell = line.cells
            yield Cell(model, frozenset(ways), task_of(setting), cell["method"], size(cell["budget"])), text


def size(budget: str) -> float:
    """Of a method that takes no budget, that of all tokens."""
    return budget_value(budget.replace("all", ""))


def at_equal_bytes(model: str, task: str, method: str, share: str, question: str = "unseen") -> Cell:
    kind = task.split()[0]
    ways = {
        BYTES,
        *([UNSEEN] if question == "unseen" and kind != "perplexity" else []),
        *filter(None, [WAYS.get(kind)]),
    }
    takes = share if method.partition(":")[0] != "full" else "all"
    return Cell(model, frozenset(ways), task_of(task), method, size(takes))


def of_results() -> Iterator[tuple[Cell, str]]:
    for line in lines(ROOT / "docs" / "results.md"):
        for task, text in line.cells.items() if "bytes" in line.cells else ():
            share, cell = line.headings[0].split()[0], line.cells
            yield at_equal_bytes(line.headings[3], task, cell["method"], share, cell["question"]), text


def of_readme() -> Iterator[tuple[Cell, str]]:
    for line in lines(ROOT / "docs" / "results.md"):
        method = line.cells.pop("share of the full cache's bytes", "")
        for share, text in line.cells.items() if method else ():
            for task, number in zip(("lines 400", "RULER 4,000"), text.split(" / "), strict=False):
                yield at_equal_bytes(docs.BIG, task, method, share), number


def of_streams() -> Iterator[tuple[Cell, str]]:
    """The exact prefills; perplexities stand there by position, and in the report over all of them."""
    for line in lines(ROOT / "docs" / "long_contexts.md"):
        if line.headings.get(3, "").startswith("Line retrieval"):
            cell, (model, *ways) = line.cells, line.headings[4].split(", ")
            task = f"lines {cell['lines'].split()[0]}"
            yield Cell(model, frozenset(ways), task, cell["method"], size(cell["budget"])), cell["exact prefill"]


def of_choosing() -> Iterator[tuple[Cell, str]]:
    for line in lines(ROOT / "docs" / "choosing.md"):
        method, *options = line.cells.get("write", "").split(":")
        budget = "".join(each.partition("=")[2] for each in options if each.startswith("budget="))
        others = [each for each in options if not each.startswith(("budget=", "bytes=", "replay=exact"))]
        written = ":".join([method, *others])
        share = next((share for words, share in SHARES.items() if line.cells["you need"].startswith(words)), "all")
        for task, number in zip(("lines 200", "lines 600"), NUMBER.findall(line.cells["right answers"]), strict=False):
            if written == "rehearse":
                method = "rehearse:replay=exact" if "replay=exact" in line.cells["write"] else written
                yield at_equal_bytes(docs.BIG, task, method, share), number
            else:
                yield Cell(docs.BIG, frozenset(), task, written, size(budget)), number


def of_papers() -> Iterator[tuple[Cell, str]]:
    for paper in PAPERS.values():
        page = (ROOT / "docs" / "papers" / f"{paper.name}.md").read_text(encoding="utf-8").splitlines()
        for claim in paper.claims:
            claimed = f"| **{claim.at}**: {claim.says} "
            shown = [text.removeprefix(claimed) for text in page if text.startswith(f"{claimed}|")]
            for name, wanted in claim.ours.items() if len(shown) == 1 and not claim.brief else ():
                where = wanted.where
                if wanted.kind in ("lines", "perplexity") and (number := _after(name, shown[0])):
                    ways = frozenset(filter(None, where["variant"].split(", ")))
                    yield Cell(where["model"], ways, where["setting"], where["method"], size(where["budget"])), number


def _after(name: str, text: str) -> str:
    """The number that follows a name in a line."""
    number = re.search(rf"[|,] {re.escape(name)} ({NUMBER.pattern})", text)
    return number[1] if number else ""


PAGES = {
    "papers": of_papers, "report": of_report, "results": of_results, "README": of_readme, "streams": of_streams,
    "choosing": of_choosing,
}  # fmt: skip
# Pages that show the same measurements, and how many at least.
SHARED = {
    ("report", "results"): 270, ("report", "README"): 60, ("results", "README"): 60, ("report", "streams"): 12,
    ("report", "choosing"): 14, ("results", "choosing"): 6, ("papers", "report"): 30,
}  # fmt: skip


@pytest.fixture(scope="module")
def printed() -> dict[Cell, dict[str, set[str]]]:
    """What pages print of each measurement: `0.86 [0.76, 0.94]`, or the number alone."""
    result: dict[Cell, dict[str, set[str]]] = {}
    for name, read in PAGES.items():
        for cell, text in read():
            if number := NUMBER.match(text):
                result.setdefault(cell, {}).setdefault(name, set()).add(number[0])
    return result


def differ(texts: Sequence[str]) -> bool:
    """Whether numbers differ, or the intervals of those that have one."""
    numbers, intervals = zip(
        *((number, interval) for number, _, interval in (t.partition(" ") for t in texts)), strict=True
    )
    return len(set(numbers)) > 1 or len(set(filter(None, intervals))) > 1


def test_every_measurement_has_one_number_and_one_interval(printed: dict[Cell, dict[str, set[str]]]) -> None:
    wrong = {cell: pages for cell, pages in printed.items() if differ([t for texts in pages.values() for t in texts])}
    assert not wrong, "\n".join(f"{cell}: {pages}" for cell, pages in wrong.items())


def test_pages_are_joined(printed: dict[Cell, dict[str, set[str]]]) -> None:
    """Without cells in common the test above would say nothing."""
    joined = Counter(pair for pages in printed.values() for pair in combinations([n for n in PAGES if n in pages], 2))
    assert {pair: count for pair, count in SHARED.items() if joined[pair] < count} == {}, joined
