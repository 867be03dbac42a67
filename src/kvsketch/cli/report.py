"""kvsketch report: turn records into Markdown, figures and one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsketch.cli.output import remarks, results


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of records, as `kvsketch eval --out` writes them.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the report; FOLDER/report unless given.")] = None,
) -> None:
    """Write report.md, report.html and figures from the records of experiments; needs no model and no torch."""
    from kvsketch.report.render import render

    written, said = render(folder, out or folder / "report")
    for remark in said:
        remarks().print(remark, markup=False)
    for path in written:
        results().print(str(path), markup=False, soft_wrap=True)
