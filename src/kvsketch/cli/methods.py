"""kvsketch methods: the methods and their parameters."""

from __future__ import annotations

import inspect
import re
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvsketch.cli.options import JsonOption
from kvsketch.cli.output import print_json, results


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, by name or as package.module:Class.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the methods with their families, ideas and parameters, or explain one."""
    from kvsketch.methods import METHODS, parse_method
    from kvsketch.methods.text import installed

    if name is not None:
        cls = type(parse_method(name))
        if as_json:
            print_json(describe(cls))
        else:
            _print_one(cls)
        return
    described = [describe(cls) for cls in (METHODS | installed(METHODS)).values()]
    if as_json:
        print_json(described)
    else:
        _print_all(described)


def describe(cls: type[Any]) -> dict[str, Any]:
    """A method as plain data: its name, family, idea, and parameters with their defaults, choices and meanings."""
    return {
        "name": cls.name,
        "family": cls.family,
        "idea": first_sentence(inspect.getdoc(cls) or ""),
        "paper": cls.paper,
        "look": list(cls.look),
        "parameters": {each.name: each.default for each in cls.options()},
        "options": [each._asdict() for each in cls.options()],
    }


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0]


def _parameters(method: dict[str, Any]) -> str:
    return " ".join(f"{name}={setting(value)}" for name, value in method["parameters"].items()) or "-"


def setting(value: Any) -> str:
    """A value as a text form has it."""
    return str(value) if isinstance(value, str | float | int) and not isinstance(value, bool) else str(value).lower()


def _print_all(described: list[dict[str, Any]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("family", no_wrap=True)
    table.add_column("idea", ratio=2)
    table.add_column("parameters and defaults", ratio=1)
    for method in described:
        table.add_row(method["name"], method["family"], method["idea"], _parameters(method))
    results().print(table)
    results().print(
        "\nWrite a method as name:key=value:key=value, for instance uniform:budget=25%:sinks=8", markup=False
    )


def _print_one(cls: type[Any]) -> None:
    method = describe(cls)
    head, body = f"{method['name']} ({method['family']})", inspect.getdoc(cls) or ""
    results().print("\n".join([head, "", body, ""]), markup=False, highlight=False)
    if method["paper"]:
        results().print(f"paper: {method['paper']}\n", markup=False, highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("parameter", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("choices")
    table.add_column("meaning")
    for each in cls.options():
        table.add_row(each.name, setting(each.default), ", ".join(each.choices), Text(each.meaning))
    results().print(table)
