"""The options of a command as a dataclass: each is declared once, with its type, default, help and bounds.

    @dataclass
    class Needle(Options):
        lengths: tuple[int, ...] = option("1000,2000", "tokens of the prompt, separated by commas", least=100)

    Needle(lengths="500,1000").lengths        # (500, 1000)
    command("needle", Needle, run, "help")    # a command of typer's: --lengths 500,1000

Values are converted and checked when the dataclass is made, from the command line or from Python: a bad one is a
ValueError that names the option, the value and what is possible. Imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

Given = TypeVar("Given", bound="Options")
NAMES = {int: "a whole number", float: "a number", str: "a text"}
SHOWN = {int: "INTEGER", float: "FLOAT", str: "TEXT"}


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
    alone: str | None = None,
    none: bool = False,
) -> Any:
    """A field of `Options`. Bounds and choices hold for each value of a list, and `none` lets a list be empty. `alone`
    is the value of an option that is given without one.
    """
    checks = {"help": help, "least": least, "most": most, "choices": tuple(choices), "alone": alone, "none": none}
    return dataclasses.field(default=default, metadata=checks)


@dataclasses.dataclass
class Options:
    """Base of a command's options."""

    def __post_init__(self) -> None:
        for name, (kind, many, field) in declared(type(self)).items():
            setattr(self, name, _converted(flag(name), getattr(self, name), kind, many, field.metadata))


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def declared(cls: type[Options]) -> dict[str, tuple[type, bool, dataclasses.Field[Any]]]:
    """The type of each option, whether it is a list, and its field."""
    hints = get_type_hints(cls)
    result = {}
    for field in dataclasses.fields(cls):
        kind, many = hints[field.name], False
        if isinstance(kind, types.UnionType):
            kind = next(each for each in get_args(kind) if each is not type(None))
        if get_origin(kind) is tuple:
            kind, many = get_args(kind)[0], True
        result[field.name] = (kind, many, field)
    return result


def _converted(name: str, value: Any, kind: type, many: bool, checks: Any) -> Any:
    if value is None or kind is bool:
        return value
    if many:
        parts = value.split(",") if isinstance(value, str) else value
        parts = [part.strip() if isinstance(part, str) else part for part in parts]
        result = tuple(dict.fromkeys(_checked(name, part, kind, checks) for part in parts if part != ""))
        if not result and not checks["none"]:
            raise ValueError(f"{name} is empty; name one value or more, separated by commas")
        return result
    return _checked(name, value, kind, checks)


def _checked(name: str, value: Any, kind: type, checks: Any) -> Any:
    least, most, choices = (checks.get(each) for each in ("least", "most", "choices"))
    try:
        result = kind(value)
        right = (not choices or result in choices) and (least is None or result >= least)
        right = right and (most is None or result <= most)
    except ValueError:
        right = False
    if not right:
        raise ValueError(f"{name} {value} is not possible; use {_possible(kind, least, most, choices)}")
    return result


def _possible(kind: type, least: float | None, most: float | None, choices: Sequence[str] | None) -> str:
    if choices:
        return f"one of {', '.join(choices)}"
    if least is not None and most is not None:
        return f"{NAMES[kind]} from {least:g} to {most:g}"
    return NAMES[kind] + (f" of {least:g} or more" if least is not None else "")


def command(name: str, cls: type[Given], run: Callable[[Given], int], help_text: str) -> TyperCommand:
    """The command with these options; its exit code is what `run` returns."""
    options = declared(cls)

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return super().parse_args(ctx, _with_values(args, options))

    def call(**values: Any) -> None:
        raise typer.Exit(run(cls(**{key: value for key, value in values.items() if value is not None})))

    call.__signature__ = inspect.Signature([_parameter(key, *each) for key, each in options.items()])  # type: ignore[attr-defined]
    call.__annotations__ = {}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, help=_paragraphs(help_text), cls=Command)(call)
    result: Any = typer.main.get_command(app)
    return result


def _parameter(key: str, kind: type, many: bool, field: dataclasses.Field[Any]) -> inspect.Parameter:
    """An option as typer reads it from a signature. Values other than flags stay texts: `Options` converts them."""
    checks, default = field.metadata, field.default
    shown = "|".join(checks["choices"] or [SHOWN.get(kind, "")])
    shown = f"{shown},..." if many else f"[{shown}]" if checks["alone"] is not None else shown
    names = f"{flag(key)}/{flag('no_' + key)}" if kind is bool and default else flag(key)
    asked = typer.Option(names, help=checks["help"].replace("[", "\\["), metavar=None if kind is bool else shown)
    if kind is not bool and default is not dataclasses.MISSING:
        default = (
            ",".join(map(str, default))
            if isinstance(default, tuple)
            else None
            if default in (None, "")
            else str(default)
        )
    annotation: Any = bool if kind is bool else str if default is dataclasses.MISSING else str | None
    return inspect.Parameter(
        key,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
        annotation=Annotated[annotation, asked],
    )


def _with_values(args: list[str], options: dict[str, tuple[type, bool, dataclasses.Field[Any]]]) -> list[str]:
    """The arguments, with the value of each option that may stand alone and does."""
    alone = {flag(key): field.metadata["alone"] for key, (_, _, field) in options.items()}
    result = []
    for arg, following in zip(args, [*args[1:], "-"], strict=False):
        result.append(arg)
        if alone.get(arg) is not None and following.startswith("-"):
            result.append(alone[arg])
    return result


def _paragraphs(text: str) -> str:
    """Help that keeps its indented lines and its brackets."""
    parts = inspect.cleandoc(text).replace("[", "\\[").split("\n\n")
    return "\n\n".join(f"\b\n{part}" if part.startswith(" ") else " ".join(part.split()) for part in parts)
