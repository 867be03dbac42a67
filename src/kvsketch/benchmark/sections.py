"""What the benchmark page says of each kind of record: a title, a sentence, a table. Reads JSON data only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Data = dict[str, Any]
Make = Callable[[list[Data]], str]
LLAMA_8B_SLOT = 8 * 2 * 128 * 2  # bytes of a token's keys and values in one layer: KV heads, both, size, bf16


def markdown(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [list(header), *[[str(cell) for cell in row] for row in rows]]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _last(data: list[Data], *keys: str) -> list[Data]:
    return list({tuple(d.get(k) for k in keys): d for d in data}.values())


def _kernels(data: list[Data]) -> str:
    cells: dict[tuple[int, int, str], dict[str, Data]] = {}
    for d in _last(data, "batch", "slots", "cache", "contender"):
        cells.setdefault((d["batch"], d["slots"], d["cache"]), {})[d["contender"]] = d
    names = ("unweighted", "tied weights", "separate weights", "sdpa flash", "sdpa cudnn")
    rows = []
    for (batch, slots, cache), by_name in sorted(cells.items()):
        times = [by_name[n]["median_us"] if n in by_name else None for n in names]
        rivals = [t for t in times[3:] if t is not None]
        ratio = f"{times[0] / min(rivals):.2f}" if rivals and times[0] else ""
        share = f"{by_name['unweighted']['share_of_copy_bandwidth']:.0%}" if "unweighted" in by_name else ""
        rows.append((batch, f"{slots:,}", cache, *(f"{t:.1f}" if t else "" for t in times), ratio, share))
    return markdown(("batch", "slots", "L2", *names, "ours / better rival", "of copy bandwidth"), rows)


def _prefill(data: list[Data]) -> str:
    timed = [d for d in _last(data, "method", "length") if d.get("prefill_ms")]
    rows = [
        (
            f"`{d['method']}`",
            f"{d['prefill_ms']:.0f}",
            f"{d['overhead']:+.1%}",
            f"{d['cache_bytes'] / 1e6:.0f}",
            f"{d['cache_bytes'] / (sum(d['stored']) * LLAMA_8B_SLOT):.3f}",
            f"{d['peak_bytes'] / 1e9:.1f}",
        )
        for d in timed
    ]
    head = f"{timed[-1]['length']:,} tokens; transformers' DynamicCache takes {timed[-1]['baseline_ms']:.0f} ms."
    header = ("method", "ms", "overhead", "cache MB", "cache / keys and values of the stored tokens", "peak GB")
    return head + "\n\n" + markdown(header, rows)


def _decode(data: list[Data]) -> str:
    last = _last(data, "method", "batch", "prompt")
    full = {d["batch"]: d["step_ms"] for d in last if d["method"] == "full" and d["step_ms"]}
    best = max((1e3 * batch / ms for batch, ms in full.items()), default=0.0)
    rows = []
    for d in sorted(last, key=lambda d: (d["batch"], d["step_ms"] or 1e9)):
        if d["step_ms"] is None:
            rows.append((d["batch"], f"`{d['method']}`", d["failed"], "", "", "", "", ""))
            continue
        rate = 1e3 * d["batch"] / d["step_ms"]
        rows.append(
            (
                d["batch"],
                f"`{d['method']}`",
                f"{d['step_ms']:.2f}",
                f"{d['p10_ms']:.2f}-{d['p90_ms']:.2f}",
                f"{d['floor_ms']:.2f}" if d["floor_ms"] else "",
                f"{full[d['batch']] / d['step_ms']:.2f}x" if d["batch"] in full and d["cache_bytes"] else "",
                f"{rate:.0f} ({rate / best:.1f}x)" if best else f"{rate:.0f}",
                f"{d['cache_bytes'] / 1e6:.0f}" if d["cache_bytes"] else "",
            )
        )
    header = (
        "batch",
        "method",
        "ms per step",
        "p10-p90",
        "floor ms",
        "against full",
        "tokens/s (to full's best)",
        "MB",
    )
    return markdown(header, rows)


Column = tuple[str, str, str]  # heading, field, format


def _plain(keys: tuple[str, ...], *columns: Column, only: Callable[[Data], bool] = lambda d: True) -> Make:
    """A table of chosen fields of the records that `only` lets through."""

    def table(data: list[Data]) -> str:
        chosen = _last([d for d in data if only(d)], *keys)
        rows = [["" if d.get(f) is None else format(d[f], spec) for _, f, spec in columns] for d in chosen]
        return markdown([heading for heading, _, _ in columns], rows)

    return table


SECTIONS: list[tuple[str, str, str, Make]] = [
    (
        "The decode kernel",
        "kernel",
        "One layer of Llama-3.1-8B shape (32 query heads, 8 KV heads, size 128, bf16), µs inside a CUDA graph.\n\n"
        "![Decode attention against SDPA](pictures/kernels.png)",
        _kernels,
    ),
    (
        "Prefill",
        "prefill",
        "Llama-3.1-8B shape, random weights, batch 1: time of the whole prefill with the compression "
        "in it. The last but one "
        "column is 1 for a cache that holds nothing but keys and values; index, weights and scores "
        "take 8 to 12 bytes of "
        "520 a slot. subgen stores keys without values, balancekv fills its budget while decoding.",
        _prefill,
    ),
    (
        "Decoding",
        "decode",
        "Llama-3.1-8B shape, random weights, bf16, captured steps after a prompt of 32,768 tokens "
        "(DynamicCache: 4,096). `full` is "
        "the full cache with our own kernel, captured: the baseline. The floor is the time to read "
        "weights and cache once at "
        "the measured copy bandwidth. Before a method is timed its captured tokens are compared with eager ones.\n\n"
        "![Decode step and throughput by batch](pictures/decode.png)",
        _decode,
    ),
    (
        "Decoding from host memory",
        "offload",
        "One batch-1 step of `clusterkv` with budget 1024 after 32,768 tokens, keys and values on "
        "the device against in pinned "
        "host memory. Queries of random weights wander, so their hit rate is low; `locality` blends "
        "each step's cluster scores "
        "with the last ones, which real models do by themselves.",
        _plain(
            ("method",),
            ("method", "method", ""),
            ("on device ms", "device_ms", ".2f"),
            ("in host memory ms", "host_ms", ".2f"),
            ("ratio", "ratio", ".2f"),
            ("hit rate", "hit_rate", ".0%"),
            ("device bytes", "offloaded_device_bytes", ",d"),
            ("host bytes", "offloaded_host_bytes", ",d"),
        ),
    ),
    (
        "Hit rate of the hot set on a real model",
        "hit_rate",
        "Qwen2.5-Coder-0.5B, 8,192 tokens of real text, then decoding with a budget of 256: share of "
        "the rows a query head reads "
        "that the last steps had brought to the device, and share of all reads that are copied from host memory.",
        _plain(
            ("method",),
            ("method", "method", ""),
            ("hit rate", "hit_rate", ".1%"),
            ("copied", "copied", ".1%"),
        ),
    ),
    (
        "Column sums of attention (h2o, keyformer)",
        "attention-mass",
        "One layer; the share is of a prefill of 1,400 ms, all 32 layers.",
        _plain(
            ("contender",),
            ("what", "contender", ""),
            ("tokens", "tokens", ",d"),
            ("µs", "median_us", ",.0f"),
            ("of prefill", "share_of_prefill", ".1%"),
            ("target", "limit", ".0%"),
        ),
    ),
    (
        "Farthest-first centers (kcenter)",
        "farthest-first",
        "One layer, 32,768 keys, 2,048 centers per KV head. `coarse` is judged by its radius against the exact one.",
        _plain(
            ("keys", "form"),
            ("keys", "keys", ""),
            ("form", "form", ""),
            ("ms", "layer_ms", ".2f"),
            ("of prefill", "share_of_prefill", ".1%"),
            ("target", "target", ".0%"),
            ("radius / exact", "radius_over_exact", ".3f"),
        ),
    ),
    (
        "Balancing walk (balancekv)",
        "balance",
        "One layer; `making room` is the halving that decoding does every so many tokens.",
        _plain(
            ("contender",),
            ("what", "contender", ""),
            ("tokens", "tokens", ",d"),
            ("ms", "median_ms", ".3f"),
            ("of prefill", "share_of_prefill", ".1%"),
            ("ms per token, all layers", "ms_per_token_all_layers", ".3f"),
        ),
    ),
    (
        "Clustering and selection (clusterkv)",
        "recall",
        "One layer, 32,768 tokens, batch 1. Shares are of a prefill (clustering) or a decode step of 7 ms (selection).",
        _plain(
            ("operation", "contender", "clusters", "rounds", "budget", "batch"),
            ("operation", "operation", ""),
            ("by", "contender", ""),
            ("clusters", "clusters", ",d"),
            ("rounds", "rounds", ""),
            ("budget", "budget", ""),
            ("µs", "median_us", ",.1f"),
            ("share", "share", ".1%"),
            ("target", "target", ".0%"),
            only=lambda d: d["operation"] in ("kmeans", "selection") and d.get("batch", 1) == 1,
        ),
    ),
    (
        "Attention over chosen rows (clusterkv, quest)",
        "recall",
        "One layer, batch 1, rows chosen per query head or shared by a group, with or without completion slots.",
        _plain(
            ("operation", "contender", "budget", "batch", "shared", "completion", "store"),
            ("operation", "operation", ""),
            ("by", "contender", ""),
            ("budget", "budget", ""),
            ("shared", "shared", ""),
            ("completion", "completion", ""),
            ("store", "store", ""),
            ("µs", "median_us", ",.1f"),
            only=lambda d: d["operation"] in ("indexed_attention", "full attention") and d.get("batch") == 1,
        ),
    ),
]
