"""Prompts in a model's template, and answers that grow: stop strings across tokens, characters across tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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


@pytest.fixture(scope="module")
def pieces_with_spaces() -> PreTrainedTokenizerFast:
    """Pieces that begin with the mark of a space, and bytes for what is no piece, as Llama 2 has them."""
    names = ["<unk>", "<s>", "\u2581a", "\u2581b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(
        BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    marks = decoders.Replace("\u2581", " ")
    made.decoder = decoders.Sequence([marks, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    result = PreTrainedTokenizerFast(tokenizer_object=made)
    result.add_special_tokens({"bos_token": "<s>"})
    return result


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("\u2581a <s> \u2581b c <s> c", "a bcc"),
        ("<s> \u2581a \u2581b", "a b"),
        ("\u2581a <0xC3> <0xA9> \u2581b", "a\u00e9 b"),
        ("\u2581a <0xF0> <0x9F>", "a\ufffd\ufffd"),
    ],
)
def test_pieces_are_together_what_the_tokens_are(
    pieces_with_spaces: PreTrainedTokenizerFast, names: str, text: str
) -> None:
    """Spaces behind special tokens, characters of several bytes, and one that is cut off at the end."""
    growing, ids = GrowingText(pieces_with_spaces), pieces_with_spaces.convert_tokens_to_ids(names.split())
    assert "".join([*(growing.put(token) for token in ids), growing.end()]) == text
    assert pieces_with_spaces.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text


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
