"""The command line: one file per command, or per pair of them.

Nothing here imports torch or transformers before a command needs them, so that --help is instant.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

import kvsketch
from kvsketch.cli.boundary import OneLineErrors, new_app, plain_warnings
from kvsketch.cli.chat import chat, read
from kvsketch.cli.compare import compare
from kvsketch.cli.env import env
from kvsketch.cli.fit import fit
from kvsketch.cli.generate import generate
from kvsketch.cli.lab import add_lab
from kvsketch.cli.methods import methods
from kvsketch.cli.models import models_app
from kvsketch.cli.recommend import recommend
from kvsketch.cli.serve import serve

__all__ = ["app", "main"]

app = new_app("Compress the KV cache of long-context language models, and measure what it costs.", cls=OneLineErrors)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvsketch {kvsketch.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app.command("demo")(compare)
app.command("compare")(compare)
app.command()(methods)
app.command()(generate)
app.command()(read)
app.command()(chat)
app.command()(serve)
app.command()(fit)
add_lab(app)
app.command()(recommend)
app.add_typer(models_app, name="models")
app.command()(env)


def main() -> None:
    """The `kvsketch` command."""
    # Read when torch loads: threads that wait by spinning make a small model ten times slower on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    plain_warnings()
    app()
