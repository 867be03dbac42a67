"""How often an offloaded query finds the tokens it reads on the device, on a real model and a real text.

    python -m kvsketch.benchmark.hit_rate --model qwen2.5-coder-0.5b --prompt 8192 --out results/hit_rate.jsonl

The model reads the beginning of a text, then goes on token by token along the text itself, so that no odd continuation
decides. `hit rate` is the share of reads (a query head that names a token of the host store) that found the token on
the device, `copied` the share that had to cross the bus: query heads of one KV head share what they name alike. The
first step, which finds nothing, is left out. Runs on any device.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvsketch import models, records
from kvsketch.cache.compressed import CompressedCache
from kvsketch.models import texts
from kvsketch.ops.hot_rows import COPIES, HITS, READS

METHODS = ("clusterkv", "clusterkv:tokens_per_cluster=80:recluster_into=4:rounds=20:completion=false", "quest")


@torch.no_grad()
def measure(model: Any, method: str, ids: torch.Tensor, prompt: int) -> dict[str, Any]:
    """Counts over the tokens behind the prompt."""
    cache = CompressedCache(model, method)
    model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1)
    counts: list[torch.Tensor] = []
    for step in range(prompt, ids.shape[1]):
        model(ids[:, step : step + 1], past_key_values=cache)
        if step == prompt:
            for layer in cache.slot_layers:
                if layer.table.hot.counts is not None:
                    counts.append(layer.table.hot.counts)
                    counts[-1][..., READS:] = 0
    if not counts:
        raise ValueError(f"{method} offloads nothing of {prompt} tokens; use a longer prompt or a smaller budget")
    total = sum((c.sum((0, 1)) for c in counts[1:]), counts[0].sum((0, 1)))
    reads = float(total[READS])
    return {
        "method": method,
        "hit_rate": float(total[HITS]) / reads,
        "copied": float(total[COPIES]) / reads,
        "layers": [round(float(c[..., HITS].sum() / c[..., READS].sum()), 4) for c in counts],
        "device_bytes": cache.device_bytes,
        "host_bytes": cache.host_bytes,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens read before the hits are counted")
    parser.add_argument("--steps", type=int, default=64, help="tokens over which they are counted")
    parser.add_argument("--share", type=int, default=32, help="the budget is one in so many tokens of the prompt")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--keep-steps", default="1,2")
    parser.add_argument("--out", default=None)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = models.load(options.model, device=device)
    ids = tokenizer(texts.document(), return_tensors="pt").input_ids[:, : options.prompt + options.steps].to(device)
    if ids.shape[1] < options.prompt + options.steps:
        print(f"the text has {ids.shape[1]} tokens; use a smaller --prompt", file=sys.stderr)
        return 2
    table = Table("method", "keep_steps", "hit rate", "copied")
    for text in options.methods.split(","):
        for keep in options.keep_steps.split(","):
            method = f"{text}:budget={options.prompt // options.share}:offload=host:keep_steps={keep}"
            data = measure(model, method, ids, options.prompt)
            table.add_row(text, keep, f"{data['hit_rate']:.1%}", f"{data['copied']:.1%}")
            print(method, f"{data['hit_rate']:.3f}", f"{data['copied']:.3f}", flush=True)
            if options.out:
                data |= {"model": options.model, "prompt": options.prompt, "steps": options.steps}
                records.append(options.out, records.make_record("hit_rate", data, 0))
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
