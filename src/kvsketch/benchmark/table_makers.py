"""Tables of pages from the data of records, and how they get into a page. Reads JSON data only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvsketch.methods import METHODS

Data = dict[str, Any]
Make = Callable[[list[Data]], str]
LLAMA_8B_SLOT = 8 * 2 * 128 * 2  # bytes of a token's keys and values in one layer: KV heads, both, size, bf16


def markdown(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [list(header), *[[str(cell) for cell in row] for row in rows]]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def last(data: list[Data], *keys: str) -> list[Data]:
    return list({tuple(d.get(k) for k in keys): d for d in data}.values())


def between(page: str, begin: str, end: str, content: str) -> str:
    """A page with `content` between two marks, in place of what stood there."""
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the page has no place for the tables; put {begin} and {end} where they belong")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def kernels(data: list[Data]) -> str:
    cells: dict[tuple[int, int, str], dict[str, Data]] = {}
    for d in last(data, "batch", "slots", "cache", "contender"):
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


def prefill(data: list[Data]) -> str:
    timed = [d for d in last(data, "method", "length") if d.get("prefill_ms")]
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


def decode(data: list[Data]) -> str:
    found = last(data, "method", "batch", "prompt")
    full = {d["batch"]: d["step_ms"] for d in found if d["method"] == "full" and d["step_ms"]}
    best = max((1e3 * batch / ms for batch, ms in full.items()), default=0.0)
    rows = []
    for d in sorted(found, key=lambda d: (d["batch"], d["step_ms"] or 1e9)):
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
    return markdown(header, rows)


def _recalls(method: str) -> bool:
    """Whether a step reads a part of the cache, so that reading all of it is no floor."""
    found = METHODS.get(method.partition(":")[0])
    return found is not None and found.family == "recall"


def step_profile(data: list[Data], most: int = 9) -> str:
    """Microseconds of a layer by kernel, the longest first."""
    rows = []
    for d in last(data, "method", "batch"):
        kernels = [
            f"{k['kernel'].split('<')[0].removeprefix('void ')} {k['us'] / d['layers']:.1f}" for k in d["kernels"]
        ]
        rows.append((d["batch"], f"`{d['method']}`", f"{d['step_ms']:.2f}", ", ".join(kernels[:most])))
    return markdown(("batch", "method", "ms per step", "kernels, µs for each layer"), rows)


def soak(data: list[Data]) -> str:
    rows = []
    for d in last(data, "method"):
        first, end = d["intervals"][0], d["intervals"][-1]
        cells = (f"{d['tokens']:,}", f"{end['tokens_stored']} of {d['budget']}", f"{end['device_bytes']:,}")
        flat = f"{end['device_bytes'] / first['device_bytes']:.3f}"
        rows.append((f"`{d['method']}`", *cells, flat, f"{d['slowdown']:.2f}", len(d["complaints"])))
    return markdown(("method", "tokens", "stored", "bytes", "end / start", "second half / first", "complaints"), rows)


def faults(data: list[Data]) -> str:
    rows = ((d["fault"], d["killed"], len(d["problems"])) for d in last(data, "fault", "pip"))
    return markdown(("what was killed", "kills", "problems"), rows)


Column = tuple[str, str, str]  # heading, field, format


def plain(keys: tuple[str, ...], *columns: Column, only: Callable[[Data], bool] = lambda d: True) -> Make:
    """A table of chosen fields of the records that `only` lets through."""

    def table(data: list[Data]) -> str:
        chosen = last([d for d in data if only(d)], *keys)
        rows = [["" if d.get(f) is None else format(d[f], spec) for _, f, spec in columns] for d in chosen]
        return markdown([heading for heading, _, _ in columns], rows)

    return table
