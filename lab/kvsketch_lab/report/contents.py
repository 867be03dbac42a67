"""Everything a report shows, computed once from the records: plain values that the writers put into words and lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsketch_lab.records import FAILED, Record, budget_value, latest, read_folder
from kvsketch_lab.report import pictures
from kvsketch_lab.report.kinds import KINDS, Data, Kind
from kvsketch_lab.report.palette import order
from kvsketch_lab.report.rows import Observation, Row, aggregate, is_overall, together

CLUSTERABILITY = "clusterability"


@dataclass(frozen=True)
class Section:
    """One experiment and its rows."""

    kind: Kind
    rows: list[Row]


@dataclass(frozen=True)
class Contents:
    sections: list[Section]
    needle: list[Data]
    positions: list[Data]
    clusters: list[Data]
    provenance: list[Data]
    remarks: list[str]
    records: int

    @property
    def methods(self) -> list[str]:
        result = {row.method for section in self.sections for row in section.rows}
        return sorted(result, key=order)

    @property
    def models(self) -> list[str]:
        """Those of which more was measured first."""
        counts = {each["name"].partition(";")[0]: 0 for each in self.clusters}
        for row in (row for section in self.sections for row in section.rows):
            counts[row.model] = counts.get(row.model, 0) + row.count
        return sorted(counts, key=lambda model: (-counts[model], model))


def gather(folder: Path) -> Contents:
    """What the records of a folder say."""
    remarks: list[str] = []
    return contents_of(read_folder(folder, remarks), remarks)


def contents_of(records: Sequence[Record], remarks: list[str]) -> Contents:
    """What records say, beside what was remarked when they were read."""
    counted = latest(records)
    known = [(kind, result) for kind in KINDS if (result := _observations(kind, counted, remarks))]
    used = [record for record in records if is_shown(record)]
    of = {kind.name: result for kind, result in known}
    estimates = {kind.name: kind.estimate for kind, _ in known}
    return Contents(
        sections=[Section(kind, _ordered(aggregate(result, kind.estimate))) for kind, result in known],
        needle=pictures.needle_maps(each for each in of.get("needle", []) if not is_overall(each.setting)),
        positions=pictures.by_position(of.get("perplexity", []), estimates.get("perplexity")),
        clusters=pictures.clusters(_drawn(counted, CLUSTERABILITY), remarks),
        provenance=provenance(used),
        remarks=[*remarks, *_failed_pictures(counted), *_left_out(records)],
        records=len(used),
    )


def _observations(kind: Kind, records: Iterable[Record], remarks: list[str]) -> list[Observation]:
    """What the records of an experiment measured; one that lacks a field is told and left out."""
    result: list[Observation] = []
    for record in filter(kind.owns, records):
        try:
            result += kind.observations(record)
        except (KeyError, TypeError, ValueError) as error:
            remarks.append(pictures.lacking(record, error))
    return together(kind.setting[0], kind.overall, result) if kind.overall and result else result


def _drawn(records: Iterable[Record], name: str) -> list[Record]:
    return [record for record in records if record["kind"].replace("-", "_") == name]


def is_shown(record: Record) -> bool:
    """Whether a report shows records of this kind."""
    return record["kind"].replace("-", "_") == CLUSTERABILITY or any(kind.owns(record) for kind in KINDS)


def _failed_pictures(records: Sequence[Record]) -> list[str]:
    """What failed of the experiments that have no rows to count it in."""
    drawn = _drawn(records, CLUSTERABILITY)
    failed = {
        f"{record['file']}: {record['data'].get('method', '')} {record['data'].get('budget', '')} failed: "
        f"{record['data'][FAILED]}"
        for record in drawn
        if record["data"].get(FAILED)
    }
    return sorted(failed)


def _left_out(records: Sequence[Record]) -> list[str]:
    """Kinds of records that no section shows, such as benchmarks."""
    counts = Counter((record["file"], record["kind"]) for record in records if not is_shown(record))
    return [
        f"{file}: {count} records of kind {kind!r} are of no experiment that this report shows"
        for (file, kind), count in sorted(counts.items())
    ]


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """Rows by model, setting, method and budget."""
    return sorted(
        rows,
        key=lambda row: (
            row.model,
            setting_order(row.setting, row.variant),
            order(row.method),
            budget_value(row.budget),
        ),
    )


def setting_order(setting: str, variant: str = "") -> tuple[int, str, list[tuple[float, str]]]:
    """Means over everything first, of the usual way to measure before others; then by the numbers in the text, so that
    `lines 200` precedes `lines 1,000`.
    """
    place = 0 if is_overall(setting) else 1
    return place, "" if place else variant, [_part(word) for word in setting.split()]


def _part(word: str) -> tuple[float, str]:
    digits = word.strip(",").replace(",", "")
    return (float(digits), "") if digits.replace(".", "", 1).isdigit() else (-1.0, word)


def provenance(records: Sequence[Record]) -> list[Data]:
    """Where records come from: one entry for each file, command, commit, machine, set of versions and model hash."""
    runs: dict[str, dict[str, Any]] = {}
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        # Records of one run share these values, so that their texts are made once.
        shared = [id(record.get(name)) for name in ("command", "commit", "machine", "versions")]
        own = (record["file"], _model(record["data"]), *shared)
        if own not in known:
            origin = _origin(record)
            new = {**origin, "records": 0, "seeds": set(), "dates": []}
            known[own] = runs.setdefault(json.dumps(origin, sort_keys=True), new)
        run = known[own]
        run["records"] += 1
        run["dates"].append(str(record.get("time", ""))[:10])
        if record.get("seed") is not None:
            run["seeds"].add(record["seed"])
    return [
        {
            **run,
            "seeds": ", ".join(map(str, sorted(run["seeds"]))),
            "dates": _span(run["dates"]),
        }
        for _, run in sorted(runs.items())
    ]


def _origin(record: Record) -> dict[str, str]:
    return {
        "file": record["file"],
        "command": record.get("command") or "unknown",
        "commit": commit_text(record.get("commit")),
        "machine": _machine(record.get("machine") or {}),
        "versions": ", ".join(f"{k} {v}" for k, v in sorted((record.get("versions") or {}).items()) if v),
        "model": _model(record["data"]),
    }


def commit_text(commit: dict[str, Any] | None) -> str:
    if not commit:
        return "unknown"
    return f"{str(commit.get('hash', 'unknown'))[:10]}{' with changes' if commit.get('dirty') else ''}"


def _machine(machine: dict[str, Any]) -> str:
    gpu = machine.get("gpu")
    return gpu or f"no GPU, {machine.get('processor', 'unknown processor')}, {machine.get('cores', '?')} cores"


def _model(data: Data) -> str:
    name, result = str(data.get("model") or ""), data.get("model_sha256") or ""
    return f"{name} ({str(result)[:16]})" if result else name


def _span(dates: list[str]) -> str:
    known = sorted(date for date in dates if date)
    if not known:
        return ""
    return known[0] if known[0] == known[-1] else f"{known[0]} to {known[-1]}"
