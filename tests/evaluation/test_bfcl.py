"""Multi-turn cases: true calls are carried out, first calls are read and compared, all ways are asked the same."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvsketch.serve.chats import CHAT
from kvsketch.serve.text import Template
from kvsketch_lab import records
from kvsketch_lab.evaluation import bfcl, bfcl_cases, transcripts
from kvsketch_lab.evaluation.experiment import Cell
from kvsketch_lab.evaluation.transcripts import Answer, Prologue, ReadPrologues, Transcript, TranscriptOptions
from tests.helpers.experiments import run_experiment
from tests.helpers.tiny import save_tiny_model

LAMPS = """
class LampAPI:
    def __init__(self):
        self.lit = []

    def _load_scenario(self, scenario, long_context=False):
        self.lit, self.words = scenario["lit"], 60 if long_context else 40

    def switch(self, room, on=True, level=3):
        if room == "attic":
            raise RuntimeError("the attic has no lamp")
        self.lit.append([room, on, level])
        return {"room": room, "on": on}

    def history(self):
        return "then a lamp was switched " * self.words

    def count(self):
        return len(self.lit)

    def _hidden(self):
        return "never shown"
"""
DOCS = [
    {
        "name": "switch",
        "description": "Switches a lamp.",
        "parameters": {
            "type": "dict",
            "properties": {
                "room": {"type": "string", "description": "which"},
                "on": {"type": "boolean", "default": True},
                "level": {"type": "float", "default": 3},
                "type": {"type": "tuple", "items": {"type": "any"}},
            },
            "required": ["room"],
        },
        "response": {"type": "dict", "properties": {}},
    },
    {"name": "history", "description": "All.", "parameters": {"type": "dict", "properties": {}, "required": []}},
    {"name": "count", "description": "Lit.", "parameters": {"type": "dict", "properties": {}, "required": []}},
]
TRUE = [
    ["switch('hall')", "history()"],
    ["switch(room='attic', on=False)", "count()"],
    [],
    ["switch(room='cellar', level=5)", "count()"],
]


def case_lines(name: str, classes: list[str], true: list[list[str]]) -> tuple[str, str]:
    asked = {
        "id": name,
        "question": [[{"role": "user", "content": f"Wish {number}."}] for number in range(len(true))],
        "initial_config": {"LampAPI": {"lit": [["bath", True, 3]]}},
        "involved_classes": classes,
    }
    return json.dumps(asked), json.dumps({"id": name, "ground_truth": true})


@pytest.fixture(scope="module")
def place(tmp_path_factory: Any) -> Path:
    """A package of the same layout, with a class of lamps."""
    root: Path = tmp_path_factory.mktemp("unpacked")
    code = root / "bfcl_eval" / bfcl_cases.CLASSES
    code.mkdir(parents=True)
    for folder in (code, *code.relative_to(root).parents):
        if str(folder) != ".":
            (root / folder / "__init__.py").write_text("")
    (code / "lamp_api.py").write_text(LAMPS)
    (code / "needs_much.py").write_text("import nothing_of_this_name\nclass Other:\n    pass\n")
    data = root / "bfcl_eval" / "data"
    (data / "multi_turn_func_doc").mkdir(parents=True)
    (data / "possible_answer").mkdir()
    (data / "multi_turn_func_doc" / "lamp_api.json").write_text("\n".join(map(json.dumps, DOCS)))
    lines = [
        case_lines("lamps_0", ["LampAPI"], TRUE),
        case_lines("other_0", ["Other"], [["f()"]]),
        case_lines("lamps_1", ["LampAPI"], [["count()"]]),
    ]
    for category in bfcl_cases.CATEGORIES:
        for folder, part in ((data, 0), (data / "possible_answer", 1)):
            name = f"BFCL_v9_multi_turn_{category}.json"
            (folder / name).write_text("".join(line[part] + "\n" for line in lines))
    return root


@pytest.fixture(scope="module")
def case(place: Path) -> bfcl_cases.Case:
    package = bfcl_cases.Package(bfcl_cases.package_folder(str(place)), "base")
    return package.case(package.chosen("LampAPI", [0])[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_true_calls_are_carried_out_one_after_the_other(case: bfcl_cases.Case, place: Path) -> None:
    first, second, empty, last = case.turns
    assert [turn.asked for turn in case.turns] == [f"Wish {number}." for number in range(4)]
    hall = first.calls[0]
    assert (hall.name, hall.given, hall.arguments) == (
        "switch",
        {"room": "hall"},
        {"room": "hall", "on": True, "level": 3},
    )
    assert json.loads(hall.result) == {"room": "hall", "on": True}
    assert second.calls[0].result == "Error during execution: the attic has no lamp"
    assert second.calls[1].result == "2" and last.calls[1].result == "3" and empty.calls == ()
    again = bfcl_cases.Package(place / "bfcl_eval", "long_context")
    assert len(again.case(again.entries[0]).turns[0].calls[1].result) * 40 == len(first.calls[1].result) * 60


def test_schemas_have_the_types_of_json_schema(case: bfcl_cases.Case) -> None:
    switch = case.tools[0]["function"]
    assert [tool["function"]["name"] for tool in case.tools] == ["switch", "history", "count"]
    assert set(switch) == {"name", "description", "parameters"} and switch["parameters"]["type"] == "object"
    known = switch["parameters"]["properties"]
    assert [known[name]["type"] for name in ("room", "on", "level", "type")] == ["string", "boolean", "number", "array"]
    assert known["type"]["items"] == {"type": "string"}


def call_in(folder: Path, case: bfcl_cases.Case, text: str) -> tuple[Any, str]:
    """The first call of an answer that a model writes token by token, and what it wrote until it was known."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reader, said = bfcl.FirstCall(tokenizer, case.signatures), []
    for token in tokenizer(text)["input_ids"]:
        said.append(token)
        if reader.put(token):
            break
    return reader.end(), tokenizer.decode(said)


@pytest.mark.parametrize(
    ("text", "name", "right"),
    [
        ('<tool_call>{"name": "switch", "arguments": {"room": "cellar", "level": 5}}</tool_call>', 1, 1),
        ('{"name": "switch", "arguments": {"level": 5.0, "room": "cellar", "on": true}}', 1, 1),
        ('```json\n{"name": "switch", "arguments": {"room": "cellar", "level": 5}}\n```', 1, 1),
        ('I do.\n<tool_call>{"name": "switch", "arguments": {"room": "cellar", "level": 5}}</tool_call>', 1, 1),
        ('<tool_call>{"name": "switch", "arguments": {"room": "cellar"}}</tool_call>', 1, 0),
        ('<tool_call>{"name": "switch", "arguments": {"room": "Cellar", "level": 5}}</tool_call>', 1, 0),
        ('<tool_call>{"name": "switch", "arguments": {"room": "cellar", "level": 5, "hue": 1}}</tool_call>', 1, 0),
        ('<tool_call>{"name": "switch", "arguments": {"level": 5}}</tool_call>', 1, 0),
        ('<tool_call>{"name": "switch", "arguments": "cellar"}</tool_call>', 1, 0),
        ('<tool_call>{"name": "count", "arguments": {"room": "cellar", "level": 5}}</tool_call>', 0, 0),
        ('<tool_call>{"name": "dim", "arguments": {"room": "cellar", "level": 5}}</tool_call>', 0, 0),
        ("I have switched it.", 0, 0),
        ('{"name": "switch", "arguments": {"room": "cellar", "level"', 0, 0),
    ],
)
def test_a_first_call_is_right_with_its_name_and_all_arguments(
    folder: Path, case: bfcl_cases.Case, text: str, name: int, right: int
) -> None:
    true = case.turns[3].calls[0]
    said, _ = call_in(folder, case, text)
    assert (said is not None and said.name == true.name) == bool(name)
    assert (said is not None and bfcl.is_right(case, said, true)) == bool(right)


@pytest.mark.parametrize(("before", "behind"), [("<tool_call>", "</tool_call>"), ("", ""), ("```json\n", "\n```")])
def test_only_the_first_call_counts_and_ends_the_answer(
    folder: Path, case: bfcl_cases.Case, before: str, behind: str
) -> None:
    one, two = (f'{before}{{"name": "{name}", "arguments": {{}}}}{behind}' for name in ("count", "history"))
    said, written = call_in(folder, case, f"{one}\n{two}")
    assert said.name == "count" and one.startswith(written) and len(written) >= len(one) - len(behind)


class Scripted:
    """A transcript whose answers are given."""

    def __init__(self, template: Template, answers: list[str]) -> None:
        self.template, self.answers = template, iter(answers)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}]
        self.asked: list[list[dict[str, Any]]] = []
        self.most: list[int] = []

    def turn(self, messages: list[dict[str, Any]]) -> None:
        self.messages += messages

    def answer(self, most: int, ended: Any, keep: bool) -> Answer:
        assert not keep
        self.asked.append(list(self.messages))
        self.most.append(most)
        text = next(self.answers)
        for token in self.template.plain(text):
            if ended(token):
                break
        return Answer(text, 10, 20, 30, 0.5)


def test_every_true_call_is_a_question_behind_the_true_history(folder: Path, case: bfcl_cases.Case) -> None:
    wrong = '<tool_call>{"name": "count", "arguments": {}}</tool_call>'
    right = '<tool_call>{"name": "switch", "arguments": {"room": "attic", "on": false}}</tool_call>'
    near = '<tool_call>{"name": "switch", "arguments": {"room": "cellar"}}</tool_call>'
    script: Any = Scripted(Template(AutoTokenizer.from_pretrained(folder)), [wrong, "no", right, wrong, near, ""])
    found = bfcl.outcome(case, script, 48)
    assert found["names"] == [0, 0, 1, 1, 1, 0] and found["correct"] == [0, 0, 1, 1, 0, 0]
    assert found["said"] == ["count", "", "switch", "count", "switch", ""]
    assert found["right"] == 2 / 6 and found["right_name"] == 1 / 2 and found["turns"] == 4
    assert found["prefill"] == [10] * 6 and found["bytes"] == [20] * 6
    whole = bfcl.whole(case, script.messages[0])
    assert script.messages == whole
    # What was answered is nowhere in the transcript; the question is about the call that comes next.
    true = [call for turn in case.turns for call in turn.calls]
    for call, asked, most in zip(true, script.asked, script.most, strict=True):
        assert asked == whole[: len(asked)]
        assert whole[len(asked)]["tool_calls"][0]["function"] == {"name": call.name, "arguments": call.given}
        assert whole[len(asked) + 1] == {"role": "tool", "name": call.name, "content": call.result}
        assert most >= 48 + len(json.dumps(call.given))
    assert script.asked[4][-2:] == [{"role": "user", "content": "Wish 2."}, {"role": "user", "content": "Wish 3."}]


class Listening(Template):
    """Keeps the conversations that it was asked to write."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.heard: list[list[int]] = []

    def chat(self, messages: Any, tools: Any = ()) -> list[int]:
        self.heard.append(super().chat(messages, tools))
        return self.heard[-1]


def test_all_ways_see_the_same_transcript_with_and_without_a_read_prologue(folder: Path, case: bfcl_cases.Case) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prologue = Prologue({"role": "system", "content": "s"}, case.tools, "sum up", 1)
    options = TranscriptOptions(summary_at=4096)
    template = Listening(AutoTokenizer.from_pretrained(folder))
    read = ReadPrologues(model, template)
    heard, found = {}, {}
    for way in (("full", ""), ("summary", ""), (CHAT, "1/4"), (CHAT, "tool=1/4+tools=1/2"), ("full", "alone")):
        transcript = Transcript(
            model, template, Cell(way[0], way[1].replace("alone", ""), "case=c", 0), prologue, options
        )
        shared = 0 if way[1] == "alone" else transcript.begin(read)
        template.heard.clear()
        found[way] = {**bfcl.outcome(case, transcript, 8), "shared": shared}
        heard[way] = [ids for at, ids in enumerate(template.heard) if at == 0 or ids != template.heard[at - 1]]
    full = found["full", ""]
    assert all(each == heard["full", ""] for each in heard.values()) and len(heard["full", ""]) == 6
    # The prologue is read once for all, and what is asked is read once: wrong answers leave nothing behind.
    assert sum(full["prefill"]) + full["shared"] == full["tokens"][-1] == len(heard["full", ""][-1])
    alone = found["full", "alone"]
    assert alone["prefill"] == [full["prefill"][0] + full["shared"], *full["prefill"][1:]]
    assert all(each["tokens"] == full["tokens"] for each in found.values())
    tool, both = found[CHAT, "1/4"], found[CHAT, "tool=1/4+tools=1/2"]
    assert both["bytes"][-1] < tool["bytes"][-1] < full["bytes"][-1]
    # Until a result has two answers behind it, the cache is that of the full way.
    assert tool["bytes"][:4] == full["bytes"][:4] and tool["bytes"][4] < full["bytes"][4]
    # Results that are not short are repeated once, when they become small.
    large = len(case.turns[0].calls[1].result) + len(case.turns[1].calls[0].result)
    assert sum(tool["prefill"]) == sum(full["prefill"]) + large


@pytest.fixture(scope="module")
def measured(tmp_path_factory: Any, folder: Path, place: Path) -> dict[str, Any]:
    out: Path = tmp_path_factory.mktemp("records")
    options = ["--model", str(folder), "--package", str(place), "--classes", "LampAPI", "--cases", "0", "--answer", "8"]
    options += ["--summary-at", "2500", "--summary-tokens", "32", "--budgets", "1/8", "--out", str(out)]
    assert run_experiment(bfcl.Bfcl, options) == 0
    return {each["data"]["method"]: each["data"] for each in records.read(out / "bfcl.jsonl")}


def test_records_say_what_was_asked_and_how_large_its_parts_are(measured: dict[str, Any]) -> None:
    full, ours, summary = measured["full"], measured[CHAT], measured["summary"]
    for data in (full, ours, summary):
        assert data["sample"] == "case=lamps_0" and data["classes"] == "LampAPI" and data["category"] == "base"
        assert len(data["correct"]) == len(data["names"]) == len(data["seconds"]) == 6
        assert data["transcript_sha256"] == full["transcript_sha256"] and data["shared"] == full["shared"]
    kinds, tokens = full["kinds"], full["all_tokens"]
    # A byte is a token: the history, and the error, which has more than 32 of them too.
    assert kinds["large"] == 40 * len("then a lamp was switched ") + len(
        "Error during execution: the attic has no lamp"
    )
    assert kinds["large"] < kinds["tool"] and sum(kinds.values()) - kinds["large"] <= tokens
    assert full["tokens"][-1] <= tokens and ours["bytes"][-1] < full["bytes"][-1]
    # A summary takes the place of older turns, and is paid for.
    assert summary["tokens"][-1] < full["tokens"][-1] and summary["bytes"][-1] < full["bytes"][-1]
    assert summary["tokens"][:4] == full["tokens"][:4] and summary["tokens"][4] < full["tokens"][4]
    assert summary["prefill"][:4] == full["prefill"][:4] and summary["prefill"][4] > 2 * full["prefill"][4]
    assert summary["summary_at"] == 2500 and "summary_at" not in full


def test_what_is_missing_is_named(place: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match=r"--package .*nowhere has no folder bfcl_eval; install it with `pip install"):
        bfcl_cases.package_folder(str(tmp_path / "nowhere"))
    assert bfcl_cases.package_folder(str(place)) == bfcl_cases.package_folder(str(place / "bfcl_eval"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="bfcl-eval is not here; install it"):
        bfcl_cases.package_folder(None)
    (tmp_path / "bfcl_eval").mkdir()
    with pytest.raises(ValueError, match=r"has no data/BFCL_v\*_multi_turn_base.json; this is not the package"):
        bfcl_cases.Package(bfcl_cases.package_folder(str(tmp_path)), "base")
    package = bfcl_cases.Package(place / "bfcl_eval", "base")
    with pytest.raises(ValueError, match="--classes Lamp: no case has exactly these; use one of LampAPI, Other"):
        package.chosen("Lamp", [0])
    with pytest.raises(ValueError, match="--cases 2 is not possible; there are 2: 0 to 1"):
        package.chosen("LampAPI", [0, 2])
    assert [each["id"] for each in package.chosen("", [0, 2])] == ["lamps_0", "lamps_1"]
    with pytest.raises(ValueError, match="--category memory is not possible; use one of base, long_context"):
        bfcl_cases.Package(place / "bfcl_eval", "memory")


@pytest.mark.parametrize(
    ("true", "said"),
    [
        ("lamps.switch('hall')", "is no call with plain values"),
        ("switch(count())", "is no call with plain values"),
        ("switch(", "is no call with plain values"),
        ("dim(room='hall')", "is of no function of the case"),
        ("switch(hue=1)", "does not fit switch"),
    ],
)
def test_a_true_call_that_cannot_be_carried_out_is_named(place: Path, true: str, said: str) -> None:
    package = bfcl_cases.Package(place / "bfcl_eval", "base")
    package.answers["lamps_1"] = [[true]]
    with pytest.raises(ValueError, match=f"lamps_1: the true call .*{said}"):
        package.case(package.chosen("LampAPI", [1])[0])


def test_shares_of_spans_are_checked_before_anything_is_measured(folder: Path, place: Path, tmp_path: Path) -> None:
    options = ["--model", str(folder), "--package", str(place), "--cases", "0", "--out", str(tmp_path / "out")]
    for wrong, said in (
        ("1/8,tols=1/2", "no kind of span 'tols'; kinds: system, tools"),
        ("64", "tool=64 is not a share"),
    ):
        with pytest.raises(ValueError, match=said):
            run_experiment(bfcl.Bfcl, [*options, "--budgets", wrong])
    with pytest.raises(ValueError, match="snapkv compacts no spans; use full, summary or rehearse:wait=compact"):
        run_experiment(bfcl.Bfcl, [*options, "--methods", "full,snapkv"])
    assert not (tmp_path / "out").exists()


def test_a_way_that_fails_leaves_the_others(folder: Path, place: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*arguments: Any) -> list[Any]:
        raise RuntimeError("no spans today")

    monkeypatch.setattr(transcripts, "finished_spans", refuse)
    options = ["--model", str(folder), "--package", str(place), "--classes", "LampAPI", "--cases", "1"]
    methods = f"{CHAT},full"
    assert run_experiment(bfcl.Bfcl, [*options, "--methods", methods, "--answer", "8", "--out", str(tmp_path)]) == 1
    ours, full = (each["data"] for each in records.read(tmp_path / "bfcl.jsonl"))
    assert ours["failed"] == "RuntimeError: no spans today" and full["right"] == 0 and "failed" not in full
