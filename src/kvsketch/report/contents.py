"""Everything a report shows, computed once from the records: plain values that the writers put into words and lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from kvsketch.report import pictures
from kvsketch.report.experiments import KINDS
from kvsketch.report.kinds import Data, Kind, latest
from kvsketch.report.observations import Observation, Row, aggregate, budget_value
from kvsketch.report.overall import is_overall, together
from kvsketch.report.palette import looks, order
from kvsketch.report.reading import Folder, Record, provenance

CLUSTERABILITY, TOKEN_LIFE = "clusterability", "token_life"
PAIR = {  # keys and values beside the methods
    "keys": {"family": "", "light": "#1b6ca8", "dark": "#6db3e8", "dash": "", "marker": "o"},
    "values": {"family": "", "light": "#c0432b", "dark": "#f2917b", "dash": "", "marker": "s"},
}
Measured = tuple[Kind, list[Observation]]


@dataclasses.dataclass(frozen=True)
class Section:
    """One experiment and its rows."""

    kind: Kind
    rows: list[Row]


@dataclasses.dataclass(frozen=True)
class Contents:
    sections: list[Section]
    needle: list[Data]
    positions: list[Data]
    clusters: list[Data]
    documents: list[Data]
    provenance: list[Data]
    remarks: list[str]
    records: int

    @property
    def methods(self) -> list[str]:
        found = {row.method for section in self.sections for row in section.rows}
        found |= {life["method"] for document in self.documents for life in document["lives"]}
        return sorted(found, key=order)

    @property
    def models(self) -> list[str]:
        """Those of which more was measured first."""
        counts = {each["name"].partition(";")[0]: 0 for each in (*self.clusters, *self.documents)}
        for row in (row for section in self.sections for row in section.rows):
            counts[row.model] = counts.get(row.model, 0) + row.count
        return sorted(counts, key=lambda model: (-counts[model], model))


def gather(folder: Folder) -> Contents:
    """What the records of a folder say."""
    measured = [_measured(kind, folder.records) for kind in KINDS]
    known = [(kind, found) for kind, found in measured if found]
    used = [record for record in folder.records if _is_shown(record)]
    of = {kind.name: found for kind, found in known}
    estimates = {kind.name: kind.estimate for kind, _ in known}
    return Contents(
        sections=[Section(kind, _ordered(aggregate(found, kind.estimate))) for kind, found in known],
        needle=pictures.needle_maps(each for each in of.get("needle", []) if not is_overall(each.setting)),
        positions=pictures.by_position(of.get("perplexity", []), estimates.get("perplexity")),
        clusters=pictures.clusters(_of_kind(folder.records, CLUSTERABILITY)),
        documents=pictures.documents(_of_kind(folder.records, TOKEN_LIFE)),
        provenance=provenance(used),
        remarks=[*folder.remarks, *_failed_pictures(folder.records), *_left_out(folder.records)],
        records=len(used),
    )


def _measured(kind: Kind, records: Iterable[Record]) -> Measured:
    """The observations of an experiment; of the same measurement made twice, the last counts."""
    found = [each for record in kind.latest(records) for each in kind.observations(record)]
    return kind, together(kind, found) if kind.overall else found


def _of_kind(records: Iterable[Record], name: str) -> list[Record]:
    return [record for record in records if record["kind"].replace("-", "_") == name]


def _is_shown(record: Record) -> bool:
    return record["kind"].replace("-", "_") in (CLUSTERABILITY, TOKEN_LIFE) or any(kind.owns(record) for kind in KINDS)


def _failed_pictures(records: Sequence[Record]) -> list[str]:
    """What failed of the experiments that have no rows to count it in."""
    drawn = latest(record for name in (CLUSTERABILITY, TOKEN_LIFE) for record in _of_kind(records, name))
    failed = {
        f"{record['file']}: {record['data'].get('method', '')} {record['data'].get('budget', '')} failed: "
        f"{record['data']['failed']}"
        for record in drawn
        if record["data"].get("failed")
    }
    return sorted(failed)


def _left_out(records: Sequence[Record]) -> list[str]:
    """Kinds of records that no section shows, such as benchmarks."""
    counts: dict[tuple[str, str], int] = {}
    for record in records:
        if not _is_shown(record):
            counts[record["file"], record["kind"]] = counts.get((record["file"], record["kind"]), 0) + 1
    return [
        f"{file}: {count} records of kind {kind!r} are of no experiment that this report shows"
        for (file, kind), count in sorted(counts.items())
    ]


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """Rows by model, setting, method and budget."""
    return sorted(
        rows, key=lambda row: (row.model, setting_order(row.setting, row.variant), order(row.method), _size(row))
    )


def _size(row: Row) -> float:
    return budget_value(row.budget)


def setting_order(setting: str, variant: str = "") -> tuple[int, str, list[tuple[float, str]]]:
    """Means over everything first, of the usual way to measure before others; then by the numbers in the text, so that
    `lines 200` precedes `lines 1,000`.
    """
    place = 0 if is_overall(setting) else 1 if setting.startswith("group") else 2
    return place, "" if place else variant, [_part(word) for word in setting.split()]


def _part(word: str) -> tuple[float, str]:
    digits = word.strip(",").replace(",", "")
    return (float(digits), "") if digits.replace(".", "", 1).isdigit() else (-1.0, word)


def as_data(contents: Contents) -> Data:
    """The contents as the page embeds them."""
    places = {model: place for place, model in enumerate(contents.models)}
    group = {
        "kind": "perplexity",
        "id": "positions",
        "title": "Perplexity by position",
        "text": "Deviation from the full cache in each stretch of the text, with 95% intervals.",
        "measure": "deviation of perplexity",
        "entries": contents.positions,
    }
    return _rounded(
        {
            "experiments": [_section(section) for section in contents.sections],
            "methods": {**{m: look._asdict() for m, look in looks(contents.methods).items()}, **PAIR},
            "methods_in_order": contents.methods,
            "models": contents.models,
            "needle": contents.needle,
            "positions": [group] if contents.positions else [],
            "clusters": sorted(contents.clusters, key=lambda each: places[each["name"].partition(";")[0]]),
            "documents": sorted(contents.documents, key=lambda each: places[each["name"].partition(";")[0]]),
            "provenance": contents.provenance,
            "remarks": contents.remarks,
        }
    )


def _section(section: Section) -> Data:
    kind = section.kind
    variants = {row.setting: row.variant for row in section.rows}
    places = sorted(variants, key=lambda setting: setting_order(setting, variants[setting]))
    names = ("title", "text", "measure", "higher_is_better", "logarithmic", "share")
    rows = [
        {
            **dataclasses.asdict(row),
            "share": row.share,
            "budget_value": budget_value(row.budget) if row.budget else 1e12,
            "setting_order": places.index(row.setting),
            "overall": is_overall(row.setting),
            "tells_failures": _tells_failures(kind, row, section.rows),
        }
        for row in section.rows
    ]
    id = kind.name.replace("_", "-")
    return {"kind": kind.name, "id": id, "rows": rows, **{name: getattr(kind, name) for name in names}}


def _tells_failures(kind: Kind, row: Row, rows: Sequence[Row]) -> bool:
    """Whether the failures of a row are told where each is told once: a failed run counts in several settings."""
    if kind.overall or not any(is_overall(each.setting) for each in rows):
        return not is_overall(row.setting)
    return is_overall(row.setting)


def _rounded(value: Any) -> Any:
    """Six significant digits are more than any interval here deserves."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value
