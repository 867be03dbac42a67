"""Questions about a text that a cache has read.

    cache = kvsketch.CompressedCache(model, "full")
    kvsketch.read(model, tokenizer, cache, text)             # once; cache.save("report.kvs") keeps it
    print(kvsketch.ask(model, tokenizer, cache, "What does it say about X?"))

In the model's chat template the text and the first question form one user turn. Every later question is a new turn
after the answer. Without a chat template, text and questions are separated by blank lines.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.streaming import prefill
from kvsketch.decode.captured import generate

GAP = "\n\n"
REPEAT = "\n\nRepeat the previous context exactly."


class Frame(NamedTuple):
    """What a chat template writes around a user's text."""

    before: str
    after: str  # up to where the answer begins
    between: str  # from the end of an answer to the next text of the user


def read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: CompressedCache,
    text: str,
    *,
    progress: bool = False,
) -> None:
    """Reads a text into an empty cache; then use `ask`."""
    if cache.tokens_seen:
        raise ValueError(
            f"the cache has read {cache.tokens_seen} tokens already; read a text into a new cache or call cache.reset()"
        )
    ids, said = document_ids(tokenizer, text), repeat_instruction(tokenizer)
    prefill(model, ids.to(model.device), cache, progress=progress, instruction=said)
    cache.text.open = True


def ask(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: CompressedCache, question: str, **options: Any
) -> str:
    """Returns the model's answer to a question about the text in the cache; both are added to the cache.

    `options` are those of `model.generate`; without them the answer is greedy and has at most 128 tokens. To ask many
    questions about the same text, ask a `cache.continued()` for each, or a `copy.deepcopy(cache)`. `cache.doubt()` then
    says how unsure the model was.
    """
    table = cache.slot_layers[0].table
    if not table.empty and table.shape[0] != 1:
        raise ValueError(f"ask needs a cache of one text, and this one has {table.shape[0]}")
    inputs = question_inputs(tokenizer, cache, question).to(model.device)
    output = generate(model, inputs, cache, **{"max_new_tokens": 128, "do_sample": False, "doubt": True, **options})
    return str(tokenizer.decode(finish(model, cache, inputs, output), skip_special_tokens=True))


def finish(model: Any, cache: CompressedCache, inputs: Any, output: Tensor) -> Tensor:
    """The new tokens of an answer; reads the last one, which generate leaves unread, unless it is an end token."""
    cache.text.open = False
    new = output[0, inputs["input_ids"].shape[1] :]
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if len(new) and int(new[-1]) not in ends:
        prefill(model, new[None, -1:], cache)
    return new


def document_ids(tokenizer: Any, text: str) -> Tensor:  # [1, n]
    """A text as the beginning of the user's turn that a question ends."""
    frame = chat_frame(tokenizer)
    return _encode(tokenizer, frame.before + text + GAP, first=True)


def repeat_instruction(tokenizer: Any) -> Tensor:  # [1, n]
    """What KVzip says before the model repeats a text, and the turn to the model; for methods that let it do so."""
    return _encode(tokenizer, REPEAT + chat_frame(tokenizer).after, first=False)


def question_inputs(tokenizer: Any, cache: CompressedCache, question: str) -> Any:
    """Inputs of generate for a question after what the cache has read: the new ids, and a mask for all tokens."""
    frame, seen = chat_frame(tokenizer), cache.tokens_seen
    before = frame.before if not seen else "" if cache.text.open else frame.between
    ids = _encode(tokenizer, before + question + frame.after, first=not seen)
    mask = torch.ones(1, seen + ids.shape[1], dtype=torch.long)
    padding = cache.slot_layers[0].table.padding
    if padding is not None:
        mask[:, cache.tokens_before : cache.tokens_before + int(padding)] = 0
    return BatchEncoding({"input_ids": ids, "attention_mask": mask})


def document_inputs(tokenizer: Any, text: str, question: str) -> Any:
    """Inputs of generate for a question about a text: the tokens of `read`, then those of `ask`."""
    behind = _encode(tokenizer, question + chat_frame(tokenizer).after, first=False)
    ids = torch.cat([document_ids(tokenizer, text), behind], 1)
    return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def chat_frame(tokenizer: Any) -> Frame:
    """What the tokenizer's chat template writes around texts; blank lines where it has none."""
    if not tokenizer.chat_template:
        return Frame("", "\n", GAP)
    first, answer, second = "FIRST-TEXT", "THE-ANSWER", "SECOND-TEXT"
    roles = [("user", first), ("assistant", answer), ("user", second)]
    messages = [{"role": role, "content": content} for role, content in roles]
    alone, talk = (
        tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=True)
        for part in (messages[:1], messages)
    )
    before, _, after = alone.partition(first)
    between = talk.partition(answer)[2].partition(second)[0]
    return Frame(before, after, between)


def _encode(tokenizer: Any, text: str, first: bool) -> Tensor:
    """Token ids [1, n]. A chat template writes its own special tokens; plain text gets them only at its beginning."""
    plain = first and not tokenizer.chat_template
    ids = tokenizer(text, add_special_tokens=plain)["input_ids"]
    # With `return_tensors` transformers copies every number in Python first, a third of the time.
    return torch.tensor([ids], dtype=torch.long)
