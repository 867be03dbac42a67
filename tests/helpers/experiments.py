"""Runs an experiment as its command does."""

from __future__ import annotations

from kvsketch_lab.evaluation import runner
from kvsketch_lab.evaluation.experiment import Experiment


def run_experiment(experiment: type[Experiment], arguments: list[str]) -> int:
    """The exit code of the command with these options."""
    return int(runner.command(experiment).main(arguments, standalone_mode=False) or 0)
