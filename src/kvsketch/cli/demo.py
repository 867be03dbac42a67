"""kvsketch demo: every method reads one long prompt with a passkey in it; a table, and a picture on request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kvsketch.cli.comparing import cache_size, shortened, show, smallest, with_progress
from kvsketch.cli.generate import require_positions
from kvsketch.cli.options import DEFAULT_MODEL, DeviceOption, DtypeOption, JsonOption, ModelOption
from kvsketch.cli.output import remarks

if TYPE_CHECKING:
    from kvsketch.compare.answers import Row

ANSWER_WIDTH = 48


def demo(
    model: ModelOption = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=200, help="Length of the prompt.")] = 2000,
    depth: Annotated[float, typer.Option(min=0.0, max=1.0, help="Where the passkey hides: 0 start, 1 end.")] = 0.5,
    budgets: Annotated[str, typer.Option(help="Budgets, comma-separated: 1/4, 25% or 512.")] = "1/8",
    budgets_in: Annotated[str, typer.Option(help="What a budget is a share of: bytes or tokens.")] = "bytes",
    methods: Annotated[str, typer.Option(help="Methods, comma-separated, or all.")] = "all",
    seed: Annotated[int, typer.Option(help="Chooses the document and the passkey.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for demo.json and demo.png.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hide a passkey in a long document and see which caches still find it."""
    if budgets_in not in ("bytes", "tokens"):
        raise ValueError(f"--budgets-in {budgets_in} is not possible; use bytes or tokens")

    from kvsketch import models
    from kvsketch.compare import answers as comparison
    from kvsketch.compare.budgets import compared
    from kvsketch.models import texts

    chosen = compared(methods, budgets)
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    require_positions(model, loaded, None, tokens)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    document = texts.passkey_document(tokenizer, tokens=tokens, depth=depth, seed=seed)
    prompt = document.input_ids.to(loaded.device)
    refused: list[str] = []
    found = comparison.compare(loaded, tokenizer, prompt, document.passkey, chosen, refused=refused, unit=budgets_in)
    rows = with_progress(found, chosen)
    for line in refused:
        remarks().print(f"left out: {line}", markup=False)
    record = {
        "model": model,
        "prompt_tokens": prompt.shape[1],
        "depth": depth,
        "seed": seed,
        "passkey": document.passkey,
        "budgets_in": budgets_in,
        "refused": refused,
    }
    title = f"{model}, prompt of {prompt.shape[1]:,} tokens, passkey {document.passkey} at depth {depth:g}"
    columns = {
        "tokens seen": lambda row: f"{row.tokens_seen:,}",
        "stored": lambda row: f"{row.tokens_stored:,}",
        "cache": cache_size,
        "ms/token": lambda row: f"{row.milliseconds_per_token:.0f}",
        "divergence": lambda row: f"{row.divergence:.4f}",
        "answer": _answer,
    }
    show("demo", title, record, rows, columns, summary(rows), out, as_json)


def _answer(row: Row) -> str:
    colour, mark = ("green", "right") if row.right else ("red", "wrong")
    return f"[{colour}]{mark}[/]: {escape(shortened(row.answer, ANSWER_WIDTH))}"


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
        lines.append(f"smallest cache that finds it: {smallest(found, full)}")
    return [*lines, "one document, one passkey: an illustration, not a benchmark"]
