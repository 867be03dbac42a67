"""kvsketch report: turn records into Markdown, figures and one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsketch.cli.output import remarks, results


def report(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder of records, as `kvsketch eval --out` writes them.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the report; FOLDER/report unless given.")] = None,
    docs: Annotated[
        bool, typer.Option("--docs", help="Write all pages and figures of docs/ from results/, here.")
    ] = False,
) -> None:
    """Write report.md, report.html and figures from the records of experiments; needs no model and no torch."""
    from kvsketch_lab.report import docs as pages
    from kvsketch_lab.report.render import render

    if docs == (folder is not None) or (docs and out is not None):
        raise ValueError("name a folder of records, or give --docs alone to write the pages of this repository")
    said: list[str] = []
    if folder is None:
        from kvsketch.cli.methods import describe
        from kvsketch.methods import METHODS
        from kvsketch_lab import reference
        from kvsketch_lab.records import write_whole

        written = pages.write(Path(), [describe(cls) for cls in METHODS.values()])
        written.append(write_whole(Path("docs") / "api.md", reference.page().encode()))
    else:
        written, said = render(folder, out or folder / "report")
    for remark in said:
        remarks().print(remark, markup=False)
    for path in written:
        results().print(str(path), markup=False, soft_wrap=True)
