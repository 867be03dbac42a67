"""The table of docs/long_contexts.md: what a streamed prompt costs beyond an exact prefill, written from records.

    python -m kvsketch.evaluation.stream_page results/stream_quality docs/long_contexts.md

What stands between the two marks of the page is replaced; the rest of the page stays as it is.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from kvsketch.benchmark import records
from kvsketch.benchmark.table_makers import between, markdown

BEGIN = "<!-- written by python -m kvsketch.evaluation.stream_page results/stream_quality docs/long_contexts.md -->"
END = "<!-- end of what is written -->"


def table(folder: Path) -> str:
    """Perplexity above the full cache's, mean over texts: a column for each kind of prefill and position."""
    kinds = sorted((path.parent.name, path) for path in folder.glob("*/perplexity.jsonl"))
    kinds.sort(key=lambda kind: kind[0] != "exact")
    cells: dict[str, dict[tuple[str, int], list[float]]] = {}
    for kind, path in kinds:
        for record in records.read(path):
            data: dict[str, Any] = record["data"]
            if "failed" not in data:
                found = cells.setdefault(f"`{data['method']}`", {}).setdefault((kind, data["position"]), [])
                found.append(data["deviation"])
    positions = sorted({position for row in cells.values() for _, position in row})
    columns = [(kind, position) for position in positions for kind, _ in kinds]
    heads = [f"{kind.replace('chunk', 'chunks of ')}, {position:,} tokens" for kind, position in columns]
    rows = [
        (method, *(f"{statistics.mean(row[column]):+.2f}" if column in row else "" for column in columns))
        for method, row in cells.items()
    ]
    return markdown(("method", *heads), rows)


def with_table(page: str, folder: Path) -> str:
    """The page with the table of the records in `folder` between its marks."""
    return between(page, BEGIN, END, table(folder))


def main(arguments: list[str]) -> int:
    folder, target = map(Path, arguments)
    target.write_text(with_table(target.read_text(encoding="utf-8"), folder), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
