"""Runs an experiment: measures the cells that have no record, and prints the summary of all.

Cells with a record are not measured again, so a killed run can be continued. A cell that fails is recorded as failed
with its reason, until `--retry-failed`. `--again` repeats what another commit measured. Options are checked before the
first cell, some of them when the model is loaded: a wrong option gives one line, and nothing is written.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm
from typer.core import TyperCommand

from kvsketch_lab import records
from kvsketch_lab.evaluation import distributed
from kvsketch_lab.evaluation.experiment import (
    Cell,
    Experiment,
    ExperimentOptions,
    Record,
    common_fields,
    key_of,
    measure_group,
    records_path,
)
from kvsketch_lab.options import command as make_command
from kvsketch_lab.records import FAILED

DEVICE_LOST = "CUDA error"  # after one, nothing else runs on the device in this process


def wanted_cells(experiment: Experiment) -> dict[str, Cell]:
    """The cells of this run by key: those of the first `--limit` samples of each setting."""
    samples: dict[tuple[tuple[str, Any], ...], set[str]] = {}
    result: dict[str, Cell] = {}
    limit = experiment.options.limit
    for cell in experiment.cells():
        known = samples.setdefault(cell.setting, set())
        if limit is None or cell.sample in known or len(known) < limit:
            known.add(cell.sample)
            result[cell.key] = cell
    return result


def recorded(experiment: Experiment, wanted: dict[str, Cell]) -> dict[str, Record]:
    """The records of the wanted cells, by key; the last record of a cell counts."""
    names = {tuple(cell.data) for cell in wanted.values()}
    result: dict[str, Record] = {}
    for record in records.read(records_path(experiment)):
        data, seed = record["data"], record["seed"]
        if experiment.metric not in data and FAILED not in data:
            continue  # without an outcome the cell is still to be measured
        for fields in names:
            if all(name in data for name in fields):
                key = key_of({name: data[name] for name in fields}, seed)
                if key in wanted:
                    result[key] = record
    return result


def pending(experiment: Experiment, wanted: dict[str, Cell]) -> list[list[Cell]]:
    """The groups of cells that have no record; with `--retry-failed` or `--again` those that failed, or that another
    commit measured, as well.
    """
    done = {key for key, record in recorded(experiment, wanted).items() if _counts(record, experiment.options)}
    groups = ([cell for cell in group if cell.key in wanted.keys() - done] for group in experiment.groups())
    return [group for group in groups if group]


def _counts(record: Record, options: ExperimentOptions) -> bool:
    if options.again and record.get("commit") != records.commit():
        return False
    return not (options.retry_failed and FAILED in record["data"])


def run(experiment: Experiment, groups: list[list[Cell]]) -> None:
    """Measures the groups one after another, with the time left, and writes their records."""
    path, common = records_path(experiment), common_fields(experiment)
    # In a log, a line every half a minute.
    seconds = 0.2 if sys.stderr.isatty() else 30.0
    bar = tqdm(total=sum(map(len, groups)), unit="cell", mininterval=seconds, desc=experiment.name)
    with records.Writer(path, common) as writer, bar:
        for group in groups:
            lost = None
            for cell, record in measure_group(experiment, group):
                if lost not in (None, (cell.method, cell.budget)):
                    break
                if reason := record["data"].get(FAILED):
                    tqdm.write(f"failed: {cell.method} {cell.budget} {cell.sample}: {reason}", file=sys.stderr)
                    lost = (cell.method, cell.budget) if DEVICE_LOST in reason else lost
                writer.add(record)
                bar.update()
            writer.end_group()
            if lost is not None:
                raise RuntimeError(f"{lost[0]} {lost[1]} left the GPU unusable; run the same command again to continue")


def start(experiment: type[Experiment], options: ExperimentOptions) -> int:
    """Measures what has no record and prints the summary. 1: a cell of the run has failed or has no record."""
    asked = experiment(options)
    wanted = wanted_cells(asked)
    if not wanted:
        raise ValueError(f"these options name nothing to measure; `kvsketch eval {experiment.name} --help` lists them")
    groups = pending(asked, wanted)
    if groups:
        # A missing model or an unwritable file is an error before hours of measurements, not after.
        asked.origin()
        _require_writable(records_path(asked))
        if options.ray is None:
            asked.open()
            asked.check()
        records.append(records_path(asked))
        (run if options.ray is None else distributed.run)(asked, groups)
    result = recorded(asked, wanted)
    asked.show([{**record["data"], "seed": record["seed"]} for record in result.values()])
    failed = sum(FAILED in record["data"] for record in result.values())
    missing = len(wanted) - len(result)
    said = [f"{len(result)} records in {records_path(asked)}"]
    said += [f"{failed} of them failed" if failed < len(result) else "all of them failed"] if failed else []
    said += [f"{missing} cells have none"] if missing else []
    print(", ".join(said))
    return 1 if failed or missing else 0


def _require_writable(path: Path) -> None:
    """Raises OSError where the file cannot be made, without making its folder."""
    folder = next(each for each in path.absolute().parents if each.exists())
    if not folder.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(folder))
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise PermissionError(13, "Permission denied", str(path))


def command(experiment: type[Experiment]) -> TyperCommand:
    """The command of an experiment; its module's docstring is the help."""
    run_it = functools.partial(start, experiment)
    about = sys.modules[experiment.__module__].__doc__ or ""
    return make_command(experiment.name, experiment.options_type(), run_it, about)
