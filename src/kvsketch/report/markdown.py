"""The report as Markdown: for each experiment, model and setting a table of methods by budgets, and the memory used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvsketch.report.contents import Contents, Section
from kvsketch.report.kinds import Kind
from kvsketch.report.observations import Row, budget_value
from kvsketch.report.overall import is_overall
from kvsketch.report.page import TITLE, lead
from kvsketch.report.palette import order

NOTE = (
    "Means with bootstrap 95% intervals; failed runs are counted beside the mean, not in it. Memory is measured, "
    "index and weights included, as `tokens stored / MB (share of the full cache)`; 'read' says how many tokens a "
    "query reads."
)


def report(contents: Contents, figures: Sequence[str] = ()) -> str:
    """The whole text; `figures` are the names of the PNG files beside it."""
    parts = [f"# {TITLE}", lead(contents), NOTE]
    for section in contents.sections:
        parts += _section(section, [name for name in figures if _stem(name).startswith(f"{section.kind.name}-")])
    for title, prefix in (("Do keys cluster, do values?", "clusterability-"),):
        found = [name for name in figures if _stem(name).startswith(prefix)]
        if found or contents.clusters:
            parts += [f"## {title}", *map(_figure, found), _cluster_table(contents)]
    return "\n\n".join([*parts, *_origin(contents)]) + "\n"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _stem(name: str) -> str:
    return name.rpartition("/")[2]


def _figure(name: str) -> str:
    return f"![{_stem(name).rpartition('.')[0].replace('-', ' ')}]({name})"


def _section(section: Section, figures: Sequence[str]) -> list[str]:
    kind = section.kind
    better = "Higher is better." if kind.higher_is_better else "Lower is better."
    parts = [f"## {kind.title}", f"{kind.text} Measure: {kind.measure}. {better}", *map(_figure, figures)]
    for model in dict.fromkeys(row.model for row in section.rows):
        own = [row for row in section.rows if row.model == model]
        settings = list(dict.fromkeys(row.setting for row in own))
        parts.append(f"### {model}")
        for setting in settings:
            body = _tables(kind, [row for row in own if row.setting == setting])
            open_at_once = is_overall(setting) or not is_overall(settings[0])
            parts += [f"**{setting}**" if setting else "", *body] if open_at_once else [_folded(setting, body)]
        parts += _failures(own)
    return [part for part in parts if part]


def _folded(setting: str, body: Sequence[str]) -> str:
    return "\n\n".join([f"<details><summary>{setting}</summary>", *body, "</details>"])


def _tables(kind: Kind, rows: Sequence[Row]) -> list[str]:
    """Results and memory, methods by budgets."""
    found = [_matrix(rows, lambda row: result(kind, row))]
    if any(each is not None for row in rows for each in (row.bytes, row.tokens_stored, row.tokens_read)):
        found.append(_matrix(rows, _memory))
    return found


def _matrix(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    budgets = sorted({row.budget for row in rows if row.budget}, key=budget_value)
    everything = any(not row.budget for row in rows)
    by_method: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_method.setdefault(row.method, {})[row.budget] = row
    columns = [*([""] if everything else []), *budgets]
    header = ["method", *(budget or "no budget" for budget in columns)]
    body = [
        [f"`{method}`", *(cell(own[budget]) if budget in own else "" for budget in columns)]
        for method, own in sorted(by_method.items(), key=lambda item: order(item[0]))
    ]
    return table(header, body)


def number(kind: Kind, value: float) -> str:
    """A value in the unit of its experiment."""
    return f"{100 * value:.1f}%" if kind.share else f"{value:.3g}"


def result(kind: Kind, row: Row) -> str:
    """`86.0% [76.0%, 94.0%]`, and how many runs failed."""
    failed = f"{row.failed} of {row.failed + row.count} failed" if row.failed else ""
    if row.mean is None:
        return failed or "-"
    text = number(kind, row.mean)
    if row.low is not None and row.high is not None:
        text += f" [{number(kind, row.low)}, {number(kind, row.high)}]"
    return f"{text}, {failed}" if failed else text


def _memory(row: Row) -> str:
    stored = "" if row.tokens_stored is None else f"{row.tokens_stored:,.0f}"
    read = "" if row.tokens_read is None else f"{row.tokens_read:,.0f} read"
    tokens = ", ".join(filter(None, (stored, read))) or "-"
    if row.device_bytes is None:
        return tokens
    host = f" + {row.host_bytes / 1e6:,.1f} host" if row.host_bytes else ""
    share = "" if row.share is None else f" ({row.share:.0%})"
    return f"{tokens} / {row.device_bytes / 1e6:,.1f}{host}{share}"


def _failures(rows: Sequence[Row]) -> list[str]:
    reasons = sorted({(row.method, row.budget, reason) for row in rows for reason in row.failures})
    return ["Failed:\n" + "\n".join(f"- `{method}` {budget}: {reason}" for method, budget, reason in reasons)] * bool(
        reasons
    )


def _cluster_table(contents: Contents) -> str:
    header = ("model and text", "layer", "query norm [95%]", "keys r(64)/r(1)", "values r(64)/r(1)")
    rows = []
    for model in contents.clusters:
        for layer in model["layers"]:
            norm = layer["query_norm"]
            falls = [layer["radius"][part].get("64") for part in ("keys", "values")]
            middle = f"{norm['mean']:.3f} [{norm['low']:.3f}, {norm['high']:.3f}]"
            rows.append([model["name"], str(layer["layer"]), middle, *("" if f is None else f"{f:.3f}" for f in falls)])
    return table(header, rows)


def _origin(contents: Contents) -> list[str]:
    header = ("file", "command", "records", "seeds", "model", "machine", "commit", "versions", "dates")
    rows = [
        [f"`{run[name]}`" if name == "command" else str(run[name]) for name in header] for run in contents.provenance
    ]
    remarks = "\n".join(f"- {remark}" for remark in contents.remarks)
    return ["## Where the numbers come from", table(header, rows), *([remarks] if remarks else [])]
