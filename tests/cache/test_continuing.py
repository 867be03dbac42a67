"""A cache goes on with the text that it has read, and says so when it is given another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsketch
from kvsketch import CompressedCache
from tests.helpers import zoo
from tests.helpers.tiny import save_tiny_model

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
TEXT, QUESTION = "The cat sat on the mat, and the dog sat on the cat. " * 3, "Who sat on the mat?"


@pytest.mark.parametrize("prefill", ["exact", "stream"])
def test_a_cache_of_another_model_is_refused(prefill: str) -> None:
    prompt, larger = zoo.tokens(1, 20), zoo.build("llama", num_hidden_layers=3)
    cache = CompressedCache(zoo.build("llama"), "full", prefill=prefill)
    with pytest.raises(ValueError, match="made for another model: model_type is llama there and qwen2 here"):
        zoo.build("qwen2").generate(prompt, past_key_values=cache, **OPTIONS)
    with pytest.raises(ValueError, match="num_hidden_layers is 2 there and 3 here"):
        kvsketch.prefill(larger, prompt, cache)
    assert cache.tokens_seen == 0
    with pytest.raises(ValueError, match="layer 2 was written to a cache that was made for a llama of 2 layers"):
        larger(prompt, past_key_values=cache)


@pytest.mark.parametrize("prefill", ["exact", "stream"])
def test_a_wrong_continuation_is_told(prefill: str, tmp_path: Path) -> None:
    model, prompt = zoo.build("llama"), zoo.tokens(1, 40)
    cache = CompressedCache(model, "snapkv:budget=16:sinks=2:window=4", prefill=prefill, chunk=12)
    told = model.generate(prompt, past_key_values=cache, **OPTIONS)
    cache.save(tmp_path / "text.kvs")

    def go_on(ids: torch.Tensor) -> torch.Tensor:
        loaded = CompressedCache.load(tmp_path / "text.kvs", model)
        return model.generate(ids, past_key_values=loaded, **OPTIONS)

    question = zoo.tokens(1, 9, seed=5)
    whole = torch.cat([told, question], 1)
    assert go_on(whole).shape[1] == whole.shape[1] + 6
    for few in (question, told[:, : cache.tokens_seen]):
        with pytest.raises(ValueError, match=rf"input_ids has {few.shape[1]} tokens, and the cache has read 45"):
            go_on(few)
    other = whole.clone()
    other[0, 7] += 1
    with pytest.raises(ValueError, match=r"first 40 tokens of input_ids are not the text.*kvsketch\.ask"):
        go_on(other)


def test_a_text_read_in_parts_and_behind_padding_is_known() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(2, 40)
    parts, whole = (CompressedCache(model, "full") for _ in range(2))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    for start, end in ((0, 13), (13, 20), (20, 40)):
        kvsketch.prefill(model, ids[:, start:end], parts, mask[:, start:end])
    kvsketch.prefill(model, torch.where(mask == 0, 3, ids), whole, mask)
    assert parts.text == whole.text and parts.text.tokens == 40
    parts.crop(-1)
    assert parts.text.tokens == 0
    parts.reset()
    kvsketch.prefill(model, ids[:, :20], parts)
    assert parts.text != whole.text


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


class Ear:
    """A streamer that keeps what it hears: the prompt, then the answer."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []

    def put(self, ids: torch.Tensor) -> None:
        self.heard.append(ids.flatten().tolist())

    def end(self) -> None:
        pass

    def answer(self) -> list[int]:
        return [token for part in self.heard[1:] for token in part if token != 0]


def encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_model_that_repeats_a_text_is_told_to(monkeypatch: pytest.MonkeyPatch, loaded: tuple[Any, Any]) -> None:
    """As in the evaluations: scores come from a repetition behind KVzip's words."""
    (model, tokenizer), said = loaded, []
    real = CompressedCache.replay

    def replay(self: CompressedCache, model: Any, ids: Any, instruction: Any = None) -> None:
        said.append(tokenizer.decode(instruction[0]))
        real(self, model, ids, instruction)

    monkeypatch.setattr(CompressedCache, "replay", replay)
    cache = CompressedCache(model, "kvzip:budget=50%")
    kvsketch.read(model, tokenizer, cache, TEXT)
    assert said and said[0].startswith("\n\nRepeat the previous context exactly.")


@pytest.mark.parametrize(("template", "prefill"), [(None, "exact"), (CHAT, "exact"), (CHAT, "stream")])
def test_questions_about_a_saved_text_are_turns_of_one_talk(
    loaded: tuple[Any, Any], template: str | None, prefill: str, tmp_path: Path
) -> None:
    model, tokenizer = loaded
    tokenizer.chat_template = template
    cache = CompressedCache(model, "full", prefill=prefill, chunk=50)
    kvsketch.read(model, tokenizer, cache, TEXT)
    cache.save(tmp_path / "text.kvs")
    cache = CompressedCache.load(tmp_path / "text.kvs", model)
    ear = Ear()
    kvsketch.ask(model, tokenizer, cache, QUESTION, streamer=ear, **OPTIONS)
    second = kvsketch.ask(model, tokenizer, cache, "Why?", **OPTIONS)
    first, between, last = f"{TEXT}\n\n{QUESTION}\n", "\n\n", "Why?\n"
    if template:
        first, between, last = f"<user>{TEXT}\n\n{QUESTION}<end><assistant>", "<end><user>", "Why?<end><assistant>"
    ids = torch.tensor([[*encoded(tokenizer, first), *ear.answer(), *encoded(tokenizer, between + last)]])
    expected = model.generate(ids, **OPTIONS)[0, ids.shape[1] :]
    assert second == tokenizer.decode(expected, skip_special_tokens=True)
    with pytest.raises(ValueError, match=r"has read \d+ tokens already"):
        kvsketch.read(model, tokenizer, cache, TEXT)
