"""Writes a report: report.md, report.html and the figures, each file whole or not at all."""

from __future__ import annotations

import importlib.util
import io
import os
import tempfile
from pathlib import Path
from typing import Any

from kvsketch.report import figures
from kvsketch.report.contents import CLUSTERABILITY, Contents, gather
from kvsketch.report.experiments import KINDS
from kvsketch.report.markdown import report
from kvsketch.report.page import page
from kvsketch.report.reading import read_folder

NO_FIGURES = "no figures: matplotlib is missing; pip install 'kvsketch[plot]'"
# Files are the same for the same records: no date, no version, no random names inside.
METADATA: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}


def render(source: Path, target: Path) -> tuple[list[Path], list[str]]:
    """Reads the records in `source` and writes the report into `target`; the files, and remarks for the user."""
    contents = gather(read_folder(source))
    if not contents.records:
        found = "; ".join(contents.remarks)
        raise ValueError(
            f"{source} holds no record of an experiment; run one first: kvsketch eval --help. Found: {found}"
        )
    drawn, remarks = _write_figures(contents, target)
    names = [path.relative_to(target).as_posix() for path in drawn if path.suffix == ".png"]
    written = [
        write(target / "report.md", report(contents, names).encode()),
        write(target / "report.html", page(contents).encode()),
    ]
    return written + drawn, [*contents.remarks, *remarks]


def _write_figures(contents: Contents, target: Path) -> tuple[list[Path], list[str]]:
    if importlib.util.find_spec("matplotlib") is None:
        return [], [NO_FIGURES]
    import matplotlib

    written = []
    with matplotlib.rc_context({"svg.hashsalt": "kvsketch", "svg.fonttype": "none"}):
        for name, figure in figures.draw(contents):
            for ending, metadata in METADATA.items():
                drawing = io.BytesIO()
                figure.savefig(drawing, format=ending, dpi=130, metadata=metadata)
                written.append(write(target / "figures" / f"{name}.{ending}", drawing.getvalue()))
    _remove_others(target / "figures", written)
    return written, []


def _remove_others(folder: Path, written: list[Path]) -> None:
    """Removes the figures of an earlier report that this one does not have; other files stay."""
    kinds = (CLUSTERABILITY, *(kind.name for kind in KINDS))
    for path in folder.glob("*"):
        ours = path.suffix[1:] in METADATA and path.name.startswith(tuple(f"{kind}-" for kind in kinds))
        if ours and path not in written:
            path.unlink()


def write(path: Path, content: bytes) -> Path:
    """Writes a file under another name first, so that no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path
