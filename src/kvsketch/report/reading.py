"""The records of a folder, with what could not be read said instead of dropped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]
REQUIRED = ("kind", "data")


@dataclass(frozen=True)
class Folder:
    """What a folder of record files holds: records in order of file and line, and remarks on lines that are none."""

    records: tuple[Record, ...]
    remarks: tuple[str, ...] = ()
    files: tuple[str, ...] = field(default=())


def read_folder(folder: Path) -> Folder:
    """Reads every *.jsonl file of `folder`."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the one that `kvsketch eval ... --out DIR` wrote to")
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise ValueError(f"{folder} holds no record files (*.jsonl); run an experiment first: kvsketch eval --help")
    records: list[Record] = []
    remarks: list[str] = []
    for path in paths:
        found, said = _read_file(path)
        records += found
        remarks += said
    return Folder(tuple(records), tuple(remarks), tuple(path.name for path in paths))


def _read_file(path: Path) -> tuple[list[Record], list[str]]:
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    records, remarks = [], []
    for number, line in enumerate(lines, 1):
        record = _parse(line)
        if record is not None:
            records.append(record | {"file": path.name})
        elif number == len(lines) and not text.endswith("\n"):
            remarks.append(f"{path.name}: the last line is incomplete, as a run that was stopped leaves it; left out")
        elif line.strip():
            remarks.append(f"{path.name}, line {number}: not a record; left out")
    return records, remarks


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    whole = isinstance(record, dict) and all(key in record for key in REQUIRED) and isinstance(record["data"], dict)
    return record if whole else None


def provenance(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Where records come from: one entry for each file, command, commit, machine, set of versions and model hash."""
    runs: dict[str, dict[str, Any]] = {}
    for record in records:
        origin = {
            "file": record["file"],
            "command": record.get("command") or "unknown",
            "commit": _commit(record.get("commit")),
            "machine": _machine(record.get("machine") or {}),
            "versions": ", ".join(f"{k} {v}" for k, v in sorted((record.get("versions") or {}).items()) if v),
            "model": _model(record["data"]),
        }
        run = runs.setdefault(json.dumps(origin, sort_keys=True), {**origin, "records": 0, "seeds": set(), "dates": []})
        run["records"] += 1
        run["dates"].append(str(record.get("time", ""))[:10])
        if record.get("seed") is not None:
            run["seeds"].add(record["seed"])
    return [
        {
            **{key: value for key, value in run.items() if key not in ("seeds", "dates")},
            "seeds": ", ".join(map(str, sorted(run["seeds"]))),
            "dates": _span(run["dates"]),
        }
        for _, run in sorted(runs.items())
    ]


def _commit(commit: dict[str, Any] | None) -> str:
    if not commit:
        return "unknown"
    return f"{str(commit.get('hash', 'unknown'))[:10]}{' with changes' if commit.get('dirty') else ''}"


def _machine(machine: dict[str, Any]) -> str:
    gpu = machine.get("gpu")
    return gpu or f"no GPU, {machine.get('processor', 'unknown processor')}, {machine.get('cores', '?')} cores"


def _model(data: dict[str, Any]) -> str:
    name = str(data.get("model") or "")
    found = data.get("model_hash") or data.get("model_sha256") or ""
    return f"{name} ({str(found)[:16]})" if found else name


def _span(dates: list[str]) -> str:
    known = sorted(date for date in dates if date)
    if not known:
        return ""
    return known[0] if known[0] == known[-1] else f"{known[0]} to {known[-1]}"
