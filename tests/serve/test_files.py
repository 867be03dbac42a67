"""Texts of files: what is no text is told; documents are converted in a process with limits and without a way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvsketch.serve import convert, files
from kvsketch.serve.files import SENT, FileText, Limits, Stopped, TooLarge, documents_in, joined, read_file
from tests.helpers import office
from tests.helpers.waiting import LONGEST_WAIT

SLOW = 200_000  # lines of a PDF of 20 kB that takes minutes
OLE = bytes.fromhex("d0cf11e0a1b11ae1")


@pytest.fixture
def pdf() -> Any:
    pytest.importorskip("pypdf", reason="not installed: pip install 'kvsketch[pdf]'")
    from tests.helpers.pdf import pdf, readers

    yield pdf
    assert readers() == [], "no process goes on reading"


def text_of(data: bytes, name: str, *args: Any, **options: Any) -> str:
    return read_file(data, name, *args, **options).text


def test_text_is_taken_as_it_is() -> None:
    assert read_file("\ufeffné".encode(), "a.txt") == FileText("né")
    assert read_file(b"<p>no page</p>\n", "a.md") == FileText("<p>no page</p>\n")
    with pytest.raises(ValueError, match="the file is empty"):
        read_file(b"\xff\xfe", "the file")


WORDS = "Die Brücke über den Fluß wurde 1921 gebaut, “so sagt man” – für 5 €.\n"


@pytest.mark.parametrize(
    ("data", "text", "note"),
    [
        (WORDS.encode("cp1252"), WORDS, "a.txt is not UTF-8: read as Latin-1 (Windows-1252)"),
        ("Der Fluß \x81".encode("latin-1"), "Der Fluß \x81", "read as Latin-1"),
        (WORDS.encode("utf-16"), WORDS, "a.txt is UTF-16 text"),
        (b"\xfe\xff" + WORDS.encode("utf-16-be"), WORDS, "a.txt is UTF-16 text"),
        (WORDS.encode("utf-16-le"), WORDS, "a.txt is UTF-16 text without a byte order mark"),
        (WORDS.encode("utf-16-be"), WORDS, "a.txt is UTF-16 text without a byte order mark"),
        (WORDS.encode("utf-32"), WORDS, "a.txt is UTF-32 text"),
        (WORDS.encode()[:-6] + b"\xe2.", WORDS[:-4] + "\ufffd.", "a.txt is UTF-8 text with 1 damaged characters"),
    ],
)
def test_other_encodings_are_read_with_a_note(data: bytes, text: str, note: str) -> None:
    read = read_file(data, "a.txt")
    assert read.text == text and len(read.notes) == 1 and note in read.notes[0]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a.bin is a picture; run a text recognition on it first"),
        (b"\xff\xd8\xff\xe0 no zero byte", "a.bin is a picture"),
        (b"\x7fELF\0", "is not text in UTF-8, UTF-16 or Latin-1; kvsketch reads plain text"),
        ("Мост был построен".encode("cp1251"), "is not text in UTF-8"),
        (b"a\0b", "is not text"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600, "a file of an old Office .* save it as .docx"),
        (b"{\\rtf1 Hello}", "Rich Text Format; save it as .docx or plain text"),
        (office.archive({"a.txt": "a"}), "it is an archive; unpack it"),
        (office.archive({"mimetype": "application/vnd.oasis.opendocument.text"}), "an OpenDocument file; save it"),
        (b"PK\x03\x04 nothing", "cannot be read: it is damaged or not whole; copy it again"),
        (OLE + b"old", "a file of an old Office"),
        (OLE + "EncryptedPackage".encode("utf-16-le"), "an Office file that is protected by a password; save a"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused_with_what_to_do(data: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_file(data, "a.bin")


def needs(*packages: str) -> None:
    for each in packages:
        pytest.importorskip(each, reason=f"{each} is not installed: pip install 'kvsketch[documents]'")


PAGE = b"""<!doctype html><html><head><title>no</title><meta charset="iso-8859-1"><style>p {}</style></head><body>
<!-- hidden --><script>document.write("no")</script><h1>Br\xfccke</h1>
<p>Built <b>well</b> by <a href="http://x.example">us</a>.</p>
<ul><li>one<li>two</ul><img src="http://x.example/p.png" alt="a bridge"><table><tr><th>a</th><th>b</th></tr><tr>
<td>1</td><td>2 &lt; 3</td></tr></table><svg><text>no</text></svg></body></html>"""


def test_html_is_read_as_text_not_as_tags() -> None:
    needs("markdownify")
    read = read_file(PAGE, "a file")
    assert read.places == () and read.notes == ()
    lines = [line for line in read.text.splitlines() if line.strip()]
    assert lines == [
        "# Brücke", "Built **well** by us.", "- one", "- two", "a bridge",
        "| a | b |", "| --- | --- |", "| 1 | 2 < 3 |",
    ]  # fmt: skip
    assert read_file(b"<p>a <i>b</i>", "short.HTM").text == "a *b*"
    assert read_file(b"<p>a <i>b</i>", "short.txt").text == "<p>a <i>b</i>"


def test_word_files_are_read() -> None:
    needs("mammoth", "markdownify")
    read = read_file(office.word("It is deep.", heading="The harbour", rows=(("basin", "m"), ("2", "14"))), "a.docx")
    assert read.text.startswith("# The harbour\n\nIt is deep.\n\n|") and "| 2 | 14 |" in read.text
    with pytest.raises(ValueError, match=r"a\.docx is a Word file without text$"):
        read_file(office.word(), "a.docx")


def test_excel_files_are_read_sheet_by_sheet() -> None:
    needs("openpyxl")
    rows = (
        '<row r="1"><c r="A1" t="inlineStr"><is><t>item</t></is></c>'
        '<c r="C1" t="inlineStr"><is><t>a | b</t></is></c></row>'
        '<row r="9"><c r="A9"><v>12</v></c><c r="B9"><f>A9*2</f><v>24</v></c><c r="C9"><f>A9*3</f></c></row>'
    )
    read = read_file(office.sheet("Costs 2024", rows), "a.xlsx")
    assert read.text == "## Sheet Costs 2024\n\n| item |  | a \\| b |\n| --- | --- | --- |\n| 12 | 24 |  |"
    assert read.places == ((0, "sheet Costs 2024"),)
    assert read.notes == ("a.xlsx: cells left out, for their formulas have no saved value: 1; save the file in Excel",)


@pytest.mark.parametrize("look", ["<fills><fill/></fills>", '<fonts><font><family val="99"/></font></fonts>'])
def test_an_excel_file_is_read_whose_colours_or_fonts_are_odd(look: str) -> None:
    """openpyxl refuses what other programs write, and what cells look like matters to nobody here."""
    needs("openpyxl")
    formats = '<cellXfs><xf numFmtId="0" fontId="0" fillId="0"/><xf numFmtId="10" fontId="0" fillId="0"/></cellXfs>'
    rows = '<row r="1"><c r="A1"><v>12</v></c><c r="B1" s="1"><v>0.25</v></c></row>'
    read = read_file(office.sheet("Costs", rows, look + formats), "a.xlsx")
    assert read.text == "## Sheet Costs\n\n| 12 | 25% |\n| --- | --- |"


def test_powerpoint_files_are_read_slide_by_slide() -> None:
    needs("pptx")
    import io

    from pptx import Presentation
    from pptx.util import Inches

    made, file = Presentation(), io.BytesIO()
    first = made.slides.add_slide(made.slide_layouts[1])
    first.shapes.title.text, first.placeholders[1].text = "The\nharbour", "It is deep."
    first.notes_slide.notes_text_frame.text = "Say this."
    second = made.slides.add_slide(made.slide_layouts[6])
    cells = second.shapes.add_table(1, 2, Inches(1), Inches(1), Inches(2), Inches(1)).table
    cells.cell(0, 0).text, cells.cell(0, 1).text = "basin", "14 m"
    second.shapes.add_group_shape().shapes.add_textbox(0, 0, 9, 9).text_frame.text = "grouped"
    made.save(file)
    read = read_file(file.getvalue(), "a.pptx")
    slides = [
        "## Slide 1: The harbour\n\nIt is deep.\n\nNotes: Say this.",
        "## Slide 2\n\n| basin | 14 m |\n| --- | --- |\n\ngrouped",
    ]
    assert read.text == "\n\n".join(slides)
    assert read.places == ((0, "slide 1"), (len(slides[0]) + 2, "slide 2"))


CHAPTER = "<html><head><title>no</title></head><body>{}</body></html>"


def test_epub_files_are_read_chapter_by_chapter() -> None:
    needs("markdownify")
    chapters = {
        "b.xhtml": CHAPTER.format("<h1>The <i>port</i></h1><p>Deep.</p>"),
        "a%20.xhtml": CHAPTER.format("<p>End."),
    }
    read = read_file(office.book(chapters), "a.epub")
    assert read.text == "# The *port*\n\nDeep.\n\nEnd."
    assert read.places == ((0, "chapter 1: The port"), (21, "chapter 2"))
    locked = '<e xmlns:x="urn:x"><x:CipherReference URI="OEBPS/b.xhtml"/></e>'
    with pytest.raises(ValueError, match="an EPUB file that cannot be read: it is protected by DRM"):
        read_file(office.book(chapters, {"META-INF/encryption.xml": locked}), "a.epub")


LAUGHS = "<!DOCTYPE x [" + "".join(
    f'<!ENTITY l{n} "{f"&l{n - 1};" * 10 if n else "ha"}">' for n in range(12)
) + "]>"  # fmt: skip


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (office.word("&l11;", before=LAUGHS), "word/document.xml in it holds a DTD"),
        (office.word("&e;", before='<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]>'), "holds a DTD"),
        (office.archive({"[Content_Types].xml": "", "word/document.xml": LAUGHS.encode("utf-16")}), "holds a DTD"),
        (office.archive({"[Content_Types].xml": "", "xl/a.xml": " " * (2**20 - 4) + LAUGHS}), "xl/a.xml in it holds"),
        (office.book({"a.xhtml": LAUGHS + CHAPTER.format("&l11;")}), "a.xhtml in it holds an XML entity of its own"),
    ],
)  # fmt: skip
def test_xml_entities_are_refused(data: bytes, told: str) -> None:
    """They are before any library sees them, so none needs to be there."""
    with pytest.raises(ValueError, match=told):
        read_file(data, "a file", SENT)


def test_a_picture_may_have_a_dtd() -> None:
    """As drawing programs write SVG, which is not parsed here."""
    needs("mammoth", "markdownify")
    picture = '<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "svg11.dtd"><svg xmlns="http://www.w3.org/2000/svg"/>'
    data = office.with_parts(office.word("It is deep."), {"word/media/a.svg": picture})
    assert read_file(data, "a.docx").text == "It is deep."


def test_an_archive_that_unpacks_to_too_much_is_refused() -> None:
    bomb = office.archive({"[Content_Types].xml": "", "ppt/media/a.png": bytes(300 * 2**20)})
    assert len(bomb) < 400_000
    with pytest.raises(TooLarge, match="a PowerPoint file that unpacks to more than 256 MiB"):
        read_file(bomb, "a.pptx", SENT)
    # One that lies about it is read as far as it says.
    needs("pptx")
    at = bomb.rindex(b"ppt/media/a.png") - 46
    lies = bomb[: at + 24] + (99).to_bytes(4, "little") + bomb[at + 28 :]
    with pytest.raises(ValueError, match="cannot be read"):
        read_file(lies, "a.pptx", SENT)


def test_a_long_document_is_refused_by_its_limits() -> None:
    needs("mammoth", "openpyxl", "markdownify")
    with pytest.raises(TooLarge, match="a Word file of more than 50 characters; split it"):
        read_file(office.word("word " * 50), "a.docx", Limits(characters=50))
    if sys.platform == "linux":
        many = office.sheet("S", '<row><c t="inlineStr"><is><t>a long cell</t></is></c></row>' * 400_000)
        assert len(many) < 200_000
        with pytest.raises(
            TooLarge, match=r"(an Excel file|a file) whose text takes more than (150 MiB of memory|2 seconds)"
        ):
            read_file(many, "a.xlsx", Limits(memory=150 * 2**20, seconds=2))


def test_html_that_is_nested_deeply_is_told() -> None:
    needs("markdownify")
    with pytest.raises(ValueError, match="nested too deeply"):
        read_file(b"<div>" * 20_000 + b"a", "a.html", Limits(seconds=LONGEST_WAIT))


@pytest.mark.parametrize(
    "does",
    [
        "__import__('socket').socket()", "__import__('urllib.request').request.urlopen('http://127.0.0.1:9')",
        "__import__('os').system('true')", "__import__('subprocess').run(['true'])", "open('made', 'w')",
        "os = __import__('os'); os.open('made', os.O_CREAT | os.O_WRONLY)",
        "__import__('os').fork()",
    ],
)  # fmt: skip
def test_the_process_has_no_way_out(does: str, tmp_path: Path) -> None:
    if "fork" in does and sys.platform == "win32":
        pytest.skip("Windows has no fork")
    script = str(Path(files.__file__).with_name("convert.py"))
    (tmp_path / "library").mkdir()
    # In place of a library that a document leads astray.
    (tmp_path / "library" / "bs4.py").write_text(does)
    code = (
        f"import runpy, sys\nsys.path.insert(0, {str(tmp_path / 'library')!r})\n"
        f"sys.argv = 'convert.py html 0 0 0 0 0'.split()\nrunpy.run_path({script!r}, run_name='__main__')\n"
    )
    command = [sys.executable, "-P", "-c", code]
    ended = subprocess.run(command, input=b"<p>a</p>", capture_output=True, cwd=tmp_path, timeout=LONGEST_WAIT)
    assert b"PermissionError: a document asks for" in ended.stdout, ended
    assert not (tmp_path / "made").exists()


def test_several_files_are_one_text_whose_places_name_them() -> None:
    first, second = (
        FileText("one\n\ntwo", ((0, "page 1"), (5, "page 2"))),
        FileText("three", notes=("b.txt is UTF-16",)),
    )
    both = joined([("a.pdf", first), ("b.txt", second)])
    assert both.text == "File a.pdf:\n\none\n\ntwo\n\nFile b.txt:\n\nthree" and both.notes == second.notes
    assert [(both.text[start:][:4], name) for start, name in both.places] == [
        ("File", "a.pdf"), ("one\n", "a.pdf, page 1"), ("two\n", "a.pdf, page 2"), ("File", "b.txt"),
    ]  # fmt: skip
    assert joined([("a.pdf", first)]) == first


def test_places_are_those_of_the_text_as_it_is_kept() -> None:
    parts = [("page 1", "a\r\nb\rc\0"), ("", "\ud83d\ude00"), ("page 3", "\ud83dd")]
    assert convert.joined(parts) == {"text": "a\nb\nc\n\n😀\n\n\ufffdd", "places": [(0, "page 1"), (10, "page 3")]}


def test_a_folder_gives_its_documents_in_order(tmp_path: Path) -> None:
    for name in ("b.md", "a.PDF", "c.png", ".hidden.txt", "sub/d.docx", ".git/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    taken, left = documents_in(tmp_path)
    assert [str(each.relative_to(tmp_path)) for each in taken] == ["a.PDF", "b.md", str(Path("sub/d.docx"))]
    assert [each.name for each in left] == ["c.png"]


def test_pdf_is_opened(pdf: Any) -> None:
    assert text_of(pdf(), "a report").strip() == "The harbour is deep"
    read = read_file(pdf(pages=3), "a report")
    assert read.text.split("\n\n") == ["The harbour is deep"] * 3
    assert read.places == ((0, "page 1"), (21, "page 2"), (42, "page 3"))
    with pytest.raises(ValueError, match="a report is a PDF that cannot be read: it is damaged or not whole; copy"):
        text_of(b"%PDF-1.4 nothing", "a report")
    with pytest.raises(ValueError, match="a report is a PDF without text"):
        text_of(pdf(lines=0), "a report")


@pytest.mark.parametrize("cipher", ["RC4-128", "AES-128", "AES-256"])
def test_an_encrypted_pdf_is_read_if_it_needs_no_password(pdf: Any, cipher: str) -> None:
    """Publishers restrict what a reader may do with a file, and everybody may open it."""
    if cipher.startswith("AES"):
        pytest.importorskip("cryptography", reason="not installed: pip install 'kvsketch[pdf]'")
    import io

    import pypdf

    for password in ("", "secret"):
        made, file = pypdf.PdfWriter(clone_from=io.BytesIO(pdf())), io.BytesIO()
        made.encrypt(password, "owner", algorithm=cipher)
        made.write(file)
        if password:
            with pytest.raises(ValueError, match="a report is a PDF that cannot be read: it is protected by a pass"):
                text_of(file.getvalue(), "a report")
        else:
            assert text_of(file.getvalue(), "a report").strip() == "The harbour is deep"


def test_an_encrypted_pdf_says_which_package_is_missing(pdf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import pypdf

    def refused(*_: Any) -> Any:
        raise pypdf.errors.DependencyError("cryptography>=3.1 is required for AES algorithm")

    monkeypatch.setattr(pypdf, "PdfReader", refused)
    assert convert.converted(pdf(), "pdf", 0, 0, 0) == {"missing": "cryptography"}
    monkeypatch.setattr(files, "_said", lambda *_: {"missing": "cryptography"})
    with pytest.raises(ImportError, match=r"needs cryptography: pip install 'kvsketch\[pdf\]'"):
        text_of(pdf(), "a report")


@pytest.mark.parametrize("picture", [70_000, 400_000, 3_000_000])
def test_a_pdf_larger_than_a_pipe_is_opened(pdf: Any, picture: int) -> None:
    data = pdf(picture=picture)
    assert len(data) > picture
    assert text_of(data, "a report", Limits(seconds=LONGEST_WAIT)).strip() == "The harbour is deep"


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
    data = pdf(**shape)
    assert len(data) < 50_000
    with pytest.raises(TooLarge, match=told):
        text_of(data, "a report", limits)


def test_a_pdf_that_is_not_wanted_any_more_is_left(pdf: Any) -> None:
    looks = [True, True, True, False]
    with pytest.raises(Stopped):
        text_of(pdf(lines=SLOW, picture=400_000), "a report", wanted=lambda: looks.pop(0))
    assert looks == []


def test_the_process_that_reads_a_pdf_ends_by_itself(pdf: Any) -> None:
    """Its processor time is limited, so it does not outlive a server that was killed for long."""
    if sys.platform == "win32":
        pytest.skip("Windows has no limits of this kind")
    command = [sys.executable, "-P", str(Path(files.__file__).with_name("convert.py")), "pdf", "0", "0", "1", "0", "0"]
    ended = subprocess.run(command, input=pdf(lines=SLOW), capture_output=True, timeout=LONGEST_WAIT)
    assert ended.returncode < 0 and ended.stdout == b""


def test_the_process_that_reads_a_pdf_starts_light(pdf: Any) -> None:
    script = str(Path(files.__file__).with_name("convert.py"))
    code = (
        "import runpy, sys\n"
        f"sys.argv = 'convert.py pdf 0 0 0 0 0'.split()\nrunpy.run_path({script!r}, run_name='__main__')\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'kvsketch'} & set(sys.modules)), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", code], input=pdf(), capture_output=True, timeout=LONGEST_WAIT)
    assert (ended.returncode, ended.stderr.strip()) == (0, b"[]")
