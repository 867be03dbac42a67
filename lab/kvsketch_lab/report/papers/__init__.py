"""The papers that the methods come from: every table, figure and number, and what the records here say of it.

A module for each paper lists its claims; `claims` says how one is answered and judged. `page` and `index` are what the
pages of docs/papers show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvsketch_lab.report.papers import balancekv, clusterkv, keyformer, subgen
from kvsketch_lab.report.papers.claims import Measured, Paper, Part, Shown, counted, shown

PAPERS = {paper.name: paper for paper in (subgen.PAPER, balancekv.PAPER, clusterkv.PAPER, keyformer.PAPER)}


class Line(NamedTuple):
    shown: Shown
    links: str  # to its commands


class Page(NamedTuple):
    paper: Paper
    parts: Sequence[tuple[Part, Sequence[Line]]]
    commands: Sequence[str]


def page(numbers: Measured, name: str) -> Page:
    """What the page of a paper shows."""
    paper = PAPERS[name]
    lines = [[shown(numbers, claim) for claim in part.claims] for part in paper.parts]
    commands = list(dict.fromkeys(each for part in lines for line in part for each in line.commands))
    parts = [[Line(line, _links(line, commands)) for line in part] for part in lines]
    return Page(paper, list(zip(paper.parts, parts, strict=True)), commands)


def _links(line: Shown, commands: Sequence[str]) -> str:
    """`[1](#commands), [3](#commands)`: the commands behind a line."""
    return ", ".join(f"[{commands.index(each) + 1}](#commands)" for each in line.commands)


def index(numbers: Measured) -> list[tuple[Paper, Mapping[str, int]]]:
    """Each paper, and how many of its claims have each verdict."""
    return [(paper, counted(shown(numbers, claim) for claim in paper.claims)) for paper in PAPERS.values()]
