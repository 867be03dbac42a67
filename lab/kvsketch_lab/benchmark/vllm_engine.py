"""One engine of vLLM for one job, in this process; prints lines of JSON, the last one whole.

`benchmark.vllm` starts it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from kvsketch_lab.benchmark.runner import FAILED, Fields
from kvsketch_lab.benchmark.shapes import SHAPES

# Caches of vLLM's own; cascade: where requests share a prefix, it is read once for all of them.
OWN: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"kv_cache_dtype": "fp8"},
    "bf16-cascade": {"disable_cascade_attn": False},
}
CONNECTOR = "KVSketchDocuments"
METHOD, HOST = "kvsketch", "kvsketch_host_gb"  # of vLLM's additional_config
BLOCK = 64  # tokens of a quantised block
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}
WARM_UP_STEPS = 8
CPU_SHARE = 0.1  # of the host's memory, for a try without a GPU


def keeps_all(contender: str) -> bool:
    """Whether a request has blocks of tokens, which grow with its text, and no page of one size."""
    return contender in OWN or contender.partition(":")[0] == "full"


@dataclass(frozen=True)
class Job:
    """What an engine is to do: time steps of `batches`, or without any answer the prompts, at most `rows` at a time."""

    contender: str = "bf16"
    shape: str = "tiny"
    layers: int = 0
    prompts: tuple[int, ...] = ()  # tokens of each; of `batches` the first counts
    rows: int = 0  # 0: as many as vLLM takes by itself
    batches: tuple[int, ...] = ()
    steps: int = 0
    new_tokens: int = 16
    longest: int = 512
    share: float = 0.9
    eager: bool = False
    device: str = "cuda"
    seed: int = 0
    wait: int = 0  # more steps, in which every row is rehearsed once
    question: int = 0  # tokens behind one document, the first prompt, that all requests share; 0: they share nothing
    kept: int = 0  # tokens of the document that a method keeps
    chats: tuple[int, ...] = ()  # so many at a time that go on: the first prompt, later turns, an answer in each
    turns: int = 0
    new: int = 0
    answer: int = 0
    texts: int = 0  # that so many questions are asked about, each of `new` tokens
    questions: int = 0
    chunk: int = 0  # tokens that are read in a forward; 0: whole prompts
    host_gb: float = 0  # of the host, for pages of chats
    trace: str = ""  # a file for what chats do, launch by launch

    @property
    def times(self) -> bool:
        """Whether it is timed: weights may be anything."""
        return bool(self.batches or self.chats or self.questions)

    @property
    def reuses(self) -> bool:
        """Whether what was read is found again."""
        return bool(self.chats or ((self.question or self.questions) and keeps_all(self.contender)))

    @property
    def documents(self) -> int:
        """That the plugin is to hold."""
        return 0 if keeps_all(self.contender) else self.texts if self.questions else int(bool(self.question))


class Engine:
    """vLLM with random weights, driven step by step."""

    def __init__(self, job: Job) -> None:
        from vllm import LLM

        self.job, self.random = job, random.Random(job.seed)
        self.vocabulary = SHAPES[job.shape]["vocab_size"]
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            self._write_model(Path(folder))
            self.llm = LLM(
                model=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=job.seed, max_model_len=job.longest,
                max_num_batched_tokens=job.chunk or job.longest + max(job.rows, *job.batches, 0),
                enable_chunked_prefill=bool(job.chunk) or (bool(job.chats) and keeps_all(job.contender)),
                enable_prefix_caching=job.reuses, **self._options(),
            )  # fmt: skip
        self.engine, self.document = self.llm.llm_engine, self.prompt(job.prompts[0]) if job.question else []
        self.start_s = time.perf_counter() - start

    def _write_model(self, folder: Path) -> None:
        """The config alone; to answer prompts, weights too, whose next tokens are far from ties."""
        from transformers import LlamaConfig, LlamaForCausalLM

        layers = {"num_hidden_layers": self.job.layers} if self.job.layers else {}
        shape = {**SHAPES[self.job.shape], **layers, "max_position_embeddings": 1 << 17}
        config = LlamaConfig(**shape, architectures=["LlamaForCausalLM"], dtype="bfloat16", initializer_range=0.3)
        config.save_pretrained(folder)
        if not self.job.times:
            torch.manual_seed(self.job.seed)
            LlamaForCausalLM(config).bfloat16().save_pretrained(folder)

    def _options(self) -> Fields:
        job = self.job
        result: Fields = {"load_format": "dummy"} if job.times else {}
        if job.rows:
            result["max_num_seqs"] = job.rows
        result["gpu_memory_utilization"] = job.share if job.device == "cuda" else CPU_SHARE
        if job.eager or job.device == "cpu":
            result["enforce_eager"] = True
        elif not job.times:
            # Layers as in an eager engine: what differs is that steps are captured.
            result["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        if job.contender in OWN:
            return result | OWN[job.contender]
        config: Fields = {METHOD: job.contender} | ({HOST: job.host_gb} if job.host_gb else {})
        result |= {"attention_backend": "CUSTOM", "additional_config": config}
        if job.documents:
            extra = {"budget": job.kept, "count": job.documents}
            result["kv_transfer_config"] = {
                "kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": extra,
            }  # fmt: skip
        return result

    def rows_that_fit(self) -> float:
        """Requests of the longest length that memory holds."""
        cache = self.engine.vllm_config.cache_config
        blocks = int(cache.num_gpu_blocks or 0)
        if not keeps_all(self.job.contender):
            return blocks - 1
        shared = len(self.document)
        return (blocks * int(cache.block_size) - shared) / (self.job.longest - shared)

    def prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(3, self.vocabulary) for _ in range(tokens)]

    def add(self, name: str, prompt: list[int], new_tokens: int | None = None, **given: str) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=new_tokens or self.job.new_tokens, ignore_eos=True, temperature=0, detokenize=False,
            output_kind=RequestOutputKind.DELTA, extra_args={"kv_transfer_params": given} if given else None,
        )  # fmt: skip
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def read_document(self) -> Fields:
        """The document that all requests share is read once."""
        start = time.perf_counter()
        given = {} if keeps_all(self.job.contender) else {"kvsketch_store": "document"}
        self.add("document", self.document, 1, **given)
        while self.engine.has_unfinished_requests():
            self.step({})
        return {"document_s": time.perf_counter() - start}

    def cache_bytes(self, requests: int) -> int:
        """Bytes that the caches of so many requests take, with the document that they share."""
        layers = self.engine.vllm_config.compilation_config.static_forward_context.values()
        if not keeps_all(self.job.contender):
            joint = next(iter(layers)).impl.joint
            return int(joint.document_pool.pages.shape.nbytes + requests * joint.page.nbytes)
        tokens = len(self.document) + requests * (self.job.question + self.job.new_tokens)
        if self.job.contender not in OWN:
            return sum(layer.impl.blocks.shape.nbytes for layer in layers) * tokens // BLOCK
        each = sum(2 * layer.num_kv_heads * layer.head_size * layer.kv_cache_torch_dtype.itemsize for layer in layers)
        return int(each * tokens)

    def step(self, made: dict[str, list[int]]) -> int:
        """One step; adds the new tokens of each request to `made`, and says how many they are."""
        count = 0
        for output in self.engine.step():
            new = [*output.outputs[0].token_ids]
            made.setdefault(output.request_id, []).extend(new)
            count += len(new)
        return count

    def answers(self) -> list[list[int]]:
        """The tokens that follow each prompt."""
        names = [f"{number}" for number in range(len(self.job.prompts))]
        for name, tokens in zip(names, self.job.prompts, strict=True):
            self.add(name, self.prompt(tokens))
        made: dict[str, list[int]] = {}
        while self.engine.has_unfinished_requests():
            self.step(made)
        return [made[name] for name in names]

    def timed(self, batches: list[int]) -> Iterator[Fields]:
        """Steps of so many requests, the most first: they are read once, and some end before fewer are timed."""
        names = [f"{number}" for number in range(max(batches))]
        made: dict[str, list[int]] = {}
        told = self.read_document() if self.job.question else {}
        start = time.perf_counter()
        for name in names:
            self.add(name, self.document + self.prompt(self.job.question or self.job.prompts[0]))
        while len(made) < len(names):
            self.step(made)
        prefill = (time.perf_counter() - start) / len(names)
        for batch in sorted(batches, reverse=True):
            self.engine.abort_request(names[batch:])
            if self.job.question:
                told["cache_bytes"] = self.cache_bytes(batch)
            yield self._timed(batch, made) | {"prefill_s": prefill} | told

    def asked(self) -> Fields:
        """Questions about texts that were read before, all at once."""
        job = self.job
        texts = [self.prompt(job.prompts[0]) for _ in range(job.texts)]
        start = time.perf_counter()
        for number, text in enumerate(texts):
            given = {"kvsketch_store": f"text {number}"} if job.documents else {}
            self.add(f"text {number}", text, 1, **given)
        while self.engine.has_unfinished_requests():
            self.step({})
        read = time.perf_counter() - start
        made: dict[str, list[int]] = {}
        first: dict[str, float] = {}
        found, start = 0, time.perf_counter()
        for number, text in enumerate(texts):
            for question in range(job.questions):
                self.add(f"{number}-{question}", text + self.prompt(job.new), job.answer)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                new = [*output.outputs[0].token_ids]
                made.setdefault(output.request_id, []).extend(new)
                if new:
                    first.setdefault(output.request_id, time.perf_counter() - start)
                if output.finished:
                    found += output.num_cached_tokens or 0
        total = time.perf_counter() - start
        return {
            "texts_s": read, "answers_s": total, "first_s": sum(first.values()) / len(first),
            "latest_s": max(first.values()), "found": found, "tokens_per_s": sum(map(len, made.values())) / total,
        }  # fmt: skip

    def conversations(self, chats: int) -> Fields:
        """So many chats that go on as soon as they have an answer."""
        job = self.job
        made: dict[str, list[int]] = {}
        texts = {chat: self.prompt(job.prompts[0]) for chat in range(chats)}
        begun: dict[str, float] = {}
        first: dict[str, float] = {}
        turn, found = dict.fromkeys(texts, 0), 0
        start = first_turns = time.perf_counter()

        def say(chat: int) -> None:
            name = f"{chat}-{turn[chat]}"
            begun[name] = time.perf_counter()
            self.add(name, [*texts[chat]], job.answer)

        for chat in texts:
            say(chat)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                name, new = output.request_id, [*output.outputs[0].token_ids]
                made.setdefault(name, []).extend(new)
                if new:
                    first.setdefault(name, time.perf_counter())
                if output.finished:
                    found += output.num_cached_tokens or 0
                    chat = int(name.partition("-")[0])
                    if turn[chat] == 0:
                        first_turns = time.perf_counter()
                    if turn[chat] < job.turns:
                        turn[chat] += 1
                        texts[chat] += made[name] + self.prompt(job.new)
                        say(chat)
        total = time.perf_counter() - start
        later = [first[name] - begun[name] for name in first if not name.endswith("-0")]
        return {
            "chats": chats, "chats_s": total, "first_turns_s": first_turns - start, "later_s": sum(later) / len(later),
            "latest_s": max(later), "found": found, "tokens_per_s": sum(map(len, made.values())) / total,
        }  # fmt: skip

    def trace(self, chats: int, file: str) -> None:
        """A first and a later turn of so many other chats, in Chrome's form; where their time went is printed."""
        on_gpu, self.job = self.job.device == "cuda", replace(self.job, turns=1, answer=2)
        with profile() as result:
            self.conversations(chats)
        result.export_chrome_trace(file)
        by = f"self_{'device' if on_gpu else 'cpu'}_time_total"
        print(result.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=80), file=sys.stderr)

    def measured(self) -> Iterator[Fields]:
        """What the job asks for, one after the other."""
        job, fits = self.job, int(self.rows_that_fit())
        if job.chats:
            yield from map(self.conversations, job.chats)
            if job.trace:
                self.trace(job.chats[0], job.trace)
        elif job.questions:
            yield self.asked()
        else:
            yield from self.timed([*{max(1, min(batch, fits)) for batch in job.batches}])

    def _timed(self, batch: int, made: dict[str, list[int]]) -> Fields:
        for _ in range(WARM_UP_STEPS):
            self.step(made)
        times, tokens = self._steps(made, self.job.steps)
        result: Fields = {"batch": batch, "step_times_ms": times, "tokens_per_s": 1e3 * tokens / sum(times)}
        if tokens < batch * len(times):
            result[FAILED] = f"{tokens / len(times):.1f} of {batch} requests ran at a time"
        if self.job.wait:
            # Rows began one after the other: in so many steps each is rehearsed once.
            times, tokens = self._steps(made, self.job.wait)
            result |= {"longest_ms": max(times), "sustained_per_s": 1e3 * tokens / sum(times)}
        return result

    def _steps(self, made: dict[str, list[int]], count: int) -> tuple[list[float], int]:
        """Milliseconds of each of so many steps, and the tokens that they made."""
        times, tokens = [], 0
        for _ in range(count):
            start = time.perf_counter()
            tokens += self.step(made)
            times.append(1e3 * (time.perf_counter() - start))
        return times, tokens


def work(job: Job) -> Fields:
    result: Fields = {}
    try:
        import vllm

        result |= {"vllm": vllm.__version__, "torch": torch.__version__}
        engine = Engine(job)
        result |= {"start_s": engine.start_s, "rows_that_fit": engine.rows_that_fit()}
        if not job.times:
            return result | {"tokens": engine.answers()}
        result["timed"] = []
        for row in engine.measured():
            peak = {"peak_bytes": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {}
            result["timed"].append(row | peak)
            print(json.dumps(result), flush=True)  # who stops this process has what was timed so far
    except Exception as error:  # told to who started this process
        traceback.print_exc()
        result[FAILED] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return result


if __name__ == "__main__":
    os.environ |= {name: value for name, value in SETTINGS.items() if name not in os.environ}
    given = json.loads(sys.argv[1])
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    print(json.dumps(work(Job(**given | lists))), flush=True)
    # Threads of the engine would keep the process.
    os._exit(0)
