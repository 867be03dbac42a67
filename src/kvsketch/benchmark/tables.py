"""Benchmark records as one Markdown page, so that no number in the docs is typed by hand.

    python -m kvsketch.benchmark.tables results docs/benchmarks.md

For each thing measured the last record counts. This module reads JSON only.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvsketch.benchmark import records
from kvsketch.benchmark.sections import SECTIONS
from kvsketch.benchmark.table_makers import Data, markdown


def page(folder: Path) -> str:
    """The whole page from the records of a folder."""
    found = [record for path in sorted(folder.glob("*.jsonl")) for record in records.read(path)]
    parts = ["# Benchmarks", INTRODUCTION, _machines(found)]
    for title, kind, text, table in SECTIONS:
        data = [record["data"] for record in found if record["kind"] == kind]
        if data:
            parts += [f"## {title}", text, table(data)]
    return "\n\n".join(parts) + "\n"


def _machines(found: list[Data]) -> str:
    rows = {}
    for record in found:
        commit = record["commit"] or {"hash": "unknown", "dirty": False}
        versions = record["versions"]
        rows[record["command"]] = (
            f"`{record['command']}`",
            record["machine"]["gpu"] or f"none ({record['machine']['processor']})",
            f"{commit['hash'][:10]}{' with changes' if commit['dirty'] else ''}",
            f"torch {versions['torch']}, triton {versions['triton']}, transformers {versions['transformers']}",
            record["time"][:10],
        )
    return markdown(("command", "GPU", "commit", "versions", "date"), rows.values())


INTRODUCTION = (
    "Written by `python -m kvsketch.benchmark.tables results docs/benchmarks.md` from the records in "
    "`results/`. Times are "
    "medians; every benchmark first compares its results with the reference and reports nothing when they differ."
)


def main(arguments: list[str]) -> int:
    folder, target = map(Path, arguments)
    target.write_text(page(folder), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
