"""kvsketch read and chat: the answers of `kvsketch.ask`, turn by turn, from a file."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvsketch
from kvsketch import models
from kvsketch.cache import saving
from kvsketch.cli import app
from kvsketch.cli.progress import Stoppable, StoppedByUser
from kvsketch.decode import asking
from tests.helpers.tiny import save_tiny_model

TEXT = "The harbour was rebuilt in 1921. Its second basin is 14 metres deep.\n" * 4
METHOD = "h2o:budget=64:sinks=2:recent=8"
FACTS = ("method", "tokens read", "tokens stored", "bits", "memory")  # that /cache shows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


def run(*args: str, text: str | None = None) -> Any:
    return CliRunner().invoke(app, list(args), input=text)


def test_a_document_is_read_once_and_talked_about(folder: str, tmp_path: Path) -> None:
    (tmp_path / "harbour.md").write_text(TEXT)
    saved = str(tmp_path / "harbour.kvs")
    done = run("read", str(tmp_path / "harbour.md"), "--out", saved, "--model", folder, "--method", METHOD)
    assert done.exit_code == 0 and f"kvsketch chat {saved}" in done.stderr, done.output
    assert saving.about(saved)["model"] == folder
    talk = run(
        "chat", saved, "--max-new-tokens", "9", text="How deep?\n/cache\nWhen?\n/reset\nHow deep?\n/nothing\n/quit\n"
    )
    assert talk.exit_code == 0, talk.output
    dtype = saving.about(saved)["dtype"]
    model, tokenizer = models.load(folder, dtype=dtype)
    cache = kvsketch.CompressedCache.load(saved, model)
    first, second = (kvsketch.ask(model, tokenizer, cache, q, max_new_tokens=9) for q in ("How deep?", "When?"))
    assert talk.stdout == f"{first}\n{second}\n{first}\n"
    shown = [line for line in talk.stderr.splitlines() if line.startswith(FACTS)]
    assert [line[:14].strip() for line in shown] == list(FACTS) and "of the full cache's" in shown[-1]
    assert "there is no /nothing; /reset clears" in talk.stderr
    plain = run("chat", folder, "--max-new-tokens", "5", "--dtype", str(dtype), text="Hello\n")
    empty = kvsketch.CompressedCache(model, "full")
    assert plain.stdout == kvsketch.ask(model, tokenizer, empty, "Hello", max_new_tokens=5) + "\n"
    assert "leave out --method" in run("chat", saved, "--method", "full").stderr
    assert "make one with `kvsketch read" in run("chat", "nowhere.kvs").stderr


@pytest.mark.parametrize(("short", "method"), [(1024, "full"), (9, "rehearse")])
def test_a_short_document_is_kept_whole(
    short: int, method: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["kvsketch.cli.chat"], "SHORT", short)
    (tmp_path / "page.txt").write_text(TEXT)
    done = run("read", str(tmp_path / "page.txt"), "--out", str(tmp_path / "page.kvs"), "--model", folder)
    assert done.exit_code == 0 and f"tokens read with {method}" in done.stderr, done.output


def test_a_large_pdf_is_read_by_every_command(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("pypdf", reason="not installed: pip install 'kvsketch[pdf]'")
    from tests.helpers.pdf import pdf

    (tmp_path / "harbour.pdf").write_bytes(pdf(picture=400_000))
    file, saved = str(tmp_path / "harbour.pdf"), str(tmp_path / "harbour.kvs")
    read = ("read", file, "--out", saved, "--model", folder, "--method", METHOD)
    # A reading that hangs ends the process.
    faulthandler.dump_traceback_later(300, exit=True, file=sys.__stderr__)
    try:
        done = run(*read)
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert done.exit_code == 0 and f"saved {saved}" in done.stderr, done.output
    talk = run("chat", file, "--model", folder, "--method", METHOD, "--max-new-tokens", "3", text="How deep?\n")
    assert talk.exit_code == 0 and f"tokens read with {METHOD}" in talk.stderr, talk.output
    said = run("generate", "How deep?", "--file", file, "--model", folder, "--max-new-tokens", "3")
    assert said.exit_code == 0, said.output


def test_several_files_and_folders_are_read_as_one_text(folder: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "a.txt").write_bytes("Die Brücke. ".encode("latin-1") + TEXT.encode())
    (notes / "b.md").write_text(TEXT)
    (notes / "broken.pdf").write_bytes(b"%PDF-1.4")
    (notes / "c.png").write_bytes(b"")
    names = [str(tmp_path / "a.txt"), str(notes / "b.md")]
    both = f"File {names[0]}:\n\nDie Brücke. {TEXT}\n\nFile {names[1]}:\n\n{TEXT}"
    model, tokenizer = models.load(folder)
    cache = kvsketch.CompressedCache(model, "full")
    kvsketch.read(model, tokenizer, cache, both)
    answer = kvsketch.ask(model, tokenizer, cache, "How deep?", max_new_tokens=5)
    done = run("chat", names[0], str(notes), "--model", folder, "--max-new-tokens", "5", text="How deep?\n")
    assert done.exit_code == 0 and done.stdout == f"{answer}\n", done.output
    said = " ".join(done.stderr.split())
    assert f"2 files are read as one text, in this order: {names[0]}, {names[1]}" in said
    assert "a.txt is not UTF-8: read as Latin-1" in said and "1 file of other kinds (.png)" in said
    assert f"left out: {notes / 'broken.pdf'} is a PDF" in said
    alone = run("chat", str(notes), "--model", folder, "--max-new-tokens", "5", text="How deep?\n")
    assert alone.exit_code == 0, alone.output
    (tmp_path / "empty").mkdir()
    for targets, told in (
        ((names[0], "x.kvs"), "x.kvs is a cache that has not seen the other files"),
        ((names[0], folder), f"there is no file {folder}"),
        ((str(tmp_path / "gone.docx"),), "there is no file"),
        ((str(tmp_path / "empty"),), "holds no document that can be read"),
        ((str(notes / "broken.pdf"),), "broken.pdf is a PDF"),
    ):
        wrong = run("chat", *targets, "--model", folder)
        assert wrong.exit_code == 2 and told in " ".join(wrong.stderr.split()), wrong.output


def test_a_stopped_answer_leaves_a_cache_that_goes_on(folder: str) -> None:
    model, tokenizer = models.load(folder, dtype="float32")

    class AfterThree(Stoppable):
        def put(self, value: Any) -> None:
            if len(self._seen) == 3:
                self.stop()
            super().put(value)

    cache, stream = kvsketch.CompressedCache(model, "full"), AfterThree(tokenizer)
    inputs = asking.question_inputs(tokenizer, cache, "Hello")
    with pytest.raises(StoppedByUser):
        kvsketch.generate(model, inputs, cache, streamer=stream, max_new_tokens=9, do_sample=False)
    assert len(asking.finish(model, cache, inputs, stream.ids())) == 3
    whole = kvsketch.CompressedCache(model, "full")
    kvsketch.ask(model, tokenizer, whole, "Hello", max_new_tokens=3)
    answers = [kvsketch.ask(model, tokenizer, each, "More", max_new_tokens=5) for each in (cache, whole)]
    assert answers[0] == answers[1] and cache.tokens_seen == whole.tokens_seen


def test_serve_refuses_what_would_open_the_machine() -> None:
    assert "set --api-key" in run("serve", "--host", "0.0.0.0").stderr
    assert "the API key is empty" in run("serve", "--api-key", "").stderr
    assert "--memory 'much' is not a size" in run("serve", "--memory", "much").stderr
