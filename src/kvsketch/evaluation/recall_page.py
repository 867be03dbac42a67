"""The table of attention errors in the page on recall, written from the records.

    python -m kvsketch.evaluation.recall_page results/attention_error.jsonl docs/recall.md

What stands between the two marks of the page is replaced; the rest of the page stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvsketch.benchmark import records
from kvsketch.benchmark.table_makers import between, markdown
from kvsketch.evaluation.attention_error import KIND, PAPER_CLUSTERKV
from kvsketch.evaluation.experiment import FAILED
from kvsketch.texts import LONGEST_SPEECH

BEGIN = "<!-- written by python -m kvsketch.evaluation.recall_page results/attention_error.jsonl docs/recall.md -->"
END = "<!-- end of what is written -->"
# What the page speaks of; other records are left out. Old records do not name what all had in common.
SETTING = {"model": "qwen2.5-coder-0.5b", "tokens": 8192, "queries": 128, "dtype": "float32", "protocol": "prefix"}
ADDED = {"clusterkv": " (default: 20 per cluster, completion)", PAPER_CLUSTERKV: " (the paper's setting)"}

# The same protocol in a few lines of plain torch, on technical prose: what the methods are expected to reach.
PLAIN_TORCH = {
    "oracle": ".014 .033 .058",
    "clusterkv": ".029 .061 .104",
    "clusterkv:completion=false": ".037 .079 .135",
    "clusterkv:tokens_per_cluster=40": ".039 .082 .134",
    "clusterkv:tokens_per_cluster=80": ".054 .107 .175",
    PAPER_CLUSTERKV: ".061 .122 .201",
    "quest": ".055 .105 .170",
    "snapkv": ".125 .204 .278",
    "streamingllm": ".149 .239 .286",
    "uniform": ".297 .411 .505",
    "balancekv": ".290 .393 .476",
    "kcenter": ".375 .457 .517",
    "h2o": ".330 .418 .481",
}


def table(found: Iterable[dict[str, Any]]) -> str:
    """One row for each method: its errors, tokens read and bytes, from the last record of each rate."""
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for record in found:
        if record["kind"] == KIND and _belongs(record["data"]):
            rows.setdefault(record["data"]["method"], {})[record["data"]["rate"]] = record["data"]
    rates = sorted({rate for by_rate in rows.values() for rate in by_rate})
    rows = dict(sorted(rows.items(), key=lambda row: _mean(row[1].values())))
    heads = [f"1/{rate}" for rate in rates]
    header = ("family", "method", *heads, "plain torch, another text", f"tokens read, {', '.join(heads)}", "MB")
    return markdown(
        header,
        (
            (
                next(iter(by_rate.values()))["family"],
                f"`{method}`{ADDED.get(method, '')}",
                *(f"{by_rate[rate]['mean']:.3f}".lstrip("0") if rate in by_rate else "" for rate in rates),
                PLAIN_TORCH.get(method, ""),
                " ".join(f"{by_rate[rate]['tokens_read']}" for rate in rates if rate in by_rate),
                " ".join(f"{by_rate[rate]['bytes'] / 1e6:.0f}" for rate in rates if rate in by_rate),
            )
            for method, by_rate in rows.items()
        ),
    )


def _belongs(data: dict[str, Any]) -> bool:
    same = all(data.get(name, value) == value for name, value in SETTING.items())
    return same and data.get("sample", LONGEST_SPEECH) == LONGEST_SPEECH and FAILED not in data


def with_table(page: str, path: Path) -> str:
    """The page with the table of the records at `path` between its marks."""
    return between(page, BEGIN, END, table(records.read(path)))


def _mean(data: Iterable[dict[str, Any]]) -> float:
    errors = [each["mean"] for each in data]
    return sum(errors) / len(errors)


def main(arguments: list[str]) -> int:
    source, target = map(Path, arguments)
    target.write_text(with_table(target.read_text(encoding="utf-8"), source), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
