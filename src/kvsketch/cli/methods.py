"""kvsketch methods: the methods and their parameters.

Classes of methods import torch. So built-in methods are shown from `methods.json`, which `kvsketch report --docs`
writes; methods from elsewhere are imported.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvsketch.cli.options import JsonOption
from kvsketch.cli.output import print_json, results

GROUP = "kvsketch.methods"  # of entry points
TABLE = Path(__file__).with_name("methods.json")


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, by name or as package.module:Class.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the methods with their families, ideas and parameters, or explain one."""
    described = [_one(name)] if name is not None else _all()
    if as_json:
        print_json(described if name is None else described[0])
    elif name is None:
        _print_all(described)
    else:
        _print_one(described[0])


def _one(name: str) -> dict[str, Any]:
    if name in (table := built_in()):
        return table[name]
    from kvsketch.methods import parse_method

    return describe(type(parse_method(name)))


def _all() -> list[dict[str, Any]]:
    """The built-in methods, and those that installed packages offer."""
    if (table := built_in()) and not entry_points(group=GROUP):
        return [*table.values()]
    from kvsketch.methods import METHODS
    from kvsketch.methods.text import installed

    return [describe(cls) for cls in (METHODS | installed(METHODS)).values()]


def built_in() -> dict[str, dict[str, Any]]:
    """What `describe` says of each built-in method, by name; empty where their classes are loaded and can be asked."""
    if "kvsketch.methods" in sys.modules:
        return {}
    return {each["name"]: each for each in json.loads(TABLE.read_text())}


def describe(cls: type[Any]) -> dict[str, Any]:
    """A method as plain data: its name, family, idea, docstring, parameters with defaults, choices and meanings, and
    what it can do with a budget in tokens.
    """
    from kvsketch.methods import usual
    from kvsketch.methods.capabilities import MEANINGS

    about = inspect.getdoc(cls) or ""
    return {
        "name": cls.name,
        "family": cls.family,
        "idea": first_sentence(about),
        "about": about,
        "paper": cls.paper,
        "look": list(cls.look),
        "parameters": {each.name: each.default for each in cls.options()},
        "options": [each._asdict() for each in cls.options()],
        "capabilities": [
            {"name": name, "meaning": MEANINGS[name], "supported": bool(can), "reason": can.reason}
            for name, can in usual(cls).capabilities.named().items()
        ],
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


def _print_one(method: dict[str, Any]) -> None:
    head = f"{method['name']} ({method['family']})"
    results().print("\n".join([head, "", method["about"], ""]), markup=False, highlight=False)
    if method["paper"]:
        results().print(f"paper: {method['paper']}\n", markup=False, highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("parameter", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("choices")
    table.add_column("meaning")
    for each in method["options"]:
        table.add_row(each["name"], setting(each["default"]), ", ".join(each["choices"]), Text(each["meaning"]))
    results().print(table)
    can = Table(box=None, header_style="bold", pad_edge=False)
    can.add_column("it works with")
    can.add_column("")
    for each in method["capabilities"]:
        can.add_row(Text(each["meaning"]), Text("yes" if each["supported"] else f"no: {each['reason']}"))
    results().print("")
    results().print(can)
