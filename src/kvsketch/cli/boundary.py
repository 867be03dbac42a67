"""The one place where an expected error becomes one line and an exit code.

    0    done
    1    measured, and something failed
    2    wrong input: method, parameter, budget, file, model or option; or a missing extra
    130  interrupted

KVSKETCH_TRACEBACK=1 shows where an error came from.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

EXPECTED = (ValueError, OSError, ImportError)


class OneLineErrors(TyperGroup):
    """A command group that reports expected errors on one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # The reader of the pipe has exited (`kvsketch methods | head`); Python must not flush into it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except EXPECTED as error:
            if os.environ.get("KVSKETCH_TRACEBACK"):
                raise
            print(f"error: {one_line(error)}", file=sys.stderr)
            raise typer.Exit(2) from None


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks; a system error becomes `file: reason`."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def new_app(help_text: str, **options: Any) -> typer.Typer:
    """A typer application that leaves exceptions to the boundary."""
    return typer.Typer(
        help=help_text, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, **options
    )
