"""What the benchmark page computes from records; for each measurement the last one counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsketch_lab.records import Record
from kvsketch_lab.report.blocks import Code, table
from kvsketch_lab.report.contents import commit_text
from kvsketch_lab.report.kinds import Data
from kvsketch_lab.report.palette import BASE, name_of

COMPARED = ("tied weights", "ragged heads", "4 bits", "ragged heads, 4 bits")  # the sizes that have them all are shown
LLAMA_8B_SLOT = 8 * 2 * 128 * 2  # bytes of a token's keys and values in one layer: KV heads, both, size, bf16
SHAPE, DYNAMIC = "llama-3.1-8b", "DynamicCache, eager"


def last(data: list[Data], *keys: str) -> list[Data]:
    """The last for each value of the fields `keys`, which are None where it has none."""
    return list({tuple(d.get(k) for k in keys): dict.fromkeys(keys) | d for d in data}.values())


def usual_steps(data: list[Data]) -> list[Data]:
    """The decode steps that are compared with each other: of one shape, after its longest prompt."""
    own = [d for d in data if d.get("shape", SHAPE) == SHAPE]
    longest = max((d.get("prompt", 0) for d in own), default=0)
    return [d for d in own if d.get("prompt", 0) == longest or d["method"] == DYNAMIC]


def benchmark_of(record: Record) -> str:
    """What was measured: the kind of a record or, of single operations, which of them."""
    return str(record["data"]["operation"] if record["kind"] == "operation" else record["kind"])


def beside(data: list[Data], *keys: str) -> list[Data]:
    """One row for each of `keys`, with the data of its contenders by name."""
    rows: dict[tuple[Any, ...], Data] = {}
    for d in data:
        row = rows.setdefault(tuple(d.get(k) for k in keys), {k: d.get(k) for k in keys})
        row[d["contender"]] = d
    return list(rows.values())


def beside_sdpa(by_name: dict[str, Data]) -> float | None:
    """Time of the unweighted kernel over that of the better of SDPA's."""
    rivals = [by_name[name]["median_us"] for name in ("sdpa flash", "sdpa cudnn") if name in by_name]
    return by_name["unweighted"]["median_us"] / min(rivals) if rivals and "unweighted" in by_name else None


def sizes(data: list[Data]) -> list[Data]:
    """What contenders needed at each size (`by`), the time beside SDPA's, and how many times as fast as bf16 slots of
    equal heads 4 bits are.
    """
    cells: dict[tuple[int, int, str], dict[str, Data]] = {}
    for d in last(data, "batch", "slots", "cache", "contender"):
        cells.setdefault((d["batch"], d["slots"], d["cache"]), {})[d["contender"]] = d
    result = []
    for (batch, slots, cache), by in sorted(cells.items(), key=lambda cell: cell[0]):
        few = [
            by[COMPARED[0]]["median_us"] / by[name]["median_us"] for name in COMPARED[2:] if set(COMPARED) <= set(by)
        ]
        size = {"batch": batch, "slots": slots, "cache": cache, "by": by, "beside_sdpa": beside_sdpa(by)}
        result.append(size | dict(zip(("four_bits", "four_bits_ragged"), few or [None, None], strict=True)))
    return result


def steps(data: list[Data]) -> list[Data]:
    """The usual decode steps, the fastest of each batch first, beside the full cache's: how many times as fast, and how
    many times the tokens per second of its best batch.
    """
    result = last(usual_steps(data), "method", "batch")
    full = {d["batch"]: d["step_ms"] for d in result if d["method"] == "full" and d["step_ms"]}
    best = max((1e3 * batch / ms for batch, ms in full.items()), default=None)
    rows = []
    for d in sorted(result, key=lambda d: (d["batch"], d["step_ms"] or 1e9)):
        rate = 1e3 * d["batch"] / d["step_ms"] if d["step_ms"] else None
        beside_full = full.get(d["batch"]) if rate and d["cache_bytes"] else None
        rows.append(d | {
            "rate": rate, "times_best": rate / best if rate and best else None,
            "times_full": beside_full / d["step_ms"] if beside_full else None,
            "floor": None if _recalls(d["method"]) or not rate else d["floor_ms"] or None,
        })  # fmt: skip
    return rows


def _recalls(method: str) -> bool:
    """Whether a step reads a part of the cache, so that reading all of it is no floor."""
    look = BASE.get(name_of(method))
    return look is not None and look.family == "recall"


def longest(kernels: Sequence[Data], layers: int, most: int = 9) -> str:
    """Microseconds of a layer by kernel, the longest first."""
    return ", ".join(
        f"{k['kernel'].split('<')[0].removeprefix('void ')} {k['us'] / layers:.1f}" for k in kernels[:most]
    )


def machines(records: Sequence[Record], kinds: Sequence[str]) -> str:
    """The commands behind the benchmarks of these kinds, and where they ran."""
    rows = {}
    for record in (record for record in records if benchmark_of(record) in kinds):
        versions, machine = record.get("versions") or {}, record.get("machine") or {}
        named = (f"{name} {versions.get(name)}" for name in ("torch", "triton", "transformers"))
        rows[record.get("command")] = (
            Code(record.get("command") or "unknown"),
            machine.get("gpu") or f"none ({machine.get('processor')})",
            commit_text(record.get("commit")),
            ", ".join(named),
            str(record.get("time", ""))[:10],
        )
    return table(("command", "GPU", "commit", "versions", "date"), rows.values())
