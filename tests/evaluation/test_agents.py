"""Runs of an agent: what is asked was shown, a turn reads its own tokens, summaries shorten a transcript."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsketch.serve.chats import CHAT
from kvsketch_lab import records
from kvsketch_lab.evaluation import agent_runs, agents
from tests.helpers.experiments import run_experiment
from tests.helpers.tiny import save_tiny_model


def test_every_value_that_is_asked_for_was_shown_once_and_before() -> None:
    run = agent_runs.Run(60, 3, seed=1)
    shown, asked, kinds = run.system["content"], [], set()
    for number, turn in enumerate(run.turns):
        text = turn.messages[2]["content"]
        shown += text
        question = turn.question
        assert shown.count(question.expected) == 1 and question.text in turn.messages[-1]["content"]
        there = run.system if question.about == agent_runs.SYSTEM else run.turns[number - question.age].messages[2]
        assert question.expected in there["content"]
        asked.append(question.text)
        kinds.add(turn.messages[0]["content"].rpartition(".")[0].rpartition(".")[2])
    assert len(set(asked)) == 60 and kinds == {"json", "log", "code"}
    assert {turn.question.about for turn in run.turns} == {agent_runs.SYSTEM, agent_runs.FILE}
    assert agent_runs.Run(60, 3, seed=1).turns == run.turns != agent_runs.Run(60, 3, seed=2).turns
    assert json.loads(run.turns[0].messages[2]["content"])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: Any) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("agents")
    model = save_tiny_model(folder / "model")
    options = ["--model", str(model), "--turns", "5", "--entries", "1", "--answer", "4", "--out", str(folder / "out")]
    options += ["--summary-at", "1000", "--summary-tokens", "32", "--budgets", "1/8"]
    assert run_experiment(agents.Agents, options) == 0
    return {each["data"]["method"]: each["data"] for each in records.read(folder / "out" / "agents.jsonl")}


def test_a_turn_reads_its_own_tokens(measured: dict[str, Any]) -> None:
    full, ours = measured["full"], measured[CHAT]
    for data in (full, ours):
        news = [b - a for a, b in zip([0, *data["tokens"]], data["tokens"], strict=False)]
        # An answer's last token, and what its text lost, are read with the next turn; a result is repeated once.
        again = max(news[1:]) if data is ours else 0
        assert all(read <= new + again + 5 for read, new in zip(data["prefill"], news, strict=True))
        assert data["prefill"][0] <= news[0] + 5
        assert len(data["correct"]) == len(data["seconds"]) == 5 and data["right"] == sum(data["correct"]) / 5
    assert ours["bytes"][-1] < full["bytes"][-1] and full["ages"] == ours["ages"]
    assert sum(full["prefill"]) < sum(ours["prefill"]) < 2 * sum(full["prefill"])
    assert all(mine <= 1.05 * whole for mine, whole in zip(ours["bytes"], full["bytes"], strict=True))


def test_a_summary_shortens_the_transcript_and_is_paid_for(measured: dict[str, Any]) -> None:
    full, summary = measured["full"], measured["summary"]
    shortened = [turn for turn in range(5) if summary["tokens"][turn] < full["tokens"][turn] - 100]
    assert shortened and sum(summary["prefill"]) > sum(full["prefill"])
    assert summary["bytes"][-1] < full["bytes"][-1] and summary["summary_at"] == 1000
