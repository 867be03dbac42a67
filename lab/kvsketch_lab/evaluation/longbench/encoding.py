"""From the text of a prompt to token ids: truncation in the middle, chat template, question fed as decode steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsketch.decode.asking import chat_frame

TRUNCATIONS = ("text", "tokens")
QUESTION_CHARACTERS = 100
# Text that was cut and joined may need a few tokens more than it had.
SPARE_TOKENS = 16


class Encoded(NamedTuple):
    """Token ids [1, n] to prefill, and [1, q] of the question to feed after them, if asked for."""

    ids: Tensor
    question: Tensor | None
    tokens: int  # of both
    truncated: bool


def chat_parts(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before and after a user's text; two empty texts where there is no template."""
    return chat_frame(tokenizer)[:2] if getattr(tokenizer, "chat_template", None) else ("", "")


def prompt_limit(model: Any, tokenizer: Any, chat: bool, max_new_tokens: int) -> int | None:
    """The most tokens of a prompt that leave room for the chat template and the answer; None: the model names none."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is None:
        return None
    template = sum(len(_ids(tokenizer, part)) for part in chat_parts(tokenizer)) if chat else 0
    limit = int(context) - max_new_tokens - template - SPARE_TOKENS
    if limit < 2:
        raise ValueError(f"the model's context of {context} tokens has no room for {max_new_tokens} new ones")
    return limit


def encode(
    tokenizer: Any, text: str, *, chat: bool, limit: int | None, truncation: str = "text", question: str = ""
) -> Encoded:
    """The prompt `text` as token ids, its middle cut out where it has more than `limit` tokens.

    truncation: `text` decodes the first and the last half of the limit and tokenises their join, as LongBench does;
    `tokens` joins the token ids themselves. question: the end of `text` that is to be fed as decode steps; the end of
    the chat template goes with it.
    """
    before, after = chat_parts(tokenizer) if chat else ("", "")
    # A chat template writes its own special tokens.
    special = not (before or after)
    ids = _ids(tokenizer, text, special)
    truncated = limit is not None and len(ids) > limit
    if truncated:
        assert limit is not None
        ids = [*ids[: limit // 2], *ids[len(ids) - limit // 2 :]]
    if truncation == "tokens":
        ids = [*_ids(tokenizer, before), *ids, *_ids(tokenizer, after)]
    else:
        halves = (ids[: len(ids) // 2], ids[len(ids) // 2 :])
        if truncated:
            text = "".join(tokenizer.decode(half, skip_special_tokens=True) for half in halves)
        ids = _ids(tokenizer, before + text + after, special)
    steps = _tokens_of_the_end(tokenizer, ids, len(question) + len(after)) if question else 0
    whole = torch.tensor([ids])
    return Encoded(whole[:, : len(ids) - steps], whole[:, len(ids) - steps :] if steps else None, len(ids), truncated)


def question_of(prompt: str, marker: str) -> str:
    """The end of a prompt that holds the question: from the last `marker` on, at most 100 characters."""
    found = prompt.rfind(marker) if marker else -1
    return prompt[max(len(prompt) - QUESTION_CHARACTERS, found, 0) :]


def _tokens_of_the_end(tokenizer: Any, ids: list[int], characters: int) -> int:
    """How many of the last tokens make up at most `characters`; at least one, and one is left to prefill."""
    steps = 1
    while steps + 1 < len(ids) and len(tokenizer.decode(ids[len(ids) - steps - 1 :])) <= characters:
        steps += 1
    return min(steps, len(ids) - 1)


def _ids(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"]) if text else []
