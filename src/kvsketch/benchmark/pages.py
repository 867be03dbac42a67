"""Pages, one layer: bounds after prefill and after a token, choice in a decode step, each beside plain torch.

    python -m kvsketch.benchmark.pages --out results/pages.jsonl

Shapes of Llama-3.1-8B: 32 query heads, 8 KV heads, head size 128, bfloat16, 32,768 tokens in pages of 16, of which a
query head reads 128. The floor of a choice is the time to read the bounds once at the measured copy bandwidth; layers
take turns, so that the bounds come from memory and not from the L2 cache. Results are first compared with the
reference, and nothing is reported when they differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvsketch import ops, records
from kvsketch.benchmark.kcenter import make_keys
from kvsketch.benchmark.timing import Call, copy_bandwidth, time_calls
from kvsketch.ops.select_pages import Bounds, Limits, Text, reference

QUERY_HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 32, 8, 128, 32
PAGE = 16
SAME_CHOICE = 0.999  # scores are summed in another order, so that pages with nearly the same score may change places


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's keys, the bounds of its pages, and a query."""

    keys: Tensor
    bounds: Bounds
    text: Text
    query: Tensor


def make_layer(tokens: int, batch: int, seed: int) -> Layer:
    keys = make_keys("rotated", tokens, seed).expand(batch, -1, -1, -1).contiguous()
    room = tokens // PAGE + tokens // PAGE // 8
    shape = (batch, KV_HEADS, room, HEAD_SIZE)
    bounds = Bounds(*(keys.new_full(shape, float(inf)) for inf in ("inf", "-inf")))
    text = Text(torch.tensor([tokens], device="cuda"), None, PAGE)
    ops.widen_pages(*bounds, keys, text.seen, PAGE)
    generator = torch.Generator("cuda").manual_seed(seed)
    query = torch.randn(batch, QUERY_HEADS, 1, HEAD_SIZE, generator=generator, device="cuda").to(keys.dtype)
    return Layer(keys, bounds, text, query)


def choose(layer: Layer, pages: int) -> Tensor:
    return ops.select_pages(layer.query, *layer.bounds, layer.text.seen, pages, PAGE)


def widen(layer: Layer, slot: Tensor | None) -> None:
    ops.widen_pages(*layer.bounds, layer.keys, layer.text.seen, PAGE, next_slot=slot)


def check(layer: Layer, pages: int) -> list[str]:
    """What is wrong with our results, one line each."""
    wrong = []
    exact = Bounds(*(torch.full_like(b, float(inf)) for b, inf in zip(layer.bounds, ("inf", "-inf"), strict=True)))
    reference.widen_pages(exact, layer.keys, layer.text, None)
    if not all(torch.equal(ours, expected) for ours, expected in zip(layer.bounds, exact, strict=True)):
        wrong.append("widen_pages: bounds differ from the reference")
    ours, expected = (
        choose(layer, pages),
        reference.select_pages(layer.query, exact, layer.text, Limits(pages, None, 1)),
    )
    chosen = [_marks(rows, layer.keys.shape[2]) for rows in (ours, expected)]
    share = float((chosen[0] & chosen[1]).sum() / chosen[1].sum())
    if share < SAME_CHOICE or int(chosen[0].sum()) != int(chosen[1].sum()):
        wrong.append(f"select_pages, {pages} pages: {share:.2%} of the tokens are those of the reference")
    return wrong


def _marks(rows: Tensor, tokens: int) -> Tensor:
    marks = torch.zeros(*rows.shape[:2], tokens + 1, dtype=torch.bool, device=rows.device)
    return marks.scatter_(2, torch.where(rows >= 0, rows, tokens).long(), True)[..., :tokens]


def measure(layers: list[Layer], pages: int, bandwidth: float) -> Iterator[dict[str, Any]]:
    batch, _, tokens, _ = layers[0].keys.shape
    slot = torch.full((batch, KV_HEADS, 1), tokens, device="cuda")
    limits = Limits(pages, None, 1)
    begun = 2 * batch * KV_HEADS * (tokens // PAGE) * HEAD_SIZE * layers[0].keys.element_size()
    read = {"choice": begun, "bounds, one token": 0, "bounds, prompt": layers[0].keys.nbytes}
    contenders: dict[tuple[str, str], list[Call]] = {
        ("choice", "ours"): [partial(choose, layer, pages) for layer in layers],
        ("choice", "torch"): [
            partial(reference.select_pages, layer.query, layer.bounds, layer.text, limits) for layer in layers
        ],
        ("bounds, one token", "ours"): [partial(widen, layer, slot) for layer in layers],
        ("bounds, one token", "torch"): [
            partial(reference.widen_pages, layer.bounds, layer.keys, layer.text, slot) for layer in layers
        ],
        ("bounds, prompt", "ours"): [partial(widen, layer, None) for layer in layers],
    }
    for (operation, contender), calls in contenders.items():
        timing = time_calls(calls)
        yield {
            "operation": operation,
            "contender": contender,
            "tokens": tokens,
            "pages_read": pages,
            "batch": batch,
            "floor_us": 1e6 * read[operation] / bandwidth,
            "layers": LAYERS,
            "all_layers_ms": LAYERS * timing.median_us / 1e3,
            **dataclasses.asdict(timing),
        }


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Pages, one layer")
    for column in ("operation", "contender", "batch", "µs", "floor µs", "32 layers, ms"):
        table.add_column(column, justify="left" if column in ("operation", "contender") else "right")
    for data in rows:
        numbers = (f"{data['median_us']:.1f}", f"{data['floor_us']:.1f}", f"{data['all_layers_ms']:.2f}")
        table.add_row(data["operation"], data["contender"], str(data["batch"]), *numbers)
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvsketch.benchmark.pages", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="append the records to this JSON-lines file")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or ops.kernel_for("select_pages", torch.device("cuda")) is None:
        print("The pages benchmark needs an NVIDIA GPU and triton, and KVSKETCH_KERNELS unset.", file=sys.stderr)
        return 2
    pages, bandwidth = options.budget // PAGE, copy_bandwidth()
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        layers = [make_layer(options.tokens, batch, options.seed + number) for number in range(8 if batch == 1 else 2)]
        if wrong := check(layers[0], pages):
            print("\n".join(["Nothing is reported: our results differ from the reference.", *wrong]), file=sys.stderr)
            return 1
        rows += measure(layers, pages, bandwidth)
    for data in rows if options.out else []:
        records.append(options.out, records.make_record("pages", data, options.seed))
    Console(width=140 if not sys.stdout.isatty() else None).print(show(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
