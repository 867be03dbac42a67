"""RULER's tasks: texts that hold what is asked for, as long as asked, and scores as RULER's."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from kvsketch.models import texts
from kvsketch_lab import records
from kvsketch_lab.evaluation import haystack, ruler
from kvsketch_lab.evaluation.paragraphs import read_paragraphs
from tests.helpers import tiny
from tests.helpers.experiments import run_experiment

WORDS = [f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(300)]
SOURCE = ruler.Source([f"Sentence {i} of the text. " for i in range(200)], WORDS, None)


@pytest.mark.parametrize("name", [name for name in ruler.TASKS if name not in ruler.OF_A_FILE])
def test_a_text_holds_what_is_asked_for(name: str) -> None:
    made = ruler.TASKS[name].make(random.Random(3), 40, SOURCE)
    larger = ruler.TASKS[name].make(random.Random(3), 60, SOURCE)
    assert len(larger.text) > len(made.text)
    for ask in made.asks:
        assert all(string in made.text and string not in ask.question for string in ask.expected)
    assert made == ruler.TASKS[name].make(random.Random(3), 40, SOURCE)


def test_the_shapes_of_the_tasks() -> None:
    made = {name: task.make(random.Random(1), 40, SOURCE) for name, task in ruler.TASKS.items() if "qa" not in name}
    counts = {name: (len(each.asks), len(each.asks[0].expected)) for name, each in made.items()}
    assert counts["niah_multikey_1"] == (4, 1) and counts["niah_multivalue"] == (1, 4)
    assert counts["niah_multiquery"] == (1, 4) and counts["niah_multikey_2"] == (40, 1) and counts["vt"] == (1, 5)
    listed = Counter(re.findall(r"\d+\. (\w+)", made["cwe"].text.rpartition("\n\n")[2]))
    assert sorted(made["cwe"].asks[0].expected) == sorted(word for word, count in listed.items() if count == 30)
    assert set(listed.values()) == {30, 3} and counts["cwe"] == (1, 10)
    coded = Counter(made["fwe"].text.rpartition("\n\n")[2].split())
    assert [word for word, _ in coded.most_common(4)] == ["...", *made["fwe"].asks[0].expected]
    chain = re.findall(r"VAR (\w{5}) = (?:VAR )?(\w{5})", made["vt"].text)[5:]
    assert [name for name, _ in chain] == made["vt"].asks[0].expected, "assignments stand in their order"


@pytest.mark.parametrize(("match", "score"), [("all", 0.5), ("part", 1.0)])
def test_scores_are_those_of_ruler(match: str, score: float) -> None:
    asked = ruler.Ruler(ruler.RulerOptions(methods="full"))
    expected = {"match": match, "strings": ["Berlin", "1234567"]}
    assert asked.score("It is 1234567.", expected) == score and asked.score("none", expected) == 0
    assert asked.score("1234567, berlin", expected) == 1.0


def test_questions_of_a_file(tmp_path: Path) -> None:
    squad = {"data": [{"paragraphs": [{"context": f"Text {i}.", "qas": [
        {"question": f"Which {i}?", "answers": [{"text": str(i)}, {"text": str(i)}]},
        {"question": "None?", "answers": []}]}]} for i in range(30)]}  # fmt: skip
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(squad))
    several, result = read_paragraphs(path)
    assert not several and len(result.texts) == 30 and result.rows[4] == ("Which 4?", (4,), ("4",))
    made = ruler.TASKS["qa_1"].make(random.Random(0), 16, SOURCE._replace(paragraphs=result))
    assert made.text.count("Document ") == 16 and len(made.asks) == 2
    for ask in made.asks:
        assert f"Text {ask.expected[0]}." in made.text
    hotpot = [{"question": "Q?", "answer": "a", "context": [["A", ["x. "]], ["B", ["y. "]]],
               "supporting_facts": [["B", 0]]}]  # fmt: skip
    path.write_text(json.dumps(hotpot))
    assert read_paragraphs(path)[1].rows == [("Q?", (1,), ("a",))]
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"squad.json is neither SQuAD's JSON"):
        read_paragraphs(path)
    with pytest.raises(ValueError, match="qa_1 asks about paragraphs of a file"):
        ruler.Ruler(ruler.RulerOptions(tasks="qa_1"))


def test_texts_are_as_long_as_asked_and_held_out_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    among: list[tuple[str, ...]] = []
    monkeypatch.setattr(texts, "speeches", lambda: ("1990-Nobody-1", "1992-Nobody-1"))
    monkeypatch.setattr(texts, "sentences", lambda *given: among.append(given[2]) or list(SOURCE.sentences))
    monkeypatch.setattr(haystack, "common_words", lambda: tuple(WORDS))
    folder = tiny.save_tiny_model(tmp_path / "model")
    line = ["--model", str(folder), "--device", "cpu", "--tasks", "niah_multikey_2,niah_single_2", "--lengths", "900"]
    line += ["--texts", "1", "--questions", "2", "--methods", "full,snapkv", "--budgets", "1/2", "--out", str(tmp_path)]
    assert run_experiment(ruler.Ruler, [*line, "--max-new-tokens", "4", "--seeds", "0,100"]) == 0
    data = [record["data"] for record in records.read(tmp_path / "ruler.jsonl")]
    assert len(data) == 2 * 2 * (2 + 1) and {each["task"] for each in data} == {"niah_multikey_2", "niah_single_2"}
    assert all(700 < each["prompt_tokens"] <= 900 for each in data)
    assert set(among) == {("1990-Nobody-1",), ("1992-Nobody-1",)}, "years that end in 2 are held out of tuning"
