"""Writes a report: report.md, report.html and the figures."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from kvsketch_lab.records import write_whole
from kvsketch_lab.report import blocks, figures
from kvsketch_lab.report.body import TITLE, body
from kvsketch_lab.report.contents import CLUSTERABILITY, Contents, gather
from kvsketch_lab.report.kinds import KINDS

NO_FIGURES = "no figures: matplotlib is missing; pip install 'kvsketch[lab]'"
COLOURS = 63  # of a figure's palette: enough for lines and text, and a third of the file size


def render(source: Path, target: Path) -> tuple[list[Path], list[str]]:
    """Reads the records in `source` and writes the report into `target`; the files, and remarks for the user."""
    contents = gather(source)
    if not contents.records:
        result = "; ".join(contents.remarks)
        raise ValueError(
            f"{source} holds no record of an experiment; run one first: kvsketch eval --help. Found: {result}"
        )
    drawn, remarks = write_figures(contents, target)
    return [*write_texts(contents, target, drawn, page=True), *drawn], [*contents.remarks, *remarks]


def write_texts(contents: Contents, target: Path, drawn: Iterable[Path], page: bool) -> list[Path]:
    """Writes what a report has beside its figures, without `page` no HTML page."""
    whole = body(contents, [path.relative_to(target).as_posix() for path in drawn])
    written = [write_whole(target / "report.md", (blocks.markdown(whole) + "\n").encode())]
    if page:
        written.append(write_whole(target / "report.html", html_page(whole, target).encode()))
    return written


def html_page(whole: Iterable[blocks.Block], folder: Path) -> str:
    """The report as one HTML file that works without a network."""
    parts = resources.files("kvsketch_lab.report") / "web"
    text = Template((parts / "page.html").read_text(encoding="utf-8"))
    style = (parts / "page.css").read_text(encoding="utf-8").strip()
    return text.substitute(title=TITLE, style=style, body=blocks.html(whole, folder))


def write_figures(contents: Contents, target: Path) -> tuple[list[Path], list[str]]:
    """Draws every figure of a report; the files, and a remark where they cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        return [], [NO_FIGURES]
    folder = target / "figures"
    written = [write_whole(folder / f"{name}.png", png(figure)) for name, figure in figures.draw(contents)]
    _remove_others(folder, written)
    return written, []


def png(figure: Any) -> bytes:
    """A figure as PNG with a palette; the same for the same figure."""
    from PIL import Image

    # What lies inside the axes has no part in the layout, which would measure each of it.
    for axes in figure.axes:
        for artist in (*axes.lines, *axes.collections, *axes.texts):
            artist.set_in_layout(False)
    # `savefig` would draw twice, the first time for the layout alone, which drawing computes anyway.
    figure.canvas.draw()
    drawn = Image.frombuffer("RGBA", figure.canvas.get_width_height(), figure.canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
    image = drawn.convert("RGB").quantize(COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    small = io.BytesIO()
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def _remove_others(folder: Path, written: list[Path]) -> None:
    """Removes the figures of an earlier report that this one does not have; other files stay."""
    kinds = (CLUSTERABILITY, *(kind.name for kind in KINDS))
    for path in folder.glob("*"):
        ours = path.suffix in (".png", ".svg") and path.name.startswith(tuple(f"{kind}-" for kind in kinds))
        if ours and path not in written:
            path.unlink()
