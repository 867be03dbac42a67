"""The text of files: plain text and Markdown as they are, other documents converted in a process of its own
(`convert.py`), several files joined into one text.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOK = 0.1  # seconds between two looks at whether the text is still wanted
GAP = "\n\n"
READS = "plain text, Markdown, PDF, Word (.docx), PowerPoint (.pptx), Excel (.xlsx), EPUB and HTML"
NAMES = {
    "pdf": "a PDF", "docx": "a Word file", "pptx": "a PowerPoint file", "xlsx": "an Excel file", "epub": "an EPUB file",
    "html": "an HTML file", "odf": "a file", "zip": "a file",
}  # fmt: skip
HTML_NAMES = (".html", ".htm", ".xhtml")
# Of a folder these are read; any other file is read when it is named itself.
DOCUMENTS = (
    ".pdf", ".docx", ".pptx", ".xlsx", ".epub", *HTML_NAMES, ".txt", ".md", ".markdown", ".rst", ".tex", ".org", ".log",
    ".csv", ".tsv", ".json", ".yaml", ".yml", ".toml", ".xml", ".py", ".js", ".ts", ".c", ".h", ".cpp", ".cu", ".java",
    ".go", ".rs", ".sh", ".sql",
)  # fmt: skip
HTML = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--[^>]*-->\s*)*<(?:!doctype\s+html|html[\s>])", re.IGNORECASE)
CONTROLS = re.compile(r"[\x00-\x08\x0e-\x19\x1c-\x1f]")
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # old Office files, and new ones with a password
PASSWORD = "EncryptedPackage".encode("utf-16-le")
PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"II*\x00", b"MM\x00*")  # PNG, JPEG, GIF, TIFF
# What begins with these bytes is known, and not read.
OTHERS = {
    OLE: "a file of an old Office (.doc, .xls, .ppt); save it as .docx, .xlsx or .pptx",
    b"{\\rtf": "a file in Rich Text Format; save it as .docx or plain text",
    **dict.fromkeys(PICTURES, "a picture; run a text recognition on it first"),
}
# The longer marks first: the mark of UTF-16 begins that of UTF-32.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip
WESTERN = 0.3  # of the bytes of a Latin-1 text at most are no ASCII: other alphabets have more


@dataclass(frozen=True)
class Limits:
    """What the text of a file may take; 0: no limit. Bytes of memory are those of the process that gets it, where it
    can be limited; `unpacked`: bytes of the parts of an archive; pages are slides, sheets and chapters too.
    """

    pages: int = 0
    characters: int = 0
    seconds: float = 0
    memory: int = 4 * 2**30
    unpacked: int = 2 * 2**30


OWN = Limits()  # a file of whoever waits for it
SENT = Limits(  # a file that a client has sent
    pages=5_000, characters=10_000_000, seconds=60, memory=2**30, unpacked=256 * 2**20
)


class TooLarge(ValueError):
    """The text of a file takes more than a limit allows."""


class Stopped(RuntimeError):
    """The text is not wanted any more."""


@dataclass(frozen=True)
class FileText:
    """The text of a file; `places`: the first character and the name of each page, slide, sheet or chapter; `notes`:
    what its reader should know.
    """

    text: str
    places: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()


def read_file(data: bytes, name: str, limits: Limits = OWN, wanted: Callable[[], bool] = lambda: True) -> FileText:
    """The text in the bytes of a file. ValueError for one that holds none, TooLarge for one beyond `limits`,
    ImportError where a package is missing.

    `wanted` is asked again and again while a file is converted; Stopped soon after it says no.
    """
    kind = kind_of(data, name)
    result = _decoded(data, name) if kind is None else _converted(data, name, kind, limits, wanted)
    if not result.text.strip():
        raise ValueError(f"{name} is empty; there is nothing to ask about")
    return result


def kind_of(data: bytes, name: str) -> str | None:
    """What converts a file: pdf, zip or html; None for plain text. ValueError for a known kind that is not read."""
    if data.startswith(OLE) and PASSWORD in data:
        raise ValueError(f"{name} is an Office file that is protected by a password; save a copy without one")
    for mark, what in OTHERS.items():
        if data.startswith(mark):
            raise ValueError(f"{name} is {what}")
    if data[:1024].lstrip().startswith(b"%PDF-"):
        return "pdf"
    if data.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    return "html" if HTML.match(data[:1024]) or name.lower().endswith(HTML_NAMES) else None


def joined(files: Sequence[tuple[str, FileText]]) -> FileText:
    """Several files as one text; a heading names each of them, and so do its places."""
    if len(files) == 1:
        return files[0][1]
    parts: list[str] = []
    places: list[tuple[int, str]] = []
    at = 0
    for name, file in files:
        heading = f"File {name}:{GAP}"
        places.append((at, name))
        places += [(at + len(heading) + start, f"{name}, {place}") for start, place in file.places]
        parts.append(heading + file.text)
        at += len(parts[-1]) + len(GAP)
    return FileText(GAP.join(parts), tuple(places), tuple(note for _, file in files for note in file.notes))


def documents_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of a folder and its folders that are read, in the order of their names, and those that are not. Hidden
    ones are neither; links to folders are not followed.
    """
    taken: list[Path] = []
    left: list[Path] = []
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                (taken if Path(name).suffix.lower() in DOCUMENTS else left).append(Path(path) / name)
    return taken, left


# ---- plain text


def _decoded(data: bytes, name: str) -> FileText:
    for mark, form in MARKS:
        if data.startswith(mark):
            return _checked(data.decode(form, "replace"), name, f"{name} is {form.upper()} text")
    with contextlib.suppress(UnicodeDecodeError):
        return _checked(data.decode("utf-8-sig"), name)
    if unmarked := _unmarked_utf16(data):
        return _checked(data.decode(unmarked, "replace"), name, f"{name} is UTF-16 text without a byte order mark")
    text = data.decode("utf-8-sig", "replace")
    damaged = text.count("\ufffd")
    if len(text) - len(text.encode("ascii", "ignore")) > 2 * damaged:
        return _checked(text, name, f"{name} is UTF-8 text with {damaged:,} damaged characters")
    if sum(byte > 127 for byte in data) > WESTERN * len(data):
        raise _no_text(name)
    # Five of the bytes of Windows-1252 mean nothing; Latin-1 knows them.
    try:
        text = data.decode("cp1252")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return _checked(
        text, name, f"{name} is not UTF-8: read as Latin-1 (Windows-1252); if letters are wrong, save it as UTF-8"
    )


def _unmarked_utf16(data: bytes) -> str | None:
    """Letters of European languages have a zero byte each."""
    half = len(data) // 2
    for form, zeros in (("utf-16-le", data[1::2].count(0)), ("utf-16-be", data[::2].count(0))):
        if half and zeros > half / 2:
            return form
    return None


def _checked(text: str, name: str, *notes: str) -> FileText:
    if CONTROLS.search(text):
        raise _no_text(name)
    return FileText(text.replace("\r\n", "\n").replace("\r", "\n"), notes=notes)


def _no_text(name: str) -> ValueError:
    return ValueError(f"{name} is not text in UTF-8, UTF-16 or Latin-1; kvsketch reads {READS}, so convert it first")


# ---- other documents


def _converted(data: bytes, name: str, kind: str, limits: Limits, wanted: Callable[[], bool]) -> FileText:
    said = _said(data, kind, limits, wanted)
    what = NAMES[said.get("kind", kind)]
    if "missing" in said:
        extra = "pdf" if said["missing"] in ("pypdf", "cryptography") else "documents"
        raise ImportError(f"{name} is {what}, and reading one needs {said['missing']}: pip install 'kvsketch[{extra}]'")
    if "limit" in said:
        beyond = {
            "pages": f"of more than {limits.pages:,} pages",
            "characters": f"of more than {limits.characters:,} characters",
            "seconds": f"whose text takes more than {limits.seconds:g} seconds to get",
            "memory": f"whose text takes more than {limits.memory / 2**20:,.0f} MiB of memory to get",
            "unpacked": f"that unpacks to more than {limits.unpacked / 2**20:,.0f} MiB",
        }
        raise TooLarge(f"{name} is {what} {beyond[said['limit']]}; split it, or send it as plain text")
    if "error" in said:
        raise ValueError(f"{name} is {what} that cannot be read: {said['error']}")
    if not said["text"].strip():
        scan = ", such as a scan; run a text recognition on it first" if kind == "pdf" else ""
        raise ValueError(f"{name} is {what} without text{scan}")
    places = tuple((int(start), str(place)) for start, place in said["places"])
    return FileText(said["text"], places, tuple(f"{name}: {note}" for note in said["notes"]))


def _said(data: bytes, kind: str, limits: Limits, wanted: Callable[[], bool]) -> dict[str, Any]:
    """What the process says of a file; it has ended when this returns."""
    words = (kind, limits.pages, limits.characters, math.ceil(limits.seconds), limits.memory, limits.unpacked)
    # -P: the modules beside the file are not those that its libraries mean by their names.
    command = [sys.executable, "-P", str(Path(__file__).with_name("convert.py")), *map(str, words)]
    # A file, not a pipe: a process takes all of it however often one looks whether it has answered.
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        pipes: dict[str, Any] = {"stdin": file, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        # A session of its own: Ctrl-C is for this process, which then ends the other.
        with subprocess.Popen(command, **pipes, start_new_session=True) as process:
            try:
                said = _heard(process, limits.seconds or math.inf, wanted)
            finally:
                process.kill()
    if said is None:
        return {"limit": "seconds"}
    with contextlib.suppress(ValueError):
        return dict(json.loads(said))
    # The system ends a process whose time or memory is over without a word.
    if -process.returncode == getattr(signal, "SIGXCPU", None):
        return {"limit": "seconds"}
    return {"error": f"the process that read it ended with status {process.returncode}"}


def _heard(process: subprocess.Popen[bytes], seconds: float, wanted: Callable[[], bool]) -> bytes | None:
    """What a process says; None where it takes longer than `seconds`."""
    end = time.monotonic() + seconds
    while wanted():
        try:
            return process.communicate(timeout=max(0.0, min(LOOK, end - time.monotonic())))[0]
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end:
                return None
    raise Stopped("reading the file was cancelled")
