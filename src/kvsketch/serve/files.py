"""The text of a file: plain text and Markdown as they are, PDF through pypdf in a process of its own (`pdf.py`)."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PDF = b"%PDF-"
LOOK = 0.1  # seconds between two looks at whether the text is still wanted


@dataclass(frozen=True)
class Limits:
    """What the text of a PDF may take; 0: no limit. Bytes are those of the process that gets it, where it can tell."""

    pages: int = 0
    characters: int = 0
    seconds: float = 0
    memory: int = 4 * 2**30


OWN = Limits()  # a file of whoever waits for it
SENT = Limits(pages=5_000, characters=10_000_000, seconds=60, memory=2**30)  # a file that a client has sent


class TooLarge(ValueError):
    """The text of a file takes more than a limit allows."""


class Stopped(RuntimeError):
    """The text is not wanted any more."""


def is_pdf(data: bytes) -> bool:
    return data[:1024].lstrip().startswith(PDF)


def text_of(data: bytes, name: str, limits: Limits = OWN, wanted: Callable[[], bool] = lambda: True) -> str:
    """The text in the bytes of a file. ValueError for one that holds none, TooLarge for a PDF beyond `limits`.

    `wanted` is asked again and again while a PDF is read; Stopped soon after it says no.
    """
    if is_pdf(data):
        text = _pdf_text(data, name, limits, wanted)
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise ValueError(
                f"{name} is not UTF-8 text; kvsketch reads plain text, Markdown and PDF, so convert it first"
            )
    if not text.strip():
        raise ValueError(f"{name} is empty; there is nothing to ask about")
    return text


def _pdf_text(data: bytes, name: str, limits: Limits, wanted: Callable[[], bool]) -> str:
    said = _said(data, limits, wanted)
    if "missing" in said:
        raise ImportError(f"{name} is a PDF, and reading one needs pypdf: pip install 'kvsketch[pdf]'")
    if "limit" in said:
        beyond = {
            "pages": f"of more than {limits.pages:,} pages",
            "characters": f"of more than {limits.characters:,} characters",
            "seconds": f"whose text takes more than {limits.seconds:g} seconds to get",
            "memory": f"whose text takes more than {limits.memory / 2**20:,.0f} MiB of memory to get",
        }
        raise TooLarge(f"{name} is a PDF {beyond[said['limit']]}; split it, or send it as plain text")
    if "error" in said:
        raise ValueError(f"{name} is a PDF that pypdf cannot read ({said['error']})")
    text = said["text"].replace("\0", "")
    if not text.strip():
        raise ValueError(f"{name} is a PDF without text, such as a scan; run a text recognition on it first")
    return text


def _said(data: bytes, limits: Limits, wanted: Callable[[], bool]) -> dict[str, str]:
    """What the process says of a PDF; it has ended when this returns."""
    words = (limits.pages, limits.characters, math.ceil(limits.seconds), limits.memory)
    # -P: the modules beside the file are not those that pypdf means by their names.
    command = [sys.executable, "-P", str(Path(__file__).with_name("pdf.py")), *map(str, words)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    # A session of its own: Ctrl-C is for this process, which then ends the other.
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        try:
            said = _heard(process, data, limits.seconds or math.inf, wanted)
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


def _heard(process: subprocess.Popen[bytes], data: bytes, seconds: float, wanted: Callable[[], bool]) -> bytes | None:
    """What a process says about `data`; None where it takes longer than `seconds`."""
    end, sent = time.monotonic() + seconds, iter([data])
    while wanted():
        try:
            # It takes its input with the first call alone.
            return process.communicate(next(sent, None), timeout=max(0.0, min(LOOK, end - time.monotonic())))[0]
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end:
                return None
    raise Stopped("the text of the file is not wanted any more")
