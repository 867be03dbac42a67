"""The text of a file: plain text and Markdown as they are, PDF through pypdf."""

from __future__ import annotations

import io
import logging

PDF = b"%PDF-"


def text_of(data: bytes, name: str) -> str:
    """The text in the bytes of a file; ValueError for one that holds none."""
    if data[:1024].lstrip().startswith(PDF):
        text = _pdf_text(data, name)
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


def _pdf_text(data: bytes, name: str) -> str:
    try:
        import pypdf
    except ImportError:
        raise ImportError(f"{name} is a PDF, and reading one needs pypdf: pip install 'kvsketch[pdf]'") from None
    logging.getLogger("pypdf").setLevel(logging.ERROR + 1)  # what matters of its remarks is in the error below
    try:
        pages = [page.extract_text() for page in pypdf.PdfReader(io.BytesIO(data)).pages]
    except Exception as error:  # a damaged or locked file fails in many ways
        raise ValueError(f"{name} is a PDF that pypdf cannot read ({type(error).__name__}: {error})") from None
    text = "\n\n".join(pages).replace("\0", "")
    if not text.strip():
        raise ValueError(f"{name} is a PDF without text, such as a scan; run a text recognition on it first")
    return text
