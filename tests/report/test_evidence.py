"""The tables of docs/evidence.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsketch_lab.report import docs, equal_bytes, evidence
from tests.report.sample_records import record, write


def test_every_part_of_the_page_has_a_text(tmp_path: Path) -> None:
    """The template names the tables by their titles."""
    for name in ("docs", "results/eval"):
        (tmp_path / name).mkdir(parents=True)
    parts = {
        "leval": {"task": "tpo"}, "locomo": {"task": "temporal"}, "gsm8k": {"problems": 1}, "ruler": {"length": 4000},
        "instructions": {"instructions": 5, "tokens": 99}, "lines": {"lines": 200, "turns": 5, "turn": 0},
        "likelihood": {"task": "qmsum", "nll": 1.0, "kl": 0.0, "kl_largest": [0.0], "tokens_scored": 1},
        "longbench2": {"choice_nll": 1.0}, "realtalk": {"task": "temporal"}, "math": {"task": "math"},
        "bamboo": {"task": "paperqa_4k", "choice_nll": 1.0}, "minilongbench": {"task": "trec"}, "financebench": {},
    }  # fmt: skip
    for kind, facts in parts.items():
        own = [made(kind, method, budget, 0, 0, **{"task": "x", "score": 1.0, **facts})
               for method, budget in (("full", ""), ("rehearse", "1/8"))]  # fmt: skip
        write(tmp_path / "results" / "evidence" / f"{kind}.jsonl", own)
    page = docs.Numbers(tmp_path).words("evidence")
    titles = {evidence.columns(record)[0] for record in docs.Numbers(tmp_path).records("evidence")}
    assert len(titles) == 13 and all(f"### {title}\n" in page for title in titles)


def made(kind: str, method: str, budget: str, text: int, number: int, **more: Any) -> Any:
    data = {
        "model": docs.BIG.partition(" ")[0], "dtype": "bfloat16", "budgets_in": "bytes", "method": method,
        "budget": budget, "question": "unseen", "sample": f"task=x text={text} question={number}",
        "device_bytes": 100 if method == "full" else 12, "host_bytes": 0, "full_bytes": 100, **more,
    }  # fmt: skip
    return {**record(kind, data), "seed": 100}


def answers() -> Iterator[Any]:
    """Of tpo the full cache knows three of four, of sci_fi half, which is what one answer would get."""
    for text in range(8):
        for number in range(4):
            for method, budget in (("full", ""), ("rehearse", "1/8"), ("snapkv", "1/16")):
                right = float(number < 3) if method != "snapkv" else 0.0
                yield made("leval", method, budget, text, number, task="tpo", score=right, expected="ABCD"[number])
                even = float((number + text) % 2)
                yield made("leval", method, budget, text, number + 4, task="sci_fi", score=even, expected=number % 2)


def test_questions_without_choices_tell_no_likelihood() -> None:
    """BAMBOO has both; the numbers of altqa are generated."""
    own = [
        made("bamboo", method, budget, text, 0, task=task, score=1.0, expected="A", **said)
        for method, budget, nll in (("full", "", 0.5), ("rehearse", "1/8", 0.75))
        for task, said in (("paperqa_4k", {"choice_nll": nll}), ("altqa_4k", {}))
        for text in range(4)
    ]
    shown = evidence.tables(own, docs.BIG, evidence.BAMBOO)
    assert "| 0.75 | +0.250" in shown and "BAMBOO, altqa_4k (4 questions" in shown
    numbers = [each for each in own if each["data"]["task"] == "altqa_4k"]
    assert "nan" not in evidence.tables(numbers, docs.BIG, evidence.BAMBOO)


def test_how_likely_the_right_choice_is_is_compared_question_by_question() -> None:
    """Of the same questions: the full cache was asked eight, rehearse the first six, where it is .1 nats less sure."""
    own = [
        made(
            "longbench2",
            method,
            budget,
            text,
            0,
            task="law",
            score=0.5,
            choice_nll=nll + text,
            expected={"task": f"domain {text}", "answer": "A"},
        )
        for method, budget, nll, texts in (("full", "", 1.0, 8), ("rehearse", "1/8", 1.1, 6))
        for text in range(texts)
    ]
    table = evidence.tables(evidence.shown(own), docs.BIG, evidence.CHOICES).splitlines()
    assert "LongBench v2 (8 questions; inconclusive, chance 1.00)" in table[2], "whatever the task, A is right"
    full, rehearse = (line.split(" | ")[3:] for line in table[-2:])
    assert [each.strip(" |") for each in full] == ["4.50", ""]
    assert [each.strip(" |") for each in rehearse] == ["3.60", "+0.100 [+0.100, +0.100]"]


def test_what_counts_is_shown() -> None:
    """The last record of a question at equal bytes, unless it failed or is of kvpress's own full cache."""
    first = made("leval", "rehearse", "1/8", 0, 0, task="tpo", score=0.0)
    again = made("leval", "rehearse", "1/8", 0, 0, task="tpo", score=1.0)
    others = [
        made("leval", "rehearse", "1024", 0, 1, task="tpo", score=1.0, budgets_in="tokens"),
        made("leval", "rehearse", "1/8", 0, 2, task="tpo", failed="MemoryError: no"),
        made("leval", "full", "", 0, 3, task="tpo", score=1.0, kvpress="0.5.5"),
    ]
    for each in (first, again, *others):
        each["identity"] = ["method", "budget", "sample", "task"]
    assert evidence.shown([first, *others, again]) == [again]


def test_the_full_cache_stands_above_and_chance_is_flagged() -> None:
    table = evidence.tables(evidence.shown(answers()), docs.BIG, "Questions about documents")
    eighth, sixteenth = table.split("**1/16 of the bytes**")
    assert "sci_fi (32 questions; inconclusive, chance 0.50)" in eighth and "tpo (32 questions)" in eighth
    lines = [line for line in eighth.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == ["full", "rehearse"]
    assert "100.0%" in lines[0] and "12.0%" in lines[1] and all("0.75 [0.75, 0.75]" in line for line in lines)
    assert "0.00 [0.00, 0.00]" in sixteenth and "`snapkv`" in sixteenth and "`rehearse`" not in sixteenth


def test_all_tokens_in_few_bits_stand_at_the_share_that_is_nearest_to_their_bytes() -> None:
    """They have no budget."""
    few = [
        made("leval", "full:bits=4", "", text, n, task="tpo", score=1.0, expected="ABCD"[n])
        for text in range(8)
        for n in range(4)
    ]
    for each in few:
        each["data"]["device_bytes"] = 9
    table = evidence.tables(evidence.shown([*answers(), *few]), docs.BIG, evidence.DOCUMENTS)
    eighth, sixteenth = table.split("**1/16 of the bytes**")
    assert "`full:bits=4` | 9.0% | " in eighth and "full:bits=4" not in sixteenth


def test_fewer_questions_have_the_full_caches_answers_to_these_beside() -> None:
    asked = [record for record in answers() if record["data"]["method"] == "full" or "question=3" in str(record)]
    table = evidence.tables(evidence.shown(asked), docs.BIG, "Questions about documents")
    assert "0.00 [0.00, 0.00] (8 questions, full 0.00)" in next(row for row in table.splitlines() if "rehearse" in row)


def test_turns_and_alone_are_apart() -> None:
    talk = [
        made("leval", "full", "", text, n, task="tpo", score=1.0, turns=5, turn=n) for text in range(3) for n in (0, 1)
    ]
    own = [*answers(), *talk]
    assert "32 questions" in evidence.tables(evidence.shown(own), docs.BIG, "Questions about documents")
    talked = [made("leval", "rehearse", "1/8", text, 1, task="tpo", score=0.5, turns=5, turn=1) for text in range(3)]
    table = evidence.tables(evidence.shown([*own, *talked]), docs.BIG, "Many turns")
    assert "tpo, first turn (3 questions" in table and "tpo, turns 2 to 5 (3 questions" in table and "0.50" in table


def test_turns_are_no_part_of_the_tables_at_equal_bytes() -> None:
    alone = made("lines", "full", "", 0, 0, lines=200, score=1.0)
    talked = made("lines", "full", "", 0, 0, lines=200, score=1.0, turns=5, turn=1)
    assert equal_bytes.counts(alone) and not equal_bytes.counts(talked)


def test_drawn_instructions_have_no_chance() -> None:
    facts = {"instructions": 5, "tokens": 3500, "expected": {"word": "x"}, "score": 0.2}
    assert evidence.is_telling(evidence.cell([made("instructions", "full", "", n, 0, **facts) for n in range(4)]))
    assert not evidence.is_telling(evidence.cell([made("locomo", "full", "", n, 0, **facts) for n in range(4)]))


def test_the_99_9th_percentile_of_all_tokens() -> None:
    some = [
        {"tokens_scored": 1000, "kl_largest": [9.0, 5.0, 1.0]},
        {"tokens_scored": 1500, "kl_largest": [8.0, 7.0, 2.0]},
    ]
    assert evidence.percentile(some) == 7.0  # the third largest of 2,500
    with pytest.raises(ValueError, match="too few"):
        evidence.percentile([{"tokens_scored": 5000, "kl_largest": [3.0, 2.0]}])


def test_likelihoods_show_their_divergence() -> None:
    facts = {"task": "qmsum", "full_nll": 2.0, "tokens_scored": 100}
    own = [
        made("likelihood", method, budget, text, 0, nll=2.0 + kl, kl=kl, kl_largest=[4 * kl, kl], **facts)
        for text in range(4)
        for method, budget, kl in (("full", "", 0.0), ("rehearse", "1/8", 0.25))
    ]
    table = evidence.tables(evidence.shown(own), docs.BIG, "How likely a reference is")
    row = next(line for line in table.splitlines() if "`rehearse`" in line)
    assert "2.25 [2.25, 2.25]" in row and "0.250" in row and "1.00" in row and "inconclusive" not in table
