"""Records that others made: checked, marked with who made them, and ranked beside ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsketch_lab import records
from kvsketch_lab.records import FAILED, Record
from kvsketch_lab.report import ranking
from kvsketch_lab.report.ranking import MADE_BY

FOLDER = Path("results") / "outside"
NEEDED: Mapping[str, type | tuple[type, ...]] = {
    "method": str, "budget": str, "sample": str, "model": str, "dtype": str,
    "score": (int, float), "device_bytes": (int, float), "full_bytes": (int, float),
}  # fmt: skip


def add(path: Path, made_by: str, root: Path) -> tuple[int, Path]:
    """Adds the records of a file to results/outside/ of a checkout; how many, and where they are.

    ValueError, and nothing is written, where one of them cannot be ranked or is there already.
    """
    if not made_by.strip():
        raise ValueError("--add needs --made-by, such as --made-by 'J. Doe, example.org'")
    if not (root / "results").is_dir():
        raise ValueError("there is no folder results/ here; run this where the repository is")
    if not path.is_file():
        raise ValueError(f"--add {path} is not a file; name a file of records, as `kvsketch eval --out` writes them")
    found = [_marked(record, made_by.strip()) for record in records.read(path)]
    if not found:
        raise ValueError(f"--add {path} holds no record")
    to = root / FOLDER / f"{re.sub('[^a-z0-9]+', '-', made_by.lower()).strip('-') or 'others'}.jsonl"
    known = {_what(record) for record in records.read(to)}
    if again := [record for record in found if _what(record) in known]:
        raise ValueError(f"{to} holds {len(again):,} of these records already, such as {again[0]['place']} of {path}")
    records.append(to, *found, common=(MADE_BY, "model", "dtype", "budgets_in", "model_sha256"))
    return len(found), to


def _marked(record: Record, made_by: str) -> Record:
    data: dict[str, Any] = record["data"]
    where = f"{record['place']}"
    if FAILED in data:
        raise ValueError(f"{where}: the measurement failed ({data[FAILED]}); leave failures out")
    wrong = [name for name, kind in NEEDED.items() if not isinstance(data.get(name), kind)]
    if wrong:
        raise ValueError(f"{where}: data needs {', '.join(NEEDED)}; missing or of another type: {', '.join(wrong)}")
    if data.get("budgets_in") != "bytes":
        raise ValueError(f"{where}: its budget is not one of bytes; measure with `kvsketch eval ... --bytes 1/8,1/16`")
    if not ranking.columns(record)[1]:
        known = "leval, locomo, realtalk, longbench2, minilongbench, bamboo, financebench, math, gsm8k, instructions, "
        known += "ruler, lines"
        raise ValueError(f"{where}: no ranking shows records of kind {record['kind']}; choose one of: {known}")
    identity = [*record.get("identity", ("method", "budget", "sample")), MADE_BY]
    return {**record, "identity": identity, "data": {**data, MADE_BY: made_by}}


def _what(record: Record) -> tuple[object, ...]:
    data = record["data"]
    named = tuple(str(data.get(name)) for name in record["identity"])
    return record["kind"], record["seed"], str(data.get("model")), named
