"""Right answers of stock vLLM: its own caches, and kvsketch's methods in it, on the questions of `kvsketch eval`.

    python -m scripts.vllm_answers --contenders bf16,fp8 --out results/vllm_answers      # on a GPU, where vLLM is
    python -m scripts.vllm_answers --contenders bf16,rehearse:budget=64 --model smollm2-135m --device cpu \
        --out build/answers -- lines --lines 5 --texts 1 --questions 2

A contender is a cache of vLLM's own (`bf16`, `fp8`, with vLLM's default scales) or a method of the plugin. Without `--`
the held-out questions behind "The same bytes, any question" are asked, in prompts of about 3,000 to 6,000 tokens; what
follows `--` are other experiments, each with its options: `-- lines ... -- ruler ...`. Prompts, tokens of an answer,
end tokens and scores are those of the experiment, and so are the records, one for each question, with the method
`vllm-CONTENDER`.

A cache that stores every token reads a text first, and the questions find it by prefix caching: they are `unseen`.
Any other method reads text and question as one prompt, each by itself, and may look at the question while it
compresses: `seen`. vLLM reads prompts whole and decodes without CUDA graphs. Questions with a record are not asked
again.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from tqdm import tqdm

from kvsketch import models
from kvsketch.methods import parse_method
from kvsketch_lab import records
from kvsketch_lab.benchmark.vllm_engine import CPU_SHARE, OWN, SETTINGS, keeps_all
from kvsketch_lab.commands import EXPERIMENTS
from kvsketch_lab.evaluation import runner
from kvsketch_lab.evaluation.experiment import Cell, common_fields, end_tokens, records_path
from kvsketch_lab.evaluation.questions import SEEN, UNSEEN, Question, QuestionExperiment
from kvsketch_lab.lists import grouped
from scripts.equal_bytes import MODEL, NEEDLES, OTHERS
from scripts.kvpress_baseline import made

HELD_OUT = (
    "lines --lines 200,400 --texts 10 --questions 12 --primed --max-new-tokens 8 --seeds 100",
    f"ruler --tasks {NEEDLES},{OTHERS} --lengths 4000 --texts 6 --questions 4 --max-new-tokens 48 --seeds 100",
)
ROWS = 64  # requests that run at a time
TEXTS = 16  # read together, and then asked about


class Asked(NamedTuple):
    """A question that has no record yet."""

    experiment: QuestionExperiment
    cell: Cell
    question: Question

    @property
    def text(self) -> tuple[int, ...]:
        """The tokens before the question."""
        return self.question.ids[: len(self.question.ids) - self.question.asked]

    @property
    def new_tokens(self) -> int:
        return self.experiment.new_tokens(self.cell)


def experiment_of(line: list[str], options: argparse.Namespace) -> QuestionExperiment:
    """The experiment of a command line such as `lines --lines 200`; ValueError for one that vLLM cannot be asked."""
    if not line or line[0] not in EXPERIMENTS:
        raise ValueError(f"-- {' '.join(line)}: no experiment has that name; use such as lines or ruler")
    try:
        result = made([*line, "--model", options.model, "--device", options.device, "--out", options.out])
    except Exception as error:  # the command's own, of no common class
        raise ValueError(f"-- {' '.join(line)}: {error}") from error
    if not isinstance(result, QuestionExperiment):
        raise ValueError(f"-- {line[0]} asks no questions that vLLM could answer; use such as lines or ruler")
    if result.options.turns > 1:
        raise ValueError(f"--turns {result.options.turns} asks after earlier answers, which vLLM is not; leave it out")
    return result


def unrecorded(experiment: QuestionExperiment, contender: str) -> Iterator[Asked]:
    """The questions of an experiment that a contender has no record of."""
    way = UNSEEN if keeps_all(contender) else SEEN
    own = [
        replace(cell, method=f"vllm-{contender}", setting=tuple((dict(cell.setting) | {"question": way}).items()))
        for cell in runner.wanted_cells(experiment).values()
    ]
    known = runner.recorded(experiment, {cell.key: cell for cell in own})
    for cell in own:
        if cell.key not in known:
            yield Asked(experiment, cell, experiment.aligned(experiment.ask(cell)))


class Engine:
    """vLLM with the weights of a real model and the cache of a contender."""

    def __init__(self, contender: str, folder: Path, dtype: str, longest: int, options: argparse.Namespace) -> None:
        import vllm
        from transformers import GenerationConfig

        # The CPU build looks at every module for kernels and stumbles over this one.
        sys.modules.pop("llvmlite.binding.ffi", None)
        self.version, self.keeps_all = vllm.__version__, keeps_all(contender)
        self.ends = end_tokens(SimpleNamespace(generation_config=GenerationConfig.from_pretrained(folder)))
        plugin = {"attention_backend": "CUSTOM", "additional_config": {"kvsketch": contender}}
        self.llm = vllm.LLM(
            model=str(folder), skip_tokenizer_init=True, dtype=dtype, seed=0, max_model_len=longest, max_num_seqs=ROWS,
            max_num_batched_tokens=longest + ROWS, enable_chunked_prefill=False, enforce_eager=True,
            enable_prefix_caching=self.keeps_all,
            gpu_memory_utilization=options.share if options.device == "cuda" else CPU_SHARE,
            **OWN.get(contender, plugin),
        )  # fmt: skip

    def answers(self, asked: Sequence[Asked]) -> list[tuple[list[int], int]]:
        """The tokens that answer each question, and how many of its prompt were found in the cache."""
        if self.keeps_all:
            texts = list(dict.fromkeys(each.text for each in asked))
            self._generated(texts, [1] * len(texts))
        return self._generated([each.question.ids for each in asked], [each.new_tokens for each in asked])

    def _generated(self, prompts: Sequence[Sequence[int]], new: Sequence[int]) -> list[tuple[list[int], int]]:
        from vllm import SamplingParams

        greedy = [
            SamplingParams(temperature=0, max_tokens=count, stop_token_ids=self.ends, detokenize=False)
            for count in new
        ]  # fmt: skip
        done = self.llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], greedy, use_tqdm=False)
        return [(list(each.outputs[0].token_ids), each.num_cached_tokens or 0) for each in done]


def ask(contender: str, experiments: list[QuestionExperiment], options: argparse.Namespace) -> None:
    """Asks one contender what it has no record of, in this process."""
    from transformers import AutoTokenizer

    folder = models.resolve(options.model)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    for experiment in experiments:
        experiment.tokenizer = tokenizer
    asked = [each for experiment in experiments for each in unrecorded(experiment, contender)]
    if not asked:
        return print(f"{contender}: every question has a record")
    longest = max(len(each.question.ids) + each.new_tokens for each in asked)
    engine = Engine(contender, folder, experiments[0].dtype, longest, options)
    texts = list(grouped(asked, lambda each: each.text).values())
    for start in tqdm(range(0, len(texts), TEXTS), unit=f"{TEXTS} texts", desc=contender, disable=None):
        some = [each for own in texts[start : start + TEXTS] for each in own]
        for each, (tokens, found) in zip(some, engine.answers(some), strict=True):
            write(each, tokenizer.decode(tokens, skip_special_tokens=True), found, engine.version)


def write(asked: Asked, answer: str, found: int, version: str) -> None:
    experiment, cell, question = asked
    data = cell.data | {
        "score": experiment.score(answer, question.expected), "answer": answer, "expected": question.expected,
        "prompt_tokens": len(question.ids), "tokens_found": found, "vllm": version,
    }  # fmt: skip
    data |= question.facts | experiment.origin()
    record = records.make_record(experiment.kind(), data, cell.seed, tuple(cell.data))
    records.append(records_path(experiment), record, common=("vllm", *common_fields(experiment)))


def in_processes(contenders: list[str], given: list[str]) -> int:
    """Each contender in a process of its own, which gives its memory back when it ends; 1: one of them failed."""
    command = [sys.executable, "-m", "scripts.vllm_answers"]
    failed = [each for each in contenders if subprocess.run([*command, "--contenders", each, *given]).returncode]
    if failed:
        print(f"failed: {', '.join(failed)}; the same command continues", file=sys.stderr)
    return int(bool(failed))


def require_contender(name: str) -> None:
    if name not in OWN:
        try:
            parse_method(name)
        except ValueError as error:
            own = ", ".join(OWN)
            raise ValueError(f"--contenders {name} is no cache of vLLM's own ({own}), and no method: {error}") from None


def parted(arguments: list[str]) -> list[list[str]]:
    """The arguments before the first `--`, and those behind each."""
    result: list[list[str]] = [[]]
    for each in arguments:
        if each == "--":
            result.append([])
        else:
            result[-1].append(each)
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", default="bf16,fp8")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--share", type=float, default=0.3, help="of the GPU's memory that vLLM may take")
    parser.add_argument("--out", default="results/vllm_answers")
    first, *lines = parted(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(first)
    contenders = [each.strip() for each in options.contenders.split(",")]
    try:
        for each in contenders:
            require_contender(each)
        experiments = [experiment_of(line, options) for line in lines or map(str.split, HELD_OUT)]
        if importlib.util.find_spec("vllm") is None:
            raise ValueError("vLLM is not installed; pip install 'kvsketch[vllm]'")
    except ValueError as error:
        parser.error(str(error))
    if len(contenders) > 1:
        given = ["--model", options.model, "--device", options.device, "--share", str(options.share)]
        given += ["--out", options.out, *(word for line in lines for word in ("--", *line))]
        return in_processes(contenders, given)
    os.environ |= {name: value for name, value in SETTINGS.items() if name not in os.environ}
    try:
        ask(contenders[0], experiments, options)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the engine would keep the process.
    os._exit(code)
