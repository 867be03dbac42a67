"""What `kvsketch demo` and `kvsketch compare` share: a progress bar over the methods, the table, the files."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvsketch.cli.output import megabytes, print_json, remarks, results

if TYPE_CHECKING:
    from kvsketch.compare.answers import Compared

LEFT = ("method", "answer")  # columns of text; the others are numbers


Row = TypeVar("Row")


def with_progress(compared: Iterable[Row], methods: Sequence[Any]) -> list[Row]:
    """The rows, with a bar that names the method at work."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    rows: list[Row] = []
    with Progress(*columns, console=remarks(), transient=True) as progress:
        task = progress.add_task(str(methods[0]), total=len(methods))
        for row in compared:
            rows.append(row)
            progress.update(task, advance=1, description=str(methods[min(len(rows), len(methods) - 1)]))
    return rows


def show(
    name: str,
    title: str,
    record: dict[str, Any],
    rows: Sequence[Compared],
    columns: Mapping[str, Callable[[Compared], str]],
    lines: Sequence[str],
    out: Path | None,
    as_json: bool,
    **words: Any,
) -> None:
    """Writes the record and the picture into `out`, then prints the record as JSON, or a table with `lines` below.

    `columns` are the headings and cells after the method's name; `words` go to `picture.draw`.
    """
    from kvsketch import environment

    record["environment"] = dataclasses.asdict(environment.describe())
    record["rows"] = [dataclasses.asdict(row) for row in rows]
    written = [] if out is None else _write(out, name, title, record, rows, **words)
    if as_json:
        print_json(record)
        return
    columns = {"method": lambda row: row.method, **columns}
    table = Table(box=None, header_style="bold", pad_edge=False, title=escape(title), title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=column == "method")
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    results().print(table)
    for line in [*lines, *written]:
        results().print(line, markup=False)


def _write(
    out: Path, name: str, title: str, record: dict[str, Any], rows: Sequence[Compared], **words: Any
) -> list[str]:
    """Writes the record and, if matplotlib is installed, the picture; returns a line about each."""
    out.mkdir(parents=True, exist_ok=True)
    path, picture = out / f"{name}.json", out / f"{name}.png"
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        return [f"record: {path}", "no picture: matplotlib is missing; pip install 'kvsketch[plot]'"]
    from kvsketch.cli.picture import draw

    draw(rows, picture, title, **words)
    return [f"record: {path}", f"picture: {picture}"]


def cache_size(row: Compared) -> str:
    return megabytes(row.device_bytes) + (f" + {megabytes(row.host_bytes)} host" if row.host_bytes else "")


def smallest(rows: Sequence[Compared], full: Compared) -> str:
    """The row with the smallest cache, and its share of the full cache's bytes."""
    least = min(rows, key=lambda row: row.device_bytes + row.host_bytes)
    share = (least.device_bytes + least.host_bytes) / (full.device_bytes + full.host_bytes)
    return f"{least.method}, {share:.0%} of the full cache's bytes"


def shortened(answer: str, width: int) -> str:
    """An answer on one line that fits a table."""
    text = " ".join(answer.split())
    return text if len(text) <= width else text[: width - 3] + "..."
