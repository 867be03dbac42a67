"""Texts of files: what is no text is told, PDF goes through pypdf."""

from __future__ import annotations

import io

import pytest

from kvsketch.serve.files import text_of


def test_text_is_taken_as_it_is() -> None:
    assert text_of("\ufeffné".encode(), "a.txt") == "né"
    with pytest.raises(ValueError, match="the file is not UTF-8 text"):
        text_of(b"\xff\xfe", "the file")


def test_pdf_is_opened() -> None:
    pypdf = pytest.importorskip("pypdf", reason="not installed: pip install 'kvsketch[pdf]'")
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer, file, content = pypdf.PdfWriter(), io.BytesIO(), DecodedStreamObject()
    content.set_data(b"BT /F 12 Tf 10 10 Td (The harbour is deep) Tj ET")
    name = {key: NameObject(f"/{key}") for key in ("Type", "Font", "Subtype", "Type1", "BaseFont", "Helvetica", "F")}
    face = {name["Type"]: name["Font"], name["Subtype"]: name["Type1"], name["BaseFont"]: name["Helvetica"]}
    fonts = DictionaryObject({name["F"]: DictionaryObject(face)})
    page = writer.add_blank_page(200, 200)
    page[NameObject("/Resources")] = DictionaryObject({name["Font"]: fonts})
    page[NameObject("/Contents")] = writer._add_object(content)
    writer.write(file)
    assert text_of(file.getvalue(), "a report").strip() == "The harbour is deep"
    with pytest.raises(ValueError, match="a report is a PDF that pypdf cannot read"):
        text_of(b"%PDF-1.4 nothing", "a report")
