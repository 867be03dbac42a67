"""Tools in prompts, and calls read from answers that come piece by piece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvsketch.serve.tools import Calls, in_words
from tests.helpers.tiny import save_tiny_model

pytest.importorskip("pydantic", reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve.schema import Message
from kvsketch.serve.text import Template

WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"


def read(text: str, size: int, **options: Any) -> tuple[str, list[tuple[str, Any, int]]]:
    reader = Calls({"weather"}, **options)
    parts = [reader.put(text[at : at + size]) for at in range(0, len(text), size)] + [reader.end()]
    calls = [call for _, each in parts for call in each]
    assert len({call.id for call in calls}) == len(calls)
    return "".join(part for part, _ in parts), [(c.name, json.loads(c.arguments), c.index) for c in calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("answer", "text", "calls"),
    [
        ("It is 5 < 6.", "It is 5 < 6.", 0),
        (TAGGED, "", 1),
        (f"Let me see. \n{TAGGED}\n{TAGGED}", "Let me see.", 2),
        (f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", 2),
        (f"<tool_call>{CALL}", "", 1),
        (CALL, "", 1),
        (f"{CALL}\n{CALL}\n", "", 2),
        (f"{CALL}\nand so on", f"{CALL}\nand so on", 0),
        ("", "", 0),
        (f"```json\n{CALL}\n```", "", 1),
        (f"```{CALL}```", "", 1),
        (f"{CALL}\n```", "", 1),
        (f"{CALL}\n{CALL}\n```\n", "", 2),
        (f"{CALL}```", "", 1),
        (f"```json\n{CALL}", "", 1),
        (f"{TAGGED}\n```", "", 1),
        (f"<tool_call>\n```json\n{CALL}\n```\n</tool_call>", "", 1),
        (f"<tool_call>\n{CALL}\n```", "", 1),
        ("```", "```", 0),
        (f"{TAGGED}\n```\nDone.", "\n```\nDone.", 1),
        (CALL.replace("arguments", "parameters"), "", 1),
        (CALL.replace("weather", "other"), CALL.replace("weather", "other"), 0),
        (TAGGED.replace("weather", "other"), "", 1),
        ("{ is a brace", "{ is a brace", 0),
        ("<tool_call>what?</tool_call> Yes", "<tool_call>what?</tool_call> Yes", 0),
        ("<tool_call>what?", "<tool_call>what?", 0),
        ("ends with <tool", "ends with <tool", 0),
        ("spaces at the end \n", "spaces at the end \n", 0),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', 0),
        ('<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', None, 0),
    ],
)
def test_calls_are_read_however_they_come(answer: str, text: str | None, calls: int, size: int) -> None:
    said, result = read(answer, size)
    assert said == (answer if text is None else text)
    assert [index for *_, index in result] == [*range(calls)]
    assert all(arguments == {"city": "Rome"} for _, arguments, _ in result)


def test_text_is_not_held_longer_than_needed() -> None:
    reader = Calls({"weather"})
    assert reader.put("It rains <to") == ("It rains", []) and reader.put("day") == (" <today", [])


def test_one_call_ends_an_answer() -> None:
    said, result = read(f"{TAGGED}{TAGGED}", 1, one=True)
    assert said == "" and len(result) == 1


def test_models_that_know_no_tools_are_told_in_words() -> None:
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    messages: Any = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "yes"},
        {"role": "tool", "content": "much"},
        {"role": "user", "content": "Thanks"},
    ]
    system, *rest = in_words(messages, [WEATHER])
    assert system["role"] == "system" and '"name": "weather"' in system["content"]
    results = "<tool_response>\nyes\n</tool_response>\n<tool_response>\nmuch\n</tool_response>"
    assert rest == [
        messages[0],
        {"role": "assistant", "content": TAGGED},
        {"role": "user", "content": results},
        messages[4],
    ]
    assert in_words(messages[:1], []) == messages[:1]
    own = in_words([{"role": "system", "content": "Be brief."}, messages[0]], [WEATHER])
    assert len(own) == 2 and own[0]["content"].startswith("Be brief.\n\nYou can call")
    assert messages[1]["content"] == "", "what was sent stays as it is"


OWN = """{% for tool in tools or [] %}<tool>{{ tool.function.name }}</tool>{% endfor %}{% for message in messages %}
{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}
</tool_call>{% endfor %}{% endfor %}"""


@pytest.mark.parametrize("knows", [True, False])
def test_templates_that_know_tools_show_them_themselves(knows: bool, tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path))
    tokenizer.chat_template = OWN if knows else OWN.replace("tool_call>", "call>")
    sent: Any = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "yes"},
    ]  # fmt: skip
    messages = [Message.model_validate(each).plain() for each in sent]
    text = tokenizer.decode(Template(tokenizer).chat(messages, [WEATHER]))
    assert ("<tool>weather</tool>" in text, "tool: yes" in text) == (knows, knows)
    assert ("You can call these functions" in text, "<tool_response>\nyes" in text) == (not knows, not knows)
    called = json.loads(text.partition("<tool_call>")[2].rpartition("</tool_call>")[0].rpartition("<tool_call>")[2])
    assert called == {"name": "weather", "arguments": {"city": "Rome"}}, "arguments are an object, not a text"
