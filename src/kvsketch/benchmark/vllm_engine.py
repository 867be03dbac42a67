"""One engine of vLLM for one job, in this process; prints one line of JSON. `benchmark.vllm` starts it."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from kvsketch.benchmark.runner import FAILED, Row
from kvsketch.benchmark.shapes import SHAPES

OWN = {"bf16": {}, "fp8": {"kv_cache_dtype": "fp8"}}  # caches of vLLM's own
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
    """What an engine is to do: time steps of `batches`, or without any answer the prompts, `rows` at a time."""

    contender: str = "bf16"
    shape: str = "tiny"
    layers: int = 0
    prompts: tuple[int, ...] = ()  # tokens of each; of `batches` the first counts
    rows: int = 1
    batches: tuple[int, ...] = ()
    steps: int = 0
    new_tokens: int = 16
    longest: int = 512
    share: float = 0.9
    eager: bool = False
    device: str = "cuda"
    seed: int = 0
    rehearsals: bool = False


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
                max_num_seqs=job.rows, max_num_batched_tokens=job.longest + job.rows, enable_chunked_prefill=False,
                enable_prefix_caching=False, **self._options(),
            )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.start_s = time.perf_counter() - start

    def _write_model(self, folder: Path) -> None:
        """The config alone; to answer prompts, weights too, whose next tokens are far from ties."""
        from transformers import LlamaConfig, LlamaForCausalLM

        layers = {"num_hidden_layers": self.job.layers} if self.job.layers else {}
        shape = {**SHAPES[self.job.shape], **layers, "max_position_embeddings": 1 << 17}
        config = LlamaConfig(**shape, architectures=["LlamaForCausalLM"], dtype="bfloat16", initializer_range=0.3)
        config.save_pretrained(folder)
        if not self.job.batches:
            torch.manual_seed(self.job.seed)
            LlamaForCausalLM(config).bfloat16().save_pretrained(folder)

    def _options(self) -> Row:
        job = self.job
        found: Row = {"load_format": "dummy"} if job.batches else {}
        found["gpu_memory_utilization"] = job.share if job.device == "cuda" else CPU_SHARE
        if job.eager or job.device == "cpu":
            found["enforce_eager"] = True
        elif not job.batches:
            # Layers as in an eager engine: what differs is that steps are captured.
            found["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        if job.contender in OWN:
            return found | OWN[job.contender]
        return found | {"attention_backend": "CUSTOM", "additional_config": {"kvsketch": job.contender}}

    def rows_that_fit(self) -> float:
        """Requests of the longest length that memory holds."""
        cache = self.engine.vllm_config.cache_config
        blocks = int(cache.num_gpu_blocks or 0)
        if not keeps_all(self.job.contender):
            return blocks - 1
        return blocks * int(cache.block_size) / self.job.longest

    def prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(3, self.vocabulary) for _ in range(tokens)]

    def add(self, name: str, tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=self.job.new_tokens, ignore_eos=True, temperature=0, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self.engine.add_request(name, {"prompt_token_ids": self.prompt(tokens)}, params)

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
            self.add(name, tokens)
        made: dict[str, list[int]] = {}
        while self.engine.has_unfinished_requests():
            self.step(made)
        return [made[name] for name in names]

    def timed(self, batch: int) -> Row:
        """Steps of so many requests, once all of them decode."""
        names = [f"{batch}-{number}" for number in range(batch)]
        made: dict[str, list[int]] = {}
        start = time.perf_counter()
        for name in names:
            self.add(name, self.job.prompts[0])
        while len(made) < batch:
            self.step(made)
        prefill = time.perf_counter() - start
        for _ in range(WARM_UP_STEPS):
            self.step(made)
        times, tokens = self._steps(made, self.job.steps)
        found: Row = {
            "batch": batch, "step_times_ms": times, "tokens_per_s": 1e3 * tokens / sum(times),
            "prefill_s": prefill / batch,
        }  # fmt: skip
        if tokens < batch * len(times):
            found[FAILED] = f"{tokens / len(times):.1f} of {batch} requests ran at a time"
        if self.job.rehearsals:
            left = self.job.new_tokens - max(len(each) for each in made.values()) - 1
            found["longest_ms"] = max(self._steps(made, left)[0])
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.step({})
        return found

    def _steps(self, made: dict[str, list[int]], count: int) -> tuple[list[float], int]:
        """Milliseconds of each of so many steps, and the tokens that they made."""
        times, tokens = [], 0
        for _ in range(count):
            start = time.perf_counter()
            tokens += self.step(made)
            times.append(1e3 * (time.perf_counter() - start))
        return times, tokens


def work(job: Job) -> Row:
    found: Row = {}
    try:
        import vllm

        found |= {"vllm": vllm.__version__, "torch": torch.__version__}
        engine = Engine(job)
        found |= {"start_s": engine.start_s, "rows_that_fit": engine.rows_that_fit()}
        if not job.batches:
            return found | {"tokens": engine.answers()}
        found["batches"] = []
        for batch in sorted({max(1, min(batch, int(engine.rows_that_fit()))) for batch in job.batches}):
            found["batches"].append(engine.timed(batch))
            print(json.dumps(found["batches"][-1])[:300], file=sys.stderr, flush=True)
        if torch.cuda.is_available():
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
    except Exception as error:  # told to who started this process
        traceback.print_exc()
        found[FAILED] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return found


if __name__ == "__main__":
    os.environ |= {name: value for name, value in SETTINGS.items() if name not in os.environ}
    given = json.loads(sys.argv[1])
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    print(json.dumps(work(Job(**given | lists))), flush=True)
    # Threads of the engine would keep the process.
    os._exit(0)
