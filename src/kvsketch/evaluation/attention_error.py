"""How far the attention of a compressed cache lies from the exact one, on a real model and a real text.

    python -m kvsketch.evaluation.attention_error --model qwen2.5-coder-0.5b --tokens 8192 \
        --out results/attention_error.jsonl --picture docs/pictures/attention_error.png

The model reads the text once; queries, keys and values of some layers are kept. In each of them the last queries read a
cache of the tokens before all of them, t tokens, once whole and once through a method:

    error = mean over queries and heads of  |out - exact| / |exact|

Every method may read the same number of tokens: 16 sinks, the 64 most recent, and one in `rate` of those between.
A bounded method compresses the t tokens at once and every query reads what it kept. A recall method indexes all but the
recent ones, which then come as new tokens, and each query reads its own choice. `oracle` reads the tokens with the
largest inner products, which no method can know without reading all keys. Layers that recall methods skip by default
are measured like the others.

One record for each method and rate; what the file holds already is not measured again. Runs on any device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from kvsketch import models, ops, texts
from kvsketch.benchmark import records
from kvsketch.cache import CompressedCache
from kvsketch.methods import METHODS, InfiniGen, Quest, parse_method
from kvsketch.methods.base import Method
from kvsketch.methods.recall import RecallingMethod
from kvsketch.slots import SlotTable

KIND = "attention_error"
SINKS, RECENT = 16, 64
RATES = (4, 8, 16)
LAYERS = (0, 1, 2, 4, 8, 12, 16, 20, 23)
ORACLE = "oracle"
PAPER_CLUSTERKV = "clusterkv:tokens_per_cluster=80:recluster_into=4:rounds=20:completion=false"
CONTENDERS = (
    ORACLE,
    "clusterkv",
    "clusterkv:rounds=20",
    "clusterkv:completion=false",
    "clusterkv:tokens_per_cluster=10:completion=false",  # its index is as large as that of the default
    "clusterkv:tokens_per_cluster=40",
    "clusterkv:tokens_per_cluster=80",
    PAPER_CLUSTERKV,
    "quest",
    "infinigen",
    "infinigen:alpha=100",  # so far from the largest score that the budget alone decides
    "snapkv",
    "streamingllm",
    "uniform",
    "balancekv",
    "subgen",
    "kcenter",
    "h2o",
)
# How each method is told of the sinks and the recent tokens that all of them keep.
EXACT_PARTS = {
    "clusterkv": f"sinks={SINKS}:skip_layers=0",
    "quest": "skip_layers=0",
    "infinigen": "skip_layers=0",
    "snapkv": f"sinks={SINKS}:window={RECENT}",
    "streamingllm": f"sinks={SINKS}",
}
BOUNDED_PARTS = f"sinks={SINKS}:recent={RECENT}"


class Captured(NamedTuple):
    """What one layer computed for a text: queries [1, Hq, n, D], keys and values [1, H, n, D]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    layer: int
    num_layers: int


class Outcome(NamedTuple):
    error: float
    tokens_read: float
    bytes: int  # of all tensors the table of the layer holds


@dataclass(frozen=True)
class Recorder(Method):
    """Keeps everything and takes note of what the chosen layers compute."""

    name: ClassVar[str] = "recorder"
    family: ClassVar[str] = "full"
    layers: tuple[int, ...] = ()
    captured: dict[int, Captured] = field(default_factory=dict, compare=False)

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        if table.layer_idx in self.layers:
            self.captured[table.layer_idx] = Captured(
                queries.clone(), table.key_slots(), table.value_slots(), table.scale, table.layer_idx, table.num_layers
            )


@torch.no_grad()
def capture(model: Any, ids: Tensor, layers: Iterable[int]) -> dict[int, Captured]:
    """Queries, keys and values of `layers` after one forward over `ids` [1, n]."""
    recorder = Recorder(layers=tuple(layers))
    cache = CompressedCache(model, recorder)
    absent = set(recorder.layers) - {layer.table.layer_idx for layer in cache.slot_layers}
    if absent:
        have = ", ".join(str(layer.table.layer_idx) for layer in cache.slot_layers)
        raise ValueError(f"layers {sorted(absent)} cannot be compressed; the model's full-attention layers are {have}")
    model(ids, past_key_values=cache, logits_to_keep=1)
    return recorder.captured


def reads(tokens: int, rate: int) -> int:
    """Tokens of a cache of `tokens` that a query may read."""
    return SINKS + RECENT + (tokens - SINKS - RECENT) // rate


def configured(text: str, total: int, context: int) -> Method:
    """The method `text`, told to read or keep `total` of `context` tokens, the sinks and the recent ones included."""
    name = text.partition(":")[0]
    # Tokens that no cluster holds yet are read beside the budget.
    budget = total - RECENT if name == "clusterkv" and total < context else total
    return parse_method(f"{text}:{EXACT_PARTS.get(name, BOUNDED_PARTS)}:budget={budget}")


@torch.no_grad()
def measure(text: str, rate: int, layer: Captured, queries: int) -> Outcome:
    """The error of a method, or of the oracle, for the last `queries` of a layer."""
    context = layer.keys.shape[2] - queries
    asked = layer.queries[:, :, context:]
    keys, values = layer.keys[:, :, :context], layer.values[:, :, :context]
    exact = ops.weighted_attention(asked, keys, values, None, None, layer.scale)
    total = reads(context, rate)
    if text == ORACLE:
        best = _best_tokens(asked, keys, values, layer.scale, total)
        return Outcome(relative_error(best, exact), total, _bytes([keys, values]))
    method = configured(text, total, context)
    table = SlotTable(layer.layer, layer.num_layers)
    table.scale = layer.scale
    new = [context - RECENT, RECENT] if isinstance(method, RecallingMethod) else [context]
    end = 0
    for count in new:
        start, end = end, end + count
        method.prepare(table, keys[:, :, start:end], values[:, :, start:end])
        table.append(keys[:, :, start:end], values[:, :, start:end])
        method.compress(table, layer.queries[:, :, start:end])
    out = _answers(method, table, asked)
    return Outcome(relative_error(out, exact), _tokens_read(method, table, asked), _bytes(table.tensors()))


def relative_error(out: Tensor, exact: Tensor) -> float:
    """Mean over queries and heads of the distance, in units of the exact answer's length."""
    return float(((out - exact).float().norm(dim=-1) / exact.float().norm(dim=-1)).mean())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _answers(method: Method, table: SlotTable, queries: Tensor) -> Tensor:
    if isinstance(method, RecallingMethod) and method.is_indexed(table):
        single = [method.attend(table, query.contiguous()) for query in queries.split(1, dim=2)]
        return torch.cat([answer for answer in single if answer is not None], 2)
    log_num = table.log_den if table.log_num is None else table.log_num
    keys, values = table.key_slots(), table.value_slots()
    return ops.weighted_attention(queries, keys, values, log_num, table.log_den, table.scale, clip=method.clip)


def _tokens_read(method: Method, table: SlotTable, queries: Tensor) -> float:
    """Tokens that a query head reads, in the mean."""
    if not isinstance(method, RecallingMethod) or not method.is_indexed(table):
        return table.stored()
    if isinstance(method, Quest | InfiniGen):
        chosen = [method.choose_rows(table, query.contiguous()) >= 0 for query in queries.split(1, dim=2)]
        return float(torch.stack(chosen).sum(-1).float().mean())
    return method.sinks + method.rows_read(table) + RECENT


def _best_tokens(queries: Tensor, keys: Tensor, values: Tensor, scale: float, total: int) -> Tensor:
    """Attention over sinks, recent tokens and, for each query, the others with the largest inner products."""
    group = queries.shape[1] // keys.shape[1]
    scores = queries @ keys.repeat_interleave(group, 1).transpose(-1, -2)
    scores[..., :SINKS] = scores[..., keys.shape[2] - RECENT :] = float("inf")
    chosen = scores.topk(min(total, keys.shape[2]), dim=-1).indices
    visible = torch.zeros_like(scores, dtype=torch.bool).scatter_(3, chosen, True)
    return ops.weighted_attention(queries, keys, values, None, None, scale, bias=visible)


def measured(path: str | Path | None, setting: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Data of the records of a file that were made with `setting`, by method and rate; the last one counts."""
    found = [record["data"] for record in records.read(path)] if path else []
    same = [data for data in found if setting.items() <= data.items()]
    return {(data["method"], data["rate"]): data for data in same}


def study(
    layers: dict[int, Captured],
    setting: dict[str, Any],
    contenders: Iterable[str],
    rates: Iterable[int],
    out: str | Path | None,
) -> list[dict[str, Any]]:
    """Measures what `out` lacks, writes it there, and returns the data of all."""
    done = measured(out, setting)
    results = []
    for text, rate in tqdm([(text, rate) for text in contenders for rate in rates], unit="setting", disable=None):
        old = done.get((text, rate), {"outcomes": {}})["outcomes"]
        missing = [index for index in layers if str(index) not in old]
        if not missing:
            results.append(done[text, rate])
            continue
        new = {str(index): measure(text, rate, layers[index], setting["queries"])._asdict() for index in missing}
        data = setting | _summary(text, rate, old | new)
        results.append(data)
        tqdm.write(f"{text:80s} 1/{rate:<3d} {data['mean']:.4f}")
        if out:
            records.append(out, records.make_record(KIND, data, 0))
    return results


def _summary(text: str, rate: int, outcomes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "method": text,
        "family": "recall" if text == ORACLE else METHODS[text.partition(":")[0]].family,
        "rate": rate,
        "mean": sum(o["error"] for o in outcomes.values()) / len(outcomes),
        "tokens_read": round(sum(o["tokens_read"] for o in outcomes.values()) / len(outcomes)),
        "bytes": sum(o["bytes"] for o in outcomes.values()),
        "outcomes": outcomes,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the text, the queries' own included")
    parser.add_argument("--queries", type=int, default=128, help="how many of the last tokens ask")
    parser.add_argument("--layers", default=",".join(map(str, LAYERS)))
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="one in so many middle tokens is read")
    parser.add_argument("--methods", default=",".join(CONTENDERS))
    parser.add_argument("--out", default=None)
    parser.add_argument("--picture", default=None, help="PNG file to draw the errors into")
    options = parser.parse_args(arguments)
    if options.tokens - options.queries < 2 * (SINKS + RECENT):
        print(f"--tokens {options.tokens} leaves too few before {options.queries} queries; use more", file=sys.stderr)
        return 2
    setting = {"model": options.model, "tokens": options.tokens, "queries": options.queries, "dtype": "float32"}
    wanted = [int(index) for index in options.layers.split(",")]
    rates, contenders = [int(rate) for rate in options.rates.split(",")], options.methods.split(",")
    done = measured(options.out, setting)
    held = [done.get((text, rate), {"outcomes": {}})["outcomes"] for text in contenders for rate in rates]
    if all(str(index) in outcomes for outcomes in held for index in wanted):
        results = [done[text, rate] for text in contenders for rate in rates]
    else:
        model, tokenizer = models.load(options.model, dtype="float32")
        ids = tokenizer(texts.document(), return_tensors="pt").input_ids[:, : options.tokens].to(model.device)
        if ids.shape[1] < options.tokens:
            print(f"the text has {ids.shape[1]} tokens; use a smaller --tokens", file=sys.stderr)
            return 2
        results = study(capture(model, ids, wanted), setting, contenders, rates, options.out)
    if options.picture:
        from kvsketch.evaluation.picture import draw

        draw(results, Path(options.picture))
    return 0


if __name__ == "__main__":
    sys.exit(main())
