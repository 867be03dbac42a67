"""Prompts in a model's template, and answers that grow: stop strings across tokens, characters across tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import kvsketch
from kvsketch.decode import asking
from kvsketch.serve.text import GrowingText, Template
from tests.helpers import zoo
from tests.helpers.tiny import save_tiny_model

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return AutoTokenizer.from_pretrained(folder)


def grown(tokenizer: Any, text: str, *stops: str) -> tuple[list[str], bool]:
    growing = GrowingText(tokenizer, stops)
    pieces = [growing.put(token) for token in tokenizer(text)["input_ids"]]
    return [*pieces, growing.end()], growing.stopped


def test_a_stop_string_is_found_across_tokens(tokenizer: Any) -> None:
    pieces, stopped = grown(tokenizer, "one two STOP three", "STOP")
    assert stopped and "".join(pieces) == "one two " and pieces[:8] == list("one two ")
    assert grown(tokenizer, "one STO two", "STOP", "xyz") == ([*"one ", "", "", "", "STO ", *"two", ""], False)
    assert "".join(grown(tokenizer, "ends in ST", "STOP")[0]) == "ends in ST"
    assert "".join(grown(tokenizer, "aab", "ab")[0]) == "a"


def test_a_character_comes_whole(tokenizer: Any) -> None:
    pieces, _ = grown(tokenizer, "né €")
    assert [piece for piece in pieces if piece] == ["n", "é", " ", "€"]
    cut = GrowingText(tokenizer)
    assert cut.put(tokenizer("€")["input_ids"][0]) == "" and cut.end() == "\ufffd"


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_a_question_about_a_document_is_that_of_ask(tokenizer: Any, template: str | None) -> None:
    tokenizer.chat_template = template
    model = zoo.build("llama", vocab_size=len(tokenizer))
    cache = kvsketch.CompressedCache(model, "full")
    kvsketch.read(model, tokenizer, cache, "A text.")
    prompts, ask = Template(tokenizer), [{"role": "user", "content": "What?"}]
    wanted = asking.question_inputs(tokenizer, cache, "What?")["input_ids"][0].tolist()
    assert prompts.after_document(ask) == wanted
    rules = {"role": "system", "content": "Be brief."}
    assert prompts.after_document([rules, *ask]) == prompts.after_document(
        [{"role": "user", "content": "Be brief.\n\nWhat?"}]
    )
    kvsketch.prefill(model, torch.tensor([[*wanted, *tokenizer("It.")["input_ids"]]]), cache)
    cache.text.open = False
    again = asking.question_inputs(tokenizer, cache, "Why?")["input_ids"][0].tolist()
    talk = [*ask, {"role": "assistant", "content": "It."}, {"role": "user", "content": "Why?"}]
    behind = prompts.after_document(talk)
    assert behind[-len(again) :] == again and behind[: len(wanted) - 1] == wanted[:-1]
    with pytest.raises(ValueError, match="begins with a message of the user"):
        prompts.after_document(talk[1:])
