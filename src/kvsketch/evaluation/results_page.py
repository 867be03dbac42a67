"""The tables of docs/results.md, written from the records of the experiments.

    python -m kvsketch.evaluation.results_page results/eval docs/results.md

What stands between the two marks of the page is replaced; the rest of the page stays as it is. Of a cell that was
measured twice, such as one that failed before, the last record counts. Models, and ways to measure such as budgets of
equal bytes, have tables of their own.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvsketch.benchmark import records
from kvsketch.benchmark.table_makers import between, markdown
from kvsketch.evaluation.statistics import bootstrap_interval
from kvsketch.report.experiments import KINDS
from kvsketch.report.kinds import budget_of, model_name, variants
from kvsketch.report.observations import FEWEST, budget_value
from kvsketch.report.palette import order
from kvsketch.report.render import write

BEGIN = "<!-- written by python -m kvsketch.evaluation.results_page results/eval docs/results.md -->"
END = "<!-- end of what is written -->"
FAILED = "failed"
KIND = {kind.name: kind for kind in KINDS}
PROTOCOLS = {"prefix": "the last queries read the tokens before them", "balancekv": "BalanceKV's protocol"}
Data = dict[str, Any]


def latest(kind: str, path: Path) -> list[Data]:
    """Data and seed of the records of an experiment; of the same cell measured twice, the last."""
    return [{**each["data"], "seed": each.get("seed")} for each in KIND[kind].latest(records.read(path))]


def lines_tables(data: list[Data]) -> list[str]:
    """Right answers by number of lines: a table for each model and way to measure."""
    return _score_tables(data, "lines", "{} lines", "question", "each number of lines")


def needle_tables(data: list[Data]) -> list[str]:
    """Passkeys found by length of the prompt, over all depths: a table for each model and way to measure."""
    return _score_tables(data, "length", "{:,} tokens", "passkey", "each length")


def _score_tables(data: list[Data], by: str, head: str, noun: str, of_each: str) -> list[str]:
    found = []
    in_bytes = {model_name(each) for each in data if each.get("budgets_in") == "bytes"}
    for name, own in by_model(data).items():
        if name in in_bytes:
            name += ", budgets of equal tokens"
        sizes = sorted({each[by] for each in own})
        usual = {size: asked([each for each in own if each[by] == size]) for size in sizes}
        rows = [
            (
                *method(cells),
                *(score([each for each in cells if each[by] == size], usual[size]) for size in sizes),
                *memory(cells),
            )
            for cells in by_method(own)
        ]
        header = ("method", "budget", *(head.format(size) for size in sizes), *MEMORY)
        found.append(titled(f"{name}: {counted(usual.values(), noun)} for {of_each}", header, rows))
    return found


def recall_tables(data: list[Data]) -> list[str]:
    """Share of the true best tokens that a query reads, by budget."""
    found = []
    for (name, tokens, steps), own in grouped(data, _name, _field("tokens"), _field("steps")).items():
        budgets = sorted({each["budget"] for each in own}, key=budget_value)
        rows = []
        for (method,), cells in _ordered(grouped(own, _field("method"))):
            means = [_plain([each for each in cells if each["budget"] == b], "recall", ".2f") for b in budgets]
            rows.append((f"`{method}`", *means, _hits(cells)))
        texts = counted([len({each["sample"] for each in own})], "text")
        title = f"{name}: {tokens:,} tokens of {texts}, {steps} queries"
        found.append(titled(title, ("method", *budgets, "cluster hits at 1024, R = 1, 2"), rows))
    return found


def _hits(cells: Iterable[Data]) -> str:
    known = [each["cluster_hits"] for each in cells if each["budget"] == "1024" and "cluster_hits" in each]
    return " ".join(f"{statistics.mean(hits[steps] for hits in known):.0%}" for steps in (known[0] if known else ()))


def error_tables(data: list[Data]) -> list[str]:
    """Error of the attention output: mean over layers and seeds, deviation over seeds where there are several."""
    found = []
    keys = (_name, *map(_field, ("protocol", "tokens", "queries", "layers")))
    for (name, protocol, tokens, queries, layers), own in grouped(data, *keys).items():
        by_name = grouped(own, _field("method"))
        budgets = sorted({budget_of(each) for each in own}, key=budget_value, reverse=True)
        rows = [
            (f"`{method}`", *(_plain([e for e in cells if budget_of(e) == b], "mean", ".3f") for b in budgets))
            for (method,), cells in _ordered(by_name)
        ]
        seeds = counted([len({each["seed"] for each in cells}) for cells in by_name.values()], "seed")
        words = f"{PROTOCOLS.get(protocol, protocol)}, {tokens:,} tokens, {queries} queries, layers {layers}, {seeds}"
        found.append(titled(f"{name}: {words}", ("method", *budgets), rows))
    return found


def perplexity_tables(data: list[Data]) -> list[str]:
    """Mean deviation of perplexity from the full cache over texts and positions, by protocol."""
    found = []
    for name, own in by_model(data).items():
        places = sorted({_place(each) for each in own})
        columns = [[each for each in own if _place(each) == place] for place in places]
        rows = [
            (*method(cells), *(deviation([each for each in cells if _place(each) == place]) for place in places))
            for cells in by_method(own)
        ]
        texts = counted([len({each["sample"] for each in column}) for column in columns], "text")
        where = [f"{place} at {_positions(column)}" for place, column in zip(places, columns, strict=True)]
        found.append(titled(f"{name}: {texts}; {'; '.join(where)}", ("method", "budget", *places), rows))
    return found


def _place(data: Data) -> str:
    (place,) = KIND["perplexity"].settings(data)
    return place.removesuffix("".join(f", {words}" for words in variants(data)))


def _positions(data: Iterable[Data]) -> str:
    found = sorted({each["position"] for each in data})
    if len(found) <= 4:
        return ", ".join(f"{position:,}" for position in found)
    return f"{len(found)} positions from {found[0]:,} to {found[-1]:,}"


TABLES: tuple[tuple[str, str, str, Callable[[list[Data]], list[str]]], ...] = (
    ("Line retrieval: right answers", "lines.jsonl", "lines", lines_tables),
    ("The same questions through kvpress", "kvpress/lines.jsonl", "lines", lines_tables),
    ("Passkeys found, over all depths", "needle.jsonl", "needle", needle_tables),
    ("Recall of the true best tokens", "recall.jsonl", "recall", recall_tables),
    ("Error of the attention output", "attention_error.jsonl", "attention_error", error_tables),
    ("Perplexity above the full cache's", "perplexity.jsonl", "perplexity", perplexity_tables),
)


def tables(folder: Path) -> str:
    """All tables of the records of a folder."""
    parts = []
    for title, name, kind, make in TABLES:
        data = latest(kind, folder / name)
        parts += [f"### {title}", *make(data)] if data else []
    return "\n\n".join(parts)


def with_tables(page: str, folder: Path) -> str:
    """The page with the tables of the records in `folder` between its marks."""
    return between(page, BEGIN, END, tables(folder))


# what tables are made of


def grouped(data: Iterable[Data], *keys: Callable[[Data], Any]) -> dict[tuple[Any, ...], list[Data]]:
    """Data by the values of the keys, in the order of their first appearance."""
    found: dict[tuple[Any, ...], list[Data]] = {}
    for each in data:
        found.setdefault(tuple(key(each) for key in keys), []).append(each)
    return found


def _field(name: str) -> Callable[[Data], Any]:
    return lambda data: data.get(name)


def _name(data: Data) -> str:
    """The model and what differs from the common way to measure."""
    rival = [f"kvpress {data['kvpress']}"] if "kvpress" in data else []
    return ", ".join([model_name(data), *rival, *variants(data)])


def by_model(data: Iterable[Data]) -> dict[str, list[Data]]:
    """Data of each model and way to measure; the common way first, then budgets of equal bytes, then others."""
    models = grouped(data, model_name)
    groups = grouped((each for own in models.values() for each in sorted(own, key=_rank)), _name)
    return {name: cells for (name,), cells in groups.items()}


def _rank(data: Data) -> int:
    own = variants(data)
    return 2 if own and own != variants({"budgets_in": "bytes"}) else len(own)


def by_method(data: Iterable[Data]) -> list[list[Data]]:
    """Data of each method and budget, in the order of the index of methods."""
    return [cells for _, cells in _ordered(grouped(data, _field("method"), budget_of))]


def _ordered(groups: dict[tuple[Any, ...], list[Data]]) -> list[tuple[tuple[Any, ...], list[Data]]]:
    return sorted(groups.items(), key=lambda item: (order(item[0][0]), *map(budget_value, item[0][1:])))


def method(cells: Sequence[Data]) -> tuple[str, str]:
    return f"`{cells[0]['method']}`", budget_of(cells[0]) or "all"


def titled(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table under its title, without the columns that say nothing."""
    kept = [at for at, _ in enumerate(header) if any(row[at] for row in rows)]
    return f"#### {title}\n\n" + markdown([header[at] for at in kept], [[row[at] for at in kept] for row in rows])


MEMORY = ("tokens stored", "device bytes", "host bytes")


def memory(cells: Iterable[Data]) -> tuple[str, str, str]:
    """Slots as a share of the prompt's tokens, bytes as shares of the full cache's, in the mean."""
    right = [each for each in cells if FAILED not in each]
    # A batch is as long as its longest prompt, so a whole cache can hold more slots than the mean prompt has tokens.
    stored = [min(1.0, each["tokens_stored"] / each["prompt_tokens"]) for each in right if "prompt_tokens" in each]
    device = [each["device_bytes"] / each["full_bytes"] for each in right if each.get("full_bytes")]
    host = [each.get("host_bytes", 0) / each["full_bytes"] for each in right if each.get("full_bytes")]
    return _percent(stored), _percent(device), _percent(host) if any(host) else ""


def _percent(shares: Sequence[float]) -> str:
    return f"{statistics.mean(shares):.0%}" if shares else ""


def asked(cells: Iterable[Data]) -> int:
    """How many questions were asked."""
    return len({(each.get("seed"), each.get("sample")) for each in cells})


def score(cells: Sequence[Data], usual: int) -> str:
    """Mean score with its 95% interval, how many failed, and the number of questions where it is not the usual one."""
    text = interval([each["score"] for each in cells if FAILED not in each], "")
    fewer = f" (of {len(cells)})" if cells and len(cells) != usual else ""
    return f"{text}{_failed(cells)}{fewer}".strip()


def deviation(cells: Sequence[Data]) -> str:
    """Mean deviation of perplexity with its 95% interval, and how many failed."""
    return f"{interval([each['deviation'] for each in cells if FAILED not in each], '+')}{_failed(cells)}".strip()


def interval(values: Sequence[float], sign: str) -> str:
    """`0.86 [0.76, 0.94]`; the mean alone of too few values to draw from, nothing without values."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):{sign}.2f}"
    if len(values) < FEWEST:
        return mean
    low, high = bootstrap_interval(values, 0)
    return f"{mean} [{low:{sign}.2f}, {high:{sign}.2f}]"


def _plain(cells: Sequence[Data], field: str, form: str) -> str:
    """The mean, `± ` the deviation where there are several values, and how many failed."""
    values = [each[field] for each in cells if FAILED not in each]
    text = f"{statistics.mean(values):{form}}" if values else ""
    spread = f" ± {statistics.pstdev(values):{form}}" if len(values) > 1 else ""
    return f"{text}{spread}{_failed(cells)}".strip()


def _failed(cells: Sequence[Data]) -> str:
    failed = sum(FAILED in each for each in cells)
    if failed == len(cells):
        return f"{failed} failed" if failed else ""
    return f" ({failed} failed)" if failed else ""


def counted(counts: Iterable[int], noun: str) -> str:
    """`50 questions`, or `6 to 50 questions`."""
    low, high = min(found := list(counts)), max(found)
    number = f"{low}" if low == high else f"{low} to {high}"
    return f"{number} {noun}{'' if high == 1 else 's'}"


def main(arguments: list[str]) -> int:
    folder, target = map(Path, arguments)
    write(target, with_tables(target.read_text(encoding="utf-8"), folder).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
