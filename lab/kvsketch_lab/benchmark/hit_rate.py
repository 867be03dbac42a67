"""How often an offloaded query finds the tokens it reads on the device, on a real model and a real text.

    kvsketch bench hit-rate --model qwen2.5-coder-0.5b --prompt 8192 --out results/hit_rate.jsonl

The model reads the beginning of a text, then continues token by token along the text itself, so that the result does
not depend on what it would generate. A read is a query head that selects a token of the host store. `hit rate` is the
share of reads that found the token on the device, `copied` the share that had to cross the bus: query heads of one KV
head share a token that several of them select. The first step, which finds nothing, is not counted. Runs on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch import CompressedCache
from kvsketch.methods import parse_method
from kvsketch.ops.hot_rows import COPIES, HITS, READS
from kvsketch_lab.benchmark.runner import Fields
from kvsketch_lab.benchmark.shapes import TextBenchmark
from kvsketch_lab.options import option

METHODS = "clusterkv,clusterkv:tokens_per_cluster=80:recluster_into=4:rounds=20:completion=false,quest"


def measure(model: Any, method: str, ids: Tensor, prompt: int) -> Fields:
    """Counts over the tokens after the prompt."""
    cache = CompressedCache(model, method)
    model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1)
    counts: list[Tensor] = []
    for step in range(prompt, ids.shape[1]):
        model(ids[:, step : step + 1], past_key_values=cache)
        if step == prompt:
            for layer in cache.slot_layers:
                if layer.table.hot.counts is not None:
                    counts.append(layer.table.hot.counts)
                    counts[-1][..., READS:] = 0
    if not counts:
        raise ValueError(f"{method} offloads nothing of {prompt} tokens; use a longer prompt or a smaller budget")
    total = torch.stack([count.sum((0, 1)) for count in counts]).sum(0)
    reads = float(total[READS])
    return {
        "method": method,
        "hit_rate": float(total[HITS]) / reads,
        "copied": float(total[COPIES]) / reads,
        "layers": [round(float(c[..., HITS].sum() / c[..., READS].sum()), 4) for c in counts],
        "device_bytes": cache.device_bytes,
        "host_bytes": cache.host_bytes,
    }


@dataclass
class HitRate(TextBenchmark):
    name, kind, title = "hit-rate", "hit_rate", "Reads that found their token on the device"
    columns = "method | hit rate=hit_rate:.1% | copied:.1%"
    prompt: int = option(8192, "tokens read before the hits are counted", least=32)
    steps: int = option(64, "tokens over which they are counted", least=2)
    share: int = option(32, "the budget is one in N tokens of the prompt", least=2)
    methods: str = option(METHODS, "methods, separated by commas")
    keep_steps: tuple[int, ...] = option(
        "1,2", "number of last steps whose reads stay on the GPU, separated by commas", least=1
    )

    def cells(self) -> list[Fields]:
        shared = {"model": self.model, "prompt": self.prompt, "steps": self.steps}
        budget = self.prompt // self.share
        result = [
            {"method": f"{text.strip()}:budget={budget}:offload=host:keep_steps={keep}", **shared}
            for text in self.methods.split(",")
            for keep in self.keep_steps
        ]
        for cell in result:
            parse_method(str(cell["method"]))
        return result

    def measure(self, method: str, **shared: Any) -> Iterator[Fields]:
        ids = self.ids(self.prompt + self.steps, "--prompt")
        yield measure(self.loaded[0], method, ids, self.prompt) | shared
