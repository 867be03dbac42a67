"""The multi-turn cases of the Berkeley Function Calling Leaderboard, as its package `bfcl-eval` has them.

A case is a talk of some turns. Each turn has true calls of functions, which the classes of the package carry out, so
that the result of each is known. The package is read where it lies, installed or unpacked; of its code only the
classes that a case names are imported. Cases are about functions such as those of a file system or a car, which the
classes hold in memory.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "bfcl_eval"
CLASSES = "eval_checker/multi_turn_eval/func_source_code"
CATEGORIES = ("base", "long_context")
GET = (
    "install it with `pip install --no-deps bfcl-eval`, or unpack its wheel (`pip download --no-deps bfcl-eval`) and "
    "name the folder with --package"
)
# The package's names of types, where JSON Schema has others.
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


@dataclass(frozen=True)
class TrueCall:
    """A call that a turn asks for, with all arguments by name, defaults too, and what it returned."""

    name: str
    given: dict[str, Any]  # the arguments that the case names
    arguments: dict[str, Any]
    result: str


@dataclass(frozen=True)
class Turn:
    asked: str
    calls: tuple[TrueCall, ...]


@dataclass(frozen=True)
class Case:
    """One talk. Signatures are those of the functions that `tools` describe."""

    name: str
    classes: tuple[str, ...]
    tools: list[dict[str, Any]]
    turns: tuple[Turn, ...]
    signatures: dict[str, inspect.Signature]

    def arguments(self, name: str, given: Any) -> dict[str, Any] | None:
        """All arguments of a call by name, as JSON holds them; None for a call that its function does not take."""
        if name not in self.signatures or not isinstance(given, dict):
            return None
        return bound(self.signatures[name], (), given)


def bound(signature: inspect.Signature, places: tuple[Any, ...], names: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments by name with those left out at their defaults; None where they do not fit."""
    try:
        result = signature.bind(*places, **names)
    except TypeError:
        return None
    result.apply_defaults()
    plain: dict[str, Any] = json.loads(json.dumps(result.arguments))
    return plain


def package_folder(place: str | None) -> Path:
    """The folder `bfcl_eval`: in `place`, `place` itself, or of the installed package."""
    if place is not None:
        for folder in (Path(place).expanduser() / PACKAGE, Path(place).expanduser()):
            if folder.name == PACKAGE and folder.is_dir():
                return folder
        raise ValueError(f"--package {place} has no folder {PACKAGE}; {GET}")
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the package bfcl-eval is not here; {GET}")
    return Path(next(iter(spec.submodule_search_locations)))


class Package:
    """The cases of one category, in the order of its file."""

    def __init__(self, folder: Path, category: str) -> None:
        if category not in CATEGORIES:
            raise ValueError(f"--category {category} is not possible; use one of {', '.join(CATEGORIES)}")
        self.folder, self.long = folder, category == "long_context"
        asked = self._data(f"BFCL_v*_multi_turn_{category}.json")
        self.entries = list(_lines(asked))
        answers = _lines(self._data(f"possible_answer/{asked.name}"))
        self.answers = {each["id"]: each["ground_truth"] for each in answers}
        self.modules = _modules(folder / CLASSES)

    def _data(self, pattern: str) -> Path:
        """The newest file of that name."""
        known = sorted((self.folder / "data").glob(pattern))
        if not known:
            raise ValueError(f"{self.folder} has no data/{pattern}; this is not the package bfcl-eval: {GET}")
        return known[-1]

    def chosen(self, classes: str, numbers: list[int]) -> list[dict[str, Any]]:
        """Entries by their place among those of exactly these classes; of all, where `classes` is empty."""
        named = sorted(each.strip() for each in classes.split("+")) if classes else []
        left = [each for each in self.entries if not named or sorted(each["involved_classes"]) == named]
        if not left:
            known = sorted({"+".join(sorted(each["involved_classes"])) for each in self.entries})
            raise ValueError(f"--classes {classes}: no case has exactly these; use one of {', '.join(known)}")
        if wrong := [number for number in numbers if number >= len(left)]:
            raise ValueError(f"--cases {wrong[0]} is not possible; there are {len(left)}: 0 to {len(left) - 1}")
        return [left[number] for number in numbers]

    def case(self, entry: dict[str, Any]) -> Case:
        """A case with the results of its true calls, which are carried out here."""
        classes = tuple(entry["involved_classes"])
        functions = dict(self._functions(classes, entry.get("initial_config", {})))
        docs = [self._data(f"multi_turn_func_doc/{self._module(name)}.json") for name in classes]
        tools = [_tool(doc) for path in docs for doc in _lines(path)]
        signatures = {name: inspect.signature(function) for name, function in functions.items()}
        turns = []
        for messages, calls in zip(entry["question"], self.answers[entry["id"]], strict=True):
            asked = "\n".join(message["content"] for message in messages)
            turns.append(Turn(asked, tuple(_carried_out(functions, call, entry["id"]) for call in calls)))
        return Case(entry["id"], classes, tools, tuple(turns), signatures)

    def _module(self, name: str) -> str:
        if name not in self.modules:
            raise ValueError(f"{self.folder / CLASSES} has no class {name}; this is not the package bfcl-eval: {GET}")
        return self.modules[name]

    def _functions(self, classes: tuple[str, ...], config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """The functions of new objects of these classes, in the state that the case begins with."""
        for name in classes:
            made = getattr(_imported(self.folder, self._module(name)), name)()
            if hasattr(made, "_load_scenario"):
                made._load_scenario(copy.deepcopy(config.get(name, {})), long_context=self.long)
            for function, method in inspect.getmembers(made, inspect.ismethod):
                if not function.startswith("_"):
                    yield function, method


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def _modules(folder: Path) -> dict[str, str]:
    """The module of each class, read from the sources: importing all of them needs many other packages."""
    return {
        each.name: path.stem
        for path in sorted(folder.glob("*.py"))
        for each in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(each, ast.ClassDef)
    }


def _imported(folder: Path, module: str) -> Any:
    """A module of the package in `folder`, and of no other of that name."""
    known = sys.modules.get(PACKAGE)
    if known is not None and str(folder) not in map(str, known.__path__):
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]
    sys.path.insert(0, str(folder.parent))
    try:
        importlib.invalidate_caches()
        return importlib.import_module(".".join([PACKAGE, *CLASSES.split("/"), module]))
    finally:
        sys.path.remove(str(folder.parent))


def _tool(doc: dict[str, Any]) -> dict[str, Any]:
    """A function as chat templates show it. What it returns is left out, as APIs of tools have no place for it."""
    told = {name: doc[name] for name in ("name", "description")}
    return {"type": "function", "function": {**told, "parameters": _schema(doc["parameters"])}}


def _schema(part: Any) -> Any:
    if isinstance(part, list):
        return [_schema(each) for each in part]
    if not isinstance(part, dict):
        return part
    result = {name: _schema(value) for name, value in part.items()}
    # A property may be called "type" as well, and is no name of a type.
    return {**result, "type": TYPES.get(part["type"], part["type"])} if isinstance(part.get("type"), str) else result


def _carried_out(functions: dict[str, Any], call: str, case: str) -> TrueCall:
    """A true call, such as cd(folder='reports'), and its result as a tool message shows it."""
    name, places, given = _parsed(call, case)
    if name not in functions:
        raise ValueError(f"{case}: the true call {call} is of no function of the case")
    signature = inspect.signature(functions[name])
    arguments = bound(signature, places, given)
    if arguments is None:
        raise ValueError(f"{case}: the true call {call} does not fit {name}{signature}")
    named = dict(signature.bind(*places, **given).arguments)
    try:
        said = functions[name](**named)
    except Exception as error:  # as the leaderboard does: the caller is told
        said = f"Error during execution: {error}"
    return TrueCall(name, named, arguments, _written(said))


def _parsed(call: str, case: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    try:
        node = ast.parse(call.strip(), mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            places = tuple(ast.literal_eval(each) for each in node.args)
            return node.func.id, places, {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    except (SyntaxError, ValueError):
        pass
    raise ValueError(f"{case}: the true call {call!r} is no call with plain values")


def _written(result: Any) -> str:
    try:
        return json.dumps(result) if isinstance(result, dict) else str(result)
    except (TypeError, ValueError):
        return str(result)
