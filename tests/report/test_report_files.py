"""The files of a report: read clearly, written whole, the same for the same records, and without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvsketch
from kvsketch.cli import app
from kvsketch.cli.methods import describe
from kvsketch_lab.records import read_folder
from kvsketch_lab.report import render as rendering
from kvsketch_lab.report.blocks import markdown
from kvsketch_lab.report.body import body
from kvsketch_lab.report.contents import gather
from kvsketch_lab.report.palette import BASE, FILE, look_file, looks
from kvsketch_lab.report.render import render
from tests.report.sample_records import METHODS, clusterability, lines, recall, record, write


def test_a_torn_last_line_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    write(tmp_path / "lines.jsonl", list(lines(1))[:3])
    with (tmp_path / "lines.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "lines", "data": {"method": "sn')
    remarks: list[str] = []
    assert len(read_folder(tmp_path, remarks)) == 3
    assert remarks == ["lines.jsonl: the last line is incomplete, as a run that was stopped leaves it; left out"]


@pytest.mark.parametrize("made", ["nothing", "empty", "benchmarks"])
def test_a_folder_without_experiments_says_what_to_do(tmp_path: Path, made: str) -> None:
    folder = tmp_path / "records"
    if made != "nothing":
        folder.mkdir()
    if made == "benchmarks":
        write(folder / "kernels.jsonl", [record("kernel", {"median_us": 1.0})])
    with pytest.raises(ValueError, match="kvsketch eval"):
        render(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_same_records_give_the_same_files(tmp_path: Path) -> None:
    source = tmp_path / "records"
    source.mkdir()
    write(source / "recall.jsonl", recall())
    write(source / "clusterability.jsonl", clusterability())
    first, _ = render(source, tmp_path / "first")
    second, _ = render(source, tmp_path / "second")
    assert [path.name for path in first] == [path.name for path in second]
    assert {path.suffix for path in first} == {".md", ".html", ".png"}
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    assert not list((tmp_path / "first").rglob(".*")), "temporary files are gone"


def test_figures_of_an_earlier_report_go_and_other_files_stay(tmp_path: Path) -> None:
    write(tmp_path / "recall.jsonl", recall())
    figures = tmp_path / "out" / "figures"
    figures.mkdir(parents=True)
    for name in ("recall-other-model.png", "recall-other-model.svg", "recall-notes.txt", "mine.png"):
        (figures / name).write_bytes(b"")
    written, _ = render(tmp_path, tmp_path / "out")
    drawn = {path.name for path in written if path.parent == figures}
    assert {path.name for path in figures.iterdir()} == drawn | {"recall-notes.txt", "mine.png"}


def test_the_command_writes_tables_with_intervals_bytes_and_failures(tmp_path: Path) -> None:
    source = tmp_path / "records"
    source.mkdir()
    write(source / "lines.jsonl", lines(4))
    done = CliRunner().invoke(app, ["report", str(source), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    full = next(row for row in text.splitlines() if row.startswith("| `full`"))
    assert "| 1.00 [1.00, 1.00] |" in full
    assert "| `snapkv` | 1/4 | " in text and "1 of 4 failed" in text
    assert "- snapkv 1/4: OutOfMemoryError: CUDA out of memory" in text
    assert "| method | budget | all numbers of lines | lines 200 | lines 400 | tokens stored | device bytes |" in text
    assert next(row for row in text.splitlines() if row.startswith("| `snapkv` | 1/8")).endswith("| 938 | 13% |")
    glance = text[text.index("## At a glance") : text.index("## Line retrieval")]
    assert all(f"| `{method.partition(':')[0]}" in glance for method in METHODS) and "Line retrieval, 1/" in glance
    assert "kvsketch eval lines --model qwen2.5-coder-1.5b" in text and "c7f6595bdf" in text
    for name in [part.partition(")")[0] for part in text.split("](")[1:]]:
        assert (tmp_path / "out" / name).is_file()


def test_a_value_of_one_question_is_marked(tmp_path: Path) -> None:
    write(tmp_path / "lines.jsonl", lines(1))
    assert "| 1.00* |" in markdown(body(gather(tmp_path)))


def test_without_matplotlib_everything_but_figures_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "recall.jsonl", recall())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    written, said = render(tmp_path, tmp_path / "out")
    assert sorted(path.name for path in written) == ["report.html", "report.md"]
    assert said == [rendering.NO_FIGURES]


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path / "recall.jsonl", recall())
    code = (
        "import sys; from pathlib import Path; from kvsketch_lab.report.render import render;"
        f"render(Path({str(tmp_path)!r}), Path({str(tmp_path / 'out')!r}));"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class _Found(HTMLParser):
    """The elements of a page, and everything it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset") and value and not value.startswith(("#", "data:")):
                self.fetched.append(value)


def without_code(text: str) -> str:
    """Markdown without what stands between backticks."""
    return re.sub(r"(?<!\\)`[^`\n]*(?<!\\)`", "", text)


EVIL = "</td></p><script>alert(1)</script><img src=x onerror=alert(2)>&lt;b&gt; [a](http://b) | `x` \u2028"


def test_text_of_records_stays_text(tmp_path: Path) -> None:
    """A model, a sample, a method, a budget, an error and a command that try to be HTML or Markdown."""
    folder = tmp_path / "records"
    write(folder / "lines.jsonl", lines())  # the page has figures
    broken = next(iter(recall()))["data"]
    evil = {**broken, "sample": EVIL, "model": EVIL, "method": f"quest:{EVIL}", "budget": EVIL}
    write(
        folder / "recall.jsonl", [record("recall", evil, command=EVIL), record("recall", {**evil, "failed": EVIL}, 1)]
    )
    written, _ = render(folder, tmp_path / "out")
    assert {".md", ".html", ".png"} == {path.suffix for path in written}
    for name in ("report.md", "report.html"):
        parser = _Found()
        text = (tmp_path / "out" / name).read_text(encoding="utf-8")
        # Markdown readers show what stands between backticks as it is.
        parser.feed(text if name.endswith("html") else without_code(text))
        assert not parser.tags & {"script", "b"}, name
        assert parser.fetched == [], name
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<img src=x" not in page and "@import" not in page and "url(" not in page
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "<img src=x" not in without_code(report) and "](http" not in without_code(report)
    assert "onerror=alert(2)" in page and "onerror=alert(2)" in report, "it is shown, as text"


def test_every_method_has_a_look_of_its_own() -> None:
    described = [describe(cls) for cls in kvsketch.METHODS.values()]
    there = (resources.files("kvsketch_lab.report") / FILE).read_text(encoding="utf-8")
    assert there == look_file(described), "the classes look otherwise; run: kvsketch report --docs"
    shown = looks([*kvsketch.METHODS, "clusterkv:rounds=20", "mine", "theirs"])
    assert len({look[1:] for look in shown.values()}) == len(shown)
    for look in BASE.values():
        assert _contrast(look.colour, "#ffffff") >= 3


def _contrast(one: str, other: str) -> float:
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
