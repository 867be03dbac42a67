"""Rewrites files of records so that they hold what counts, once.

    python scripts/compact_records.py results/eval/*.jsonl

Of a measurement made several times the record that reports show stays, and what the records of a run have in common is
written with the run. Files of benchmarks keep all their records in order, because there the last one counts. A file of
more than a megabyte becomes its archive, NAME.jsonl.gz. Nothing else changes; run it after a re-measurement.
"""

from __future__ import annotations

import gzip
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from kvsketch_lab import records
from kvsketch_lab.records.files import OWN, PLACE, archive_of
from kvsketch_lab.report.contents import is_shown

Record = dict[str, Any]
ARCHIVED = 1 << 20  # bytes


def compact(path: Path) -> tuple[int, int]:
    """Rewrites one file; how many records it had and has."""
    result = list(records.read(path))
    kept = result
    if all(map(is_shown, result)):
        kept = sorted(records.latest(result), key=lambda record: (_run(record), _sample(record)))
    target = path.with_name(f".{path.name}.compact")
    target.unlink(missing_ok=True)
    for _, run in groupby(kept, key=_run):
        own = list(run)
        records.append(target, *own, common=_shared(own))
    target.with_name(f".{target.name}.lock").unlink(missing_ok=True)
    archive = archive_of(path)
    if target.stat().st_size > ARCHIVED:
        # Without the time, so that equal records give equal bytes.
        target.write_bytes(gzip.compress(target.read_bytes(), mtime=0))
        target.replace(archive)
        path.unlink(missing_ok=True)
    else:
        target.replace(path)
        archive.unlink(missing_ok=True)
    return len(result), len(kept)


def _run(record: Record) -> str:
    run = {name: value for name, value in record.items() if name not in (*OWN, PLACE)}
    # Runs that measured again replace what stands before them, so they come first.
    return json.dumps([not record.get("again"), run, records.FAILED in record["data"]], sort_keys=True)


def _sample(record: Record) -> str:
    # Answers to one question stand together: an archive of them is a quarter smaller.
    return json.dumps([record["seed"], record["data"].get("sample")])


def _shared(run: list[Record]) -> list[str]:
    """Fields of data that have one value in the whole run."""
    first, *others = (record["data"] for record in run)
    same = [name for name, value in first.items() if all(_same(each.get(name), value) for each in others)]
    return [name for name in same if others and name != records.FAILED]


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def main(arguments: list[str]) -> int:
    for path in map(Path, arguments):
        before, after = compact(path)
        print(f"{path}: {before} records, {after} kept")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
