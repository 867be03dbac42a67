"""Small PDF files with text, and the processes that read them."""

from __future__ import annotations

import contextlib
import io
import random

import psutil
from pypdf import PdfWriter
from pypdf.generic import DictionaryObject, NameObject, StreamObject

LINE = b"10 10 Td (The harbour is deep) Tj\n"
# A small file whose reading takes several times as long as a test waits for anything.
ENDLESS = {"pages": 50, "lines": 60_000}


def pdf(pages: int = 1, lines: int = 1, blanks: int = 0, picture: int = 0) -> bytes:
    """A PDF whose pages all show one compressed stream of `lines` text operators and some blanks.

    `picture`: bytes of a stream that no page shows and nothing makes smaller.
    """
    writer, file, content = PdfWriter(), io.BytesIO(), StreamObject()
    content.set_data(b"BT /F 12 Tf\n" + LINE * lines + b" " * blanks + b"ET")
    stream = writer._add_object(content.flate_encode())
    face = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    font = DictionaryObject({NameObject(key): NameObject(value) for key, value in face.items()})
    fonts = DictionaryObject({NameObject("/F"): writer._add_object(font)})
    if picture:
        noise = StreamObject()
        noise.set_data(random.Random(0).randbytes(picture))
        writer._add_object(noise)
    for _ in range(pages):
        page = writer.add_blank_page(200, 200)
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        page[NameObject("/Contents")] = stream
    writer.write(file)
    return file.getvalue()


def readers() -> list[psutil.Process]:
    """The processes of `serve/convert.py` that this one has started."""
    result = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "convert.py" in " ".join(each.cmdline()):
                result.append(each)
    return result
