"""kvsketch eval, bench and report: the commands of the laboratory, a package of its own."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperCommand

COMMANDS = {
    "bench": "Measure speed; `kvsketch bench` lists the benchmarks.",
    "eval": "Measure quality on a real model; `kvsketch eval` lists the experiments.",
    "report": "Write pages and figures from the records of experiments.",
}


def lab(module: str, what: str) -> Any:
    """A module of kvsketch_lab, which `what` needs."""
    try:
        return importlib.import_module(f"kvsketch_lab.{module}")
    except ModuleNotFoundError as error:
        if error.name != "kvsketch_lab":
            raise
        raise ImportError(
            f"{what} needs kvsketch-lab: pip install 'kvsketch[lab]', or in a clone: pip install -e . -e lab"
        ) from None


class LabCommand(TyperCommand):
    """Stands for a command of kvsketch_lab, which is imported when the command is named."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        command = lab("commands", f"kvsketch {self.name}").command(str(self.name))
        return command.make_context(info_name, args, parent, **extra)


def add_lab(app: typer.Typer) -> None:
    """Lists the laboratory's commands, whether it is installed or not."""
    for name, about in COMMANDS.items():
        app.command(name, help=about, cls=LabCommand)(lambda: None)
