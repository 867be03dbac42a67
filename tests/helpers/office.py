"""Small Office files, books and archives, written with the standard library alone."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from xml.sax.saxutils import escape

PACKAGE = "http://schemas.openxmlformats.org/package/2006"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
TYPES = "application/vnd.openxmlformats-officedocument."
HEAD = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'


def archive(parts: Mapping[str, str | bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in parts.items():
            made.writestr(name, content)
    return file.getvalue()


def _package(main: str, kind: str, more: Mapping[str, str]) -> dict[str, str | bytes]:
    overrides = "".join(f'<Override PartName="/{name}" ContentType="{TYPES}{kind}"/>' for name, kind in more.items())
    types = '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    target = f'<Relationship Id="r1" Type="{OFFICE}/officeDocument" Target="{main}"/>'
    return {
        "[Content_Types].xml": f'{HEAD}<Types xmlns="{PACKAGE}/content-types">{types}'
        f'<Override PartName="/{main}" ContentType="{TYPES}{kind}"/>{overrides}</Types>',
        "_rels/.rels": f'{HEAD}<Relationships xmlns="{PACKAGE}/relationships">{target}</Relationships>',
    }


def word(*paragraphs: str, heading: str = "", rows: tuple[tuple[str, ...], ...] = (), before: str = "") -> bytes:
    """A Word file; `before` stands in front of its root, where a DTD would."""
    run = lambda text, style="": f"<w:p>{style}<w:r><w:t>{text}</w:t></w:r></w:p>"  # noqa: E731
    title = run(escape(heading), '<w:pPr><w:pStyle w:val="Heading1"/></w:pPr>') if heading else ""
    cells = "".join(f"<w:tr>{''.join(f'<w:tc>{run(escape(cell))}</w:tc>' for cell in row)}</w:tr>" for row in rows)
    body = title + "".join(map(run, paragraphs)) + (f"<w:tbl>{cells}</w:tbl>" if cells else "")
    styles = '<w:style w:type="paragraph" w:styleId="Heading1"><w:name w:val="heading 1"/></w:style>'
    parts = _package("word/document.xml", "wordprocessingml.document.main+xml", {})
    link = f'<Relationship Id="r1" Type="{OFFICE}/styles" Target="styles.xml"/>'
    parts["word/_rels/document.xml.rels"] = (
        f'{HEAD}<Relationships xmlns="{PACKAGE}/relationships">{link}</Relationships>'
    )
    parts["word/styles.xml"] = f'{HEAD}<w:styles xmlns:w="{WORD}">{styles}</w:styles>'
    parts["word/document.xml"] = f'{HEAD}{before}<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
    return archive(parts)


def with_parts(data: bytes, more: Mapping[str, str | bytes]) -> bytes:
    """The archive with further parts."""
    file = io.BytesIO(data)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as made:
        for name, content in more.items():
            made.writestr(name, content)
    return file.getvalue()


def sheet(name: str, rows: str, styles: str = "") -> bytes:
    """An Excel file with one sheet, of rows in its own XML; `styles`: what its cells look like."""
    kind = "spreadsheetml.worksheet+xml"
    parts = _package("xl/workbook.xml", "spreadsheetml.sheet.main+xml", {"xl/worksheets/sheet1.xml": kind})
    link = f'<Relationship Id="r1" Type="{OFFICE}/worksheet" Target="worksheets/sheet1.xml"/>'
    if styles:
        parts["xl/styles.xml"] = f'{HEAD}<styleSheet xmlns="{SHEET}">{styles}</styleSheet>'
    parts["xl/_rels/workbook.xml.rels"] = f'{HEAD}<Relationships xmlns="{PACKAGE}/relationships">{link}</Relationships>'
    parts["xl/workbook.xml"] = (
        f'{HEAD}<workbook xmlns="{SHEET}" xmlns:r="{OFFICE}"><sheets>'
        f'<sheet name="{escape(name)}" sheetId="1" r:id="r1"/></sheets></workbook>'
    )
    parts["xl/worksheets/sheet1.xml"] = (
        f'{HEAD}<worksheet xmlns="{SHEET}"><dimension ref="A1:XFD1048576"/><sheetData>{rows}</sheetData></worksheet>'
    )
    return archive(parts)


def book(chapters: Mapping[str, str], more: Mapping[str, str] | None = None) -> bytes:
    """An EPUB file; chapters are XHTML by their names, in the order of the spine."""
    items = "".join(f'<item id="c{n}" href="{name}" media-type="x"/>' for n, name in enumerate(chapters))
    spine = "".join(f'<itemref idref="c{n}"/>' for n in range(len(chapters)))
    opf = f'{HEAD}<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>'
    container = (
        f'{HEAD}<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
    )
    inside = {f"OEBPS/{name.replace('%20', ' ')}": text for name, text in chapters.items()}
    parts = {"mimetype": "application/epub+zip", "META-INF/container.xml": container, "OEBPS/book.opf": opf}
    return archive({**parts, **inside, **(more or {})})
