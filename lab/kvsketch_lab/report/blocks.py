"""The blocks of a report, and how they are written as Markdown and HTML.

Text from records (names of models, commands, errors) may contain any characters; both writers escape it.
"""

from __future__ import annotations

import base64
import html as escaping
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


class Code(str):
    """Text that is shown as it was typed."""

    __slots__ = ()


@dataclass(frozen=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True)
class Words:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Points:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Picture:
    """A figure, by its path relative to the report."""

    name: str

    @property
    def alt(self) -> str:
        return self.name.rpartition("/")[2].rpartition(".")[0].replace("-", " ")


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def without_empty_columns(self) -> Table:
        """The table without its empty columns."""
        kept = [at for at, _ in enumerate(self.header) if any(row[at] for row in self.rows)]
        return Table([self.header[at] for at in kept], [[row[at] for at in kept] for row in self.rows])


@dataclass(frozen=True)
class Folded:
    """Blocks that are hidden until the reader opens them."""

    title: str
    body: Sequence[Block]


Block = Heading | Words | Points | Picture | Table | Folded


def markdown(blocks: Iterable[Block]) -> str:
    """Blocks as Markdown."""
    return "\n\n".join(filter(None, map(_markdown, blocks)))


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {plain(text)}"
        case Words(text):
            return plain(text)
        case Points(items):
            return "\n".join(f"- {plain(item)}" for item in items)
        case Picture(name):
            return f"![{plain(block.alt)}]({name})"
        case Table(header, rows):
            return table(header, rows)
        case Folded(title, body):
            inside = markdown(body)
            return f"<details><summary>{plain(title)}</summary>\n\n{inside}\n\n</details>" if inside else ""


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [[plain(cell).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(text: str) -> str:
    """Text on one line, escaped so that Markdown does not read it as HTML; code between backticks."""
    one_line = " ".join(str(text).split())
    if isinstance(text, Code):
        return f"`{one_line.replace('`', chr(39))}`" if one_line else ""
    # Comparisons such as `1 < 2` stay readable; only what could open a tag, an entity or a link is escaped.
    safe = re.sub(r"&(?=#?\w+;)", "&amp;", one_line)
    safe = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", safe)
    return re.sub(r"\]\(", r"]\\(", safe).replace("`", "\\`")


def html(blocks: Iterable[Block], folder: Path) -> str:
    """Blocks as HTML; the pictures in `folder` are embedded."""
    return "\n".join(_html(block, folder) for block in blocks)


def _html(block: Block, folder: Path) -> str:
    match block:
        case Heading(level, text):
            name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
            return f'<h{level} id="{name}">{_inline(text)}</h{level}>'
        case Words(text):
            return f"<p>{_inline(text)}</p>"
        case Points(items):
            return f"<ul>{''.join(f'<li>{_inline(item)}</li>' for item in items)}</ul>"
        case Picture(name):
            drawn = base64.b64encode((folder / name).read_bytes()).decode()
            return f'<figure><img alt="{escaping.escape(block.alt)}" src="data:image/png;base64,{drawn}"></figure>'
        case Table(header, rows):
            return _html_table(header, rows)
        case Folded(title, body):
            return f"<details><summary>{_inline(title)}</summary>\n{html(body, folder)}\n</details>"


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    line: Callable[[Sequence[str], str], str] = lambda cells, tag: "".join(  # noqa: E731
        f"<{tag}>{_inline(cell)}</{tag}>" for cell in cells
    )
    body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{line(header, "th")}</tr></thead>\n<tbody>{body}</tbody></table></div>'
    )


def _inline(text: str) -> str:
    safe = escaping.escape(str(text))
    return f"<code>{safe}</code>" if isinstance(text, Code) else safe
