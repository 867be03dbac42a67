"""`kvsketch demo` and `compare`: their questions, numbers, words and picture, and one run on a real model."""

from __future__ import annotations

import io
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import kvsketch
from kvsketch import models
from kvsketch.cli import app, picture
from kvsketch.cli.compare import Report, _subject, contenders, in_words, note, stored
from kvsketch.compare import questions
from kvsketch.compare.questions import Answered, Contender, Question
from kvsketch.compare.shared_prefill import shared_prefill
from kvsketch.decode.asking import chat_frame, document_ids
from kvsketch.models import texts
from tests.helpers.tiny import save_tiny_model

TEXT = "The harbour was rebuilt in 1921. A new pier followed. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(folder: Path) -> tuple[Any, Any]:
    return models.load(folder, device="cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    result = tmp_path / "mine.txt"
    result.write_text(TEXT, encoding="utf-8")
    return result


def ask(tiny: tuple[Any, Any], asked: list[Question], *chosen: Contender, text: str = TEXT[:800]) -> list[Answered]:
    return list(questions.ask_all(*tiny, text, asked, chosen, 8))


def test_every_method_takes_part_in_the_same_bits_and_rehearse_is_the_first() -> None:
    chosen = contenders("all", "1/8", "bytes")
    names = [str(each).partition(":")[0] for each in chosen]
    assert names[0] == "rehearse" and set(names) == set(kvsketch.METHODS)
    endings = {each.method.partition(":")[0]: str(each).rpartition(":")[2] for each in chosen if each.budget}
    recall = {"quest", "clusterkv", "infinigen"}
    assert endings == {name: "budget=1/8" if name in recall else "bytes=1/8" for name in {*names} - {"full"}}
    dropping = [m for m in (kvsketch.parse_method(each.method) for each in chosen) if m.family != "recall"]
    assert {m.stored_bits.pair for m in dropping} == {(4, 4)}, "no method is weaker for its bits"


def test_a_budget_of_a_method_is_one_of_tokens_and_the_others_follow_the_option() -> None:
    chosen = contenders("uniform,full,full:bits=4,snapkv:budget=1/4", "128,1/8", "bytes")
    assert [(str(each), each.unit) for each in chosen] == [
        ("uniform:budget=128", "bytes"), ("uniform:bytes=1/8", "bytes"), ("full:bits=4", "bytes"),
        ("snapkv:budget=1/4", "tokens"),
    ]  # fmt: skip
    assert str(contenders("uniform", "1/8", "tokens")[0]) == "uniform:budget=1/8"
    with pytest.raises(ValueError, match="--budgets is empty"):
        contenders("uniform", "", "bytes")
    with pytest.raises(ValueError, match="names nothing to compare"):
        contenders("full", "1/8", "bytes")


def test_answers_are_those_of_generate_and_do_not_hear_each_other(tiny: tuple[Any, Any]) -> None:
    """Questions of equal length share a batch; one of another length has its own."""
    model, tokenizer = tiny
    asked = [Question("How deep?", "It is"), Question("How wide?", "It is"), Question("Who built the harbour?")]
    (full,) = ask(tiny, asked)
    for question, answer in zip(asked, full.answers, strict=True):
        behind = tokenizer(
            question.text + chat_frame(tokenizer).after + question.opening,
            add_special_tokens=False,
            return_tensors="pt",
        )["input_ids"]
        ids = torch.cat([document_ids(tokenizer, TEXT[:800]), behind], 1)
        expected = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert answer == tokenizer.decode(expected, skip_special_tokens=True).strip()


def test_a_small_cache_answers_in_a_batch_as_it_does_alone(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    asked = [Question("How deep?"), Question("How wide?"), Question("How long?")]
    prefilled = shared_prefill(model, document_ids(tokenizer, TEXT[:800]))
    cache = prefilled.cache("rehearse:budget=1/2")
    together = questions.answers_of(tokenizer, prefilled, cache, asked, 8)
    alone = [questions.answers_of(tokenizer, prefilled, cache, [each], 8)[0] for each in asked]
    assert list(together) == alone and cache.tokens_seen == prefilled.input_ids.shape[1]


def test_an_answer_is_right_by_its_code_or_by_the_full_cache(
    tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter([("it is 12345", "54321"), ("it was 12345", "11111")])
    monkeypatch.setattr(questions, "answers_of", lambda *_: next(given))
    asked = [Question("red?", expected="12345"), Question("blue?")]
    full, small = ask(tiny, asked, Contender("streamingllm:bits=4", "1/4"))
    assert full.right == (True, True) and small.right == (True, False) and (full.count, small.count) == (2, 1)
    assert full.agreement == 1 and small.agreement == pytest.approx((2 / 3 + 0) / 2)


def test_shares_are_of_the_bytes_of_a_16_bit_cache(tiny: tuple[Any, Any]) -> None:
    """Also of a float32 model, whose vectors take twice as much."""
    names = ("streamingllm", "snapkv", "streamingllm:bits=8", "full:bits=4")
    rows = ask(tiny, [Question("What?")], *(Contender(name, "" if "full" in name else "1/2") for name in names))
    full, *others = rows
    assert tiny[0].dtype == torch.float32 and full.share == 1
    assert all(0.4 < row.share <= 0.5 for row in others[:3])
    assert 0.25 < others[3].share < 0.75 and others[3].tokens_per_head == full.tokens_seen
    half = models.load(tiny[0].name_or_path, device="cpu", dtype="bfloat16")
    measured = ask(half, [Question("What?")], Contender("snapkv", "1/2"))
    assert measured[0].bytes == full.bytes and measured[1].bytes == pytest.approx(others[1].bytes, rel=0.05)


def test_stored_is_the_mean_over_heads(tiny: tuple[Any, Any]) -> None:
    """Heads of rehearse share a budget: the largest of them holds more than the budget."""
    _, row = ask(tiny, [Question("What?")], Contender("rehearse", "1/4", "tokens"))
    cache = shared_prefill(tiny[0], document_ids(tiny[1], TEXT[:800])).cache("rehearse:budget=1/4")
    assert row.tokens_per_head == cache.tokens_per_head < cache.tokens_stored
    assert row.tokens_per_head <= row.tokens_seen // 4 + 1


def test_what_does_not_fit_says_so_in_its_row(tiny: tuple[Any, Any]) -> None:
    chosen = [Contender("kcenter", "1/200"), Contender("quest", "1/2", "tokens"), Contender("full:bits=4")]
    chosen.append(Contender("quest:offload=host", "1/8", "tokens"))
    _, refused, recall, bits, far = ask(tiny, [Question("What?")], *chosen)
    assert (
        refused.method == "kcenter:bytes=1/200" and not refused.answers and note(refused).startswith("no budget fits")
    )
    assert recall.share > 0.9 and note(recall) == "reads a part" and stored(recall) == f"all {recall.tokens_seen:,}"
    assert note(bits) == "" and stored(bits) == stored(recall) and far.share > 1, "host memory is memory"


def test_ten_codes_are_hidden_in_a_text(tiny: tuple[Any, Any]) -> None:
    tokenizer = tiny[1]
    document = texts.codes_document(tokenizer, 2000, seed=3, text=TEXT)
    places = [document.text.index(texts.CODE.format(door=door, code=code)) for door, code in document.codes.items()]
    assert len(set(document.codes.values())) == 10 and places == sorted(places)
    assert max(b - a for a, b in itertools.pairwise(places)) < 2 * min(b - a for a, b in itertools.pairwise(places))
    assert len(tokenizer(document.text)["input_ids"]) <= 2000
    assert document != texts.codes_document(tokenizer, 2000, seed=4, text=TEXT)
    with pytest.raises(ValueError, match="2 sentences of the text beside ten codes; use more tokens, or a longer"):
        texts.codes_document(tokenizer, 2000, text="One. Two.")


def test_the_text_and_what_is_asked(tiny: tuple[Any, Any]) -> None:
    text, asked = _subject(tiny[1], TEXT, [], None, 1)
    assert len(asked) == 10 and all(f"{each.opening} {each.expected}" in text for each in asked)
    assert _subject(tiny[1], TEXT, ["Who?"], None, 1) == (TEXT, [Question("Who?")])
    cut, _ = _subject(tiny[1], TEXT, ["Who?"], 200, 1)
    assert TEXT.startswith(cut) and len(tiny[1](cut)["input_ids"]) <= 201
    with pytest.raises(ValueError, match=r"--tokens 400 less 100 .*: 300 tokens hold .*"):
        _subject(tiny[1], "One. Two.", [], 400, 1)


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.124, "an eighth"), (0.25, "a quarter"), (0.5, "half"), (0.061, "a sixteenth"), (0.42, "42%")],
)
def test_a_share_in_words(share: float, words: str) -> None:
    assert in_words(share) == f"{words} of the memory"


def row(method: str, right: int, size: float, family: str = "evict", refused: str = "") -> Answered:
    held = int(size * 1e6)
    marks = tuple(number < right for number in range(10))
    return Answered(method, family, refused, method, 1847, 500, held, size / 22.7, 1.0, ("12345.",) * 10, marks, 1.0)


ROWS = [
    row("full", 10, 22.7, "full"), row("rehearse:bytes=1/8", 10, 2.8, "summarise"),
    row("kvzip:bits=4:bytes=1/8", 10, 2.81), row("expected:bits=4:bytes=1/8", 9, 2.8),
    row("h2o:bits=4:bytes=1/8", 2, 2.8),
    row("snapkv:bits=4:bytes=1/8", 2, 2.82), row("subgen:bits=4:bytes=1/8", 2, 2.79, "summarise"),
    row("full:bits=4", 10, 6.4, "full"), row("quest:bits=4:bytes=1/8", 10, 6.7, "recall"),
    row("kcenter:bits=4:bytes=1/8", 0, 0, refused="kcenter: no budget fits; use more"),
]  # fmt: skip


def report(rows: list[Answered], model: str = "qwen") -> Report:
    asked = [Question(f"What is the code of door {number}?", "", "12345") for number in range(10)]
    return Report("demo", model, "a speech", asked, rows, "float32")


def test_the_result_is_one_sentence() -> None:
    said = report(ROWS).sentence()
    assert said == (
        "rehearse:bytes=1/8 gives 10 of 10 right answers from 2.8 MB, an eighth of the memory; "
        "the full cache gives 10 from 22.7 MB"
    )


def test_a_model_that_fails_is_blamed_and_not_the_cache() -> None:
    said = report([row("full", 3, 22.7, "full"), row("rehearse:bytes=1/8", 2, 2.8)], "smollm2-135m").sentence()
    assert said.startswith("The model, not the cache, is wrong: with every token kept, smollm2-135m gives 3 of 10")
    assert "--model qwen2.5-coder-0.5b" in said


def test_rows_are_ranked_by_right_answers_and_then_memory() -> None:
    ranked = [each.method.partition(":")[0] for each in report(ROWS).ranked()]
    assert ranked[:4] == ["full", "rehearse", "kvzip", "full"] and ranked[-1] == "kcenter"


@pytest.mark.parametrize(("width", "last"), [(80, "of bf16"), (100, "seconds")])
def test_the_table_fits_in_a_terminal(width: int, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is a line, whatever the longest name of a method and remark."""
    rows = [*ROWS[:-1], row("pyramidkv:budget_is=mean:bits=4:bytes=1/8", 0, 2.8)]
    printed = io.StringIO()
    monkeypatch.setattr(sys.modules["kvsketch.cli.compare"], "results", lambda: Console(file=printed, width=width))
    report(rows).show_table()
    _, head, *lines = printed.getvalue().splitlines()
    assert head.rstrip().endswith(last)
    for each, line in zip(report(rows).ranked(), lines, strict=False):
        assert line.startswith(each.method) and line.rstrip().endswith(note(each)) and len(line) <= width


def test_what_to_try_next_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make demo` calls a command that is not on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for called in (".venv/bin/kvsketch", str(tmp_path / ".venv/bin/kvsketch")):
        monkeypatch.setattr(sys, "argv", [called, "demo"])
        lines = report(ROWS)._next()[1:]
        assert len(lines) == 4 and all(line.startswith("  .venv/bin/kvsketch ") for line in lines)
    found = tmp_path / "found" / "kvsketch"
    found.parent.mkdir()
    found.touch(0o755)
    monkeypatch.setenv("PATH", str(found.parent))
    assert report(ROWS)._next()[1].startswith("  kvsketch demo report.pdf ")


def test_names_in_the_picture_cover_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    picture.draw(ROWS, tmp_path / "demo.png", "Ten questions $x_", "a [model], a text", "right answers", ROWS[1].method)
    content = (tmp_path / "demo.png").read_bytes()
    assert content.startswith(b"\x89PNG") and 10_000 < len(content) < 150_000
    axes = kept[0].axes[0]
    renderer = kept[0].canvas.get_renderer()
    labels = {label.get_text(): label.get_window_extent(renderer) for label in axes.texts}
    names = " ".join(labels).replace(",", "").split()
    assert {"rehearse", "kvzip", "h2o", "snapkv", "subgen", "quest"} < set(names) and "kcenter" not in names
    assert not any(a.overlaps(b) for a, b in itertools.combinations(labels.values(), 2))
    title = axes.title.get_window_extent(renderer)
    assert not any(box.overlaps(title) for box in labels.values())
    assert axes.get_ylim()[0] < 0 and axes.get_ylim()[1] > 10 and list(axes.get_yticks()) == list(range(11))
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert ticks[0] == "22.7 MB\nall" and "2.8 MB\n1/8" in ticks


def test_points_at_one_place_share_a_name_but_the_strong_one() -> None:
    answered = [each for each in ROWS if not each.refused]
    found = [[each.method.partition(":")[0] for each in group] for group in picture.groups(answered, ROWS[1].method)]
    assert found[0] == ["rehearse"] and ["subgen", "h2o", "snapkv"] in found and ["kvzip"] in found
    names = picture.short_names([*answered, row("h2o:bytes=1/8", 2, 2.8)])
    assert names["h2o:bits=4:bytes=1/8"] == "h2o:bits=4:bytes=1/8" and names["snapkv:bits=4:bytes=1/8"] == "snapkv"
    assert names["full:bits=4"] == "full in 4 bits"


def test_the_demo_asks_about_a_file(folder: Path, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["demo", str(file), "--model", str(folder), "--tokens", "1500", "--out", str(out)]
    shown = CliRunner().invoke(app, [*command, "--methods", "streamingllm,quest,rehearse,kcenter:budget=9"])
    assert shown.exit_code == 0, shown.output
    head, table = shown.stdout.split("Every method, the same questions")
    lines = head.splitlines()
    assert lines[0].startswith("10 codes are hidden in mine.txt, 1,")
    assert next(line for line in lines if line.startswith("question")).split() == [
        "question", "code", "full", "cache", "rehearse:bytes=1/8"
    ]  # fmt: skip
    assert sum(line.startswith("What is the code of the ") for line in lines) == 10
    assert "The model, not the cache, is wrong" in head and "an eighth of the memory" in head
    assert next(line for line in table.splitlines() if line.startswith("method")).split() == [
        "method", "right", "cache", "of", "bf16", "stored", "seconds"
    ]  # fmt: skip
    assert "quest:budget=1/8" in table and "reads a part: keeps every token" in table
    assert "kvsketch compare report.pdf --question" in table.split("Try next:")[1]
    record = json.loads((out / "demo.json").read_text(encoding="utf-8"))
    assert [each["method"] for each in record["rows"]][:2] == ["full", "rehearse:bytes=1/8"]
    assert record["rows"][1]["share"] <= 0.125 and len(record["questions"]) == 10
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_compare_asks_questions_of_the_user(folder: Path, file: Path, tmp_path: Path) -> None:
    out, asked = tmp_path / "out", [r"Who [/sat] for $\nothing$?", "When?"]
    command = ["compare", "--file", str(file), "--model", str(folder), "--out", str(out), "--max-new-tokens", "4"]
    command += [word for each in asked for word in ("--question", each)]
    options = ["--methods", "full,streamingllm,quest:skip_layers=0", "--budgets", "1/2,5000", "--budgets-in", "tokens"]
    shown = CliRunner().invoke(app, [*command, *options])
    assert shown.exit_code == 0, shown.output
    record = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    rows = {each["method"]: each for each in record["rows"]}
    assert list(rows) == [
        "full", "streamingllm:budget=1/2", "streamingllm:budget=5000", "quest:skip_layers=0:budget=1/2",
        "quest:skip_layers=0:budget=5000",
    ]  # fmt: skip
    assert rows["streamingllm:budget=5000"]["right"] == [True, True]
    assert rows["streamingllm:budget=5000"]["agreement"] == 1.0
    assert rows["streamingllm:budget=1/2"]["bytes"] < 0.7 * rows["full"]["bytes"]
    assert asked[0] in shown.stdout and "right: as the full cache answers" in shown.stdout
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_compare_takes_a_memory(folder: Path, file: Path, tmp_path: Path) -> None:
    command = ["compare", str(file), "--question", "When?", "--model", str(folder), "--out", str(tmp_path / "out")]
    command += ["--methods", "streamingllm,quest", "--memory", "60kB", "--max-new-tokens", "4", "--json"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    full, fits, refused = json.loads(shown.stdout)["rows"]
    assert fits["bytes"] <= 60_000 < full["bytes"] and not fits["refused"]
    assert refused["method"] == "quest" and "memory=60.00 kB is too little" in refused["refused"]


def test_one_method_is_enough(folder: Path, file: Path, tmp_path: Path) -> None:
    command = ["compare", str(file), "--question", "What is 7?", "--model", str(folder), "--methods", "rehearse"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0 and "Try next:" in result.stdout


def test_demo_and_compare_are_one_command() -> None:
    helps = [CliRunner().invoke(app, [name, "--help"]).stdout for name in ("demo", "compare")]
    words = [text.replace("root demo", "root compare").split() for text in helps]
    assert words[0] == words[1] and "--budgets-in" in words[0]


@pytest.mark.real_model
def test_the_smallest_model_is_said_to_be_too_small(tmp_path: Path) -> None:
    command = ["demo", "--model", "smollm2-135m", "--tokens", "700", "--methods", "rehearse", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    full, small = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))["rows"]
    blamed = "The model, not the cache, is wrong" in result.stdout
    assert blamed == (sum(full["right"]) < 8) and "12345" not in full["answers"]
    assert all(answer[:1].isdigit() for answer in full["answers"]), "the opening of an answer is followed by a code"
    assert small["share"] <= 0.125


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"--file": "nowhere.txt"}, "nowhere.txt: No such file"),
        ({"--question": " "}, "--question is empty"),
        ({"--methods": "snapvk"}, "did you mean 'snapkv'"),
        ({"--budgets": "1/0"}, "1/8"),
        ({"--budgets-in": "words"}, "use bytes or tokens"),
        ({"--memory": "2XB"}, "XB is no unit"),
    ],
)
def test_compare_names_a_mistake_in_one_line(change: dict[str, str], told: str, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("text", encoding="utf-8")
    given = {"--file": str(tmp_path / "mine.txt"), "--question": "what?", "--out": str(tmp_path / "out"), **change}
    done = CliRunner().invoke(app, ["compare", *(word for pair in given.items() for word in pair)])
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert told in done.stderr and not (tmp_path / "out").exists()


def test_a_question_needs_a_file_and_one_file_is_enough(file: Path) -> None:
    assert "name one" in CliRunner().invoke(app, ["demo", "--question", "Who?"]).stderr
    assert "two files" in CliRunner().invoke(app, ["demo", str(file), "--file", "other.txt"]).stderr
