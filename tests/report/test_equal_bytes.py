"""Tables and pictures of answers at equal bytes, and what is recommended from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvsketch.cli import app
from kvsketch_lab import records
from kvsketch_lab.report import docs, equal_bytes, recommend, render
from tests.report.sample_records import record

MODEL = docs.BIG.partition(" ")[0]
RIGHT = {"full": 1.0, "full:bits=4": 1.0, "rehearse": 0.75, "snapkv": 0.25}


def answer(method: str, budget: str, share: float, number: int, score: float, seed: int = 100, **more: Any) -> Any:
    data = {
        "model": MODEL, "dtype": "bfloat16", "budgets_in": "bytes", "method": method, "budget": budget, "lines": 400,
        "question": "unseen", "sample": f"lines=400 text={number // 4} question={number % 4}", "score": score,
        "device_bytes": int(share * 28_672 * 6000), "host_bytes": 0, "full_bytes": 28_672 * 6000, "tokens_stored": 6000,
        "prompt_tokens": 6000, **({"budget_tokens": 3000} if budget else {}), **more,
    }  # fmt: skip
    return {**record("lines", data), "seed": seed}


def made() -> Iterator[Any]:
    for method, right in RIGHT.items():
        sizes = (
            [("", 1.0 if method == "full" else 0.27)] if method.startswith("full") else [("1/8", 0.12), ("1/4", 0.24)]
        )
        for budget, share in sizes:
            yield from (answer(method, budget, share, n, float(n % 4 < 4 * right)) for n in range(16))
    # Tuned on, and so not counted.
    yield from (answer("rehearse", "1/8", 0.12, n, 0.0, seed=0) for n in range(16))
    for method, kl in (("full", 0.0), ("rehearse", 0.02)):
        runs = {"chunk_tokens": [64], "chunk_nll": [2.0 + kl], "full_chunk_nll": [2.0], "kl": kl, "position": 4096}
        result = answer(method, "" if kl == 0 else "1/8", 0.12 if kl else 1.0, 0, 0.0, **runs)
        yield {**result, "kind": "perplexity", "data": {**result["data"], "sample": "1907-Roosevelt-1"}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("results/eval", "docs"):
        (tmp_path / name).mkdir(parents=True)
    records.append(tmp_path / "results" / "eval" / "lines.jsonl", *made())
    speed = {"method": "rehearse:budget=2048", "batch": 1, "prompt": 32768, "step_ms": 4.5, "shape": "llama-3.1-8b"}
    records.append(tmp_path / "results" / "decode.jsonl", record("decode", speed))
    # Nothing to recommend from: bytes without tokens, another dtype, another library.
    wide = answer("full", "", 2.0, 0, 1.0, dtype="float32", full_bytes=99)
    other = answer("press", "1/8", 0.12, 0, 1.0, kvpress="0.5.5")
    bits = record("bits", {"model": MODEL, "method": "full", "full_bytes": 100})
    records.append(tmp_path / "results" / "a.jsonl", bits, wide, other)
    return tmp_path


def test_a_table_for_each_share_holds_held_out_questions_alone(root: Path) -> None:
    numbers = docs.Numbers(root)
    cells = numbers.at_equal_bytes
    assert numbers.byte_models() == [docs.BIG] and equal_bytes.least_questions(cells, docs.BIG) == "16 questions"
    quarter, eighth = equal_bytes.tables(cells, docs.BIG).split("**1/8 of the bytes**")
    assert "| `full:bits=4` | unseen | 27.0% | 1.00 [1.00, 1.00]" in quarter and "full:bits=4" not in eighth
    assert "| `rehearse` | unseen | 12.0% | 0.75 [0.75, 0.75] | +0.15 | 0.020 |" in eighth
    assert "| `full` | unseen | 100.0% | 1.00 [1.00, 1.00] | +0.00 | 0.000 |" in eighth
    short = equal_bytes.short_table(cells, docs.BIG)
    assert "| `snapkv` |  | 0.25 | 0.25 |" in short and "| `full` | 1.00 |" in short
    page = numbers.words("bytes")
    assert "pictures/bytes.png" in page and "not measured" not in page
    figure = equal_bytes.picture(numbers.at_equal_bytes, docs.BIG)
    assert figure is not None
    assert {line.get_label() for line in figure.axes[0].get_lines()} >= {"full cache"}
    assert render.png(figure).startswith(b"\x89PNG")


def test_a_method_without_a_budget_stands_in_one_table() -> None:
    # Near the middle between two shares: of each task alone the nearest would differ.
    result = equal_bytes.cells(
        answer("full:bits=2", "", share, 0, 1.0, lines=lines, sample=f"lines={lines} text=0 question=0")
        for lines, share in ((200, 0.18), (400, 0.174))
    )
    assert {cell.column for cell in result} == {"1/4"} and {cell.bytes for cell in result} == {0.18, 0.174}


def test_a_task_that_was_asked_far_less_is_named() -> None:
    asked = [answer("full", "", 1.0, number, 1.0) for number in range(12)]
    asked += [answer("full", "", 1.0, number, 1.0, lines=600) for number in range(3)]
    assert equal_bytes.least_questions(equal_bytes.cells(asked), docs.BIG) == "12 questions (lines 600: 3)"


def test_pages_without_such_records_say_so(root: Path) -> None:
    (root / "results" / "eval" / "lines.jsonl").write_text("")
    numbers = docs.Numbers(root)
    assert "not measured yet" in numbers.words("bytes") and equal_bytes.tables(numbers.at_equal_bytes, docs.BIG) == ""
    assert equal_bytes.picture(numbers.at_equal_bytes, docs.BIG) is None


def test_what_fits_is_recommended_from_the_smallest_loss_on(root: Path) -> None:
    result = records.read_folder(root / "results", below=True)
    measured = recommend.table(result)[MODEL]
    fits = measured.fitting(0.3, "unseen")
    assert [each.method for each in fits] == ["full:bits=4", "rehearse:budget=50%", "rehearse:budget=50%",
                                                  "snapkv:budget=50%", "snapkv:budget=50%"]  # fmt: skip
    assert fits[1].bytes < fits[2].bytes and fits[1].loss == pytest.approx(0.25) and fits[1].step_ms == 4.5
    assert measured.fitting(0.13, "unseen")[0].method == "rehearse:budget=50%"
    assert measured.fitting(0.3, "seen") == []
    on_host = [answer("clusterkv", "1/8", 0.12, number, 1.0, host_bytes=9) for number in range(8)]
    assert recommend.table([*result, *on_host])[MODEL] == measured, "bytes of the host are not bytes saved"


def test_the_command_says_what_it_does_not_know(root: Path) -> None:
    line = ["recommend", "--context", "32000", "--records", str(root / "results")]
    told = CliRunner().invoke(app, [*line, "--model", MODEL, "--memory", "300MB"])
    assert told.exit_code == 0 and "full:bits=4" in told.stdout and "33% of it" in told.stdout
    none = CliRunner().invoke(app, [*line, "--model", MODEL, "--memory", "1MB"])
    assert none.exit_code == 0 and "there is no record of a cache of 0.1%" in none.stdout
    other = CliRunner().invoke(app, [*line, "--model", "gpt", "--memory", "1GB"])
    assert other.exit_code == 2 and MODEL in other.output
    wrong = CliRunner().invoke(app, [*line, "--model", MODEL, "--memory", "much"])
    assert wrong.exit_code == 2 and "such as 2GB" in wrong.output


def ruler(method: str, task: str, text: int, score: float) -> Any:
    name = {"task": task, "length": 4000, "sample": f"task={task} length=4000 text={text} question=0"}
    result = answer(method, "" if method == "full" else "1/8", 0.12, text, score, **name)
    return {**result, "kind": "ruler", "data": {k: v for k, v in result["data"].items() if k != "lines"}}


def test_what_was_asked_less_is_marked_or_left_out() -> None:
    tasks = {"vt": 0.5, "cwe": 0.0, "fwe": 1.0}
    made = [ruler("full", task, n, score) for task, score in tasks.items() for n in range(4)]
    made += [ruler("rehearse", task, n, 0.5) for task in ("vt", "cwe") for n in range(4)]
    made += [ruler("snapkv", "vt", n, 0.5) for n in range(4)]  # lacks two tasks
    made += [ruler("kvzip", task, 0, 0.5) for task in tasks]  # a quarter of the questions
    result = equal_bytes.cells(made)
    assert {cell.method for cell in result} == {"full", "rehearse"}
    assert "without fwe (full 0.25)" in equal_bytes.tables(result, docs.BIG)
    assert "0.50*" in equal_bytes.short_table(result, docs.BIG)
    assert equal_bytes.short_note(result, docs.BIG) == "*: without RULER's fwe, where the full cache has 0.25"


def test_papers_methods_that_were_asked_less_are_named() -> None:
    made = [ruler(method, task, n, 0.5) for method in ("full", "kcenter") for task in ("vt", "cwe") for n in range(4)]
    assert equal_bytes.seed_note(equal_bytes.cells(made), docs.BIG) == ""
    made += [ruler("subgen", task, n, 0.5) for task in ("vt", "cwe") for n in range(3)]
    note = equal_bytes.seed_note(equal_bytes.cells(made), docs.BIG)
    assert note == "`subgen` at 1/8 was asked 6 of 8 questions of RULER 4,000"


def test_bits_are_chosen_among_forms_of_one_method() -> None:
    scores = {"": 0.2, ":value_bits=3": 0.4, ":refit=none": 0.9, ":replay=learned": 0.5, ":replay=learned:bits=3": 0.3}
    made = [ruler(f"rehearse{form}", "vt", n, score) for form, score in scores.items() for n in range(4)]
    cells = equal_bytes.cells(made)
    plain, mapped = (equal_bytes.bit_table(cells, cells, docs.BIG, base) for base in ("rehearse", equal_bytes.MAPPED))
    assert [line.split(" | ")[1:3] for line in plain.splitlines()[2:]] == [
        ["`value_bits=3`", "0.40"],
        ["`bits=4`", "0.20"],
    ]
    assert [line.split(" | ")[1:3] for line in mapped.splitlines()[2:]] == [["`bits=4`", "0.50"], ["`bits=3`", "0.30"]]
    assert all(table.count("chosen") == 1 for table in (plain, mapped))
