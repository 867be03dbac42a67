"""A decode step of vLLM: its own caches beside kvsketch's plugin, every engine in a process of its own.

    kvsketch bench vllm --contenders bf16,fp8,rehearse:budget=16384 --batches 1,16,64 --out results/vllm.jsonl

A contender is one of vLLM's own caches (`bf16`, `fp8`, and `bf16-cascade`, which reads a shared prefix once for all) or
a method of the plugin. All get the same model, prompts,
memory and settings; vLLM's prefix cache is off, and prompts are read whole. An engine reads as many prompts as the
largest batch has rows, then whole steps are timed, host included, while every request decodes; for a smaller batch some
requests end. The weights are random: these are time and memory. With fewer steps than `wait` no row is rehearsed;
`--rehearsals` goes on until each has been, and reports the longest step and the tokens per second of all these.

With `--question N` all requests share one document: vLLM's own caches with its prefix caching, a method with the
documents of the plugin, of which it keeps `--kept` tokens; its own budget is for what a request says itself.

With `--turns N` each of `--batches` chats says `prompt` tokens and N times `--new` more, and gets `--answer` tokens
each time; a chat goes on as soon as it has its answer. One engine has all of `--batches`, one after the other. Prefix
caching is on for all: what is timed is whole conversations, and how long a later turn waits for its first token.
`--host-gb` sets memory of the host aside for chats that do not fit.
`--trace FILE` then shows where the time of a first and a later turn goes, launch by launch.

With `--questions N` each of `--batches` texts of `prompt` tokens is read once, and then N questions about each, of
`--new` tokens, are sent at once. vLLM's own caches and `full` find the text by prefix caching, a method by the
documents of the plugin, of which it keeps `--kept` tokens. What is timed is reading the texts, and all answers.

Prompts are read whole unless `--chunk` says how many tokens vLLM may read in a forward. The records of docs/vllm.md, on
a machine with a GPU, all contenders in the same run:

    M=bf16,fp8,full:bits=4,rehearse:budget=8192
    kvsketch bench vllm --contenders $M --turns 3 --prompt 16384 --batches 16,128 --out results/vllm.jsonl
    kvsketch bench vllm --contenders $M --turns 3 --prompt 16384 --batches 16,128 --chunk 8192 --out results/vllm.jsonl
    kvsketch bench vllm --contenders $M --questions 16 --prompt 8192 --batches 3 --new 64 --out results/vllm.jsonl
    kvsketch bench vllm --contenders $M --batches 1,16,64,96 --rehearsals --out results/vllm.jsonl

First a small model answers requests of mixed lengths, long enough to be rehearsed: a method whose captured tokens are
not those of the same engine without CUDA graphs has no speed. Needs vLLM (`pip install 'kvsketch[vllm]'`).
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from kvsketch.methods import parse_method
from kvsketch_lab.benchmark.runner import FAILED, Benchmark, Fields
from kvsketch_lab.benchmark.shapes import SHAPES
from kvsketch_lab.benchmark.vllm_engine import OWN, Job, keeps_all
from kvsketch_lab.options import option

CHECKED = Job(shape="tiny", layers=2, prompts=(40, 75, 131, 2, 90), rows=2, new_tokens=150, longest=300, share=0.2)
WORKER = "kvsketch_lab.benchmark.vllm_engine"


@dataclass
class Vllm(Benchmark):
    name, kind, title = "vllm", "vllm", "A decode step of vLLM, whole steps, host included"
    columns = (
        "contender | batch:d | step ms=step_ms:.2f | p99 ms=p99_ms:.2f | tokens/s=tokens_per_s:,.0f | "
        "prefill of a row s=prefill_s:.2f | rows that fit=rows_that_fit:,.0f | start s=start_s:.0f | "
        "longest step ms=longest_ms:.1f | tokens/s with rehearsals=sustained_per_s:,.0f | "
        "document s=document_s:.2f | GB of caches=cache_bytes/1e9:.2f | chats s=chats_s:.2f | "
        "first turns s=first_turns_s:.2f | later turn begins s=later_s:.3f | at most s=latest_s:.3f | "
        "tokens found=found:,.0f | texts s=texts_s:.2f | answers s=answers_s:.2f | first token s=first_s:.3f"
    )
    contenders: str = option("bf16,fp8,snapkv:budget=2048", "caches of vLLM's own or methods, separated by commas")
    shape: str = option("llama-3.1-8b", "a shape with random weights", choices=sorted(SHAPES))
    layers: int = option(0, "the first layers alone; 0: all", least=0)
    prompt: int = option(32768, "tokens of a prompt", least=2)
    batches: tuple[int, ...] = option("1,16,64", "requests at a time, or as many as fit, separated by commas", least=1)
    steps: int = option(96, "steps of all requests that are timed", least=2)
    share: float = option(0.9, "of the GPU's memory that vLLM may take (gpu_memory_utilization)", least=0.05, most=1)
    rehearsals: bool = option(False, "continue until every request was compressed, and report that too")
    question: int = option(0, "tokens after a shared document of `prompt` tokens; 0: each reads its own prompt")
    kept: int = option(0, "tokens of that document that methods keep; 0: half", least=0)
    turns: int = option(0, "later turns of chats; 0: steps are timed", least=0)
    questions: int = option(0, "questions about each of `batches` texts; 0: steps are timed", least=0)
    chunk: int = option(0, "tokens that vLLM reads in a forward, with chunked prefill; 0: whole prompts", least=0)
    new: int = option(512, "tokens of a later turn, or of a question", least=1)
    answer: int = option(128, "tokens of each answer", least=1)
    host_gb: float = option(0, "GB of the host for pages of chats that the GPU has no room for; with --turns", least=0)
    trace: str = option("", "a file, such as trace.json.gz, for a trace of a first and a later turn; with --turns")
    check: bool = option(True, "compare captured tokens with those of eager steps first")

    def check_options(self) -> None:
        if self.turns and self.questions:
            raise ValueError("--turns and --questions are two runs; give one of them")
        if self.host_gb and not self.turns:
            raise ValueError(f"--host-gb {self.host_gb:g} is for chats; give --turns")
        if self.trace and not (self.turns and len(self.texts) == 1):
            raise ValueError(f"--trace {self.trace} is of the chats of one contender; give one, and --turns")
        if importlib.util.find_spec("vllm") is None:
            raise ValueError("vLLM is not installed; pip install 'kvsketch[vllm]'")
        for each in self.texts:
            if each not in OWN:
                parse_method(each)

    @property
    def least_rows(self) -> int:
        return len(self.batches) if self.turns else 1

    @property
    def texts(self) -> list[str]:
        return [each.strip() for each in self.contenders.split(",")]

    def cells(self) -> list[Fields]:
        return [{"contender": each} for each in self.texts]

    def measure(self, contender: str) -> Iterator[Fields]:
        row: Fields = {"contender": contender, "shape": self.shape, "layers": self.layers, "prompt": self.prompt}
        if reason := self._wrong(contender):
            yield row | {FAILED: reason}
            return
        if self.turns:
            yield from self._chats(row)
            return
        if self.questions:
            yield from self._asked(row)
            return
        row |= {"question": self.question} if self.question else {}
        wait = _wait(contender) if self.rehearsals else 0
        new = len(self.batches) * (self.steps + wait + 16) + max(self.batches)
        job = Job(
            contender=contender, shape=self.shape, layers=self.layers, prompts=(self.prompt,), batches=self.batches,
            steps=self.steps, new_tokens=new, longest=self.prompt + self.question + new, share=self.share,
            device=self.device, seed=self.seed, wait=wait, question=self.question,
            kept=(self.kept or self.prompt // 2) if self.question else 0,
        )  # fmt: skip
        told = run(job)
        times = told.pop("timed", [])
        for each in times:
            gaps = each.pop("step_times_ms")
            each |= {"step_ms": statistics.median(gaps), "p99_ms": sorted(gaps)[int(0.99 * len(gaps))]}
            yield row | told | each
        if told.get(FAILED) or not times:
            yield row | told | {FAILED: told.get(FAILED) or "no step was timed"}

    def _chats(self, row: Fields) -> Iterator[Fields]:
        longest = self.prompt + self.turns * (self.new + self.answer) + self.answer + 64
        job = Job(
            contender=row["contender"], shape=self.shape, layers=self.layers, prompts=(self.prompt,),
            rows=max(self.batches), chats=self.batches, longest=longest, share=self.share, device=self.device,
            seed=self.seed, turns=self.turns, new=self.new, answer=self.answer, chunk=self.chunk, trace=self.trace,
            host_gb=self.host_gb,
        )  # fmt: skip
        row |= {"turns": self.turns, "new": self.new, "answer": self.answer}
        row |= {"chunk": self.chunk} if self.chunk else {}
        row |= {"host_gb": self.host_gb} if self.host_gb else {}
        told: Fields = {}
        count = 0  # rows that are told
        for told in tellings(job):
            timed = told.pop("timed", [])
            for each in timed[count:]:
                yield row | told | each
            count = max(count, len(timed))
        if told.get(FAILED) or not count:
            yield row | told | {"chats": max(self.batches), FAILED: told.get(FAILED) or "no chat was timed"}

    def _asked(self, row: Fields) -> Iterator[Fields]:
        for texts in self.batches:
            job = Job(
                contender=row["contender"], shape=self.shape, layers=self.layers, prompts=(self.prompt,),
                rows=texts * self.questions, texts=texts, questions=self.questions, new=self.new, answer=self.answer,
                longest=self.prompt + self.new + self.answer + 64, share=self.share, device=self.device,
                seed=self.seed, kept=self.kept or self.prompt // 2, chunk=self.chunk,
            )  # fmt: skip
            said = {"texts": texts, "questions": self.questions, "new": self.new, "answer": self.answer}
            said |= {"chunk": self.chunk} if self.chunk else {}
            told = run(job)
            timed = told.pop("timed", [{}])
            yield row | said | told | timed[0]

    def _wrong(self, contender: str) -> str:
        """What is wrong with the tokens of captured steps."""
        if not self.check or contender in OWN or not self.on.is_gpu:
            return ""
        short = _shortened(contender)
        captured, eager = (
            run(replace(CHECKED, contender=short, eager=eager, device=self.device)) for eager in (False, True)
        )
        if failed := captured.get(FAILED) or eager.get(FAILED):
            return f"the check of the tokens failed: {failed}"
        same = captured["tokens"] == eager["tokens"]
        return "" if same else "captured steps gave other tokens than the same steps without CUDA graphs"


def _shortened(method: str) -> str:
    """The method with a budget, and a time between rehearsals, that the check's short texts exceed."""
    if keeps_all(method):
        return method
    parts = [part for part in method.split(":") if not part.startswith(("budget=", "wait="))]
    return ":".join([*parts, "budget=48", *(["wait=64"] if parts[0] == "rehearse" else [])])


def _wait(contender: str) -> int:
    """Tokens until a row is rehearsed."""
    return 0 if contender in OWN else getattr(parse_method(contender), "most_waiting", 0)


def run(job: Job) -> Fields:
    """What the engine of a job measured, when it has ended."""
    return [*tellings(job)][-1]


def tellings(job: Job) -> Iterator[Fields]:
    """All that the engine of a job has measured so far, each time that there is more.

    It is a process of its own: an engine gives its memory back when that ends.
    """
    command = [sys.executable, "-m", WORKER, json.dumps(asdict(job))]
    silent = True
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        for line in engine.stdout:
            if line.startswith("{"):
                silent = False
                yield json.loads(line)
            else:
                sys.stderr.write(line)  # vLLM's log: among others, kernels that are compiled while requests wait
    if silent:
        yield {FAILED: f"the engine ended with {engine.returncode} and told nothing"}
