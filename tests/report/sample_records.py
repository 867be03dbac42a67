"""Records of every experiment in the form that the experiments write, with made-up values that look like real ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvsketch_lab.records import append

# Of each family one or two, at the budgets that pages show: a report of all methods takes long to draw.
QUALITY = {"full": 0.0, "streamingllm": 0.9, "snapkv": 0.3, "subgen": 0.75, "quest": 0.2, "clusterkv": 0.1}
QUALITY |= {"clusterkv:completion=false": 0.15, "infinigen": 0.25}
METHODS = tuple(QUALITY)
BUDGETS = ("1/8", "1/4")
RECALL = ("quest", "clusterkv", "infinigen")
MODEL = {"model": "qwen2.5-coder-1.5b", "dtype": "bfloat16", "budgets_in": "tokens", "model_sha256": "ab12" * 16}
WORDS = ("The", "pass", "key", "is", "48213", "It", "has", "been", "the", "policy", "of", "this", "Government")

SETTING = (
    "model", "weights", "dtype", "budgets_in", "method", "budget", "sample", "question", "primed", "lines", "length",
    "depth", "task", "protocol", "position", "layer", "tokens", "chunk", "kvpress",
)  # fmt: skip


def record(kind: str, data: dict[str, Any], seed: int = 0, command: str | None = None) -> dict[str, Any]:
    return {
        "kind": kind,
        "command": command or f"kvsketch eval {kind.replace('_', '-')} --model qwen2.5-coder-1.5b --out results",
        "commit": {"hash": "c7f6595bdf73d020c5b662e2d12ec57eaa36920e", "dirty": False},
        "machine": {"gpu": "NVIDIA H200", "processor": "x86_64", "cores": 16, "system": "Linux"},
        "versions": {"python": "3.12.3", "kvsketch": "0.1.0", "torch": "2.11.0", "transformers": "5.17.0"},
        "identity": [name for name in SETTING if name in data and (name != "position" or kind == "perplexity")],
        "seed": seed,
        "time": "2026-11-15T14:00:00+00:00",
        "data": data,
    }


def share_of(budget: str) -> float:
    top, _, bottom = budget.partition("/")
    return int(top) / int(bottom)


def memory(method: str, budget: str, tokens: int) -> dict[str, Any]:
    token, full = 28_672, 28_672 * tokens
    if method == "full" or method.split(":")[0] in RECALL:
        return {"tokens_stored": tokens, "device_bytes": int(full * 1.04), "host_bytes": 0, "full_bytes": full}
    kept = int(tokens * share_of(budget))
    return {"tokens_stored": kept, "device_bytes": int(kept * token * 1.02), "host_bytes": 0, "full_bytes": full}


def pairs(methods: Iterable[str] = METHODS, budgets: Iterable[str] = BUDGETS) -> Iterator[tuple[str, str, float]]:
    """(method, budget, chance of failing a task)."""
    for method in methods:
        if method == "full":
            yield method, "", 0.03
        else:
            yield from ((m, b, min(0.97, QUALITY[m] * (1.1 - share_of(b)))) for m, b in ((method, b) for b in budgets))


def lines(questions: int = 12) -> Iterator[dict[str, Any]]:
    chance = random.Random(1)
    for count in (200, 400):
        for method, budget, miss in pairs():
            for question in range(questions):
                cell = {"method": method, "budget": budget, "sample": f"lines={count} question={question}", **MODEL}
                outcome: dict[str, Any] = {"score": float(chance.random() > miss), **memory(method, budget, 25 * count)}
                if method == "snapkv" and budget == "1/4" and question == 3:
                    outcome = {"failed": "OutOfMemoryError: CUDA out of memory"}
                yield record("lines", {**cell, "lines": count, **outcome})


def needle() -> Iterator[dict[str, Any]]:
    chance = random.Random(2)
    for method, budget, miss in pairs():
        for length in (1024, 4096, 16384):
            for depth in (0.0, 0.5, 1.0):
                cell = {"method": method, "budget": budget, "sample": f"length={length} depth={depth}", **MODEL}
                score = float(chance.random() > miss * (1.2 - depth))
                place = {"length": length, "depth": depth}
                yield record("needle", {**cell, **place, "score": score, **memory(method, budget, length)})


def perplexity() -> Iterator[dict[str, Any]]:
    chance = random.Random(4)
    for method, budget, miss in pairs(budgets=("1/8", "1/4")):
        for position in range(2000, 16_000, 4000):
            full = [chance.gauss(2.1, 0.2) for _ in range(20)]
            nll = [value + miss * 0.12 * abs(chance.gauss(1, 0.5)) * position / 8000 for value in full]
            yield record("perplexity", perplexity_data(method, budget, position, nll, full))


def perplexity_data(method: str, budget: str, position: int, nll: list[float], full: list[float]) -> dict[str, Any]:
    return {
        "method": method,
        "budget": budget,
        "sample": "1981-Carter-1",
        **MODEL,
        "protocol": "stream",
        "position": position,
        "nll": sum(nll) / len(nll),
        "full_nll": sum(full) / len(full),
        "deviation": math.exp(sum(nll) / len(nll)) - math.exp(sum(full) / len(full)),
        "chunk_tokens": [50] * len(nll),
        "chunk_nll": nll,
        "full_chunk_nll": full,
        **memory(method, budget, position),
    }


def recall() -> Iterator[dict[str, Any]]:
    chance = random.Random(5)
    for method in ("quest", "clusterkv", "infinigen"):
        for budget in (256, 512, 1024, 2048):
            heads = {
                str(n): [round(min(1, chance.gauss(0.9 - QUALITY[method] * 100 / budget, 0.05)), 4) for _ in range(4)]
                for n in range(2, 6)
            }
            cell = {"method": method, "budget": str(budget), "sample": "1981-Carter-1", **MODEL, "tokens": 8192}
            outcome = {"recall": 0.8, "recall_by_head": heads, "tokens_read": float(budget)}
            yield record("recall", {**cell, **outcome, **memory(method, "1/8", 8192)})


def clusterability(points: int = 120) -> Iterator[dict[str, Any]]:
    chance = random.Random(6)
    for layer in range(4):
        data: dict[str, Any] = {"method": "full", "budget": "", "sample": "1981-Carter-1", **MODEL, "tokens": 8192}
        norm = 14 + layer
        data |= {"layer": layer, "query_norm": {"mean": norm, "low": norm - 0.1, "high": norm + 0.1}}
        for name, fall in (("keys", 0.35), ("values", 0.12)):
            radius = {str(2**k): [round(10 * 2 ** (-fall * k), 4)] * 2 for k in range(9)}
            counts = {f"{d:g}": [int(4000 / (1 + 8 * d * fall) ** 3)] * 2 for d in (0.5, 0.75, 1.0, 1.5, 2.0)}
            data[name] = {"spread": [3.0, 3.1], "radius": radius, "clusters": counts}
        if layer % 3 == 0:
            data["tsne"] = {"head": 1, "keys": plane(chance, points, 9), "values": plane(chance, points, 1)}
        yield record("clusterability", data)


def plane(chance: random.Random, points: int, groups: int) -> dict[str, Any]:
    middles = [(chance.uniform(-40, 40), chance.uniform(-40, 40)) for _ in range(groups)]
    width = 40 / groups
    chosen = (middles[at % groups] for at in range(points))
    result = [[round(chance.gauss(x, width), 2), round(chance.gauss(y, width), 2)] for x, y in chosen]
    return {"points": result, "centers": list(range(0, points, points // 16))[:16]}


EXPERIMENTS = (lines, needle, perplexity, recall, clusterability)


def write_all(folder: Path) -> Path:
    """A folder with the records of every experiment, and one of benchmark records."""
    folder.mkdir(parents=True, exist_ok=True)
    for experiment in EXPERIMENTS:
        write(folder / f"{experiment.__name__}.jsonl", experiment())
    write(folder / "kernels.jsonl", [record("kernel", {"contender": "sdpa flash", "median_us": 12.5})])
    return folder


def of_other_model(records: Iterable[dict[str, Any]], **more: Any) -> Iterator[dict[str, Any]]:
    """The same records of a smaller model, or measured in another way."""
    for each in records:
        yield {**each, "data": {**each["data"], "model": "qwen2.5-coder-0.5b", **more}}


def in_bytes(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same records with budgets of equal bytes: recall methods hold their tokens on the host."""
    for each in records:
        data = {**each["data"], "budgets_in": "bytes"}
        if data["method"].split(":")[0] in RECALL and "full_bytes" in data:
            data |= {"host_bytes": data["full_bytes"], "device_bytes": data["full_bytes"] * share_of(data["budget"])}
        yield {**each, "data": data}


def write_two_models(folder: Path) -> Path:
    """A folder with the records of two models, those of lines with budgets in tokens and in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for experiment in (needle, perplexity, recall, clusterability):
        write(folder / f"{experiment.__name__}.jsonl", [*experiment(), *of_other_model(experiment())])
    both = [*lines(4), *of_other_model(lines(3))]
    write(folder / "lines.jsonl", [*both, *in_bytes(both)])
    return folder


def write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.unlink(missing_ok=True)
    append(path, *records)
