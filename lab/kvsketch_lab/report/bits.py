"""Tables of `kvsketch eval bits`: quantised keys and values, the parts of the codec, and what users have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import FAILED, Record, latest, mean
from kvsketch_lab.report import blocks
from kvsketch_lab.report.kinds import model_name

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
