"""Printing for all commands: results to standard output, remarks and progress to standard error."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

PIPE_WIDTH = 200


def results() -> Console:
    """The present standard output; wide if it is not a terminal."""
    return _console(sys.stdout)


def remarks() -> Console:
    """The present standard error."""
    return _console(sys.stderr)


def _console(stream: Any) -> Console:
    console = Console(file=stream, highlight=False)
    return console if console.is_terminal else Console(file=stream, highlight=False, width=PIPE_WIDTH)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def megabytes(count: float) -> str:
    """Bytes in MB, 10^6 bytes."""
    return f"{count / 1e6:,.1f} MB"
