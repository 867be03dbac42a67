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
    "realtalk": "Many questions about one real conversation of 21 days: REALTALK, by F1.",
    "longbench2": "Questions with four choices about long documents: LongBench v2.",
    "minilongbench": "Questions, labels and summaries of LongBench v1, in MiniLongBench's prompts.",
    "bamboo": "Several questions about a meeting or a paper: BAMBOO.",
    "financebench": "Questions about annual reports, read from their PDFs: FinanceBench.",
    "math": "Mathematics with long answers, compressed while they are written: MATH-500, AIME.",
    "gsm8k": "Problems with long answers, compressed while they are written: GSM8K.",
    "long-answers": "What the full cache's own long answers cost, token by token, as they are compressed.",
    "instructions": "Whether five instructions of a system prompt survive compression.",
    "likelihood": "How likely reference summaries are: nats per token and KL.",
    "summaries": "Summaries compared with the full cache's and a reference, by ROUGE.",
    "needle": "A passkey hidden in real text, by length and depth.",
    "perplexity": "Perplexity of a long text against the full cache, by position.",
    "recall": "How many of the best tokens a recall method reads, and how often they were on the GPU.",
    "clusterability": "How keys and values cluster: t-SNE, k-center radii, cluster counts, query norms.",
    "concentration": "How few tokens attention goes to, where they are and for how long they matter.",
    "bits": "Quantised keys and values: error, divergence, bytes, time; ours, QuantizedCache and fp8.",
    "promise": "Whether the limit of rehearse:loss holds, on other passages and for answers.",
    "facts": "Facts of texts of seven kinds, asked for after compression, with the likelihood of right answers.",
    "doubt": "Whether a threshold of doubt finds lost answers, and what asking them again costs.",
    "agents": "A long run of an agent: spans compacted in place, the full cache, and summaries.",
    "bfcl": "Function calls in multi-turn chats: bfcl-eval's cases, with the caches of `agents`.",
}
BENCHMARKS = {
    "decode": "One decode step, captured, for any method and batch, with full-cache baselines.",
    "step-profile": "Device time of a decode step by kernel.",
    "prefill": "A prefill with any method, compared with transformers' own cache.",
    "rehearse": "What rehearse adds to a prefill: score, choice, refit, encoding.",
    "operations": "Single operations, compared with rivals, a floor or a prefill: attention, linear, mass and so on.",
    "offload": "A decode step with the cache in host memory, compared with the same step on the GPU.",
    "hit-rate": "How often an offloaded query finds its tokens on the GPU, with a real model.",
    "serve": "Requests that share a decode step: throughput, first tokens, joins, compared with the full cache.",
    "vllm": "A decode step of vLLM: its own caches and kvsketch's plugin.",
    "cpu": "Reading and decoding on a CPU, compared with transformers' own cache.",
    "fit": "What a fit costs by its tokens, and what fewer tokens cost in quality.",
    "document": "First token of an answer about a document: read again, from its file, or in memory.",
    "stream": "Prompts of any length read chunk by chunk: time, memory, time per token.",
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
    add: Annotated[
        Path | None, typer.Option(help="A file of records that others made: it goes into results/outside/, here.")
    ] = None,
    made_by: Annotated[str, typer.Option(help="Who made the records of --add; pages show it beside the method.")] = "",
) -> None:
    """Write report.md, report.html and figures from the records of experiments; needs no model and no torch."""
    from kvsketch_lab.report import docs as pages
    from kvsketch_lab.report.render import render

    if add is not None:
        from kvsketch_lab.report import outside

        if docs or folder is not None or out is not None:
            raise ValueError("--add stands alone; write the pages afterwards with `kvsketch report --docs`")
        count, path = outside.add(add, made_by, Path())
        results().print(f"{count:,} records of {made_by} in {path}; kvsketch report --docs shows them", soft_wrap=True)
        return
    if made_by:
        raise ValueError(f"--made-by {made_by} is for records that --add adds; name their file")
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
