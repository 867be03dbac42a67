"""Time of a decode step whose keys and values lie in host memory, beside the same step with everything on the device.

    python -m kvsketch.benchmark.offload --out results/offload.jsonl

Both steps are captured. First the tokens are compared: offloaded and captured, offloaded and eager, on the device; a
method whose tokens differ is reported as failed and its speed is not printed.

What an offloaded step costs depends on how much a query reads that the queries before it did not. In a model with
random weights neighbouring queries have nothing in common, in text they do. `--locality a` makes the scores of clusters
a mean over the past, s_t = a s_(t-1) + (1 - a) <q_t, centroid>, on the device and in host memory alike; 0 leaves them
as they are, the worst case. The table gives the hit rate that came out and the bytes that crossed the bus.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvsketch import records
from kvsketch.benchmark.decode import Session, check_tokens, time_steps
from kvsketch.benchmark.options import parse, without_gpu
from kvsketch.benchmark.shapes import HELP, build
from kvsketch.methods import METHODS, ClusterKV, Method, parse_method
from kvsketch.methods.clusterkv.clusters import Clusters
from kvsketch.methods.recall import RecallingMethod
from kvsketch.ops.hot_rows import COPIES, HITS, READS
from kvsketch.slots.state import per_row
from kvsketch.slots.table import SlotTable

DEVICE = "cuda"
CHECK_PROMPT = 4096


@dataclasses.dataclass
class SteadyClusters(Clusters):
    """Clusters, and what they scored so far."""

    scores: Tensor | None = per_row()  # [B, Hq or H, C]


@dataclasses.dataclass(frozen=True)
class SteadyClusterKV(ClusterKV):
    """ClusterKV whose choice changes slowly, as it does when text is read: scores are a mean over the past."""

    State: ClassVar[type[SteadyClusters]] = SteadyClusters
    locality: float = 0.0

    def _scores(self, table: SlotTable, query: Tensor) -> Tensor:
        scores = super()._scores(table, query)
        state = table.state_of(self.State)
        if state.scores is None or state.scores.shape != scores.shape:
            state.scores = scores
        return state.scores.lerp_(scores, 1 - self.locality)


@dataclasses.dataclass
class Result:
    """One method on the device and in host memory; times in milliseconds."""

    method: str
    batch: int
    prompt: int
    device_ms: float | None = None
    host_ms: float | None = None
    host_p10_ms: float | None = None
    host_p90_ms: float | None = None
    hit_rate: float | None = None
    copied_bytes: float | None = None  # in each step
    device_prefill_ms: float | None = None
    host_prefill_ms: float | None = None
    device_bytes: int | None = None  # of the cache that lies on the device as a whole
    offloaded_device_bytes: int | None = None
    offloaded_host_bytes: int | None = None
    checked_tokens: int = 0
    failed: str | None = None

    @property
    def ratio(self) -> float | None:
        return self.host_ms / self.device_ms if self.host_ms and self.device_ms else None


def variants(text: str, locality: float) -> tuple[Method, Method]:
    """The method that `text` describes, on the device and in host memory."""
    method = parse_method(text)
    if locality:
        if not isinstance(method, ClusterKV):
            raise ValueError(f"locality is made for clusterkv, not {method.name}; use --locality 0 for it")
        method = SteadyClusterKV(
            **{f.name: getattr(method, f.name) for f in dataclasses.fields(method)}, locality=locality
        )
    if not isinstance(method, RecallingMethod):
        recalling = ", ".join(name for name, kind in METHODS.items() if kind.family == "recall")
        raise ValueError(f"{method.name} keeps nothing in host memory; choose among {recalling}")
    return method, dataclasses.replace(method, offload="host")


def tokens_of(model: Any, method: Method, prompt: Tensor, count: int) -> Tensor:
    """The tokens of `count` captured steps."""
    session = Session(model, method, prompt, 1, count + 1)
    for _ in range(count):
        session.step.run()
    return session.sampler.tokens()


def same_tokens(model: Any, near: Method, far: Method, prompt: Tensor, count: int) -> bool:
    """Whether offloaded steps, captured and eager, give the tokens of steps on the device."""
    wrong, _ = check_tokens(model, far, prompt, count)
    return wrong is None and torch.equal(*(tokens_of(model, m, prompt, count) for m in (near, far)))


def counts_of(session: Session) -> Tensor:  # [4]
    """What the hot sets of all layers have counted so far."""
    found = [layer.table.hot.counts for layer in session.cache.slot_layers]
    counts = [each.sum((0, 1)).cpu() for each in found if each is not None]
    return torch.stack(counts).sum(0)


def measure(model: Any, methods: tuple[Method, Method], batch: int, prompt: Tensor, steps: int) -> Result:
    """One method, on the device and in host memory."""
    result = Result(str(methods[0]), batch, prompt.shape[1])
    near = Session(model, methods[0], prompt, batch, steps + 8)
    result.device_ms = statistics.median(time_steps(near, steps))
    result.device_bytes, result.device_prefill_ms = near.cache.device_bytes, near.prefill_ms
    del near
    _free_memory()
    far = Session(model, methods[1], prompt, batch, steps + 8)
    time_steps(far, 1)
    before = counts_of(far)
    times = time_steps(far, steps - 14)
    done = counts_of(far) - before
    # The steps that time_steps runs before it times are counted too.
    rounds = len(times) + 6
    table = far.cache.slot_layers[-1].table
    assert table.host is not None
    row_bytes = (table.host.keys.shape[3] + table.host.values.shape[3]) * table.host.keys.element_size()
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    result.host_ms, result.host_p10_ms, result.host_p90_ms = statistics.median(times), deciles[0], deciles[-1]
    result.hit_rate = float(done[HITS] / done[READS])
    result.copied_bytes = float(done[COPIES]) * row_bytes / rounds
    result.host_prefill_ms = far.prefill_ms
    result.offloaded_device_bytes, result.offloaded_host_bytes = far.cache.device_bytes, far.cache.host_bytes
    return result


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def table_of(results: list[Result]) -> Table:
    table = Table(
        "method", "batch", "device ms", "host ms", "p10-p90", "ratio", "hit rate", "MB copied", "device MB", "host MB"
    )
    for r in results:
        if r.host_ms is None or r.device_ms is None or r.copied_bytes is None:
            table.add_row(r.method, str(r.batch), r.failed or "", *[""] * 7)
            continue
        table.add_row(
            r.method,
            str(r.batch),
            f"{r.device_ms:.2f}",
            f"{r.host_ms:.2f}",
            f"{r.host_p10_ms:.2f}-{r.host_p90_ms:.2f}",
            f"{r.ratio:.2f}x",
            f"{r.hit_rate:.0%}",
            f"{r.copied_bytes / 1e6:.1f}",
            f"{r.device_bytes or 0:,} -> {r.offloaded_device_bytes or 0:,}",
            f"{(r.offloaded_host_bytes or 0) / 1e6:.0f}",
        )
    return table


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help=HELP)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--methods", default="clusterkv,quest")
    parser.add_argument("--locality", default="0,0.9,0.96", help="see above; only clusterkv takes more than 0")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--check-tokens", type=int, default=96)
    options = parse(parser, arguments)
    if without_gpu("offload"):
        return 2
    pairs = [
        variants(text, locality)
        for text in options.methods.split(",")
        for locality in map(float, options.locality.split(","))
        if locality == 0 or text.startswith("clusterkv")
    ]
    model = build(options.shape, options.layers, options.seed)
    generator = torch.Generator(DEVICE).manual_seed(options.seed)
    prompt = torch.randint(10, 10000, (1, options.prompt), device=DEVICE, generator=generator)
    results: list[Result] = []
    for pair in pairs:
        same = same_tokens(model, *pair, prompt[:, : min(CHECK_PROMPT, options.prompt)], options.check_tokens)
        for batch in map(int, options.batches.split(",")):
            _free_memory()
            if same:
                result = measure(model, pair, batch, prompt, options.steps)
            else:
                result = Result(str(pair[0]), batch, options.prompt, failed="offloaded tokens differ")
            result.checked_tokens = options.check_tokens
            results.append(result)
            print(result.method, batch, result.ratio or result.failed, flush=True)
            if options.out:
                data = {"shape": options.shape, "ratio": result.ratio, **dataclasses.asdict(result)}
                records.append(options.out, records.make_record("offload", data, options.seed))
    Console(width=170).print(table_of(results))
    return 0 if all(r.failed is None for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
