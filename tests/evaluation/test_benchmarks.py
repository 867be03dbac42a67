"""The named benchmarks: their files are read, texts stand before questions, and right answers count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch_lab import records
from kvsketch_lab.evaluation import bamboo, financebench, longbench2, math, minilongbench, realtalk
from kvsketch_lab.evaluation.documents import Item
from tests.helpers import tiny
from tests.helpers.experiments import run_experiment

SAMPLE = """# Metadata

- ID: 1

# Question

Who is it?
Say so.

# Choices

- A: the first
of them
- B: - the second
- C: the third
- D: none

# Answer

C
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tiny_model(tmp_path_factory.mktemp("model"))


def options(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        "--data", str(data), "--model", str(model), "--device", "cpu", "--methods", "full,streamingllm",
        "--budgets", "64", "--question", "unseen", "--out", str(out), *more,
    ]  # fmt: skip


# LongBench v2


def longbench2_files(folder: Path) -> Path:
    own = folder / "law"
    own.mkdir()
    for number in (1, 2, 3):
        (own / f"sample_00{number}_easy_short.md").write_text(SAMPLE)
        text = "The same text of words. " * 20 if number < 3 else "Another text of words. " * 9000
        (own / f"sample_00{number}_easy_short_context.txt").write_text(text)
    return folder


def test_longbench2_reads_questions_with_their_choices(tmp_path: Path) -> None:
    made = longbench2.Longbench2(longbench2.Longbench2Options(data=str(longbench2_files(tmp_path))))
    # Two samples share a text, and the third is too large.
    assert [(name, len(each.items)) for name, each in made.read().items()] == [("task=law text=0", 2)]
    item = made.read()["task=law text=0"].items[0]
    listed = "(A) the first\nof them\n(B) - the second\n(C) the third\n(D) none"
    assert item == Item("law", f"Who is it?\nSay so.\n{listed}", "C")


@pytest.mark.parametrize("broken", ["- D: none", "# Answer\n\nC"])
def test_a_sample_without_choices_or_answer_is_named(broken: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no question of LongBench v2"):
        longbench2.parsed(SAMPLE.replace(broken, ""), "law", tmp_path / "sample.md")


def test_choices_are_answered_by_their_likelihoods(tmp_path: Path, model: Path) -> None:
    """The oracle is one forward of the model alone over the whole prompt."""
    data = longbench2_files(tmp_path)
    made = longbench2.Longbench2(
        longbench2.Longbench2Options(data=str(data), model=str(model), device="cpu", methods="full", question="unseen")
    )
    made.open()
    outcomes = {cell.sample: (cell, data) for group in made.groups() for cell, data in made.measure(group)}
    assert len(outcomes) == 2
    for cell, outcome in outcomes.values():
        ids = torch.tensor([made.ask(cell).ids])
        with torch.no_grad():
            logits = made.model(ids).logits[0, -1].double()
        letters = [made.tokenizer(f"({x}", add_special_tokens=False)["input_ids"][-1] for x in "ABCD"]
        likely = logits[letters].log_softmax(-1)
        assert outcome["choice_nll"] == pytest.approx(-float(likely[2]), abs=1e-4)
        assert outcome["answer"] == "ABCD"[int(likely.argmax())]
        assert outcome["score"] == float(outcome["answer"] == "C")


def test_longbench2_writes_records(tmp_path: Path, model: Path) -> None:
    data = longbench2_files(tmp_path)
    assert run_experiment(longbench2.Longbench2, options(model, data, tmp_path / "out")) == 0
    made = [record["data"] for record in records.read(tmp_path / "out" / "longbench2.jsonl")]
    assert len(made) == 4 and all(each["task"] == "law" and each["choice_nll"] > 0 for each in made)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (longbench2.Longbench2, "name a clone of itsnamgyu/longbench2_md"),
        (realtalk.Realtalk, "name data/ of danny911kr/REALTALK"),
        (bamboo.Bamboo, "datasets/ of RUCAIBox/BAMBOO"),
        (minilongbench.Minilongbench, "name pred_data/example of"),
        (financebench.Financebench, "name a clone of patronus-ai/financebench"),
        (math.Math, "name a file of problems"),
    ],
)
def test_a_folder_without_files_says_what_to_name(kind: Any, said: str, tmp_path: Path) -> None:
    made = kind(options_of(kind)(data=str(tmp_path)))
    with pytest.raises(ValueError, match=said):
        made.file_rows if isinstance(made, math.Math) else made.read()


def options_of(kind: Any) -> Any:
    module = {c.__name__: m for m in (bamboo, financebench, longbench2, math, minilongbench, realtalk)
              for c in vars(m).values() if isinstance(c, type)}[kind.__name__]  # fmt: skip
    return getattr(module, f"{kind.__name__}Options")


# BAMBOO


def bamboo_files(folder: Path) -> Path:
    text = "A meeting of words. " * 15
    asked = {"options": "['A. this', 'B. that', 'C. both', 'D. none']", "answer": "B", "content": text}
    rows = {
        "meetingqa_4k": [{"question": f"Which {n}?", **asked} for n in (1, 2)],
        "senhallu_4k": [{"content": text, "hypothesis": "It is so.", "answer": "False"}],
        "altqa_4k": [{"content": f"{text}\n\nQuestion:\nwhich year\n", "answer": "1,964"}],
    }
    for task, own in rows.items():
        # Line breaks inside strings, as the files have them.
        lines = [json.dumps(row).replace("words. ", "words.\t\u2028") for row in own]
        (folder / f"{task}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_bamboo_reads_questions_hypotheses_and_numbers(tmp_path: Path) -> None:
    tasks = ("meetingqa_4k", "senhallu_4k", "altqa_4k")
    made = bamboo.Bamboo(bamboo.BambooOptions(data=str(bamboo_files(tmp_path)), tasks=tasks))
    documents = made.read()
    assert [len(each.items) for each in documents.values()] == [2, 1, 1]
    meeting, hypothesis, number = (each.items[0] for each in documents.values())
    assert meeting.question == "Which 1?\n(A) this\n(B) that\n(C) both\n(D) none" and meeting.answer == "B"
    assert hypothesis.question == "Hypothesis: It is so.\n(A) right\n(B) wrong" and hypothesis.answer == "B"
    assert number.question == "which year" and number.answer == "1964"
    assert "Question" not in documents["task=altqa_4k text=0"].text
    assert made.score(" in 1,964.", {"task": "altqa_4k", "answer": "1964"}) == 1
    assert made.score(" 19645", {"task": "altqa_4k", "answer": "1964"}) == 0


def test_bamboo_asks_behind_a_document_whose_question_stands_before_it(tmp_path: Path) -> None:
    """So it is in half of the lines of altqa; each of them is a text of its own."""
    contents = [f"Answer.\n\nQuestion:\nwhich {n}\n\nDocument:\nIn {n} it was so." for n in (1964, 1965)]
    lines = [json.dumps({"content": each, "answer": "1964"}) for each in contents]
    (tmp_path / "altqa_4k.jsonl").write_text("\n".join(lines))
    documents = bamboo.Bamboo(bamboo.BambooOptions(data=str(tmp_path), tasks=("altqa_4k",))).read()
    assert [each.text for each in documents.values()] == [
        f"Answer.\n\nDocument:\nIn {n} it was so." for n in (1964, 1965)
    ]
    assert [each.items[0].question for each in documents.values()] == ["which 1964", "which 1965"]


def test_bamboo_writes_records_of_all_kinds(tmp_path: Path, model: Path) -> None:
    tasks = ["--tasks", "meetingqa_4k,senhallu_4k,altqa_4k", "--max-new-tokens", "3"]
    assert run_experiment(bamboo.Bamboo, options(model, bamboo_files(tmp_path), tmp_path / "out", *tasks)) == 0
    made = [record["data"] for record in records.read(tmp_path / "out" / "bamboo.jsonl")]
    assert len(made) == 8 and sum("choice_nll" in each for each in made) == 6
    assert {each["answer"] for each in made if each["task"] == "senhallu_4k"} <= {"A", "B"}


# REALTALK


def test_realtalk_reads_sessions_with_their_days(tmp_path: Path, model: Path) -> None:
    turn = {"speaker": "Ann", "date_time": "29.12.2023, 00:51:12"}
    chat = {
        "session_1": [{**turn, "clean_text": "Hello."}, {**turn, "speaker": "Bob", "clean_text": "Hi."}],
        "session_2": [{**turn, "date_time": "30.12.2023, 10:00:00", "clean_text": "Again."}],
        "qa": [{"question": f"q{n}", "answer": "Bob, Ann", "category": 1 + n % 3} for n in range(6)],
    }
    (tmp_path / "Chat_2_Ann.json").write_text(json.dumps(chat))
    made = realtalk.Realtalk(realtalk.RealtalkOptions(data=str(tmp_path)))
    ((name, document),) = made.read().items()
    assert name == "realtalk text=2"
    assert document.text == "[29.12.2023]\nAnn: Hello.\nBob: Hi.\n\n[30.12.2023]\nAnn: Again."
    # The categories in turn.
    assert [item.question for item in document.items] == ["q0", "q1", "q2", "q3", "q4", "q5"]
    assert run_experiment(realtalk.Realtalk, options(model, tmp_path, tmp_path, "--max-new-tokens", "3")) == 0
    assert len([*records.read(tmp_path / "realtalk.jsonl")]) == 12


# MiniLongBench


def test_minilongbench_splits_before_the_question(tmp_path: Path, model: Path) -> None:
    text = f"Read.\n{'Words. ' * 30}"
    prompts = [f"{text}\n\nQuestion: who {n}?\nAnswer:" for n in range(2)]
    rows = {n: {"origin_prompt": each, "gold": "['Ann', 'Bob']"} for n, each in enumerate(prompts)}
    (tmp_path / "MiniLongBench_hotpotqa.json").write_text(json.dumps(rows))
    made = minilongbench.Minilongbench(minilongbench.MinilongbenchOptions(data=str(tmp_path), tasks=("hotpotqa",)))
    document = made.read()["task=hotpotqa text=1"]
    assert document.text.endswith("Words.") and document.items[0].question == "Question: who 1?\nAnswer:"
    more = ["--tasks", "hotpotqa", "--max-new-tokens", "3"]
    assert run_experiment(minilongbench.Minilongbench, options(model, tmp_path, tmp_path, *more)) == 0
    assert len([*records.read(tmp_path / "minilongbench.jsonl")]) == 4


@pytest.mark.parametrize(
    ("task", "said", "gold", "score"),
    [
        ("hotpotqa", " Ann Lee\nQuestion: more", ["Ann", "Bob"], 2 / 3),
        ("passage_retrieval_en", " Paragraph 12.", ["Paragraph 12"], 1.0),
        ("passage_retrieval_en", " Paragraph 12.", ["Paragraph 1"], 0.0),
        ("passage_count", "There are 7", ["7"], 1.0),
        ("trec", "Manner of an action", ["Manner of an action"], 1.0),
        ("qmsum", "the cat sat", ["the cat sat"], 1.0),
    ],
)
def test_answers_of_longbench_are_scored_by_task(task: str, said: str, gold: list[str], score: float) -> None:
    made = minilongbench.Minilongbench(minilongbench.MinilongbenchOptions())
    assert made.score(said, {"task": task, "answers": gold}) == pytest.approx(score)


def test_a_label_is_right_without_the_classes_that_it_was_chosen_from() -> None:
    """So trec has it; the others have a list, or the text of one."""
    assert minilongbench.gold({"all_classes": ["Date", "Individual"], "answers": ["Individual"]}) == ["Individual"]
    assert minilongbench.gold("['Ann', 'Bob']") == minilongbench.gold(["Ann", "Bob"]) == ["Ann", "Bob"]


# FinanceBench


@pytest.mark.parametrize(
    ("said", "right", "score"),
    [
        (" It was $1,577 million", "$1577.00", 1.0),
        (" 1580", "$1577.00", 1.0),
        (" 1590", "$1577.00", 0.0),
        ("-0.02", "-0.02", 1.0),
        ("4.2", "4.2%", 1.0),
        ("Data Center", "Data Center", 1.0),
        ("no", "Data Center", 0.0),
    ],
)
def test_numbers_of_reports_are_right_within_half_a_percent(said: str, right: str, score: float) -> None:
    made = financebench.Financebench(financebench.FinancebenchOptions())
    assert made.score(said, {"task": "x", "answer": right}) == score


def test_the_evidence_is_among_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "pdfs").mkdir()
    known = {"answer": "1", "question_type": "metrics"}
    evidence = [{"evidence_page_num": 7}]
    rows = [{"doc_name": "R", "question": f"q{n}", "evidence": evidence, **known} for n in range(2)]
    rows.append({"doc_name": "gone", "question": "q", "evidence": evidence, **known})
    (tmp_path / "data" / "financebench_open_source.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "pdfs" / "R.pdf").write_bytes(b"%PDF-")
    made = financebench.Financebench(financebench.FinancebenchOptions(data=str(tmp_path), most_tokens=100))
    pages = [f"<page {n}>" + "x" * 50 for n in range(20)]
    monkeypatch.setattr(made, "_pages", lambda name: pages)
    ((name, document),) = made.read().items()
    assert name == "document=R text=7" and [item.question for item in document.items] == ["q0", "q1"]
    assert "<page 7>" in document.text and 100 < len(document.text) <= 250
    first = int(document.text[6 : document.text.index(">")])
    assert document.text == "".join(pages[first : first + document.text.count("<")])


# mathematics


@pytest.mark.parametrize(
    ("said", "right", "same"),
    [
        (r"\frac{1}{2}", "1/2", True),
        (r"\dfrac12", r"\frac{1}{2}", True),
        ("0.5", r"\frac{1}{2}", True),
        ("025", "25", True),
        ("27", "27.0", True),
        ("1,234", "1234", True),
        (r"90^\circ", "90", True),
        (r"\$18", "18", True),
        (r"\left(3, \frac{\pi}{2}\right)", r"(3,\frac{\pi}{2})", True),
        ("(1, 2)", "(2, 1)", False),
        ("(1,2]", "[1,2]", False),
        ("12", "21", False),
        (r"\sqrt{2}", r"\sqrt{3}", False),
        ("1/0", "0", False),
    ],
)
def test_answers_that_say_the_same(said: str, right: str, same: bool) -> None:
    assert math.is_same(said, right) == same == math.is_same(right, said)


def test_the_last_box_is_the_answer() -> None:
    assert math.boxed(r"\boxed{1} and then \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert math.boxed(r"so \boxed{1") is None and math.boxed("so 1") is None


@pytest.mark.parametrize(("file", "name"), [("aime24/test.jsonl", "aime24"), ("data/math.jsonl", "math")])
def test_problems_are_named_after_their_file_or_its_folder(tmp_path: Path, file: str, name: str) -> None:
    """Qwen2.5-Math has a folder for each set, LongFLow one for all, with answers of another name."""
    path = tmp_path / file
    path.parent.mkdir()
    path.write_text(json.dumps({"question": "q", "true_answer": "7"}))
    made = math.Math(math.MathOptions(data=str(path)))
    assert [row["answer"] for row in made.file_rows] == ["7"]
    assert [own for _, own in made.questions()] == [{"task": name}]


def test_math_takes_the_files_of_several_sets(tmp_path: Path, model: Path) -> None:
    rows = [
        {"problem": "p", "answer": 27.0},
        {"question": "q", "answer": "x"},
        {"problem": "r", "solution": r"so \boxed{3}"},
    ]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = options(model, tmp_path / "test.jsonl", tmp_path, "--max-new-tokens", "4")
    assert run_experiment(math.Math, given) == 0
    made = [record["data"] for record in records.read(tmp_path / "math.jsonl")]
    assert [each["expected"] for each in made if each["method"] == "full"] == ["27.0", "x", "3"]
    (tmp_path / "test.jsonl").write_text(json.dumps({"problem": "p"}))
    with pytest.raises(ValueError, match=r"line 1.* problem"):
        math.Math(math.MathOptions(data=str(tmp_path / "test.jsonl"))).file_rows  # noqa: B018
