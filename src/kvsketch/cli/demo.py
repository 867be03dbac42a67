"""kvsketch demo: every method reads one long prompt with a passkey in it; a table, and a picture on request."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvsketch.cli.options import DEFAULT_MODEL, DeviceOption, DtypeOption, JsonOption, ModelOption
from kvsketch.cli.output import megabytes, print_json, remarks, results

if TYPE_CHECKING:
    from kvsketch.demo import Row

ANSWER_WIDTH = 48


def demo(
    model: ModelOption = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=200, help="Length of the prompt.")] = 2000,
    depth: Annotated[float, typer.Option(min=0.0, max=1.0, help="Where the passkey hides: 0 start, 1 end.")] = 0.5,
    budgets: Annotated[str, typer.Option(help="Budgets, comma-separated: 1/4, 25% or 512.")] = "1/4,1/8",
    methods: Annotated[str, typer.Option(help="Methods, comma-separated, or all.")] = "all",
    seed: Annotated[int, typer.Option(help="Chooses the document and the passkey.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for demo.json and demo.png.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hide a passkey in a long document and see which caches still find it."""
    names = [] if methods == "all" else split(methods, "--methods", "streamingllm,uniform or all")
    sizes = split(budgets, "--budgets", "1/4,1/8")

    from kvsketch import demo as comparison
    from kvsketch import environment, models
    from kvsketch.models import texts

    chosen = comparison.choose_methods(names, sizes)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    document = texts.passkey_document(tokenizer, tokens=tokens, depth=depth, seed=seed)
    prompt = document.input_ids.to(loaded.device)
    rows = with_progress(comparison.compare(loaded, tokenizer, prompt, document.passkey, chosen), chosen)
    record = {
        "model": model,
        "prompt_tokens": prompt.shape[1],
        "depth": depth,
        "seed": seed,
        "passkey": document.passkey,
        "environment": dataclasses.asdict(environment.describe()),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    title = f"{model}, prompt of {prompt.shape[1]:,} tokens, passkey {document.passkey} at depth {depth:g}"
    written = [] if out is None else write(out, "demo", record, rows, title)
    if as_json:
        print_json(record)
        return
    _print_table(rows, title)
    for line in [*summary(rows), *written]:
        results().print(line, markup=False)


def summary(rows: Sequence[Row]) -> list[str]:
    """What was lost and what was saved, in words; the first row is the full cache."""
    full, compressed = rows[0], rows[1:]
    lines = [
        "divergence: KL in nats from the full cache's next-token distribution, mean over its answer; 0 is the same"
    ]
    if not full.right:
        lines.append("the full cache itself misses the passkey: too hard for this model; compare the divergences only")
        return lines
    lost = [row.method for row in compressed if not row.right]
    lines.append(f"lost the passkey: {', '.join(lost) or 'none'}")
    found = [row for row in compressed if row.right]
    if found:
        least = min(found, key=lambda row: row.device_bytes + row.host_bytes)
        share = (least.device_bytes + least.host_bytes) / (full.device_bytes + full.host_bytes)
        lines.append(f"smallest cache that finds it: {least.method}, {share:.0%} of the full cache's bytes")
    return [*lines, "one document, one passkey: an illustration, not a benchmark"]


def _print_table(rows: Sequence[Row], title: str) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in ("tokens seen", "stored", "cache", "ms/token", "divergence"):
        table.add_column(column, justify="right")
    table.add_column("answer")
    for row in rows:
        colour, mark = ("green", "right") if row.right else ("red", "wrong")
        host = f" + {megabytes(row.host_bytes)} host" if row.host_bytes else ""
        answer = shortened(row.answer)
        table.add_row(
            row.method,
            f"{row.tokens_seen:,}",
            f"{row.tokens_stored:,}",
            megabytes(row.device_bytes) + host,
            f"{row.milliseconds_per_token:.0f}",
            f"{row.divergence:.4f}",
            f"[{colour}]{mark}[/]: {escape(answer)}",
        )
    results().print(table)


def shortened(answer: str, width: int = ANSWER_WIDTH) -> str:
    """An answer on one line that fits a table."""
    text = " ".join(answer.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def write(out: Path, name: str, record: dict[str, Any], rows: Sequence[Row], title: str, **words: Any) -> list[str]:
    """Writes the record and, where matplotlib is there, the picture; what to tell of them."""
    path, picture = out / f"{name}.json", out / f"{name}.png"
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        return [f"record: {path}", "no picture: matplotlib is missing; pip install 'kvsketch[plot]'"]
    from kvsketch.cli.picture import draw

    draw(rows, picture, title, **words)
    return [f"record: {path}", f"picture: {picture}"]


def split(text: str, option: str, example: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"{option} is empty; use for instance {example}")
    return parts


def with_progress(found: Iterable[Row], methods: Sequence[Any]) -> list[Row]:
    """The rows, with a bar that names the method at work."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    rows: list[Row] = []
    with Progress(*columns, console=remarks(), transient=True) as progress:
        task = progress.add_task(str(methods[0]), total=len(methods))
        for row in found:
            rows.append(row)
            progress.update(task, advance=1, description=str(methods[min(len(rows), len(methods) - 1)]))
    return rows
