"""The text of a PDF, Word, PowerPoint, Excel, EPUB or HTML file, in a process of its own:

    python -P convert.py KIND PAGES CHARACTERS SECONDS MEMORY UNPACKED < FILE

KIND is pdf, html or zip, and 0 is no limit.

Some files of a few kilobytes take minutes or gigabytes, so `files.read_file` runs this file and ends it when it takes
too long. It opens no connection, starts no program and writes no file. It imports the standard library and what one
kind of file needs, to start fast, and prints JSON: the text with its places and notes, or why there is none.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import posixpath
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

GAP = "\n\n"
# Pictures (.svg) have a DTD as often as not, and nobody parses them here.
XML = (".xml", ".rels", ".opf", ".ncx", ".xhtml", ".html", ".htm", ".vml")
CHUNK = 2**20
LONGEST_MARK = 64  # bytes of what a part is searched for, at most
DROPPED = ("script", "style", "template", "noscript", "svg", "math", "object", "iframe", "head")
CONTAINER = "{urn:oasis:names:tc:opendocument:xmlns:container}"
OPF = "{http://www.idpf.org/2007/opf}"
# A cell with a formula and no value, as programs write it that do not compute.
UNCOMPUTED = re.compile(rb"<f(?:\s[^>]*)?>[^<]*</f>(?:<v\s*/>|<v></v>)?</c>")
FORBIDDEN = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "urllib.")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
DAMAGED = "it is damaged or not whole; copy it again"
Part = tuple[str, str]  # the name of a place, "" for none, and its text


def main() -> None:
    kind, *words = sys.argv[1:]
    pages, characters, seconds, memory, unpacked = map(int, words)
    limit_process(seconds, memory)
    logging.disable(logging.CRITICAL)  # what matters of the libraries' remarks is in the error below
    data = sys.stdin.buffer.read()
    sys.addaudithook(stay_inside)
    said = {"kind": kind_of_archive(data) if kind == "zip" else kind}
    said |= converted(data, said["kind"], pages, characters, unpacked)
    json.dump(said, sys.stdout)


def converted(data: bytes, kind: str, pages: int, characters: int, unpacked: int) -> dict[str, Any]:
    """The text of a file, its places and notes; or a limit that it exceeds, a package that is missing, an error."""
    notes: list[str] = []
    try:
        if kind in ARCHIVES:
            check_archive(data, unpacked, ENTITY if kind == "epub" else DTD)
        if kind not in KINDS:
            raise Refused(OTHERS[kind])
        return {**joined(limited(KINDS[kind](data, notes), pages, characters)), "notes": notes}
    except ModuleNotFoundError as error:
        return {"missing": str(error.name)}
    except TooMuch as error:
        return {"limit": str(error)}
    except MemoryError:
        return {"limit": "memory"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Refused as error:
        return {"error": str(error)}
    except zipfile.BadZipFile:
        return {"error": DAMAGED}
    except Exception as error:  # a damaged or locked file fails in many ways
        return {"error": f"{type(error).__name__}: {error}"}


class TooMuch(Exception):
    """The name of a limit that a file exceeds."""


class Refused(Exception):
    """What a file must not hold, or lacks."""


# ---- the process


def limit_process(seconds: int, memory: int) -> None:
    """The operating system's own limits, where it has them: they hold even when nobody is left to end this process."""
    try:
        import resource
    except ImportError:
        return
    for what, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory)):
        hard = resource.getrlimit(what)[1]
        if most and (hard == resource.RLIM_INFINITY or most < hard):
            try:
                resource.setrlimit(what, (most, hard))
            except (OSError, ValueError):  # macOS has the names, not the limits
                continue


def stay_inside(event: str, arguments: Any) -> None:
    """An audit hook: a file that names an address or a program gets neither, whatever a library does with it."""
    # Python keeps the modules that it has compiled.
    writes = event == "open" and arguments[2] & WRITING and "__pycache__" not in str(arguments[0])
    if writes or event.startswith(FORBIDDEN):
        raise PermissionError(f"a document asks for {event}")


# ---- limits of a file


def limited(parts: Iterable[Part], most_parts: int, most_characters: int) -> Iterator[Part]:
    """The parts as they are; TooMuch for more than the most of them or of their characters, 0: no limit."""
    characters = 0
    for number, (name, text) in enumerate(parts, 1):
        if most_parts and number > most_parts:
            raise TooMuch("pages")
        characters += len(text)
        if most_characters and characters > most_characters:
            raise TooMuch("characters")
        yield name, text


def joined(parts: Iterable[Part]) -> dict[str, Any]:
    """One text, and the places [first character, name] of its parts."""
    texts: list[str] = []
    places: list[tuple[int, str]] = []
    at = 0
    for name, part in parts:
        # Halves of surrogate pairs find their other half, or become U+FFFD.
        text = part.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        text = text.replace("\0", "").replace("\r\n", "\n").replace("\r", "\n")
        if name:
            places.append((at, name))
        texts.append(text)
        at += len(text) + len(GAP)
    return {"text": GAP.join(texts), "places": places}


def encoded(mark: str) -> list[bytes]:
    return [mark.encode(form) for form in ("ascii", "utf-16-le", "utf-16-be")]


ENTITY = ("an XML entity of its own", encoded("<!ENTITY"))
DTD = ("a DTD", [*encoded("<!DOCTYPE"), *ENTITY[1]])  # Office formats forbid it


def kind_of_archive(data: bytes) -> str:
    """By the parts of an archive; zip for any other and for a damaged one."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = set(archive.namelist())
            own = archive.open("mimetype").read(100) if "mimetype" in names else b""
    except Exception:  # what is wrong with it is told when it is read
        return "zip"
    if own.strip() == b"application/epub+zip":
        return "epub"
    for folder, kind in (("word/", "docx"), ("ppt/", "pptx"), ("xl/", "xlsx")):
        if "[Content_Types].xml" in names and any(name.startswith(folder) for name in names):
            return kind
    return "odf" if b"opendocument" in own else "zip"


def check_archive(data: bytes, most: int, forbidden: tuple[str, list[bytes]]) -> None:
    """TooMuch for an archive that unpacks to more than `most` bytes, Refused for one whose XML defines entities."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        # No part unpacks to more than its entry says: zipfile reads no further.
        if most and sum(each.file_size for each in archive.infolist()) > most:
            raise TooMuch("unpacked")
        for each in archive.infolist():
            if each.filename.lower().endswith(XML):
                with archive.open(each) as part:
                    if holds(part, forbidden[1]):
                        raise Refused(f"{each.filename} in it holds {forbidden[0]}")


def holds(part: Any, marks: Sequence[bytes]) -> bool:
    before = b""
    while chunk := part.read(CHUNK):
        found = before + chunk
        if any(mark in found for mark in marks):
            return True
        before = found[-LONGEST_MARK:]
    return False


# ---- the kinds of files: the parts of each, with notes for the reader of the text


def pdf(data: bytes, notes: list[str]) -> Iterator[Part]:
    import pypdf

    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        # Many are encrypted without a password: what a reader may do with them is restricted.
        locked = reader.is_encrypted and not reader.decrypt("")
    except pypdf.errors.DependencyError:
        raise ModuleNotFoundError(name="cryptography") from None
    except pypdf.errors.PdfReadError:
        raise Refused(DAMAGED) from None
    if locked:
        raise Refused("it is protected by a password; save a copy without one")
    for number, page in enumerate(reader.pages, 1):
        yield f"page {number}", page.extract_text()


def html(data: bytes, notes: list[str]) -> Iterator[Part]:
    yield "", text_of_html(data)


def text_of_html(data: bytes | str) -> str:
    """Headings, lists and tables as Markdown; links and pictures are their words."""
    import bs4
    import markdownify

    soup = bs4.BeautifulSoup(data, "lxml")
    for each in soup.find_all(DROPPED):
        each.decompose()
    for each in soup.find_all("img"):
        each.replace_with(str(each.get("alt") or ""))
    for comment in soup.find_all(string=lambda text: isinstance(text, bs4.element.PreformattedString)):
        comment.extract()
    maker = markdownify.MarkdownConverter(
        heading_style="ATX", bullets="-", strip=["a"], escape_asterisks=False, escape_underscores=False
    )
    return re.sub(r"\n{3,}", GAP, str(maker.convert_soup(soup))).strip()


def docx(data: bytes, notes: list[str]) -> Iterator[Part]:
    import mammoth

    made = mammoth.convert_to_html(io.BytesIO(data), convert_image=lambda image: [])
    yield "", text_of_html(made.value)


def pptx(data: bytes, notes: list[str]) -> Iterator[Part]:
    from pptx import Presentation

    for number, slide in enumerate(Presentation(io.BytesIO(data)).slides, 1):
        title = slide.shapes.title
        heading = " ".join(title.text_frame.text.split()) if title is not None else ""
        others = (each for each in slide.shapes if title is None or each.shape_id != title.shape_id)
        texts = [f"## Slide {number}{': ' if heading else ''}{heading}", *shape_texts(others)]
        if slide.has_notes_slide and (said := slide.notes_slide.notes_text_frame) is not None and said.text.strip():
            texts.append(f"Notes: {said.text.strip()}")
        yield f"slide {number}", GAP.join(texts)


def shape_texts(shapes: Iterable[Any]) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from shape_texts(shape.shapes)
        elif getattr(shape, "has_table", False):
            yield table([cell.text for cell in row.cells] for row in shape.table.rows)
        elif shape.has_text_frame and shape.text_frame.text.strip():
            # A vertical tab is a line break inside a paragraph.
            yield shape.text_frame.text.replace("\v", "\n").strip()


def xlsx(data: bytes, notes: list[str]) -> Iterator[Part]:
    import openpyxl

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        sheets = [name for name in archive.namelist() if name.startswith("xl/worksheets/") and name.endswith(".xml")]
        missing = sum(len(UNCOMPUTED.findall(archive.read(name))) for name in sheets)
    if missing:
        notes.append(f"cells left out, for their formulas have no saved value: {missing:,}; save the file in Excel")
    try:
        book = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True, keep_links=False)
    except (TypeError, ValueError):
        plain = io.BytesIO(without_looks(data))
        book = openpyxl.load_workbook(plain, read_only=True, data_only=True, keep_links=False)
    for sheet in book.worksheets:
        sheet.reset_dimensions()  # what a file says of its size may be the whole sheet, or wrong
        rows = ([cell_text(cell) for cell in row] for row in sheet.iter_rows())
        if text := table(row for row in rows if any(row)):
            yield f"sheet {sheet.title}", f"## Sheet {sheet.title}{GAP}{text}"


def without_looks(data: bytes) -> bytes:
    """The workbook without colours, fonts and frames, some of which openpyxl refuses; formats of numbers stay."""
    made = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for each in old.infolist():
            part = old.read(each)
            if each.filename == "xl/styles.xml":
                styles = ElementTree.fromstring(part)
                for look in [child for child in styles if child.tag.rpartition("}")[2] not in ("numFmts", "cellXfs")]:
                    styles.remove(look)
                part = ElementTree.tostring(styles)
            new.writestr(each.filename, part)
    return made.getvalue()


def cell_text(cell: Any) -> str:
    value = cell.value
    if value is None:
        return ""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return f"{100 * value:.10g}%" if "%" in (cell.number_format or "") else f"{value:.15g}"
    return str(value).removesuffix(" 00:00:00")


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows as a Markdown table, the first as its head; columns at the end that are empty everywhere go."""
    lines: list[list[str]] = []
    for row in rows:
        cells = [" ".join(cell.split()).replace("|", "\\|") for cell in row]
        while cells and not cells[-1]:
            cells.pop()
        lines.append(cells)
    width = max(map(len, lines), default=0)
    if not width:
        return ""
    written = [f"| {' | '.join([*cells, *[''] * (width - len(cells))])} |" for cells in lines]
    return "\n".join([written[0], f"|{' --- |' * width}", *written[1:]])


def epub(data: bytes, notes: list[str]) -> Iterator[Part]:
    import bs4
    import markdownify  # noqa: F401  missing packages are told before anything else

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        container = ElementTree.fromstring(archive.read("META-INF/container.xml"))
        root = container.find(f"{CONTAINER}rootfiles/{CONTAINER}rootfile")
        if root is None:
            raise Refused("it names no contents")
        package = ElementTree.fromstring(archive.read(root.attrib["full-path"]))
        folder = posixpath.dirname(root.attrib["full-path"])
        items = {each.attrib["id"]: each.attrib["href"] for each in package.iter(f"{OPF}item")}
        order = [each.attrib["idref"] for each in package.iter(f"{OPF}itemref")]
        names = [posixpath.normpath(posixpath.join(folder, unquote(items[each]))) for each in order if each in items]
        if protected(archive) & set(names):
            raise Refused("it is protected by DRM")
        chapters = itertools.count(1)
        for name in names:
            page = archive.read(name)
            if text := text_of_html(page):
                title = bs4.BeautifulSoup(page, "lxml").find(["h1", "h2"])
                heading = " ".join(title.get_text(" ").split())[:80] if title else ""
                yield f"chapter {next(chapters)}{': ' if heading else ''}{heading}", text


def protected(archive: zipfile.ZipFile) -> set[str]:
    """The parts of a book that are encrypted; fonts often are, which nobody reads here."""
    if "META-INF/encryption.xml" not in archive.namelist():
        return set()
    tree = ElementTree.fromstring(archive.read("META-INF/encryption.xml"))
    return {unquote(each.attrib.get("URI", "")) for each in tree.iter() if each.tag.endswith("}CipherReference")}


KINDS: dict[str, Callable[[bytes, list[str]], Iterator[Part]]] = {
    "pdf": pdf, "html": html, "docx": docx, "pptx": pptx, "xlsx": xlsx, "epub": epub,
}  # fmt: skip
OTHERS = {
    "odf": "it is an OpenDocument file; save it as .docx, .pptx, .xlsx or PDF",
    "zip": "it is an archive; unpack it and name the files in it",
}
ARCHIVES = ("docx", "pptx", "xlsx", "epub", *OTHERS)

if __name__ == "__main__":
    main()
