"""kvsketch bench: run a benchmark; its options follow its name."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

BENCHMARKS = {
    "decode": "one decode step, captured, for any method and batch, beside full-cache baselines",
    "step-profile": "device time of a decode step by kernel",
    "prefill": "a whole prefill under any method, beside transformers' own cache",
    "kernels": "the decode kernel beside SDPA's flash and cuDNN kernels",
    "linear": "the linear layers of a decode step beside torch's",
    "offload": "a decode step with the cache in host memory, beside the same step on the device",
    "stream": "prompts of any length read chunk by chunk: time, memory, flatness",
    "chunk": "the attention of a chunk beside flash attention",
    "mass": "the column sums of attention that H2O and Keyformer need",
    "kcenter": "farthest-first centers, exact and coarse",
    "balance": "the balancing walk of BalanceKV",
    "subgen": "SubGen's streaming structure",
    "pages": "Quest's choice of pages",
    "recall": "clustering, selection and indexed attention of the recall methods",
}


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="One of: " + ", ".join(BENCHMARKS))],
) -> None:
    """Run a benchmark on a CUDA device; `kvsketch bench NAME --help` lists its options."""
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; choose one of: {', '.join(BENCHMARKS)}")
    module = importlib.import_module(f"kvsketch.benchmark.{name.replace('-', '_')}")
    raise typer.Exit(module.main(context.args))
