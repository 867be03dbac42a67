"""kvsketch eval, bench and report. A module of an experiment or a benchmark is imported when its command is named."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvsketch.cli.boundary import new_app
from kvsketch.cli.output import remarks, results

EXPERIMENTS = {
    "attention-error": "Error of the attention output against the tokens kept or read.",
    "lines": "Retrieval of one of many numbered lines, as in LongEval.",
    "ruler": "Needles, variables and words in texts of any length: RULER's tasks.",
    "leval": "Questions about long documents: the closed tasks of L-Eval.",
    "locomo": "Many questions about one long conversation: LoCoMo, by F1.",
    "gsm8k": "Problems with long answers, compressed while they are written: GSM8K.",
    "instructions": "Whether five instructions of a system prompt survive compression.",
    "likelihood": "How likely reference summaries are: nats per token and KL.",
    "summaries": "Summaries beside that of the full cache and a reference, by ROUGE.",
    "needle": "A passkey hidden in real text, by length and depth.",
    "perplexity": "Perplexity of a long text against the full cache, by position.",
    "recall": "How many of the best tokens a recall method reads, and how often they were on the device.",
    "speculation": "Recall of a layer that scores with a query predicted from the layer before.",
    "clusterability": "How keys and values cluster: t-SNE, k-center radii, cluster counts, query norms.",
    "concentration": "How few tokens attention goes to, where they lie and for how long they matter.",
    "shared-budget": "Best tokens, balanced samples and refits in heads that share one budget, at equal slots.",
    "bits": "Keys and values in few bits: error, divergence, bytes, time; ours, QuantizedCache and fp8.",
    "promise": "Whether a promise of the loss holds: on passages that were not tried, and for answers.",
    "agents": "A long run of an agent: spans compacted in place beside the full cache and summaries.",
    "bfcl": "Calls of functions in talks of some turns, held as those of agents: bfcl-eval's multi-turn cases.",
    "token-life": "How long each token of a document stays in the cache, by layer and head.",
}
BENCHMARKS = {
    "decode": "One decode step, captured, for any method and batch, beside full-cache baselines.",
    "step-profile": "Device time of a decode step by kernel.",
    "prefill": "A whole prefill under any method, beside transformers' own cache.",
    "rehearse": "What rehearse adds to a prefill: score, choice, refit, encoding.",
    "operations": "Single operations, each beside its rivals, a floor or a prefill: attention, linear, mass and so on.",
    "offload": "A decode step with the cache in host memory, beside the same step on the device.",
    "hit-rate": "How often an offloaded query finds its tokens on the device, on a real model.",
    "serve": "Requests that share a decode step: throughput, first tokens, joins, beside the full cache.",
    "vllm": "A decode step of vLLM: its own caches beside kvsketch's plugin.",
    "cpu": "Reading and decoding on a CPU, beside transformers' own cache.",
    "document": "First token of an answer about a document: read again, from its file, held ready.",
    "stream": "Prompts of any length read chunk by chunk: time, memory, flatness.",
}


def command(name: str) -> Any:
    """The command `kvsketch NAME`."""
    app = new_app("")
    app.add_typer(_group("evaluation", EXPERIMENTS, "Measure quality on a real model"), name="eval")
    app.add_typer(_group("benchmark", BENCHMARKS, "Measure speed"), name="bench")
    app.command()(report)
    return typer.main.get_group(app).commands[name]


def _group(package: str, commands: dict[str, str], about: str) -> typer.Typer:
    """Commands by name, each with one line of help."""

    class Lazy(TyperCommand):
        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            runner = importlib.import_module(f"kvsketch_lab.{package}.runner")
            made = runner.command(class_of(package, str(self.name)))
            return made.make_context(info_name, args, parent, **extra)

    class Group(TyperGroup):
        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in commands:
                raise ValueError(
                    f"unknown name {cmd_name!r} after `{ctx.info_name}`; choose one of: {', '.join(commands)}"
                )
            return super().get_command(ctx, cmd_name)

    app = new_app(f"{about}; NAME --help lists the options of one.", cls=Group)
    for name, help_text in commands.items():
        app.command(name, help=help_text, cls=Lazy)(lambda: None)
    return app


def class_of(package: str, name: str) -> Any:
    """The experiment or benchmark of a name: the class that has it in the module of that name."""
    module = importlib.import_module(f"kvsketch_lab.{package}.{name.replace('-', '_')}")
    own = (each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__)
    return next(each for each in own if vars(each).get("name") == name)


def report(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder of records, as `kvsketch eval --out` writes them.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the report; FOLDER/report unless given.")] = None,
    docs: Annotated[
        bool, typer.Option("--docs", help="Write all pages and figures of docs/ from results/, here.")
    ] = False,
) -> None:
    """Write report.md, report.html and figures from the records of experiments; needs no model and no torch."""
    from kvsketch_lab.report import docs as pages
    from kvsketch_lab.report.render import render

    if docs == (folder is not None) or (docs and out is not None):
        raise ValueError("name a folder of records, or give --docs alone to write the pages of this repository")
    said: list[str] = []
    if folder is None:
        from kvsketch.cli.methods import TABLE, describe
        from kvsketch.methods import METHODS
        from kvsketch_lab import reference, sizes
        from kvsketch_lab.records import write_whole

        described = [describe(cls) for cls in METHODS.values()]
        written = pages.write(Path(), described, sizes)
        written.append(write_whole(Path("src/kvsketch/cli") / TABLE.name, table_text(described).encode()))
        written.append(write_whole(Path("docs") / "api.md", reference.page().encode()))
    else:
        written, said = render(folder, out or folder / "report")
    for remark in said:
        remarks().print(remark, markup=False)
    for path in written:
        results().print(str(path), markup=False, soft_wrap=True)


def table_text(described: list[dict[str, Any]]) -> str:
    """The content of `methods.json` of the command line, a line for each method."""
    return "[\n" + ",\n".join(json.dumps(each, ensure_ascii=False) for each in described) + "\n]\n"
