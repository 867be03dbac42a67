"""The benchmark page: a title, a text and a table for each kind of record.

For each measurement the last record counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvsketch_lab.records import Record
from kvsketch_lab.report.blocks import Code, table
from kvsketch_lab.report.contents import commit_text
from kvsketch_lab.report.palette import BASE, name_of

Data = dict[str, Any]
Make = Callable[[list[Data]], str]
FEW_BITS = ("tied weights", "ragged heads", "4 bits", "ragged heads, 4 bits")  # the sizes that have them all are shown
LLAMA_8B_SLOT = 8 * 2 * 128 * 2  # bytes of a token's keys and values in one layer: KV heads, both, size, bf16
SHAPE, DYNAMIC = "llama-3.1-8b", "DynamicCache, eager"


def _table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    return table(header, [[cell if isinstance(cell, str) else str(cell) for cell in row] for row in rows])


def last(data: list[Data], *keys: str) -> list[Data]:
    return list({tuple(d.get(k) for k in keys): d for d in data}.values())


def usual_steps(data: list[Data]) -> list[Data]:
    """The decode steps that are compared with each other: of one shape, after its longest prompt."""
    own = [d for d in data if d.get("shape", SHAPE) == SHAPE]
    longest = max((d.get("prompt", 0) for d in own), default=0)
    return [d for d in own if d.get("prompt", 0) == longest or d["method"] == DYNAMIC]


def benchmark_of(record: Record) -> str:
    """What was measured: the kind of a record or, of single operations, which of them."""
    return str(record["data"]["operation"] if record["kind"] == "operation" else record["kind"])


def beside(data: list[Data], *keys: str) -> list[Data]:
    """One row for each of `keys`, in which the fields of its contenders are named `contender.field`."""
    rows: dict[tuple[Any, ...], Data] = {}
    for d in data:
        row = rows.setdefault(tuple(d.get(k) for k in keys), {k: d.get(k) for k in keys})
        row |= {f"{d['contender']}.{name}": value for name, value in d.items()}
    return list(rows.values())


def contenders(data: list[Data]) -> list[tuple[tuple[int, int, str], dict[str, Data]]]:
    """What each contender needed, for each batch, number of slots and state of the L2 cache."""
    cells: dict[tuple[int, int, str], dict[str, Data]] = {}
    for d in last(data, "batch", "slots", "cache", "contender"):
        cells.setdefault((d["batch"], d["slots"], d["cache"]), {})[d["contender"]] = d
    return sorted(cells.items(), key=lambda cell: cell[0])


def beside_sdpa(by_name: dict[str, Data]) -> float | None:
    """Time of the unweighted kernel over that of the better of SDPA's."""
    rivals = [by_name[name]["median_us"] for name in ("sdpa flash", "sdpa cudnn") if name in by_name]
    return by_name["unweighted"]["median_us"] / min(rivals) if rivals and "unweighted" in by_name else None


def sizes(data: list[Data]) -> list[Data]:
    """At each size the time beside SDPA's, and how many times as fast as bf16 slots of equal heads 4 bits are."""
    result = []
    for (batch, slots, cache), by_name in contenders(data):
        times = {name: each["median_us"] for name, each in by_name.items()}
        few = (
            [times["tied weights"] / times[name] for name in FEW_BITS[2:]]
            if set(FEW_BITS) <= set(times)
            else [None] * 2
        )
        size = {"batch": batch, "slots": slots, "cache": cache, "beside_sdpa": beside_sdpa(by_name)}
        result.append(size | {"four_bits": few[0], "four_bits_ragged": few[1]})
    return result


def kernels(data: list[Data]) -> str:
    names = ("unweighted", "tied weights", "separate weights", "sdpa flash", "sdpa cudnn")
    rows = []
    for (batch, slots, cache), by_name in contenders(data):
        times = [by_name[n]["median_us"] if n in by_name else None for n in names]
        ratio = f"{beside:.2f}" if (beside := beside_sdpa(by_name)) else ""
        share = f"{by_name['unweighted']['share_of_copy_bandwidth']:.0%}" if "unweighted" in by_name else ""
        if any(times):
            rows.append((batch, f"{slots:,}", cache, *(f"{t:.1f}" if t else "" for t in times), ratio, share))
    return _table(("batch", "slots", "L2", *names, "ours / better rival", "of copy bandwidth"), rows)


def few_bits(data: list[Data]) -> str:
    """Slots of 4 bits and heads of different sizes beside equal heads in bf16."""
    names = FEW_BITS
    rows = [
        (batch, f"{slots:,}", cache, *(f"{by_name[n]['median_us']:.1f}" for n in names),
         *(f"{by_name['tied weights']['median_us'] / by_name[n]['median_us']:.2f}x" for n in names[2:]),
         *(f"{by_name[n]['share_of_copy_bandwidth']:.0%}" for n in names[2:]))
        for (batch, slots, cache), by_name in contenders(data) if set(names) <= set(by_name)
    ]  # fmt: skip
    header = ("batch", "slots", "L2", "bf16", "bf16, ragged", "4 bits", "4 bits, ragged", "faster", "ragged")
    return _table((*header, "of copy bandwidth", "ragged"), rows)


def prefill(data: list[Data]) -> str:
    timed = [d for d in last(data, "method", "length", "beside") if d.get("prefill_ms")]
    rows = [
        (
            Code(d["method"] + (", on a second stream" if d.get("beside") else "")),
            f"{d['length']:,}",
            f"{d['prefill_ms']:,.0f}",
            f"{d['baseline_ms']:,.0f}",
            f"{d['overhead']:+.1%}",
            f"{d['cache_bytes'] / 1e6:.0f}",
            f"{d['cache_bytes'] / (sum(d['stored']) * LLAMA_8B_SLOT):.3f}",
            f"{d['peak_bytes'] / 1e9:.1f}",
        )
        for d in timed
    ]
    header = ("method", "tokens", "ms", "DynamicCache, ms", "overhead", "cache MB")
    return _table((*header, "cache / keys and values of the stored tokens", "peak GB"), rows)


def decode(data: list[Data]) -> str:
    result = last(usual_steps(data), "method", "batch")
    full = {d["batch"]: d["step_ms"] for d in result if d["method"] == "full" and d["step_ms"]}
    best = max((1e3 * batch / ms for batch, ms in full.items()), default=0.0)
    rows = []
    for d in sorted(result, key=lambda d: (d["batch"], d["step_ms"] or 1e9)):
        if d["step_ms"] is None:
            rows.append((d["batch"], Code(d["method"]), d["failed"], "", "", "", "", ""))
            continue
        rate = 1e3 * d["batch"] / d["step_ms"]
        rows.append(
            (
                d["batch"],
                Code(d["method"]),
                f"{d['step_ms']:.2f}",
                f"{d['p10_ms']:.2f}-{d['p90_ms']:.2f}",
                f"{d['floor_ms']:.2f}" if d["floor_ms"] and not _recalls(d["method"]) else "",
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
    return _table(header, rows)


def _recalls(method: str) -> bool:
    """Whether a step reads a part of the cache, so that reading all of it is no floor."""
    look = BASE.get(name_of(method))
    return look is not None and look.family == "recall"


def step_profile(data: list[Data], most: int = 9) -> str:
    """Microseconds of a layer by kernel, the longest first."""
    rows = []
    for d in last(data, "method", "batch"):
        kernels = [
            f"{k['kernel'].split('<')[0].removeprefix('void ')} {k['us'] / d['layers']:.1f}" for k in d["kernels"]
        ]
        rows.append((d["batch"], Code(d["method"]), f"{d['step_ms']:.2f}", ", ".join(kernels[:most])))
    return _table(("batch", "method", "ms per step", "kernels, µs for each layer"), rows)


def soak(data: list[Data]) -> str:
    rows = []
    for d in last(data, "method"):
        first, end = d["intervals"][0], d["intervals"][-1]
        cells = (f"{d['tokens']:,}", f"{end['tokens_stored']} of {d['budget']}", f"{end['device_bytes']:,}")
        flat = f"{end['device_bytes'] / first['device_bytes']:.3f}"
        rows.append((Code(d["method"]), *cells, flat, f"{d['slowdown']:.2f}", len(d["complaints"])))
    return _table(("method", "tokens", "stored", "bytes", "end / start", "second half / first", "complaints"), rows)


def faults(data: list[Data]) -> str:
    rows = (
        (f"{d['fault']}, {d['pip']} pip" if d["pip"] else d["fault"], d["killed"], len(d["problems"]))
        for d in last(data, "fault", "pip")
    )
    return _table(("what was killed", "kills", "problems"), rows)


def plain(keys: str, columns: str, only: Callable[[Data], bool] = lambda d: True) -> Make:
    """A table of chosen fields of the records that `only` lets through, the last for each of `keys`.

    A column is `heading = field/divisor:format`, or the field alone where it is the heading. With fields of contenders,
    such as `torch.median_us`, these stand in one row.
    """
    cells = [re.fullmatch(r"(?:(.+) = )?([\w.]+)(?:/(1e\d))?(?::(.+))?", column) for column in columns.split(" | ")]
    assert all(cells), columns
    parts = [(cell[1] or cell[2], cell[2], float(cell[3] or 1), cell[4] or "") for cell in cells if cell]
    choose = beside if any("." in field for _, field, _, _ in parts) else last

    def shown(value: Any, divisor: float, form: str) -> str:
        return "" if value is None else format(value / divisor if divisor != 1 else value, form)

    def table(data: list[Data]) -> str:
        chosen = choose([d for d in data if only(d)], *keys.split())
        rows = [[shown(d.get(field), divisor, form) for _, field, divisor, form in parts] for d in chosen]
        return _table([heading for heading, *_ in parts], rows)

    return table


# Whole models first, then single operations.
SECTIONS: list[tuple[str, str, str, Make]] = [
    (
        "Decoding",
        "decode",
        "Llama-3.1-8B shape, random weights, bf16, captured steps after a prompt of 32,768 tokens (DynamicCache: "
        "4,096). The baseline `full` is the full cache with our own kernel, captured. The floor is the time to read "
        "weights and cache once at the measured copy bandwidth; recall methods read a part of the cache and have no "
        "floor. Before a method is timed, its captured tokens are compared with eager ones. If no layer is read in "
        "full, the tokens without fused kernels are also compared with those of `model.generate`.\n\n![Decode step "
        "and throughput by batch](pictures/decode.png)",
        decode,
    ),
    (
        "Prefill",
        "prefill",
        "Llama-3.1-8B shape, random weights, batch 1: time of the whole prefill, compression included, beside "
        "transformers' DynamicCache in the same run. The last but one column is 1 for a cache of keys and values only; "
        "index, weights and scores take 8 to 12 bytes of 520 a slot. subgen stores keys without values, balancekv "
        "fills its budget while decoding.",
        prefill,
    ),
    (
        "What rehearse adds to a prefill",
        "rehearse",
        "The same prefill with [rehearse](rehearse.md). The parts are timed in one more prefill that waits for the "
        "device before and after each, so they add up to more than the overhead. Coding keys is part of the refit "
        "where there is one. Weights are random, so that heads keep nearly equal numbers of tokens.",
        plain(
            "method length",
            "method | tokens = length:,d | ms = prefill_ms:,.0f | DynamicCache = baseline_ms:,.0f | overhead:+.1% | "
            "score, ms = score_ms:,.0f | choice = choice_ms:,.0f | refit = refit_ms:,.0f | "
            "encoding = encoding_ms:,.0f | cache bytes = cache_bytes:,d",
        ),
    ),
    (
        "Serving",
        "serve",
        "Requests that share a decode step in the batched engine: Llama-3.1-8B shape, random weights. When all rows "
        "run, their steps are timed; then a whole prompt is read beside them. The requests continue copies of one "
        "prompt's cache, as those that name a document do. The full cache has as many rows as fit.",
        plain(
            "method",
            "method | prompt:,d | rows | tokens/s = tokens_per_s:,.0f | "
            "between tokens, ms: median = p50_ms:.1f | p99 = p99_ms:.1f | "
            "p99 beside a prompt = busy_p99_ms:.0f | first token, s = ttft_s:.2f | "
            "beside others = busy_ttft_s:.2f | of a document = document_ttft_s:.2f | join, ms = join_ms:.2f | "
            "bytes a row = row_bytes:,d",
            only=lambda d: not d.get("failed") and not d.get("tail"),
        ),
    ),
    (
        "Users of one document",
        "serve",
        "The same engine and shape: all requests continue one document that lies in the tables once, each with a tail "
        "of its own for its question and answer.",
        plain(
            "method prompt rows tail",
            "method | document = prompt:,d | rows | tail | tokens/s = tokens_per_s:,.0f | "
            "between tokens, ms: median = p50_ms:.1f | p99 = p99_ms:.1f | first token, s = document_ttft_s:.2f | "
            "join, ms = join_ms:.2f | bytes a row = row_bytes:,d | document = document_bytes:,d | "
            "all = device_bytes:,d",
            only=lambda d: not d.get("failed") and bool(d.get("tail")),
        ),
    ),
    (
        "Documents",
        "document",
        "Seconds to the first token of an answer about a document: when it is read again, when its cache is loaded "
        "from its file, and when that is held in memory. A real model and a real text; all three give the same token.",
        plain(
            "model method tokens cache",
            "model | method | tokens:,d | cache | first token, s = seconds:.2f | cache bytes = cache_bytes:,d | "
            "file bytes = file_bytes:,d",
            only=lambda d: not d.get("failed"),
        ),
    ),
    (
        "On a CPU",
        "cpu",
        "Reading a text and one decode step on a CPU, in float32, beside transformers' DynamicCache, which took turns "
        "with it in one process. Processor time; `times` are medians of the quotients. A real model and a real text; "
        "the tokens are those of the torch references.",
        plain(
            "model method tokens threads",
            "model | method | tokens:,d | threads | kernels | read, s = read_s:.2f | times = read_ratio:.2f | "
            "step, ms = step_ms:.1f | times a step = step_ratio:.2f | cache bytes = cache_bytes:,d",
            only=lambda d: not d.get("failed"),
        ),
    ),
    (
        "Streaming prefill",
        "stream",
        "Random weights: the Llama-3.1-8B shape on an H200 in chunks of 8,192 tokens, and one layer of a tiny shape on "
        "a CPU in chunks of 2,048. Memory and time only: the trained model's positions end at 131,072 ([where "
        "positions end](long_contexts.md#where-positions-end)). Tenths: time per token of the slowest over the fastest "
        "tenth of the prompt, without the first tenth. Peak: device memory, model included.",
        plain(
            "model method tokens",
            "model | method | tokens:,d | seconds = prefill_s:.1f | tenths = slowest_over_fastest_tenth:.2f | "
            "cache bytes = cache_bytes:,d | full cache = full_bytes:,d | peak bytes = peak_bytes:,d | "
            "peak / shortest = peak_over_shortest:.3f",
        ),
    ),
    (
        "Decoding from host memory",
        "offload",
        "One step at batch 1, budget 1024, after 32,768 tokens: keys and values on the device against pinned host "
        "memory. With random weights successive queries differ much, so the hit rate is low; `locality` blends each "
        "step's cluster scores with the previous ones, as successive queries of real models are similar.",
        plain(
            "method",
            "method | on device ms = device_ms:.2f | in host memory ms = host_ms:.2f | ratio:.2f | "
            "hit rate = hit_rate:.0% | device bytes = offloaded_device_bytes:,d | "
            "host bytes = offloaded_host_bytes:,d",
        ),
    ),
    (
        "Hit rate of the hot set on a real model",
        "hit_rate",
        "Qwen2.5-Coder-0.5B, 8,192 tokens of real text, then decoding with a budget of 256: share of the rows read by "
        "a query head that are already on the device, and share of all reads that are copied from host memory.",
        plain("method", "method | hit rate = hit_rate:.1% | copied:.1%"),
    ),
    (
        "kvpress",
        "kvpress",
        "The same shape and prompt with kvpress 0.5.5 and transformers 5.2. Its decoding is eager, so a step is "
        "limited by the host and varies with it.",
        plain(
            "press",
            "press | kept:,d | prefill ms = prefill_ms:,.0f | ms per step = step_ms:.1f | cache bytes = cache_bytes:,d",
        ),
    ),
    (
        "Long generation",
        "soak",
        "A small random model generates token by token on a CPU: bytes of the cache at the end over those at the "
        "start, and time per token of the second half over the first. Memory and time only: a trained model breaks "
        "down after its last position ([where positions end](long_contexts.md#where-positions-end)).",
        soak,
    ),
    (
        "Faults",
        "faults",
        "Processes are killed at random moments, then run again. A problem is a result that differs from that of an "
        "uninterrupted run.",
        faults,
    ),
    (
        "The decode kernel",
        "attention",
        "One layer of the Llama-3.1-8B shape (32 query heads, 8 KV heads, size 128, bf16), µs inside a CUDA graph.\n\n"
        "![Decode attention against SDPA](pictures/kernels.png)",
        kernels,
    ),
    (
        "Few bits and ragged heads",
        "attention",
        "The same layer, µs: keys and values of 4 bits, and as many slots in heads of different sizes.",
        few_bits,
    ),
    (
        "Where the time of a step goes",
        "step_profile",
        "The first eight layers of the shape, captured, after 32,768 tokens. A kernel starts before the previous one "
        "ends, and its time includes the wait, so the times add up to more than the step. clusterkv reads all "
        "tokens in its first two layers (`split_kernel`) and selected rows in the other six (`pieces_kernel`).",
        step_profile,
    ),
    (
        "Linear layers of a decode step",
        "linear",
        "One layer of Llama-3.1-8B and its head, bf16, weights read from memory: µs inside a CUDA graph, beside "
        "torch's products and additions, and the share of the copy bandwidth at which the weights are read.",
        plain(
            "batch product",
            "batch | product | µs = ours.median_us:.1f | torch µs = torch.median_us:.1f | "
            "of copy bandwidth = ours.share_of_copy_bandwidth:.0% | torch = torch.share_of_copy_bandwidth:.0%",
        ),
    ),
    (
        "Column sums of attention (h2o, keyformer)",
        "mass",
        "One layer; the share is of a prefill of 1,400 ms, all 32 layers.",
        plain(
            "contender",
            "what = contender | tokens:,d | µs = median_us:,.0f | of prefill = share:.1%",
        ),
    ),
    (
        "Farthest-first centers (kcenter)",
        "kcenter",
        "One layer, 32,768 keys, 2,048 centers per KV head. The last column is the radius of `coarse` over the exact "
        "one.",
        plain(
            "keys contender",
            "keys | form = contender | ms = median_us/1e3:.2f | of prefill = share:.1% | "
            "radius / exact = radius_over_exact:.3f",
        ),
    ),
    (
        "Balancing walk (balancekv)",
        "balance",
        "One layer; `making room` is the periodic halving while decoding.",
        plain(
            "contender",
            "what = contender | tokens:,d | ms = median_us/1e3:.3f | of prefill = share:.1% | "
            "ms per token, all layers = ms_per_token_all_layers:.3f",
        ),
    ),
    (
        "Clustering and selection (clusterkv)",
        "recall",
        "One layer, 32,768 tokens, batch 1. Shares are of a prefill (clustering) or a decode step of 7 ms (selection).",
        plain(
            "part contender clusters rounds budget batch",
            "operation = part | by = contender | clusters:,d | rounds | budget | µs = median_us:,.1f | share:.1%",
            only=lambda d: d["part"] in ("kmeans", "index", "selection") and d.get("batch", 1) == 1,
        ),
    ),
    (
        "Attention over chosen rows (clusterkv, quest)",
        "recall",
        "One layer, batch 1, rows selected per query head or shared by a group, with or without completion slots.",
        plain(
            "part contender budget batch shared completion store",
            "operation = part | by = contender | budget | shared | completion | store | µs = median_us:,.1f",
            only=lambda d: d["part"] in ("indexed_attention", "full attention") and d.get("batch") == 1,
        ),
    ),
    (
        "Choosing pages (quest)",
        "pages",
        "One layer, 32,768 tokens in pages of 16, of which each query head reads 128. The floor is the time to read "
        "the pages' bounds once.",
        plain(
            "part contender batch",
            "operation = part | by = contender | batch | µs = median_us:,.1f | floor µs = floor_us:,.1f | "
            "ms, all layers = all_layers_ms:.2f",
        ),
    ),
    (
        "SubGen",
        "subgen",
        "One layer, budget 1,024: folding a prompt of 32,768 tokens, host included, and one decode step in a graph. "
        "98% or more of the slots are those of the reference.",
        plain(
            "keys",
            "keys | prompt, ms = prompt.median_us/1e3:.2f | of prefill = prompt.share:.1% | "
            "step, µs = step.median_us:.1f | bytes / formula = prompt.bytes_over_formula:.3f",
            only=lambda d: d.get("budget", 1024) == 1024,
        ),
    ),
]


def page(records: Sequence[Record]) -> str:
    """The whole page from the records of benchmarks."""
    parts: list[str] = []
    for title, kind, text, make in SECTIONS:
        data = [record["data"] for record in records if benchmark_of(record) == kind]
        if data:
            parts += [f"## {title}", text, make(data)]
    known = {kind for _, kind, _, _ in SECTIONS}
    told = (
        "A command runs at its commit; `python -m kvsketch.benchmark.NAME` is `kvsketch bench NAME` at later ones, and "
        "of a single operation `kvsketch bench operations --only NAME` (`kernels`: `--only attention`)."
    )
    machines = _machines([record for record in records if benchmark_of(record) in known])
    parts += ["## Where the numbers come from", told, machines]
    return "\n\n".join(parts)


def _machines(records: Sequence[Record]) -> str:
    rows = {}
    for record in records:
        versions, machine = record.get("versions") or {}, record.get("machine") or {}
        named = (f"{name} {versions.get(name)}" for name in ("torch", "triton", "transformers"))
        rows[record.get("command")] = (
            Code(record.get("command") or "unknown"),
            machine.get("gpu") or f"none ({machine.get('processor')})",
            commit_text(record.get("commit")),
            ", ".join(named),
            str(record.get("time", ""))[:10],
        )
    return _table(("command", "GPU", "commit", "versions", "date"), rows.values())
