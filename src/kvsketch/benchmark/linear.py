"""The linear layers of a decode step beside torch's, one layer of Llama-3.1-8B and its head.

    python -m kvsketch.benchmark.linear --out results/linear.jsonl
    python -m kvsketch.benchmark.linear --tune

Each product is timed as the model needs it: queries, keys and values of one input; gate and up with the SiLU; output
and down with the addition to the residual. Several copies of the weights are read in turn, so that none is still in the
cache. Results are first compared with fp32 products; nothing is reported when ours are further away than torch's.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvsketch import records
from kvsketch.benchmark.options import parse, whole_numbers, without_gpu
from kvsketch.benchmark.timing import copy_bandwidth, time_calls
from kvsketch.ops.thin_linear import reference

HIDDEN, INNER, QUERIES, KEYS, VOCABULARY = 4096, 14336, 4096, 1024, 128256
BATCHES = (1, 8, 16, 64)
COPIED_BYTES = 400e6  # several times what the second-level cache holds
TILES = {  # rows, columns, warps, stages
    1: [(4, 1024, 4, 0), (16, 512, 8, 0), (8, 512, 4, 0), (16, 512, 4, 3), (8, 1024, 4, 3), (8, 1024, 4, 4),
        (4, 1024, 4, 4), (8, 512, 4, 5), (16, 512, 8, 4), (4, 1024, 2, 4)],
    16: [(16, 512, 4, 3), (16, 512, 4, 4), (16, 256, 4, 6), (32, 256, 4, 3), (32, 256, 4, 4), (32, 256, 4, 5),
         (32, 128, 4, 5), (32, 128, 4, 7), (64, 128, 4, 4), (64, 128, 4, 6), (16, 512, 2, 3), (16, 256, 2, 6)],
    64: [(32, 128, 4, 4), (32, 128, 4, 5), (32, 128, 4, 6), (64, 128, 4, 4), (64, 64, 4, 5), (64, 64, 4, 7),
         (64, 64, 8, 5), (128, 64, 8, 4), (128, 64, 4, 4)],
}  # fmt: skip


@dataclasses.dataclass
class Product:
    """One product of a decoder layer: its kernel, torch's modules, and the weights of one copy."""

    name: str
    shapes: list[tuple[int, int]]
    ours: Callable[..., Any]
    torch: Callable[..., Any]


def products() -> list[Product]:
    from kvsketch.ops.thin_linear import kernel

    def ours(x: Tensor, residual: Tensor | None, weights: list[Tensor], tile: Any = None) -> Any:
        return kernel.linears(x, weights, [None] * len(weights), residual, tile)

    def plain(x: Tensor, residual: Tensor | None, weights: list[Tensor]) -> Any:
        results = reference.linears(x, weights, [None] * len(weights))
        return results if residual is None else [residual + results[0]]

    def gated(x: Tensor, _residual: None, weights: list[Tensor], tile: Any = None) -> Any:
        gate, up = weights
        return [kernel.gated_linear(x, gate, up, tile)]

    def plain_gated(x: Tensor, _residual: None, weights: list[Tensor]) -> Any:
        return [reference.gated_linear(x, *weights)]

    return [
        Product("queries, keys, values", [(QUERIES, HIDDEN), (KEYS, HIDDEN), (KEYS, HIDDEN)], ours, plain),
        Product("output", [(HIDDEN, QUERIES)], ours, plain),
        Product("gate and up", [(INNER, HIDDEN)] * 2, gated, plain_gated),
        Product("down", [(HIDDEN, INNER)], ours, plain),
        Product("head", [(VOCABULARY, HIDDEN)], ours, plain),
    ]


def make_inputs(product: Product, batch: int, seed: int) -> tuple[Tensor, Tensor | None, list[list[Tensor]]]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device="cuda")

    size = sum(2 * n * k for n, k in product.shapes)
    copies = max(1, round(COPIED_BYTES / size))
    weights = [[normal(n, k) / k**0.5 for n, k in product.shapes] for _ in range(copies)]
    residual = normal(batch, 1, HIDDEN) if product.name in ("output", "down") else None
    return normal(batch, 1, product.shapes[0][1]), residual, weights


def errors(product: Product, x: Tensor, residual: Tensor | None, weights: list[Tensor]) -> tuple[float, float]:
    """Relative distance of ours and of torch's to the product in fp32."""
    wide = residual.float() if residual is not None else None
    exact = product.torch(x.float(), wide, [w.float() for w in weights])

    def distance(found: list[Tensor]) -> float:
        return max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True))

    return distance(product.ours(x, residual, weights)), distance(product.torch(x, residual, weights))


def time_product(call: Callable[..., Any], x: Tensor, residual: Tensor | None, copies: list[list[Tensor]]) -> Any:
    calls = [functools.partial(call, x, residual, weights) for weights in copies]
    return time_calls(calls, replays=10, least_calls=8)


def measure(product: Product, batch: int, bandwidth: float, seed: int) -> dict[str, Any]:
    x, residual, copies = make_inputs(product, batch, seed)
    data: dict[str, Any] = {"product": product.name, "batch": batch}
    ours, theirs = errors(product, x, residual, copies[0])
    data |= {"error": ours, "torch_error": theirs}
    if ours > 1.05 * theirs:
        return {**data, "failed": f"error {ours:.2e} where torch has {theirs:.2e}"}
    for name, call in (("us", product.ours), ("torch_us", product.torch)):
        timing = time_product(call, x, residual, copies)
        data |= {name: timing.median_us, f"{name}_p10": timing.p10_us, f"{name}_p90": timing.p90_us}
    size = sum(2 * n * k for n, k in product.shapes)
    return {**data, "weight_bytes": size, "of_copy_bandwidth": size / (1e-6 * data["us"]) / bandwidth,
            "torch_of_copy_bandwidth": size / (1e-6 * data["torch_us"]) / bandwidth,
            "copy_bytes_per_s": bandwidth}  # fmt: skip


def tune(batches: list[int], seed: int) -> None:
    from kvsketch.ops.thin_linear.kernel import Tile

    for product, batch in itertools.product(products(), batches):
        x, residual, copies = make_inputs(product, batch, seed)
        found = []
        for sizes in TILES[1 if batch == 1 else 16 if batch <= 16 else 64]:
            call = functools.partial(product.ours, tile=Tile(*sizes))
            found.append((time_product(call, x, residual, copies).median_us, sizes))
        torch_us = time_product(product.torch, x, residual, copies).median_us
        best = "  ".join(f"{us:.1f} {sizes}" for us, sizes in sorted(found))
        print(f"{product.name}, batch {batch}: torch {torch_us:.1f}  {best}", flush=True)


def table_of(data: list[dict[str, Any]]) -> Table:
    table = Table("batch", "product", "µs", "torch µs", "of copy bandwidth", "torch")
    for row in data:
        if "failed" in row:
            table.add_row(str(row["batch"]), row["product"], row["failed"])
            continue
        shares = (f"{row['of_copy_bandwidth']:.0%}", f"{row['torch_of_copy_bandwidth']:.0%}")
        table.add_row(str(row["batch"]), row["product"], f"{row['us']:.1f}", f"{row['torch_us']:.1f}", *shares)
    return table


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=whole_numbers, default=",".join(map(str, BATCHES)))
    parser.add_argument("--tune", action="store_true", help="time launch sizes instead")
    options = parse(parser, arguments)
    if without_gpu("linear"):
        return 2
    if options.tune:
        tune(options.batches, options.seed)
        return 0
    bandwidth = copy_bandwidth()
    found = []
    for batch, product in itertools.product(options.batches, products()):
        found.append(measure(product, batch, bandwidth, options.seed))
        if options.out:
            records.append(options.out, records.make_record("linear", found[-1], options.seed))
    Console(width=120).print(table_of(found))
    return 1 if any("failed" in row for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
