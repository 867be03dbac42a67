"""kvsketch eval: run an experiment; its options follow its name."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

EXPERIMENTS = {"attention-error": "error of the attention output against the tokens kept or read, on a real model"}


def evaluate(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="One of: " + ", ".join(EXPERIMENTS))],
) -> None:
    """Run an experiment on a real model; `kvsketch eval NAME --help` lists its options."""
    if name not in EXPERIMENTS:
        raise ValueError(f"unknown experiment {name!r}; choose one of: {', '.join(EXPERIMENTS)}")
    module = importlib.import_module(f"kvsketch.evaluation.{name.replace('-', '_')}")
    raise typer.Exit(module.main(context.args))
