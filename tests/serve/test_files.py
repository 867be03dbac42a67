"""Texts of files: what is no text is told, PDF goes through pypdf in a process with limits."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvsketch.serve import files
from kvsketch.serve.files import Limits, Stopped, TooLarge, text_of

SLOW = 200_000  # lines of a PDF of 20 kB that takes minutes


@pytest.fixture
def pdf() -> Any:
    pytest.importorskip("pypdf", reason="not installed: pip install 'kvsketch[pdf]'")
    from tests.helpers.pdf import pdf, readers

    yield pdf
    assert readers() == [], "no process goes on reading"


def test_text_is_taken_as_it_is() -> None:
    assert text_of("\ufeffné".encode(), "a.txt") == "né"
    with pytest.raises(ValueError, match="the file is not UTF-8 text"):
        text_of(b"\xff\xfe", "the file")


def test_pdf_is_opened(pdf: Any) -> None:
    assert text_of(pdf(), "a report").strip() == "The harbour is deep"
    assert text_of(pdf(pages=3), "a report").split("\n\n") == ["The harbour is deep"] * 3
    with pytest.raises(ValueError, match="a report is a PDF that pypdf cannot read"):
        text_of(b"%PDF-1.4 nothing", "a report")
    with pytest.raises(ValueError, match="a report is a PDF without text"):
        text_of(pdf(lines=0), "a report")


@pytest.mark.parametrize(
    ("shape", "limits", "told"),
    [
        ({"pages": 4}, Limits(pages=3), "of more than 3 pages; split it"),
        ({"pages": 4}, Limits(characters=50), "of more than 50 characters"),
        ({"lines": SLOW}, Limits(seconds=0.5), "takes more than 0.5 seconds"),
        ({"blanks": 40_000_000}, Limits(memory=100 * 2**20), "takes more than 100 MiB of memory"),
    ],
)
def test_a_pdf_beyond_a_limit_is_refused_by_its_name(pdf: Any, shape: Any, limits: Limits, told: str) -> None:
    if limits.memory < Limits().memory and sys.platform != "linux":
        pytest.skip("only Linux limits the memory of a process")
    data, start = pdf(**shape), time.monotonic()
    assert len(data) < 50_000
    with pytest.raises(TooLarge, match=told):
        text_of(data, "a report", limits)
    assert time.monotonic() - start < 20


def test_a_pdf_that_is_not_wanted_any_more_is_left(pdf: Any) -> None:
    data, start = pdf(lines=SLOW), time.monotonic()
    with pytest.raises(Stopped):
        text_of(data, "a report", wanted=lambda: time.monotonic() < start + 0.5)
    assert time.monotonic() - start < 20


def test_the_process_that_reads_a_pdf_ends_by_itself(pdf: Any) -> None:
    """Its processor time is limited, so it does not outlive a server that was killed for long."""
    if sys.platform == "win32":
        pytest.skip("Windows has no limits of this kind")
    command = [sys.executable, "-P", str(Path(files.__file__).with_name("pdf.py")), "0", "0", "1", "0"]
    ended = subprocess.run(command, input=pdf(lines=SLOW), capture_output=True, timeout=60)
    assert ended.returncode < 0 and ended.stdout == b""


def test_the_process_that_reads_a_pdf_starts_light(pdf: Any) -> None:
    script = str(Path(files.__file__).with_name("pdf.py"))
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['pdf.py', '0', '0', '0', '0']\nrunpy.run_path({script!r}, run_name='__main__')\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'kvsketch'} & set(sys.modules)), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", code], input=pdf(), capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr.strip()) == (0, b"[]")
