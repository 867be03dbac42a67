"""Spreads the groups of an experiment over a Ray cluster: `kvsketch eval NAME ... --ray [ADDRESS]`.

Every worker is a process on some machine of the cluster. It opens the experiment once, which loads the model, and
measures one group of cells after another. A record is made by the worker, so it describes the worker's machine; only
the process that the user started writes the file. A run with Ray gives the same records as one without, in another
order, and each can continue the other.

A worker that dies (out of memory, lost machine) is replaced, and its group is measured again. A group in which two
workers died is recorded as failed.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from kvsketch_lab import records
from kvsketch_lab.evaluation.experiment import (
    Cell,
    Experiment,
    ExperimentOptions,
    common_fields,
    make_record,
    measure_group,
    records_path,
)
from kvsketch_lab.records import FAILED, Record

TRIES = 2
CONNECT_SECONDS = 10.0


def run(experiment: Experiment, groups: list[list[Cell]]) -> None:
    """Measures the groups on the cluster that `--ray` names, or on this machine, and writes their records."""
    ray = _import_ray()
    path, common = records_path(experiment), common_fields(experiment)
    with cluster(ray, "" if experiment.options.ray == "local" else str(experiment.options.ray)):
        pool = _Pool(ray, experiment, len(groups))
        with tqdm(total=sum(map(len, groups)), unit="cell", disable=None, desc=experiment.name) as bar:
            for result in pool.measure(groups):
                for record in result:
                    if FAILED in (data := record["data"]):
                        told = f"failed: {data['method']} {data['budget']} {data['sample']}: {data[FAILED]}"
                        tqdm.write(told, file=sys.stderr)
                records.append(path, *result, common=common)
                bar.update(len(result))


class Worker:
    """One process of the cluster: an open experiment."""

    def __init__(
        self, experiment: type[Experiment], options: ExperimentOptions, folder: str, command: list[str], threads: int
    ) -> None:
        # Paths among the options and the command in the records are those of the process that the user started.
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.orig_argv = command
        torch.set_num_threads(threads)
        self.experiment = experiment(options)

    def open(self) -> list[Record]:
        """Loads the model."""
        self.experiment.open()
        return []

    def measure(self, cells: list[Cell]) -> list[Record]:
        """The records of one group."""
        return [record for _cell, record in measure_group(self.experiment, cells)]


class _Pool:
    """Workers and what each of them does at the moment."""

    def __init__(self, ray: Any, experiment: Experiment, groups: int) -> None:
        self.ray, self.experiment = ray, experiment
        self.share = share_of(ray.cluster_resources(), experiment.options, groups)
        self.running: dict[Any, tuple[Any, list[Cell]]] = {}  # answer to come -> worker, its group; none: it opens
        self.deaths: Counter[str] = Counter()  # by the first cell of their group

    def measure(self, groups: list[list[Cell]]) -> Iterator[list[Record]]:
        """The records of each group, as they come."""
        waiting = deque(groups)
        for _ in range(self.share.workers):
            self._start()
        while waiting or any(group for _, group in self.running.values()):
            answer = self.ray.wait(list(self.running), num_returns=1)[0][0]
            worker, group = self.running.pop(answer)
            try:
                result = self.ray.get(answer)
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, Exception) else error from None
            except self.ray.exceptions.RayError as error:
                result = self._after_death(group, waiting, error)
                if waiting:
                    self._start()
            else:
                if waiting:
                    group = waiting.popleft()
                    self.running[worker.measure.remote(group)] = (worker, group)
            if result:
                yield result

    def _start(self) -> None:
        share, experiment = self.share, self.experiment
        actor = self.ray.remote(Worker).options(
            num_cpus=share.processors, num_gpus=share.gpus, scheduling_strategy="SPREAD"
        )
        worker = actor.remote(type(experiment), experiment.options, os.getcwd(), sys.orig_argv, share.threads)
        self.running[worker.open.remote()] = (worker, [])

    def _after_death(self, group: list[Cell], waiting: deque[list[Cell]], error: Exception) -> list[Record]:
        """Puts the group of a dead worker back into the queue, or records it as failed."""
        # What follows the first line names processes and machines.
        reason = str(error).strip().partition("\n")[0]
        first = group[0].key if group else "open"
        self.deaths[first] += 1
        if not group and self.deaths[first] >= TRIES:
            raise ChildProcessError(f"{TRIES} workers of Ray died while they loaded the model: {reason}")
        if self.deaths[first] < TRIES:
            waiting.extendleft([group] if group else [])
            return []
        told = {FAILED: f"WorkerDied: {TRIES} workers died while they measured this group: {reason}"}
        return [make_record(self.experiment, cell, told) for cell in group]


class Share(NamedTuple):
    """How many workers there are, and what each of them asks of the cluster."""

    workers: int
    gpus: float
    processors: int
    threads: int


def share_of(cluster: dict[str, float], options: ExperimentOptions, groups: int) -> Share:
    """One worker for each GPU, without GPUs one for each machine, or `--ray-workers`; no more than groups."""
    gpus = 0 if str(options.device).startswith("cpu") else int(cluster.get("GPU", 0))
    machines = sum(name.startswith("node:") and not name.startswith("node:__") for name in cluster)
    workers = min(groups, options.ray_workers or gpus or max(1, machines))
    processors = int(cluster.get("CPU", 1))
    threads = max(1, min(torch.get_num_threads(), processors // workers))
    # Workers that share a GPU ask for equal parts of it.
    return Share(workers, 1 / math.ceil(workers / gpus) if gpus else 0, int(workers <= processors), threads)


@contextmanager
def cluster(ray: Any, address: str) -> Iterator[None]:
    """Connects to the cluster at the address; without one, starts Ray on this machine and stops it at the end."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        _require_listener(address)
        ray.init(address=address or None, include_dashboard=None if address else False, logging_level="ERROR")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--ray {address}: no Ray cluster answers ({' '.join(str(error).split())}); start one with "
            "`ray start --head`, or leave the address out to use this machine alone"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Raises OSError when nothing listens at host:port; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            f"--ray needs Ray, which cannot be imported ({error}); install kvsketch[ray], or leave --ray out"
        ) from error
    return ray
