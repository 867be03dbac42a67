"""The tables of docs/results.md, written from the records of the experiments.

    python -m kvsketch.evaluation.results_page results/eval docs/results.md

What stands between the two marks of the page is replaced; the rest of the page stays as it is.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvsketch.benchmark import records
from kvsketch.benchmark.table_makers import between, markdown
from kvsketch.evaluation.statistics import bootstrap_interval

BEGIN = "<!-- written by python -m kvsketch.evaluation.results_page results/eval docs/results.md -->"
END = "<!-- end of what is written -->"
FAILED = "failed"
Data = dict[str, Any]


def lines_table(data: list[Data]) -> str:
    """Right answers by number of lines, one row for each model, method and budget; failures are counted beside."""
    sizes = sorted({each["lines"] for each in data})
    rows = []
    for (model, method, budget), cells in _grouped(data, "model", "method", "budget").items():
        scores = [_share([each for each in cells if each["lines"] == size]) for size in sizes]
        held = [each["device_bytes"] / each["full_bytes"] for each in cells if FAILED not in each]
        memory = f"{sum(held) / len(held):.0%}" if held else ""
        rows.append((model, f"`{method}`", budget or "all", *scores, memory))
    return markdown(("model", "method", "budget", *(f"{size} lines" for size in sizes), "bytes"), rows)


def needle_table(data: list[Data]) -> str:
    """Passkeys found by model and length of the prompt, over all depths."""
    lengths = sorted({each["length"] for each in data})
    rows = [
        (model, f"`{method}`", budget or "all", *(_share([e for e in cells if e["length"] == n]) for n in lengths))
        for (model, method, budget), cells in _grouped(data, "model", "method", "budget").items()
    ]
    return markdown(("model", "method", "budget", *(f"{length:,} tokens" for length in lengths)), rows)


def recall_table(data: list[Data]) -> str:
    """Share of the true best tokens that a query reads, by budget."""
    budgets = sorted({int(each["budget"]) for each in data})
    rows = []
    for (method,), cells in _grouped(data, "method").items():
        by_budget = {int(each["budget"]): each for each in cells if FAILED not in each}
        found = [f"{by_budget[b]['recall']:.2f}" if b in by_budget else "" for b in budgets]
        hits: dict[str, float] = next(
            (each["cluster_hits"] for each in cells if each["budget"] == "1024" and "cluster_hits" in each), {}
        )
        rows.append((f"`{method}`", *found, " ".join(f"{hit:.0%}" for hit in hits.values())))
    return markdown(("method", *map(str, budgets), "cluster hits at 1024, R = 1, 2"), rows)


def error_table(data: list[Data]) -> str:
    """Error of the attention output in BalanceKV's protocol: mean over layers and seeds, deviation over seeds."""
    own = [each for each in data if each["protocol"] == "balancekv" and FAILED not in each]
    rates = sorted({each["rate"] for each in own})
    rows = []
    for (method, model), cells in _grouped(own, "method", "model").items():
        found = [[each["mean"] for each in cells if each["rate"] == rate] for rate in rates]
        rows.append((f"`{method}`", model, *(f"{statistics.mean(v):.3f} ± {statistics.pstdev(v):.3f}" for v in found)))
    return markdown(("method", "model", *(f"1/{rate}" for rate in rates)), rows)


def perplexity_table(data: list[Data]) -> str:
    """Mean deviation of perplexity from the full cache over texts and positions, by protocol."""
    protocols = sorted({each["protocol"] for each in data})
    rows = []
    for (method, budget), cells in _grouped(data, "method", "budget").items():
        found = [[e["deviation"] for e in cells if e["protocol"] == name and FAILED not in e] for name in protocols]
        rows.append((f"`{method}`", budget or "all", *(_mean(values) for values in found)))
    return markdown(("method", "budget", *protocols), rows)


TABLES = (
    ("Line retrieval: right answers; 1.5B 50 questions each, 0.5B 6 with the answer begun", "lines.jsonl", lines_table),
    ("The same questions through kvpress 0.5.5", "kvpress/lines.jsonl", lines_table),
    ("Passkeys found, over all depths", "needle.jsonl", needle_table),
    ("Recall of the true best tokens, 8,192 tokens", "recall.jsonl", recall_table),
    ("Error of the attention output, BalanceKV's protocol, ten seeds", "attention_error.jsonl", error_table),
    ("Perplexity above the full cache's, four texts", "perplexity.jsonl", perplexity_table),
)


def tables(folder: Path) -> str:
    """All tables of the records of a folder."""
    parts = []
    for title, name, make in TABLES:
        data = [record["data"] for record in records.read(folder / name)]
        if data:
            parts.append(f"### {title}\n\n{make(data)}")
    return "\n\n".join(parts)


def with_tables(page: str, folder: Path) -> str:
    """The page with the tables of the records in `folder` between its marks."""
    return between(page, BEGIN, END, tables(folder))


def _grouped(data: Iterable[Data], *keys: str) -> dict[tuple[Any, ...], list[Data]]:
    found: dict[tuple[Any, ...], list[Data]] = {}
    for each in data:
        found.setdefault(tuple(each[key] for key in keys), []).append(each)
    return found


def _share(cells: list[Data]) -> str:
    """Mean score with its 95% interval, and how many failed."""
    scores = [each["score"] for each in cells if FAILED not in each]
    failed = f" ({len(cells) - len(scores)} failed)" if len(scores) < len(cells) else ""
    if not scores:
        return failed.strip(" ()") if cells else ""
    low, high = bootstrap_interval(scores, 0)
    return f"{sum(scores) / len(scores):.2f} [{low:.2f}, {high:.2f}]{failed}"


def _mean(values: list[float]) -> str:
    if not values:
        return ""
    low, high = bootstrap_interval(values, 0)
    return f"{sum(values) / len(values):+.2f} [{low:+.2f}, {high:+.2f}]"


def main(arguments: list[str]) -> int:
    folder, target = map(Path, arguments)
    target.write_text(with_tables(target.read_text(encoding="utf-8"), folder), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
