"""How methods look: one colour and marker for each, in a light and a dark scheme."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Look(NamedTuple):
    """Family, colour on a light and on a dark ground, dash pattern of lines, marker."""

    family: str
    light: str
    dark: str
    dash: str = ""
    marker: str = "o"


BASE = {
    "full": Look("full", "#444444", "#bdbdbd", "6 4"),
    "oracle": Look("oracle", "#222222", "#dddddd", "2 3", "*"),
    "streamingllm": Look("evict", "#1b6ca8", "#6db3e8", "", "o"),
    "uniform": Look("summarise", "#667085", "#a6afbf", "", "s"),
    "h2o": Look("evict", "#007a87", "#4dc3cf", "", "D"),
    "keyformer": Look("evict", "#5e4fc0", "#a79cf2", "", "v"),
    "snapkv": Look("evict", "#2f4fd0", "#8ea6ff", "", "^"),
    "pyramidkv": Look("evict", "#8e44ad", "#cf95e6", "", "s"),
    "kcenter": Look("evict", "#b0307a", "#f08cc0", "", "D"),
    "subgen": Look("summarise", "#c0432b", "#f2917b", "", "o"),
    "balancekv": Look("summarise", "#a86200", "#e8b04e", "", "^"),
    "quest": Look("recall", "#728200", "#c5d14a", "", "s"),
    "clusterkv": Look("recall", "#1b7f45", "#5fd18f", "", "o"),
    "infinigen": Look("recall", "#7a5230", "#cfa27a", "", "v"),
}
SPARE = (("#6d4c41", "#c9a899"), ("#ad1457", "#f48fb1"), ("#33691e", "#aed581"), ("#283593", "#9fa8da"))
DASHES = ("5 3", "2 2", "8 3 2 3", "3 5")


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """A look for each method text: variants of a method share its colour and differ by dash."""
    found: dict[str, Look] = {}
    variants: dict[str, int] = {}
    unknown: dict[str, Look] = {}
    for method in sorted(set(methods), key=order):
        name, _, settings = method.partition(":")
        if name not in BASE and name not in unknown:
            unknown[name] = Look("other", *SPARE[len(unknown) % len(SPARE)])
        look = BASE.get(name) or unknown[name]
        if settings:
            look = look._replace(dash=DASHES[variants.get(name, 0) % len(DASHES)])
            variants[name] = variants.get(name, 0) + 1
        found[method] = look
    return found


def order(method: str) -> tuple[int, str]:
    """Methods in the order of the index of methods, variants after their method."""
    names = list(BASE)
    name = method.partition(":")[0]
    return (names.index(name) if name in names else len(names), method)
