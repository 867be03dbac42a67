"""Tables of `kvsketch eval bits`: quantised keys and values, the parts of the codec, and what users have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import FAILED, Record, interval_text, latest, mean
from kvsketch_lab.report import blocks
from kvsketch_lab.report.equal_bytes import held_out, tasks_of
from kvsketch_lab.report.evidence import question_of
from kvsketch_lab.report.kinds import difference_of, estimate_of, model_name
from kvsketch_lab.report.ranking import is_unseen

Means = Mapping[str, Mapping[str, float]]  # store -> what was measured -> its mean over texts
CODED = (8, 4, 3, 2)
WITHOUT = {
    "complete": "full:bits={}",
    "no center": "codec:bits={}:center=no",
    "no rotation": "codec:bits={}:rotation=no",
    "neither": "codec:bits={}:center=no:rotation=no",
    "first tokens quantised": "codec:bits={}:exact=no",
}
BESIDE = (
    "full", "full:bits=8", "fp8", "full:bits=auto", "full:bits=4", "quanto:bits=4", "hqq:bits=4", "full:bits=3",
    "full:bits=2", "quanto:bits=2", "hqq:bits=2",
)  # fmt: skip
BASIS = ":basis="
NAMES = {"quanto": "QuantizedCache, quanto", "hqq": "QuantizedCache, hqq"}


def tables(records: Iterable[Record]) -> str:
    """All tables of every model, under a heading each; empty without records."""
    known = [each["data"] for each in latest(each for each in records if each["kind"] == "bits")]
    by_model = grouped((data for data in known if FAILED not in data), model_name)
    return "\n\n".join(_of_model(name, data) for name, data in by_model.items())


def _of_model(name: str, data: Sequence[dict[str, Any]]) -> str:
    means = _means(data)
    texts, tokens = len({each["sample"] for each in data}), data[0]["tokens"]
    own = [each["full_again_nll"] for each in data if "full_again_nll" in each]
    full = f"; -log p of the passage with the full cache is {mean(own):.3f}" if own else ""
    parts = [
        f"### {name}",
        f"{'One text' if texts == 1 else f'Means over {texts} texts'} of {tokens:,} tokens{full}.",
        "Keys and values, keys alone, values alone:",
        _by_bits(means),
        "KL on the repeated passage (attention error in brackets), without parts of the quantiser:",
        _by_parts(means),
        "Compared with transformers and torch:",
        _beside(means),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


def chosen(data: Sequence[Mapping[str, Any]]) -> str:
    """Stores side by side, of every model, without attention errors; empty without measurements."""
    measured = [dict(each) for each in data if each["kind"] == "bits" and FAILED not in each]
    rows = []
    for name, own in grouped(measured, model_name).items():
        means, texts = _means(own), f"{len({each['sample'] for each in own})} of {own[0]['tokens']:,} tokens"
        for store, held in means.items():
            share = f"{held['device_bytes'] / held['full_bytes']:.1%}"
            rows.append([name, texts, blocks.Code(store), *_divergences(means, store), share])
    head = ["model", "held-out texts", "cache", "KL", "KL, repeated passage", "-log p, repeated passage", "bytes"]
    return blocks.table(head, rows) if rows else ""


def learned(records: Iterable[Record], model: str) -> str:
    """Right answers of methods with learned directions beside those of the same method with random ones, and paired
    differences; empty without records.
    """
    own = [each for each in held_out(records) if is_unseen(each) and model_name(each["data"]) == model]
    by = grouped(own, lambda each: (str(each["data"]["method"]), str(each["data"].get("budget") or "")))
    lines, tasks = [], ["lines 200", "lines 400", "RULER 4,000"]
    for (method, share), some in sorted(by.items(), key=lambda item: (item[0][0], -len(item[0][1]), item[0][1])):
        plain, _, basis = method.rpartition(BASIS)
        if not basis or (plain, share) not in by:
            continue
        asked = {name: grouped(by[name, share], lambda each: tasks_of(each)[0]) for name in (method, plain)}
        held = mean([each["data"]["device_bytes"] / each["data"]["full_bytes"] for each in some])
        row = [blocks.Code(method), f"{held:.1%}"]
        for task in tasks:
            ours = asked[method].get(task, [])
            same = {question_of(each) for each in ours}
            theirs = [each for each in asked[plain].get(task, []) if question_of(each) in same]
            if not theirs:
                row += ["", ""]
                continue
            found = difference_of(ours, theirs)
            told = " / ".join(f"{estimate_of(each).value:.2f}" for each in (ours, theirs))
            row += [f"{told} ({len(theirs)})", interval_text(found, "+.2f") if found else ""]
        lines.append(row)
    heads = [part for task in tasks for part in (f"{task}: learned / random (questions)", "difference")]
    return blocks.table(["method", "bytes", *heads], lines) if lines else ""


def _divergences(means: Means, store: str) -> list[str]:
    return [
        _told(means, store, what, form) for what, form in (("kl", ".4f"), ("again_kl", ".4f"), ("again_nll", ".3f"))
    ]


def _means(data: Sequence[dict[str, Any]]) -> Means:
    result: dict[str, dict[str, list[float]]] = {}
    for each in data:
        for key, value in each.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                result.setdefault(_short(each["method"]), {}).setdefault(key, []).append(value)
    return {store: {key: mean(values) for key, values in by.items()} for store, by in result.items()}


def _short(store: str) -> str:
    """A text form without the 16 bits that are the default."""
    return ":".join(part for part in store.split(":") if part not in ("key_bits=16", "value_bits=16"))


def _by_bits(means: Means) -> str:
    kinds = ("bits", "key_bits", "value_bits")
    rows = []
    for bits in CODED:
        cells = [
            " / ".join(_told(means, f"full:{kind}={bits}", what, form) for kind in kinds)
            for what, form in (("error", ".3f"), ("kl", ".4f"), ("again_kl", ".4f"))
        ]
        rows.append([str(bits), *cells])
    return _table(["bits", "attention error", "KL", "KL, repeated passage"], rows)


def _by_parts(means: Means) -> str:
    def told(store: str) -> str:
        error = _told(means, store, "error", ".3f")
        return f"{_told(means, store, 'again_kl', '.4f')} ({error})" if _measured(error) else error

    rows = [[str(bits), *(told(form.format(bits)) for form in WITHOUT.values())] for bits in CODED]
    return _table(["bits", *WITHOUT], rows)


def _beside(means: Means) -> str:
    rows = []
    for store in (store for store in BESIDE if store in means):
        name, _, bits = store.partition(":bits=")
        label = f"{NAMES[name]}, {bits} bits" if name in NAMES else blocks.Code(store)
        held = means[store]
        rows.append(
            [
                label,
                _told(means, store, "error", ".3f"),
                *_divergences(means, store),
                f"{held['device_bytes'] / held['full_bytes']:.1%}",
                _told(means, store, "step_ms", ".1f"),
                _told(means, store, "captured_ms", ".2f"),
            ]
        )
    head = ["cache", "attention error", "KL", "KL, repeated passage", "-log p, repeated passage", "bytes"]
    return _table([*head, "eager step, ms", "captured step, ms"], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    """The rows and columns in which something was measured."""
    rows = [row for row in rows if any(map(_measured, row[1:]))]
    wanted = [0, *(at for at in range(1, len(head)) if any(_measured(row[at]) for row in rows))]
    return blocks.table([head[at] for at in wanted], [[row[at] for at in wanted] for row in rows])


def _measured(cell: str) -> bool:
    return bool(cell.strip("-/ "))


def _told(means: Means, store: str, what: str, form: str) -> str:
    value = means.get(store, {}).get(what)
    return "-" if value is None else f"{value:{form}}"
