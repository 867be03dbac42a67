"""Line retrieval: records of the right form, answers that are those of the model, scores as LongEval's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch import CompressedCache, models
from kvsketch.compare import budgets
from kvsketch_lab import records
from kvsketch_lab.evaluation import line_records, lines, questions
from kvsketch_lab.evaluation.questions import chat_question
from tests.helpers import tiny
from tests.helpers.experiments import run_experiment

LINE = re.compile(r"line ([a-z]+-[a-z]+): REGISTER_CONTENT is <(\d+)>")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tiny_model(tmp_path_factory.mktemp("model"))


def run(out: Path, folder: Path, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    common = ["--model", str(folder), "--out", str(out), "--device", "cpu", "--max-new-tokens", "8"]
    assert run_experiment(lines.Lines, [*common, *arguments]) == code
    return [record["data"] for record in records.read(out / "lines.jsonl")]


def test_generated_records_have_the_form_of_longeval() -> None:
    positions = set()
    for number in range(30):
        result = line_records.generate(30, seed=1, text=0, question=number % 30)
        rows = LINE.findall(result.text)
        assert len(rows) == len({name for name, _ in rows}) == 30
        name, value = rows[result.position]
        assert int(value) == result.expected and f"in line {name} is" in result.question
        assert all(1 <= int(value) <= 50_000 for _, value in rows)
        positions.add(result.position)
    assert len(positions) == 30, "each question asks for another line of the same text"
    assert line_records.generate(30, 1, 3) == line_records.generate(30, 1, 3) != line_records.generate(30, 2, 3)
    assert len(LINE.findall(line_records.generate(1350, 0, 0).text)) == 1350


def test_a_longeval_file(tmp_path: Path) -> None:
    source = line_records.generate(5, 0, 0)
    row = {"prompt": source.text + source.question, "expected_number": source.expected, "num_lines": 5,
           "random_idx": [source.name, source.position], "correct_line": "", "token_size": 1}  # fmt: skip
    path = tmp_path / "5_lines.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert line_records.read_file(path) == [source]
    path.write_text(json.dumps(row) + "\n" + json.dumps({"prompt": "no lines"}) + "\n")
    with pytest.raises(ValueError, match=r"line 2 is not a LongEval question \(KeyError"):
        line_records.read_file(path)


def asked(**options: Any) -> lines.Lines:
    return lines.Lines(lines.LinesOptions(**options))


def test_the_last_number_counts_or_the_first_of_an_answer_begun() -> None:
    answer = "line 3 holds <24169>, no, <24160>."
    assert asked().score(answer, "24160") == 1.0 and asked().score(answer, "24169") == 0.0
    assert asked().score("none", "0") == 0.0
    assert asked(primed=True).score("24169>, or 24160", "24169") == 1.0


def test_an_answer_can_be_begun_for_the_model(model_folder: Path) -> None:
    _, tokenizer = models.load(model_folder, device="cpu")
    plain, primed = asked(lines="5"), asked(lines="5", primed=True)
    plain.tokenizer = primed.tokenizer = tokenizer
    cells = [each.cells()[0] for each in (plain, primed)]
    assert cells[0].key != cells[1].key
    without, begun = plain.ask(cells[0]), primed.ask(cells[1])
    added = tokenizer.decode(begun.ids[len(without.ids) :])
    assert begun.ids[: len(without.ids)] == without.ids and begun.asked == without.asked + len(added)
    assert re.fullmatch(r"The <REGISTER_CONTENT> in line [a-z]+-[a-z]+ is <", added)


def source_of(data: dict[str, Any]) -> line_records.LineRecord:
    lines, text, question = (int(part.partition("=")[2]) for part in data["sample"].split())
    return line_records.generate(lines, 0, text, question)


def test_answers_are_those_of_generate(tmp_path: Path, model_folder: Path) -> None:
    """Questions in left-padded batches, a prefill shared by all methods: each answer is that of the question alone."""
    data = run(tmp_path, model_folder, "--lines", "3", "--texts", "2", "--questions", "2", "--budgets", "1/2",
               "--batch", "3", "--question", "seen", "--methods", "full,snapkv,uniform,quest")  # fmt: skip
    assert len(data) == 2 * 2 * 4
    model, tokenizer = models.load(model_folder, device="cpu")
    for each in data:
        source = source_of(each)
        ids = tokenizer(source.text + source.question, return_tensors="pt")
        method = budgets.with_budget(each["method"], each["budget"])
        cache = CompressedCache(model, method, seed=each.get("cache_seed", 0))
        assert ("cache_seed" in each) == (each["method"] == "uniform")
        tokens = model.generate(**ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
        answer = tokenizer.decode(tokens[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert each["answer"] == answer
        assert each["expected"] == str(source.expected) and each["position"] == source.position
        assert each["score"] == float(lines.numbers(answer)[-1:] == [source.expected])
        assert each["prompt_tokens"] == ids["input_ids"].shape[1]
        assert min(each["tokens_stored"], each["device_bytes"]) > 0 and each["model_sha256"]


@pytest.mark.parametrize("more", [["--question", "seen"], ["--chunk", "64"], []])
def test_questions_of_a_method_that_draws_share_no_random_numbers(
    tmp_path: Path, model_folder: Path, more: list[str]
) -> None:
    """One text asked twice: with a seed for both the answers agree, with seeds of their own other tokens are kept."""
    line = ["--lines", "5", "--texts", "3", "--questions", "1", "--budgets", "1/4", "--methods", "uniform"]
    line += ["--batch", "3", *more]
    own = run(tmp_path / "own", model_folder, *line)
    assert len({each["cache_seed"] for each in own}) == 3
    shared = run(tmp_path / "shared", model_folder, *line, "--rows-per-seed", "3")
    assert {each["cache_seed"] for each in shared} == {own[0]["cache_seed"]}
    assert own[0]["answer"] == shared[0]["answer"], "the first question has the same seed in both"
    assert [each["answer"] for each in own[1:]] != [each["answer"] for each in shared[1:]]


def test_a_batch_that_does_not_fit_is_halved(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["--lines", "4", "--texts", "5", "--questions", "1", "--budgets", "1/2", "--methods", "full,snapkv"]
    line += ["--batch", "5", "--question", "seen"]
    whole = run(tmp_path / "a", model_folder, *line)
    sizes: list[int] = []
    prefill = questions.shared_prefill

    def with_room_for_two(model: Any, inputs: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("no room")
        return prefill(model, inputs)

    monkeypatch.setattr(questions, "shared_prefill", with_room_for_two)
    halved = run(tmp_path / "b", model_folder, *line)
    assert sizes == [5, 3, 2, 1, 2]
    answers = [{(e["method"], e["sample"]): e["answer"] for e in data} for data in (whole, halved)]
    assert answers[0] == answers[1] and len(answers[0]) == 10


def test_a_longeval_file_is_asked(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "3_lines.jsonl"
    result = [line_records.generate(3, 0, number) for number in range(2)]
    rows = [{"prompt": each.text + each.question, "expected_number": each.expected, "num_lines": 3,
             "random_idx": ["x-y", each.position]} for each in result]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = run(tmp_path, model_folder, "--file", str(path), "--methods", "full")
    assert [(each["expected"], each["position"], each["lines"], each["file"]) for each in data] == [
        (str(each.expected), each.position, 3, path.name) for each in result
    ]


def test_many_questions_of_one_compressed_text(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are compressed once, before the questions; every answer is that of a cache that met its question alone."""
    made: list[str] = []
    make = questions.Prefilled.cache
    monkeypatch.setattr(questions.Prefilled, "cache", lambda *a: made.append(str(a[1])) or make(*a))
    methods = "full,snapkv,rehearse"
    line = ["--lines", "3", "--texts", "2", "--questions", "2", "--budgets", "1/2", "--question", "seen,unseen"]
    data = run(tmp_path, model_folder, *line, "--methods", methods)
    assert len(data) == 2 * 2 * 2 * 3 and len(made) == 2 * 3, "seen and unseen, one cache for all texts of a batch each"
    full = {(each["question"], each["sample"]): each["answer"] for each in data if each["method"] == "full"}
    assert all(full["seen", sample] == answer for (_, sample), answer in full.items()), "it forgets nothing"
    monkeypatch.undo()
    model, tokenizer = models.load(model_folder, device="cpu")
    for each in (each for each in data if each["question"] == "unseen"):
        source = source_of(each)
        text, question = (tokenizer(part, return_tensors="pt")["input_ids"] for part in (source.text, source.question))
        cache = CompressedCache(model, budgets.with_budget(each["method"], each["budget"]))
        with torch.no_grad():
            model(text, past_key_values=cache)
        ids = torch.cat([text, question], 1)
        tokens = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert each["answer"] == tokenizer.decode(tokens, skip_special_tokens=True), each["method"]


def test_methods_that_look_at_the_question_see_it_unless_told_otherwise() -> None:
    result = asked(lines="5", texts=1, questions=1, methods="snapkv,streamingllm", budgets="1/2").cells()
    assert [(cell.method, dict(cell.setting)["question"]) for cell in result] == [
        ("snapkv", "seen"), ("streamingllm", "unseen")]  # fmt: skip


def test_where_a_question_begins(model_folder: Path) -> None:
    _, tokenizer = models.load(model_folder, device="cpu")
    tokenizer.chat_template = "<{{ messages[0].content }}|{% if add_generation_prompt %}ANSWER{% endif %}"
    question = chat_question(tokenizer, "a text. ", "What?", "7")
    assert tokenizer.decode(question.ids[-question.asked :]) == "What?|ANSWER"


def test_budgets_in_bytes_are_measured_and_what_cannot_fit_is_refused(tmp_path: Path, model_folder: Path) -> None:
    data = run(tmp_path, model_folder, "--lines", "12", "--texts", "2", "--questions", "1", "--bytes", "1/2,1/8",
               "--methods", "snapkv,streamingllm,quest,full:bits=8", code=1)  # fmt: skip
    good = [each for each in data if "failed" not in each and each["budget"]]
    assert {(e["method"], e["budget"]) for e in good} >= {("snapkv", "1/2"), ("snapkv", "1/8"), ("streamingllm", "1/8")}
    for each in good:
        share, asked = each["device_bytes"] / each["full_bytes"], {"1/2": 0.5, "1/8": 0.125}[each["budget"]]
        assert 0.9 * asked < share <= asked, each
        assert each["budgets_in"] == "bytes" and each["budget_tokens"] == each["tokens_stored"]
    failed = next(each["failed"] for each in data if each["method"] == "quest" and each["budget"] == "1/8")
    assert re.search(r"quest.*no budget fits into 1/8.*use a share of more", failed)
    assert all(each["device_bytes"] < 0.5 * each["full_bytes"] for each in data if each["method"] == "full:bits=8")


def test_wrong_options_are_named(model_folder: Path) -> None:
    for arguments, said in (
        (["--lines", "many"], "--lines many is not possible"),
        (["--methods", "snap"], "unknown method 'snap'"),
    ):
        with pytest.raises(ValueError, match=said):
            run_experiment(lines.Lines, ["--model", str(model_folder), *arguments])


def test_prompts_read_as_a_stream_give_the_answers_of_streaming_generation(tmp_path: Path, model_folder: Path) -> None:
    method = "streamingllm:sinks=2"
    arguments = ["--lines", "4", "--texts", "2", "--questions", "1", "--methods", method, "--budgets", "40"]
    arguments += ["--chunk", "32", "--question", "seen"]
    result = run(tmp_path, model_folder, *arguments)
    assert [data["chunk"] for data in result] == [32, 32]
    model, tokenizer = models.load(model_folder, device="cpu")
    for data in result:
        asked = source_of(data)
        inputs = models.encode_chat(tokenizer, asked.text + asked.question)
        cache = CompressedCache(model, f"{method}:budget=40", prefill="stream", chunk=32)
        # Rows are padded to the longest of their batch, and chunks are cut by column.
        if inputs["input_ids"].shape[1] == max(each["prompt_tokens"] for each in result):
            whole = model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False)
            answer = tokenizer.decode(whole[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            assert data["answer"] == answer
            break
    else:
        pytest.fail("no row without padding")
