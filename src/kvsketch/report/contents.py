"""Everything a report shows, computed once from the records: plain values that the writers put into words and lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from kvsketch.report import pictures
from kvsketch.report.experiments import KINDS
from kvsketch.report.kinds import Data, Kind
from kvsketch.report.observations import Observation, Row, aggregate, budget_value
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
        named = {row.model for section in self.sections for row in section.rows}
        return sorted(named | {each["name"].partition(";")[0] for each in (*self.clusters, *self.documents)})


def gather(folder: Folder) -> Contents:
    """What the records of a folder say."""
    measured = [_measured(kind, folder.records) for kind in KINDS]
    known = [(kind, found) for kind, found in measured if found]
    used = [record for record in folder.records if _is_shown(record)]
    of = {kind.name: found for kind, found in known}
    estimates = {kind.name: kind.estimate for kind, _ in known}
    return Contents(
        sections=[Section(kind, _ordered(kind, aggregate(found, kind.estimate))) for kind, found in known],
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
    own = {kind.identity(record): record for record in records if kind.owns(record)}
    return kind, [each for record in own.values() for each in kind.observations(record)]


def _of_kind(records: Iterable[Record], name: str) -> list[Record]:
    return [record for record in records if record["kind"].replace("-", "_") == name]


def _is_shown(record: Record) -> bool:
    return record["kind"].replace("-", "_") in (CLUSTERABILITY, TOKEN_LIFE) or any(kind.owns(record) for kind in KINDS)


def _failed_pictures(records: Sequence[Record]) -> list[str]:
    """What failed of the experiments that have no rows to count it in."""
    drawn = [record for name in (CLUSTERABILITY, TOKEN_LIFE) for record in _of_kind(records, name)]
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


def _ordered(kind: Kind, rows: Sequence[Row]) -> list[Row]:
    """Rows by model, setting, method and budget; where there is a single setting, nothing stands for all of them."""
    settings: dict[str, set[str]] = {}
    for row in rows:
        settings.setdefault(row.model, set()).add(row.setting)
    single = {model for model, found in settings.items() if kind.overall and len(found) == 2}
    kept = [row for row in rows if row.model not in single or not is_overall(row.setting)]
    return sorted(kept, key=lambda row: (row.model, setting_order(row.setting), order(row.method), _size(row)))


def _size(row: Row) -> float:
    return budget_value(row.budget)


def is_overall(setting: str) -> bool:
    """Whether a setting stands for all others of its experiment; of the forms of ROUGE the one of the paper does."""
    return setting.startswith(("mean", "average", "all", "ROUGE-2"))


def setting_order(setting: str) -> tuple[int, list[tuple[float, str]]]:
    """Means over everything first, then by the numbers in the text, so that `lines 200` precedes `lines 1,000`."""
    place = 0 if is_overall(setting) else 1 if setting.startswith("group") else 2
    return place, [_part(word) for word in setting.split()]


def _part(word: str) -> tuple[float, str]:
    digits = word.strip(",").replace(",", "")
    return (float(digits), "") if digits.replace(".", "", 1).isdigit() else (-1.0, word)


def as_data(contents: Contents) -> Data:
    """The contents as the page embeds them."""
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
            "needle": contents.needle,
            "positions": [group] if contents.positions else [],
            "clusters": contents.clusters,
            "documents": contents.documents,
            "provenance": contents.provenance,
            "remarks": contents.remarks,
        }
    )


def _section(section: Section) -> Data:
    kind = section.kind
    settings = {row.setting: place for place, row in enumerate(section.rows)}
    names = ("title", "text", "measure", "higher_is_better", "logarithmic", "share")
    rows = [
        {
            **dataclasses.asdict(row),
            "share": row.share,
            "budget_value": budget_value(row.budget) if row.budget else 1e12,
            "setting_order": settings[row.setting],
            "overall": is_overall(row.setting),
        }
        for row in section.rows
    ]
    id = kind.name.replace("_", "-")
    return {"kind": kind.name, "id": id, "rows": rows, **{name: getattr(kind, name) for name in names}}


def _rounded(value: Any) -> Any:
    """Six significant digits are more than any interval here deserves."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value
