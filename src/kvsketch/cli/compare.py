"""kvsketch compare and demo: every method answers a question about a text; a table and a picture.

`demo` is `compare` on a built-in text with a passkey in it, at equal bytes; an answer is right if it has the passkey.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from kvsketch.cli.comparing import cache_size, shortened, show, smallest, with_progress
from kvsketch.cli.generate import file_text, require_positions
from kvsketch.cli.options import DEFAULT_MODEL, DeviceOption, DtypeOption, JsonOption, ModelOption
from kvsketch.cli.output import remarks

if TYPE_CHECKING:
    from torch import Tensor

    from kvsketch.compare.answers import Compared
    from kvsketch.methods import Method

ANSWER_WIDTH = 96
OPENING = "The pass key is"  # of the answer to the demo's question
MOST = 10  # tokens of it
COLUMNS: dict[str, Callable[[Compared], str]] = {
    "stored": lambda row: f"{row.tokens_stored:,}",
    "cache": cache_size,
    "seconds": lambda row: f"{row.seconds:.1f}",
    "ms/token": lambda row: f"{row.milliseconds_per_token:.0f}",
    "agreement": lambda row: f"[{'green' if row.right else 'red'}]{row.agreement:.0%}[/]",
    "divergence": lambda row: f"{row.divergence:.4f}",
    "answer": lambda row: escape(shortened(row.answer, ANSWER_WIDTH)),
}
MethodsOption = Annotated[str, typer.Option(help="Methods, comma-separated text forms, or all.")]
BudgetsOption = Annotated[str, typer.Option(help="Budgets, comma-separated: 1/4, 25% or 512.")]


def compare(
    file: Annotated[Path, typer.Option(help="A text file, UTF-8.")],
    question: Annotated[str, typer.Option(help="What to ask about it.")],
    model: ModelOption = DEFAULT_MODEL,
    budgets: BudgetsOption = "1/4,1/8",
    memory: Annotated[
        str | None, typer.Option(help="Such as 200MB, in place of --budgets: each method has what fits.")
    ] = None,
    methods: MethodsOption = "all",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 32,
    out: Annotated[Path, typer.Option(help="Folder for compare.json and compare.png.")] = Path("build/compare"),
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask one question about a file through every cache, beside the full one."""
    text = file_text(file)
    if not question.strip():
        raise ValueError("--question is empty; ask something about the file")

    from kvsketch import models
    from kvsketch.cache.memory import parsed
    from kvsketch.compare.budgets import compared

    room = None if memory is None else parsed(memory)
    chosen = compared(methods, budgets)
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    ids = models.encode_chat(tokenizer, f"{text}\n\n{question}")["input_ids"].to(loaded.device)
    require_positions(model, loaded, None, ids.shape[1] + max_new_tokens)
    out.mkdir(parents=True, exist_ok=True)
    refused: list[str] = []
    if room is not None:
        chosen = [chosen[0], *_fitting(loaded, methods, room, ids.shape[1] + max_new_tokens, refused)]
        if len(chosen) == 1:
            raise ValueError(f"no method fits into --memory {memory}. {refused[-1]}")
    record = {
        "model": model,
        "file": file.name,
        "question": question,
        "prompt_tokens": ids.shape[1],
        "refused": refused,
    }
    title = f"{model}, {file.name}, prompt of {ids.shape[1]:,} tokens: {shortened(question, 80)}"
    rows = _rows(loaded, tokenizer, ids, chosen, refused, most=max_new_tokens)
    show("compare", title, record, rows, COLUMNS, summary(rows), out, as_json, marks=("same answer", "another answer"))


def demo(
    model: ModelOption = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=200, help="Length of the prompt.")] = 2000,
    depth: Annotated[float, typer.Option(min=0.0, max=1.0, help="Where the passkey hides: 0 start, 1 end.")] = 0.5,
    budgets: BudgetsOption = "1/8",
    budgets_in: Annotated[str, typer.Option(help="What a budget is a share of: bytes or tokens.")] = "bytes",
    methods: MethodsOption = "all",
    seed: Annotated[int, typer.Option(help="Chooses the document and the passkey.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for demo.json and demo.png.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hide a passkey in a long document and see which caches still find it."""
    if budgets_in not in ("bytes", "tokens"):
        raise ValueError(f"--budgets-in {budgets_in} is not possible; use bytes or tokens")

    import torch

    from kvsketch import models
    from kvsketch.compare.budgets import compared
    from kvsketch.models import texts

    chosen = compared(methods, budgets)
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    require_positions(model, loaded, None, tokens)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    document = texts.passkey_document(tokenizer, tokens=tokens, depth=depth, seed=seed)
    opening = tokenizer(OPENING, add_special_tokens=False, return_tensors="pt")["input_ids"]
    ids = torch.cat([document.input_ids, opening], 1).to(loaded.device)
    refused: list[str] = []
    record = {
        "model": model, "prompt_tokens": document.input_ids.shape[1], "depth": depth, "seed": seed,
        "passkey": document.passkey, "budgets_in": budgets_in, "refused": refused,
    }  # fmt: skip
    title = f"{model}, prompt of {ids.shape[1]:,} tokens, passkey {document.passkey} at depth {depth:g}"
    rows = _rows(loaded, tokenizer, ids, chosen, refused, passkey=document.passkey, unit=budgets_in, most=MOST)
    show("demo", title, record, rows, COLUMNS, summary(rows, document.passkey), out, as_json)


def _rows(
    model: Any, tokenizer: Any, ids: Tensor, chosen: Sequence[Method], refused: list[str], **options: Any
) -> list[Compared]:
    """A row for each method; one that refuses this prompt is named and left out."""
    from kvsketch.compare.answers import answers

    rows = with_progress(answers(model, tokenizer, ids, chosen, refused=refused, **options), chosen)
    for line in refused:
        remarks().print(f"left out: {line}", markup=False)
    return rows


def _fitting(model: Any, methods: str, room: int, tokens: int, refused: list[str]) -> list[Method]:
    """The methods with the budgets that fit into `room` bytes; what does not fit goes to `refused`, in words."""
    from kvsketch import CompressedCache
    from kvsketch.compare.budgets import contenders

    result = []
    for name in dict.fromkeys(method for method, _ in contenders(methods, "1/2")):
        try:
            result.append(CompressedCache(model, name, memory=room, context=tokens).method)
        except ValueError as error:
            refused.append(str(error))
    return result


def summary(rows: Sequence[Compared], passkey: str = "") -> list[str]:
    """Which caches gave the right answer, and the smallest of them; the first row is the full cache."""
    full, compressed = rows[0], rows[1:]
    lines = ["agreement: words in common with the full cache's answer; divergence: KL in nats from its next tokens"]
    if passkey and not full.right:
        return [
            *lines,
            "the full cache itself misses the passkey: too hard for this model; compare the divergences only",
        ]
    right = [row for row in compressed if row.right]
    if passkey:
        lines.append(f"lost the passkey: {_names(row for row in compressed if not row.right)}")
    else:
        lines += [f"the full cache's answer: {' '.join(full.answer.split())}", f"the same answer: {_names(right)}"]
    if right:
        lines.append(f"smallest cache that {'finds' if passkey else 'gives'} it: {smallest(right, full)}")
    if passkey:
        return [*lines, "one document, one passkey: an illustration, not a benchmark"]
    return [*lines, "the full cache's answer may be wrong itself; one question is an illustration, not a benchmark"]


def _names(rows: Iterable[Compared]) -> str:
    return ", ".join(row.method for row in rows) or "none"
