"""LongBench: questions, summaries, few-shot, synthetic and code tasks over long documents (arXiv 2308.14508).

tasks.py      the tasks, their groups, metrics and templates
data.py       rows and prompts from a local copy, or from the hub
encoding.py   prompts as token ids, cut in the middle
metrics.py    what of an answer is scored, and how
scores.py     means of tasks, groups and all, with intervals
experiment.py the experiment
"""

from __future__ import annotations

from typer.core import TyperCommand


def command() -> TyperCommand:
    from kvsketch_lab.evaluation.longbench import experiment

    return experiment.command()
