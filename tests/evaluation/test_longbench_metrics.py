"""LongBench's metrics: by hand, by their properties, and against lm-eval's own."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch_lab.evaluation.longbench import metrics

DATA = Path(__file__).parent.parent / "data" / "longbench"
KINDS = ["Place", "Place of meeting", "Person", "Number"]
VOCABULARY = ("the", "a", "state", "union", "Peace", "war,", "12", "7", "North-Carolina", ".", "b")
WORDS = st.lists(st.sampled_from(VOCABULARY), max_size=12)
NEEDS = {"rouge_l": "rouge", "rouge_l_zh": "rouge", "qa_f1_zh": "jieba", "code_similarity": "rapidfuzz"}


def scored(metric: str, answer: str, *references: str, classes: list[str] | None = None) -> float:
    if metric in NEEDS:
        pytest.importorskip(NEEDS[metric])
    if metric.endswith("_zh"):
        pytest.importorskip("jieba")
    return metrics.score(metric, answer, references, classes or [])


@pytest.mark.parametrize(
    ("metric", "answer", "reference", "expected"),
    [
        ("qa_f1", "The Union, of states!", "union of states", 1.0),
        ("qa_f1", "in North Carolina", "North Carolina", 0.8),
        ("qa_f1", "war war", "war", 2 / 3),
        ("qa_f1", "peace", "war", 0.0),
        ("qa_f1", "", "war", 0.0),
        ("qa_f1_zh", "北卡罗来纳州。", "北卡罗来纳州", 1.0),
        ("qa_f1_zh", "维护和平", "备战", 0.0),
        ("rouge_l", "the cat sat", "the cat ran", 2 / 3),
        ("rouge_l", "ran cat the", "the cat ran", 1 / 3),
        ("rouge_l", "", "the cat ran", 0.0),
        ("rouge_l_zh", "总统祝贺国会", "总统祝贺国会", 1.0),
        ("count", "There are 3, no, 4 paragraphs", "3", 0.5),
        ("count", "13", "3", 0.0),
        ("count", "three", "3", 0.0),
        ("retrieval", "Paragraph 12", "Paragraph 1", 0.0),
        ("retrieval", "Paragraph 1 or 2", "Paragraph 1", 0.5),
        ("retrieval", "段落3", "段落3", 1.0),
        ("code_similarity", "# sum\n```python\nreturn a + b\nprint()", "return a + b", 1.0),
        ("code_similarity", "abcd", "abxy", 0.5),
        ("code_similarity", "// nothing else", "abxy", 0.0),
    ],
)
def test_by_hand(metric: str, answer: str, reference: str, expected: float) -> None:
    assert scored(metric, answer, reference) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("Place of meeting", "Place of meeting", 1.0),  # `Place` is part of the right name
        ("Place of meeting", "Place", 0.5),
        ("Person or Number", "Person", 0.5),
        ("Person or Number", "Place", 0.0),
        ("I do not know", "Place", 0.0),
    ],
)
def test_classification_by_hand(answer: str, reference: str, expected: float) -> None:
    assert scored("classification", answer, reference, classes=KINDS) == expected


def test_the_best_reference_counts() -> None:
    assert scored("qa_f1", "prepared for war", "peace", "to be prepared for war") == pytest.approx(0.75)
    assert metrics.score("qa_f1", "peace", []) == 0.0


def test_a_long_answer_gets_its_score() -> None:
    text = " ".join(f"word{index}" for index in range(600))
    limit = sys.getrecursionlimit()
    assert scored("rouge_l", text, text) == pytest.approx(1.0)
    assert sys.getrecursionlimit() == limit


@settings(max_examples=50, deadline=None)
@given(WORDS, WORDS)
def test_properties(some: list[str], others: list[str]) -> None:
    answer, reference = " ".join(some), " ".join(others)
    for metric in ("qa_f1", "count", "classification"):
        found = metrics.score(metric, answer, [reference, "Paragraph 7"], ["war,", "Peace", reference])
        assert 0 <= found <= 1
        assert found >= metrics.score(metric, answer, [reference], ["war,", "Peace", reference])
    assert metrics.qa_f1(answer, reference) == metrics.qa_f1(reference, answer)
    assert metrics.qa_f1(reference, reference) == float(bool(metrics._words(reference)))


def test_they_are_lm_evals(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("rouge", "jieba", "rapidfuzz", "lm_eval"):
        pytest.importorskip(package)
    from rapidfuzz import fuzz

    rounded = types.SimpleNamespace(ratio=lambda a, b: round(fuzz.ratio(a, b)))
    monkeypatch.setitem(sys.modules, "fuzzywuzzy", types.SimpleNamespace(fuzz=rounded))
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / "tasks" / "longbench" / "metrics.py"
    if not file.is_file():
        pytest.skip("this lm-eval has no LongBench")
    module_spec = importlib.util.spec_from_file_location("lm_evals_longbench", file)
    assert module_spec is not None and module_spec.loader is not None
    theirs = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(theirs)
    names = {"qa_f1": "qa_f1_score", "qa_f1_zh": "qa_f1_zh_score", "rouge_l": "rouge_score", "count": "count_score"}
    names |= {"rouge_l_zh": "rouge_zh_score", "retrieval": "retrieval_score", "code_similarity": "code_sim_score"}
    texts = [sentence for text in english_texts() for sentence in text.split(";")]
    chinese = [json.loads(line)["answers"][0] for line in (DATA / "multifieldqa_zh.jsonl").read_text().splitlines()]
    for ours, name in names.items():
        for answer in [*texts, *chinese, "Paragraph 2", "2 or 3", ""]:
            for reference in [*texts[:4], *chinese, "Paragraph 2"]:
                if ours == "retrieval" and not reference.startswith("Paragraph"):
                    continue
                expected = getattr(theirs, name)(answer, reference)
                assert metrics.score(ours, answer, [reference]) == pytest.approx(expected), (ours, answer, reference)


def english_texts() -> list[str]:
    files = [DATA / f"{name}.jsonl" for name in ("gov_report", "qasper", "lcc", "passage_retrieval_en")]
    return [row for file in files for line in file.read_text().splitlines() for row in json.loads(line)["answers"]]


def test_what_of_an_answer_is_scored() -> None:
    answer = "\n\nNumber\nQuestion: Who?  Nobody"
    assert metrics.clean(answer, first_line=True) == "Number"
    assert metrics.clean(answer, first_line=False) == answer
    assert metrics.clean("Number  and more\nlines", first_line=False, cleaning="first-line") == "Number"


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown metric 'bleu'.*qa_f1"):
        metrics.score("bleu", "", [""])
    with pytest.raises(ValueError, match="'Paragraph' of a retrieval task has no number"):
        metrics.score("retrieval", "1", ["Paragraph"])
    metrics._jieba.cache_clear()
    for module, metric in (("jieba", "qa_f1_zh"), ("rouge", "rouge_l"), ("rapidfuzz.fuzz", "code_similarity")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=r"needs the package \w+: pip install 'kvsketch\[eval\]'"):
            metrics.require([metric])
    metrics.require(["qa_f1", "count", "classification", "retrieval"])
