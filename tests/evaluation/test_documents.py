"""Questions about documents and conversations, long answers, instructions, likelihoods: what is asked, what counts."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch.cache import memory
from kvsketch.compare.budgets import sized
from kvsketch.decode.asking import chat_frame
from kvsketch.methods import parse_method
from kvsketch_lab import records
from kvsketch_lab.evaluation import gsm8k, instructions, leval, likelihood, locomo
from kvsketch_lab.evaluation.experiment import end_tokens
from kvsketch_lab.evaluation.questions import Question
from tests.helpers import tiny
from tests.helpers.experiments import run_experiment

ROW = {
    "input": "A text of words. " * 12,
    "instructions": ["which\nA. this\nB. that", "why", "who"],
    "outputs": list("BAC"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tiny_model(tmp_path_factory.mktemp("model"))


def asked(folder: Path, model: Path, **options: Any) -> leval.Leval:
    (folder / "tpo.jsonl").write_text(json.dumps(ROW) + "\n")
    given = {"data": str(folder), "model": str(model), "device": "cpu", "tasks": "tpo", "max_new_tokens": 4}
    given |= {"methods": "full,streamingllm", "budgets": "64", "question": "unseen", "out": str(folder)}
    return leval.Leval(leval.LevalOptions(**(given | options)))


def answers(experiment: Any) -> dict[tuple[str, str], dict[str, Any]]:
    experiment.open()
    pairs = [pair for group in experiment.groups() for pair in experiment.measure(group)]
    return {(cell.method, cell.sample): outcome for cell, outcome in pairs}


def test_an_aligned_question_has_a_multiple_of_tokens(tmp_path: Path, model: Path) -> None:
    experiment = asked(tmp_path, model, align="8")
    experiment.open()
    aligned = experiment.aligned(Question((5, 6, 7, 8, 9), 3, "B"))
    assert aligned.asked == 8 and aligned.ids[:2] == (5, 6) and aligned.ids[-3:] == (7, 8, 9)
    assert experiment.tokenizer.decode(aligned.ids[2:-3]) == "\n" * 5
    assert experiment.aligned(aligned) == aligned
    assert dict(experiment.cells()[0].setting)["align"] == 8


def test_a_turn_follows_the_answers_before_it(tmp_path: Path, model: Path) -> None:
    """The oracle is the model alone, greedy, over the tokens of the whole talk."""
    experiment = asked(tmp_path, model, turns="2", questions="3", methods="full")
    result = answers(experiment)
    between = experiment.tokenizer(chat_frame(experiment.tokenizer).between).input_ids
    cells = experiment.cells()
    questions = [experiment.ask(cell) for cell in cells]
    ends = end_tokens(experiment.model)
    for first, second in ((0, 1), (2, None)):
        ids = list(questions[first].ids)
        new = greedy(experiment.model, ids, 4, ends)
        assert result["full", cells[first].sample]["answer"] == experiment.tokenizer.decode(new, True)
        assert result["full", cells[first].sample]["turn"] == 0
        if second is not None:
            told = [token for token in new if token not in ends]
            ids += [*told, *between, *questions[second].ids[-questions[second].asked :]]
            new = greedy(experiment.model, ids, 4, ends)
            assert result["full", cells[second].sample]["answer"] == experiment.tokenizer.decode(new, True)
            assert result["full", cells[second].sample]["turn"] == 1


@torch.no_grad()
def greedy(model: Any, ids: list[int], count: int, ends: list[int]) -> list[int]:
    result: list[int] = []
    while len(result) < count and not (result and result[-1] in ends):
        logits = model(torch.tensor([ids + result])).logits[0, -1]
        result.append(int(logits.argmax()))
    return result


def test_one_turn_at_a_time_is_each_question_alone(tmp_path: Path, model: Path) -> None:
    apart, talked = (answers(asked(tmp_path, model, turns=turns, questions="1")) for turns in ("1", "2"))
    assert {key: each["answer"] for key, each in apart.items()} == {key: each["answer"] for key, each in talked.items()}


# locomo

TALK = {
    "session_1_date_time": "1 May 2023",
    "session_1": [
        {"speaker": "Ann", "text": "I bought a red kite."},
        {"speaker": "Ben", "text": "Look", "blip_caption": "a dog on a beach"},
    ],
    "session_2_date_time": "3 June 2023",
    "session_2": [{"speaker": "Ann", "text": "It flew away."}],
}
QA = [
    {"question": "What did Ann buy?", "answer": "red kite", "category": 4},
    {"question": "What else?", "answer": "nothing", "category": 4},
    {"question": "When did it fly away?", "answer": 2023, "category": 2},
    {"question": "What did Ben sell?", "adversarial_answer": "a kite", "category": 5},
]


def test_a_conversation_from_a_zip_or_a_json_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "talks.zip", "w") as archive:
        archive.writestr("data/26.json", json.dumps(TALK | {"qa": QA}))
    (tmp_path / "talks.json").write_text(json.dumps([{"sample_id": "conv-26", "conversation": TALK, "qa": QA}]))
    one, other = (locomo.read_conversations(str(tmp_path / name)) for name in ("talks.zip", "talks.json"))
    assert one == other and list(one) == ["locomo text=26"]
    text, items = one["locomo text=26"]
    assert text == (
        "[1 May 2023]\nAnn: I bought a red kite.\nBen: Look (shows a picture: a dog on a beach)\n\n"
        "[3 June 2023]\nAnn: It flew away."
    )
    assert [(item.task, item.answer) for item in items] == [
        ("temporal", "2023"), ("single-hop", "red kite"), ("single-hop", "nothing"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"is no file; name data/locomo10\.zip"):
        locomo.read_conversations(str(tmp_path / "none.zip"))


@pytest.mark.parametrize(
    ("task", "said", "wanted", "score"),
    [
        ("single-hop", " The red kite.\nMore words", "red kite", 1.0),
        ("single-hop", "a big red kite", "red kite", 2 * 2 / 5),
        ("single-hop", "a dog", "red kite", 0.0),
        ("multi-hop", "kite, old dog", "dog, kite, ball", (2 / 3 + 1 + 0) / 3),
        ("multi-hop", "", "dog", 0.0),
    ],
)
def test_f1_of_an_answer(task: str, said: str, wanted: str, score: float) -> None:
    experiment = locomo.Locomo(locomo.LocomoOptions())
    assert experiment.score(said, {"task": task, "answer": wanted}) == pytest.approx(score)


# gsm8k


@pytest.mark.parametrize(
    ("answer", "count", "result"),
    [
        ("2 + 2 = 4\n#### 4", 1, [4]),
        ("so it is \\boxed{1,200}", 1, [1200]),
        ("there are 3 and then 12.", 1, [12]),
        ("#### $5\nthen 7\n#### -2.5", 2, [5, -2.5]),
        ("3 and 4", 2, []),
    ],
)
def test_numbers_of_a_solution(answer: str, count: int, result: list[float]) -> None:
    assert gsm8k.numbers(answer, count) == result


def test_a_long_answer_stays_within_its_share(tmp_path: Path, model: Path) -> None:
    rows = [{"question": f"What is {n} and {n}? Say it with care.", "answer": f"... #### {2 * n}"} for n in range(5)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--data", str(tmp_path / "test.jsonl"), "--model", str(model), "--device", "cpu", "--problems", "2"]
    options += ["--max-new-tokens", "120", "--methods", "full,streamingllm", "--bytes", "1/4", "--out", str(tmp_path)]
    assert run_experiment(gsm8k.Gsm8k, options) == 0
    data = [record["data"] for record in records.read(tmp_path / "gsm8k.jsonl")]
    assert len(data) == 4 and data[0]["expected"] == [0.0, 2.0] and data[0]["source"] == "openai/grade-school-math"
    small = [each for each in data if each["method"] == "streamingllm"]
    assert all(each["tokens_stored"] <= each["budget_tokens"] for each in small)
    assert all(each["device_bytes"] <= each["full_bytes"] / 3.5 for each in small)


def test_a_share_counts_the_tokens_of_the_answer(model: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    for more in (0, 300):
        tokens = sized(config, "streamingllm", "1/4", 100, "bytes", more)[1]["budget_tokens"]
        least, most = (
            memory.sizes_of(config, 100).bytes(parse_method(f"streamingllm:budget={count}"), more)
            for count in (tokens, tokens + 1)
        )
        assert least is not None and most is not None
        assert least <= memory.sizes_of(config, 100 + more).full / 4 < most


# instructions


def test_instructions_are_drawn_and_checked() -> None:
    experiment = instructions.Instructions(instructions.InstructionsOptions())
    system, expected = instructions.drawn(100, 3, len(instructions.INSTRUCTIONS))
    assert instructions.drawn(100, 3, 8) == (system, expected) != instructions.drawn(101, 3, 8)
    assert all(word in system for word in expected.values())
    parts = {
        "opening": "{} this is", "word": "a {} here", "address": "dear {}, read", "number": "file {}",
        "title": "[[{}]]", "postscript": "P.S. {}", "motto": '"{}"', "signature": "-- {}.",
    }  # fmt: skip
    said = {name: part.format(expected[name]) for name, part in parts.items()}
    assert experiment.score("\n".join(said.values()), expected) == 1.0
    for name in parts:
        others = "\n".join(part for other, part in said.items() if other != name)
        assert experiment.score(others, expected) == pytest.approx(7 / 8)
    assert experiment.score("Nothing of this.", expected) == 0.0


# likelihood


def test_likelihood_of_a_reference(tmp_path: Path, model: Path) -> None:
    rows = [{"input": "It was so. " * n, "instructions": ["What?"], "outputs": ["It was said that."]} for n in (12, 20)]
    (tmp_path / "news_summ.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    experiment = likelihood.Likelihood(
        likelihood.LikelihoodOptions(
            data=str(tmp_path), model=str(model), device="cpu", tasks=("news_summ",),
            methods="full,snapkv,clusterkv:skip_layers=0", budgets="40,4096", question=("unseen",), batch=2,
        )
    )  # fmt: skip
    experiment.open()
    result = {c.key: (c, outcome) for group in experiment.groups() for c, outcome in experiment.measure(group)}
    for cell, outcome in result.values():
        question = experiment.ask(cell)
        reference = experiment.tokenizer(question.expected).input_ids
        with torch.no_grad():
            logits = experiment.model(torch.tensor([[*question.ids, *reference]])).logits[0].double()
        told = logits.log_softmax(-1)[len(question.ids) - 1 : -1].gather(1, torch.tensor(reference)[:, None])
        assert outcome["full_nll"] == pytest.approx(-float(told.mean()), abs=1e-4)
        assert outcome["tokens_scored"] == len(reference) == len(outcome["kl_largest"])
        assert outcome["kl"] == pytest.approx(sum(outcome["kl_largest"]) / len(reference), abs=1e-4)
        if cell.method == "full" or cell.budget == "4096":
            assert outcome["kl"] < 1e-5 and outcome["nll"] == pytest.approx(outcome["full_nll"], abs=1e-4)
        else:
            assert outcome["kl"] > 1e-4, cell
