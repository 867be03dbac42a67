"""The one place where an expected error becomes one line and an exit code.

    0    done
    1    measured, and something failed
    2    wrong input: method, parameter, budget, file, model or option; or a missing extra
    130  interrupted

KVSKETCH_TRACEBACK=1 shows where an error came from.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

EXPECTED = (ValueError, OSError, ImportError)
PACKAGE = str(Path(__file__).parents[1])
# typer brings its own click, or uses the one that is installed; its BadParameter comes from the right one.
UsageError: Any = typer.BadParameter.__base__


class OneLineErrors(TyperGroup):
    """A command group that reports expected errors on one line."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        try:
            return super().make_context(info_name, list(args), parent, **extra)
        except UsageError as error:
            raise _refused(error, args) from None

    def invoke(self, ctx: Any) -> Any:
        args = [*ctx._protected_args, *ctx.args]
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except UsageError as error:
            raise _refused(error, args) from None
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


def plain_warnings() -> None:
    """Prints warnings of kvsketch as one line, without a path and a line of source; those of others as they are."""
    usual = warnings.formatwarning

    def plain(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        if not filename.startswith(PACKAGE):
            return usual(message, category, filename, lineno, line)
        return f"warning: {' '.join(str(message).split()).removeprefix('kvsketch: ')}\n"

    warnings.formatwarning = plain


def _refused(error: Any, args: list[str]) -> Exception:
    """Prints what typer cannot parse, with the value that was typed; a bare group shows its help instead."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return error
    names = getattr(getattr(error, "param", None), "opts", [])
    typed = [value for name, value in itertools.pairwise(args) if name in names]
    typed += [word.partition("=")[2] for word in args if word.partition("=")[0] in names and "=" in word]
    said = " ".join(error.format_message().split()).rstrip(".") + (f", not {typed[-1]!r}" if typed else "")
    if said.startswith("No such command"):
        said += f"; choose one of: {', '.join(error.ctx.command.list_commands(error.ctx))}"
    command = error.ctx.command_path if error.ctx else "kvsketch"
    print(f"error: {said}; see `{command} --help`", file=sys.stderr)
    return typer.Exit(2)


def new_app(help_text: str, **options: Any) -> typer.Typer:
    """A typer application that leaves exceptions to the boundary."""
    return typer.Typer(
        help=help_text, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, **options
    )
