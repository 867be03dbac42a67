"""kvsketch eval: run an experiment; its options follow its name."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

EXPERIMENTS = {
    "attention-error": "error of the attention output against the tokens kept or read",
    "lines": "retrieval of one of many numbered lines, as in LongEval",
    "needle": "a passkey hidden in real text, by length and depth",
    "longbench": "the 21 tasks of LongBench, from a local copy or the hub",
    "perplexity": "perplexity of a long text against the full cache, by position",
    "recall": "how many of the tokens that matter a recall method reads, and how often the device held them",
    "clusterability": "how keys and values cluster: t-SNE, k-center radii, cluster counts, query norms",
    "token-life": "how long each token of a document stays in the cache, by layer and head",
}


def evaluate(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="One of: " + ", ".join(EXPERIMENTS))] = "--help",
) -> None:
    """Run an experiment on a real model; `kvsketch eval NAME --help` lists its options."""
    if name in ("--help", "-h"):
        typer.echo("kvsketch eval NAME [OPTIONS]; kvsketch eval NAME --help lists the options.\n")
        typer.echo("\n".join(f"  {name:16s} {about}" for name, about in EXPERIMENTS.items()))
        raise typer.Exit
    if name not in EXPERIMENTS:
        raise ValueError(f"unknown experiment {name!r}; choose one of: {', '.join(EXPERIMENTS)}")
    module = importlib.import_module(f"kvsketch.evaluation.{name.replace('-', '_')}")
    raise typer.Exit(module.main(context.args))
