"""The report in blocks: for each experiment its figures, and for each model a table of methods and budgets by settings.

Every table shows memory next to the results, because methods with the same budget may hold different bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvsketch_lab.records import budget_value
from kvsketch_lab.report.blocks import Block, Code, Folded, Heading, Picture, Points, Table, Words
from kvsketch_lab.report.contents import Contents, Section
from kvsketch_lab.report.kinds import Kind
from kvsketch_lab.report.palette import order
from kvsketch_lab.report.rows import Row, is_overall, known_mean

TITLE = "What a smaller KV cache costs"
MOST_COLUMNS = 8
ONE_QUESTION = "*"
MEMORY = ("tokens stored", "tokens read", "device bytes", "host bytes")
NOTE = (
    "Means with 95% intervals (percentile bootstrap over texts, none of fewer than three); failed runs are counted "
    "beside the mean, not in it; "
    "(27) marks a value of fewer samples than others of its column have, * one that rests on a single question or "
    "text. Memory is measured, index and weights included; bytes are shares of the full cache's, in the mean over the "
    "columns. Methods at one budget may hold different bytes: pyramidkv gives its upper layers less, recall methods "
    "keep everything. The built-in models (smollm2-135m, qwen2.5-coder-0.5b and so on) are 4-bit files, unpacked to "
    "the dtype named beside them."
)


def body(contents: Contents, figures: Sequence[str] = ()) -> list[Block]:
    """The whole report; `figures` are the paths of the figures beside it."""
    result: list[Block] = [Heading(1, TITLE), Words(lead(contents)), Words(NOTE), *_glance(contents)]
    for section in contents.sections:
        result += _section(section, contents.models, _named(figures, f"{section.kind.name}-"))
    if contents.clusters:
        pictures = _named(figures, "clusterability-")
        result += [Heading(2, "Do keys cluster, do values?"), *pictures, _cluster_table(contents)]
    header = ("file", "command", "records", "seeds", "model", "machine", "commit", "versions", "dates")
    rows = [
        [Code(run[name]) if name == "command" else str(run[name]) for name in header] for run in contents.provenance
    ]
    result += [Heading(2, "Where the numbers come from"), Table(header, rows)]
    return [*result, *([Points(contents.remarks)] if contents.remarks else [])]


def lead(contents: Contents) -> str:
    """What the report covers, in a sentence."""
    models = ", ".join(dict.fromkeys(contents.models))
    return f"{contents.records:,} records of {len(contents.methods)} methods on {models or 'no model'}."


def _glance(contents: Contents) -> list[Block]:
    """For each model a row for each method and a column for each experiment, at a middle budget."""
    found: list[Block] = []
    for model in contents.models:
        columns = [(section.kind, rows) for section in contents.sections if (rows := _one_budget(section, model))]
        methods = sorted({row.method for _, rows in columns for row in rows}, key=order)
        lines = []
        for method in methods:
            own = [next((row for row in rows if row.method == method), None) for _, rows in columns]
            if len(columns) > 2 and sum(row is not None for row in own) < 2:
                continue  # a variant that one experiment alone has tried
            cells = [
                result(kind, row, max(each.count for each in rows)) if row else ""
                for (kind, rows), row in zip(columns, own, strict=True)
            ]
            share = next((row.device_share for row in own if row and row.device_share is not None), None)
            lines.append([Code(method), *cells, "" if share is None else f"{share:.0%}"])
        heads = [f"{kind.title}, {_budget(rows)} ({rows[0].setting})" for kind, rows in columns]
        if lines:
            table = Table(["method", *heads, "device bytes"], lines).without_empty_columns()
            found += [Heading(3, f"At a glance: {model}"), table]
    words = Words(
        "One number for each method and experiment, at a middle budget of those that most methods were tried at; "
        "device bytes are those of the first experiment that has them. The sections below have all budgets."
    )
    return [Heading(2, "At a glance"), words, *found] if found else []


def _one_budget(section: Section, model: str) -> list[Row]:
    """The rows of one setting (the overall one if there is one) at one budget, with those of the full cache."""
    measured = [row for row in section.rows if row.model == model and row.mean is not None]
    settings = Counter(row.setting for row in measured if row.budget)
    if not settings:
        return []
    setting = max(settings, key=lambda name: (is_overall(name), settings[name]))
    rows = [row for row in measured if row.setting == setting]
    budgets = Counter(row.budget for row in rows if row.budget)
    usual = [text for text in budgets if budgets[text] >= 0.8 * max(budgets.values())]
    budget = sorted(usual, key=budget_value)[len(usual) // 2]
    return [row for row in rows if row.budget in ("", budget)]


def _budget(rows: Sequence[Row]) -> str:
    return next(row.budget for row in rows if row.budget)


def _named(figures: Sequence[str], prefix: str) -> list[Picture]:
    return [Picture(name) for name in figures if name.rpartition("/")[2].startswith(prefix)]


def _section(section: Section, models: Sequence[str], figures: Sequence[Picture]) -> list[Block]:
    kind = section.kind
    better = "Higher is better." if kind.higher_is_better else "Lower is better."
    result: list[Block] = [Heading(2, kind.title), Words(f"{kind.text} Measure: {kind.measure}. {better}"), *figures]
    for model in models:
        own = [row for row in section.rows if row.model == model]
        for variant in dict.fromkeys(row.variant for row in own):
            rows = [row for row in own if row.variant == variant]
            result += [
                Heading(3, ", ".join(filter(None, (model, variant)))),
                *result_tables(kind, rows),
                *_failures(rows),
            ]
    return result


def result_tables(kind: Kind, rows: Sequence[Row]) -> list[Block]:
    """Tables of one model and variant; if there are many settings, all but the overall ones are folded."""
    settings = list(dict.fromkeys(row.setting for row in rows))
    if len(settings) <= MOST_COLUMNS:
        return [result_table(kind, rows, settings)]
    first = [setting for setting in settings if is_overall(setting)]
    rest = [setting for setting in settings if setting not in first]
    parts = [rest[at : at + MOST_COLUMNS] for at in range(0, len(rest), MOST_COLUMNS)]
    shown: list[Block] = [result_table(kind, rows, first)] if first else []
    return [*shown, *(Folded(f"{part[0]} to {part[-1]}", [result_table(kind, rows, part)]) for part in parts)]


def result_table(kind: Kind, rows: Sequence[Row], settings: Sequence[str]) -> Table:
    """A row for each method and budget, a column for each setting, and the memory."""
    own = [row for row in rows if row.setting in settings]
    most = {setting: max(row.count for row in own if row.setting == setting) for setting in settings}
    by_method: dict[tuple[str, str], dict[str, Row]] = {}
    for row in own:
        by_method.setdefault((row.method, row.budget), {})[row.setting] = row
    body = [
        [
            Code(method),
            budget or "all",
            *(result(kind, found[s], most[s]) if s in found else "" for s in settings),
            *memory(list(found.values())),
        ]
        for (method, budget), found in sorted(
            by_method.items(), key=lambda item: (order(item[0][0]), budget_value(item[0][1]))
        )
    ]
    variant = own[0].variant
    heads = [setting.removesuffix(f", {variant}") if variant else setting for setting in settings]
    return Table(["method", "budget", *heads, *MEMORY], body).without_empty_columns()


def result(kind: Kind, row: Row, most: int) -> str:
    """`0.86 [0.76, 0.94]`, the number of samples if it is smaller than usual, and how many runs failed."""
    failed = f"{row.failed} of {row.failed + row.count} failed" if row.failed else ""
    if row.mean is None:
        return failed or "-"
    text = f"{row.mean:{kind.form}}"
    if row.low is not None and row.high is not None:
        text += f" [{row.low:{kind.form}}, {row.high:{kind.form}}]"
    if row.count == 1:
        text += ONE_QUESTION
    elif row.count < most and not row.failed:
        text += f" ({row.count})"
    return f"{text}, {failed}" if failed else text


def memory(rows: Sequence[Row]) -> list[str]:
    """Tokens stored and read, and bytes as shares of the full cache's (in MB if those are not known)."""
    tokens = [known_mean([getattr(row, name) for row in rows]) for name in ("tokens_stored", "tokens_read")]
    device, host = (known_mean([getattr(row, name) for row in rows]) for name in ("device_share", "host_share"))
    held = known_mean([row.device_bytes for row in rows])
    known = f"{device:.0%}" if device is not None else f"{held / 1e6:,.1f} MB" if held is not None else ""
    return [*("" if each is None else f"{each:,.0f}" for each in tokens), known, "" if host is None else f"{host:.0%}"]


def _failures(rows: Sequence[Row]) -> list[Block]:
    # The first sentence is the reason; an out-of-memory error goes on with a list of processes.
    reasons = sorted({(r.method, r.budget, reason.partition(". ")[0]) for r in rows for reason in r.failures})
    listed = Points([f"{method} {budget}: {reason}" for method, budget, reason in reasons])
    return [Folded("What failed", [listed])] if reasons else []


def _cluster_table(contents: Contents) -> Table:
    header = ("model and text", "layer", "query norm [95%]", "keys r(64)/r(1)", "values r(64)/r(1)")
    rows = []
    for model in contents.clusters:
        for layer in model["layers"]:
            norm = layer["query_norm"]
            falls = [layer["radius"][part].get("64") for part in ("keys", "values")]
            middle = f"{norm['mean']:.3f} [{norm['low']:.3f}, {norm['high']:.3f}]"
            rows.append([model["name"], str(layer["layer"]), middle, *("" if f is None else f"{f:.3f}" for f in falls)])
    return Table(header, rows)
