"""docs/api.md: the public names with their signatures and docstrings. `kvsketch report --docs` writes it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

INTRODUCTION = """\
# API reference

The public names, with the docstrings of the code. `kvsketch report --docs` writes this page. For a first program see
the [quickstart](quickstart.md); the parameters of a method are on [its own page](methods/README.md), the words in the
[glossary](glossary.md)."""

SHAPES = """\
Shapes: B batch rows, H KV heads, Hq query heads, S slots, N or n tokens, D channels. Formulas and parameters of an
operation: `help(kvsketch.ops.NAME)`."""


def page() -> str:
    """The page as it should read."""
    return "\n\n".join(_sections()) + "\n"


def _sections() -> Iterator[str]:
    import kvsketch
    from kvsketch.methods.base import Method
    from kvsketch.methods.parameters import Parameters

    yield INTRODUCTION
    names = [name for name in dir(kvsketch) if inspect.isroutine(getattr(kvsketch, name))]
    yield "## kvsketch.CompressedCache"
    yield from _entry("CompressedCache", kvsketch.CompressedCache)
    yield from _members("cache", kvsketch.CompressedCache)
    yield "## Functions of kvsketch"
    for name in names:
        yield f"### kvsketch.{name}"
        yield from _entry(name, getattr(kvsketch, name))
    yield "## kvsketch.METHODS"
    known = ", ".join(f"`{name}`" for name in kvsketch.METHODS)
    yield f"A dictionary from a method's name to its class: {known}. The classes are in `kvsketch.methods`."
    yield "## kvsketch.methods.base.Method"
    yield from _entry("Method", Method, signature=False)
    yield from _members("method", Method)
    yield from _members("method", Parameters)
    for module in (kvsketch.models, kvsketch.texts):
        yield from _module(module)
    yield from _module(kvsketch.ops, SHAPES, brief=True)


def _module(module: ModuleType, note: str = "", brief: bool = False) -> Iterator[str]:
    """The functions of a module, and the small classes that they take and return; `brief`: in one paragraph each."""
    short = module.__name__.replace("kvsketch.models.texts", "kvsketch.texts")
    yield f"## {short}"
    yield (module.__doc__ or "").partition("\n")[0]
    if note:
        yield note
    names = getattr(module, "__all__", [name for name, value in vars(module).items() if _is_own(module, name, value)])
    for name in names:
        value = getattr(module, name)
        if callable(value) and value.__doc__:
            yield f"### {short.removeprefix('kvsketch.')}.{name}"
            yield from _entry(name, value, brief=brief)


def _is_own(module: ModuleType, name: str, value: object) -> bool:
    return not name.startswith("_") and inspect.isfunction(value) and value.__module__ == module.__name__


def _members(owner: str, cls: type[Any]) -> Iterator[str]:
    """The methods and properties that a class explains itself."""
    for name, value in vars(cls).items():
        if name.startswith("_") or not (isinstance(value, property | classmethod) or inspect.isfunction(value)):
            continue
        if value.__doc__:
            whose = cls.__name__ if isinstance(value, classmethod) else owner
            yield f"### {whose}.{name}"
            yield from _entry(name, getattr(cls, name), signature=not isinstance(value, property))


def _entry(name: str, value: Any, signature: bool = True, brief: bool = False) -> Iterator[str]:
    if signature and not issubclass(value if inspect.isclass(value) else object, Exception):
        yield f"```python\n{_signature(name, value)}\n```"
    text = inspect.cleandoc(value.__doc__ or "")
    yield _markdown(_first(text) if brief else text)


def _first(text: str) -> str:
    """The first paragraph, with the formula that it announces."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(paragraphs[: 1 + paragraphs[0].endswith(":")])


def _signature(name: str, value: Any) -> str:
    """`name(a: int, b: str = "x") -> Tensor`, one parameter a line where one line is too long."""
    whole = inspect.signature(value)
    words: list[str] = []
    star = False
    for each in whole.parameters.values():
        if each.name == "self":
            continue
        if each.kind is each.VAR_POSITIONAL:
            star = True
        elif each.kind is each.KEYWORD_ONLY and not star:
            words, star = [*words, "*"], True
        words.append(str(each.replace(annotation=each.empty, default=each.empty)) + _annotation(each.annotation))
        if each.default is not each.empty:
            words[-1] += f" = {each.default!r}"
    returned = "" if inspect.isclass(value) else _annotation(whole.return_annotation).replace(": ", " -> ", 1)
    line = f"{name}({', '.join(words)}){returned}"
    if len(line) <= 88:
        return line
    return f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){returned}"


def _annotation(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    written = getattr(annotation, "__forward_arg__", annotation)
    return f": {written}" if isinstance(written, str) else f": {inspect.formatannotation(written)}"


def _markdown(docstring: str) -> str:
    """A docstring as Markdown. A line that begins with a parameter's name after a full stop becomes a list item."""
    lines: list[str] = []
    item = False
    for line in docstring.splitlines():
        before = lines[-1] if lines else ""
        if not line or line.startswith("    "):
            item = False
            lines.append(line)
        elif re.match(r"[a-z_]+( \[|, |: )", line) and before.endswith((".", ";")):
            lines += ([] if item else [""]) + [f"- {_escaped(line)}"]
            item = True
        else:
            if item and line[0].isupper() and before.endswith("."):
                lines.append("")
                item = False
            lines.append(f"  {_escaped(line.strip())}" if item else _escaped(line))
    return "\n".join(lines)


def _escaped(line: str) -> str:
    """`<q, k>` in prose is no tag of HTML."""
    return line if "`" in line else line.replace("<", "&lt;")
