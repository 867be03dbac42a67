"""The comparison behind `kvsketch demo`: its numbers, its words, its picture, and one run on a real model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kvsketch
from kvsketch import models
from kvsketch.cli import app
from kvsketch.cli.compare import _ten_questions, summary
from kvsketch.cli.picture import draw, spread
from kvsketch.compare import answers, budgets, questions
from kvsketch.compare.shared_prefill import shared_prefill
from kvsketch.decode.asking import chat_frame, document_ids
from kvsketch.models import texts
from tests.helpers.tiny import save_tiny_model

TOKENS = 160


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return models.load(save_tiny_model(tmp_path_factory.mktemp("tiny")), device="cpu")


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return torch.randint(1, 256, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def test_every_method_takes_part_and_the_full_cache_is_the_first() -> None:
    chosen = [str(method) for method in budgets.compared("all", "1/8")]
    assert chosen[0] == "full" and {text.partition(":")[0] for text in chosen} == set(kvsketch.METHODS)
    named = [str(method) for method in budgets.compared("uniform,full,full:bits=4", "128")]
    assert named == ["full", "uniform:budget=128", "full:bits=4"]
    with pytest.raises(ValueError, match="--budgets is empty"):
        budgets.compared("uniform", "")


def test_the_greedy_answer_is_the_one_of_generate(tiny: tuple[Any, Any], prompt: torch.Tensor) -> None:
    model, _ = tiny
    cache = shared_prefill(model, prompt[:, :-1]).cache("full")
    first = answers.next_logits(model, int(prompt[0, -1]), cache)
    answer, seconds = answers.greedy_answer(model, first, cache, 10)
    expected = model.generate(prompt, max_new_tokens=10, do_sample=False)
    assert answer == expected[0, TOKENS:].tolist()
    assert len(seconds) == len(answer)


def test_rows_measure_memory_and_divergence(tiny: tuple[Any, Any], prompt: torch.Tensor) -> None:
    model, tokenizer = tiny
    chosen = [kvsketch.parse_method(text) for text in ("full", "streamingllm:budget=1000", "streamingllm:budget=1/8")]
    full, roomy, tight = answers.answers(model, tokenizer, prompt, chosen, "60494", 10)
    assert full.divergence == 0
    assert roomy.divergence == pytest.approx(0, abs=1e-5)
    assert tight.divergence > 1e-3
    assert roomy.answer == full.answer
    assert full.tokens_stored == full.tokens_seen > TOKENS
    assert tight.tokens_stored == (TOKENS - 1) // 8
    assert tight.device_bytes < full.device_bytes / 4
    assert full.milliseconds_per_token > 0


def test_budgets_can_be_shares_of_the_bytes(tiny: tuple[Any, Any], prompt: torch.Tensor) -> None:
    """Of a cache in half precision: few bits take as much in float32, vectors as they are twice as much."""
    chosen = budgets.compared("streamingllm,snapkv,streamingllm:bits=8,quest,kcenter:budget=1/100", "1/2")
    refused: list[str] = []
    full, *rows = answers.answers(*tiny, prompt, chosen, "60494", 10, unit="bytes", refused=refused)
    assert [row.method.partition(":")[0] for row in rows] == ["streamingllm", "snapkv", "streamingllm", "quest"]
    shares = [row.device_bytes / full.device_bytes for row in rows]
    assert all(0.3 < share <= 0.5 for share in shares[:2]) and shares[2] <= 0.25 < 1 <= shares[3]
    assert len(refused) == 1 and "kcenter" in refused[0] and "no budget fits" in refused[0]


def test_ten_codes_are_hidden_in_a_text(tiny: tuple[Any, Any]) -> None:
    tokenizer, text = tiny[1], "The harbour was rebuilt in 1921. A new pier followed. " * 40
    document = texts.codes_document(tokenizer, 2000, seed=3, text=text)
    places = [document.text.index(texts.CODE.format(door=door, code=code)) for door, code in document.codes.items()]
    assert len(set(document.codes.values())) == 10 and places == sorted(places)
    assert max(b - a for a, b in itertools.pairwise(places)) < 2 * min(b - a for a, b in itertools.pairwise(places))
    assert len(tokenizer(document.text)["input_ids"]) <= 2000
    assert document != texts.codes_document(tokenizer, 2000, seed=4, text=text)
    with pytest.raises(ValueError, match="2 sentences of the text beside ten codes; use more tokens, or a longer"):
        texts.codes_document(tokenizer, 2000, text="One. Two.")


def test_too_few_tokens_are_told_as_they_were_given(tiny: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"--tokens 400 less 100 .*: 300 tokens hold .* or --no-questions"):
        _ten_questions(*tiny, 400, 1, "One. Two.")


def test_questions_are_counted_by_their_codes(tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is asked of the cache as the text has left it."""
    seen: list[int] = []

    def asked(model: Any, tokenizer: Any, cache: Any, door: str) -> str:
        seen.append(cache.tokens_seen)
        model(torch.ones(1, 3, dtype=torch.long), past_key_values=cache)
        return "it is 12345" if door == "red" else "54321"

    text = "The harbour was rebuilt in 1921. " * 12
    monkeypatch.setattr(questions, "_asked", asked)
    full, small = questions.ask_all(*tiny, text, {"red": "12345", "blue": "11111"}, ["full", "streamingllm:budget=1/4"])
    assert list(full.wrong) == list(small.wrong) == ["blue"] and set(seen) == {full.tokens_seen}
    assert full.share == pytest.approx(2.0, rel=0.1) and small.share <= 0.5


def test_a_question_ends_in_the_opening_of_its_answer(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    text = "The code of the red door is 7. " * 9
    (row,) = questions.ask_all(model, tokenizer, text, {"red": "7"}, ["full"])
    ids = document_ids(tokenizer, text)
    asked = questions.QUESTION.format(door="red") + chat_frame(tokenizer).after + questions.OPENING.format(door="red")
    behind = tokenizer(asked, add_special_tokens=False, return_tensors="pt")["input_ids"]
    expected = model.generate(torch.cat([ids, behind], 1), max_new_tokens=questions.MOST, do_sample=False)
    new = expected[0, ids.shape[1] + behind.shape[1] :]
    assert row.answers["red"] == tokenizer.decode(new, skip_special_tokens=True).strip()


def test_the_demo_asks_about_a_file(tmp_path: Path) -> None:
    folder, file = save_tiny_model(tmp_path / "model"), tmp_path / "mine.txt"
    file.write_text("The harbour was rebuilt in 1921. A new pier followed. " * 40, encoding="utf-8")
    command = ["demo", str(file), "--model", str(folder), "--tokens", "1500", "--methods", "streamingllm,quest"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    questions_part, table = shown.stdout.split("Every method")
    assert "Ten questions about mine.txt" in questions_part and "left out" not in shown.output
    lines = [line.split() for line in questions_part.splitlines() if line.startswith(("full", "rehearse"))]
    assert [int(line[1]) + int(line[2]) for line in lines] == [10, 10] and int(lines[1][-1].rstrip("%")) <= 13
    assert "quest" in table and "shares are of a bfloat16 cache" in table


def test_mean_kl_is_the_definition() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]), torch.tensor([[0.25, 0.25, 0.5], [0.1, 0.2, 0.7]])
    by_hand = 0.5 * torch.log(torch.tensor(2.0)) - 0.25 * torch.log(torch.tensor(2.0))
    assert answers.mean_kl(p.log(), q.log()) == pytest.approx(float(by_hand) / 2, rel=1e-5)


def row(method: str, right: bool, size: int, divergence: float = 0.1) -> answers.Compared:
    return answers.Compared(method, method.partition(":")[0], 100, 50, size, 0, 10.0, "an answer", right, divergence)


def test_the_summary_says_what_was_lost() -> None:
    rows = [row("full", True, 1000), row("a:budget=1/4", True, 250), row("b:budget=1/8", False, 125)]
    text = "\n".join(summary(rows, "60494"))
    assert "lost the passkey: b:budget=1/8" in text
    assert "smallest cache that finds it: a:budget=1/4, 25% of the full cache's bytes" in text


def test_the_summary_does_not_blame_a_cache_for_a_model_that_fails() -> None:
    text = "\n".join(summary([row("full", False, 1000), row("a", False, 250)], "60494"))
    assert "full cache itself misses the passkey" in text
    assert "lost the passkey" not in text


def test_spread_keeps_order_distance_and_mean() -> None:
    heights = [1.0, 1.1, 1.2, 9.0, 9.0]
    places = spread(heights, gap=1.0)
    assert all(above - below >= 1.0 - 1e-9 for below, above in itertools.pairwise(places))
    assert sum(places) == pytest.approx(sum(heights))


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row("full", True, 10**8), row("a", True, 2 * 10**7, 0.0), row("b", False, 10**7, 2.0)]
    draw(rows, tmp_path / "demo.png", "a title")
    content = (tmp_path / "demo.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


@pytest.mark.real_model
def test_the_demo_runs_on_a_real_model(tmp_path: Path) -> None:
    command = [
        "demo",
        "--no-questions",
        "--tokens",
        "320",
        "--budgets",
        "1/2",
        "--methods",
        "streamingllm",
        "--depth",
        "0.9",
    ]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    full, compressed = record["rows"]
    assert full["right"]
    assert record["passkey"] in full["answer"]
    assert compressed["right"], "the passkey lies inside the recent window and must be found"
    assert 0 < compressed["divergence"] < 1
    assert 280 < record["prompt_tokens"] <= 320
    assert compressed["device_bytes"] < 0.6 * full["device_bytes"]
    assert json.loads((tmp_path / "demo.json").read_text(encoding="utf-8")) == record


@pytest.mark.real_model
def test_the_demo_prints_a_table() -> None:
    command = [
        "demo",
        "--no-questions",
        "--tokens",
        "240",
        "--budgets",
        "60",
        "--budgets-in",
        "tokens",
        "--methods",
        "streamingllm",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    header = next(line for line in result.stdout.splitlines() if line.startswith("method"))
    assert header.split() == ["method", "stored", "cache", "seconds", "ms/token", "agreement", "divergence", "answer"]
    assert "streamingllm:budget=60" in result.stdout
    assert "lost the passkey" in result.stdout


def test_compare_asks_every_method_about_a_file(tmp_path: Path) -> None:
    folder, file, out = save_tiny_model(tmp_path / "model"), tmp_path / "mine.txt", tmp_path / "out"
    file.write_text("The cat sat on the mat, and the dog sat on the cat. " * 6, encoding="utf-8")
    command = [
        "compare",
        "--file",
        str(file),
        "--question",
        r"Who [/sat] for $\nothing$?",
        "--model",
        str(folder),
        "--out",
        str(out),
    ]
    command += ["--methods", "full,streamingllm,quest:skip_layers=0", "--budgets", "1/2,5000", "--max-new-tokens", "4"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    record = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    rows = {row["method"]: row for row in record["rows"]}
    assert next(iter(rows)) == "full" and len(rows) == 5
    assert rows["streamingllm:budget=5000"]["right"] and rows["streamingllm:budget=5000"]["agreement"] == 1.0
    assert rows["streamingllm:budget=50%"]["device_bytes"] < 0.6 * rows["full"]["device_bytes"]
    assert rows["quest:budget=50%:skip_layers=0"]["divergence"] > 0 and all(row["seconds"] > 0 for row in rows.values())
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "the same answer: " in shown.stdout and "picture: " in shown.stdout
    shown = CliRunner().invoke(app, [*command, "--memory", "60kB"])
    rows = {row["method"]: row for row in json.loads((out / "compare.json").read_text(encoding="utf-8"))["rows"]}
    assert len(rows) == 2 and all(row["device_bytes"] <= 60_000 for row in list(rows.values())[1:]), shown.output
    assert "left out: quest:skip_layers=0: memory=60.00 kB is too little" in shown.stderr


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"--file": "nowhere.txt"}, "nowhere.txt: No such file"),
        ({"--question": " "}, "--question is empty"),
        ({"--methods": "snapvk"}, "did you mean 'snapkv'"),
        ({"--budgets": "1/0"}, "1/8"),
        ({"--memory": "2XB"}, "XB is no unit"),
    ],
)
def test_compare_names_a_mistake_in_one_line(change: dict[str, str], told: str, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("text", encoding="utf-8")
    given = {"--file": str(tmp_path / "mine.txt"), "--question": "what?", "--out": str(tmp_path / "out"), **change}
    done = CliRunner().invoke(app, ["compare", *(word for pair in given.items() for word in pair)])
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert told in done.stderr and not (tmp_path / "out").exists()
