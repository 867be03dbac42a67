"""What tests a promise of the loss: passages that the model repeats, and lookups that it answers.

    passage    64 tokens, said again behind the tokens before them
    lookup     a few tokens that occur once in the text, then the 8 tokens behind them: what a question needs

Half of them lie anywhere in the text. The others lie where loss is likely: where the rest of the text says little about
the tokens (numbers, names), or where most heads drop them; they are drawn from the riskiest quarter. The seed decides.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsketch.cache import rollback

PASSAGES, LENGTH = 12, 64  # that the model repeats, and tokens of each
BEFORE = 8  # tokens before a passage that are said again
LOOKUPS, ANSWER = 48, 8  # that are asked for, and tokens of each answer
KEY = (3, 12)  # tokens that a lookup begins with: the fewest and the most that occur once in the text
PACK = 16  # lookups in one forward
RISKY = 0.25  # of the places: those that the risky half is drawn from
TRIES = 32  # at a place that is free, before all of them are looked through
LONGEST = max(BEFORE + LENGTH, PACK * (KEY[1] + ANSWER))  # tokens of a forward, without the instruction


class Lookup(NamedTuple):
    """Where a key begins, its answer begins, and the answer ends."""

    key: int
    begin: int
    end: int


class Answers(NamedTuple):
    """What a cache says of passages and lookups."""

    passages: Tensor  # [B, K] float64: the mean log-likelihood of a passage's tokens
    lookups: Tensor  # [B, M] float64: the probability of saying the whole answer


@dataclass(frozen=True)
class Probes:
    passages: list[tuple[int, int]]
    lookups: list[Lookup]

    @classmethod
    def drawn(cls, ids: Tensor, risks: Sequence[Tensor], seed: str) -> Probes:
        """Probes of a text `ids` [B, n]; `risks` [B, n]: how likely loss is at each token, in some measure."""
        chance, tokens = random.Random(f"promise {seed}"), ids.shape[1]
        length = min(LENGTH, max(1, tokens // 2))
        count = max(1, min(PASSAGES, tokens // length))
        starts = list(range(tokens - length + 1))
        passages = _places(chance, starts, [_windows(risk, length) for risk in risks], count, length)
        keys = unique_keys(ids)
        usable = [at for at in range(tokens - ANSWER + 1) if keys[at]]
        answers = _places(chance, usable, [_windows(risk, ANSWER) for risk in risks], LOOKUPS, ANSWER)
        lookups = [Lookup(at - keys[at], at, at + ANSWER) for at in answers]
        return cls([(at, at + length) for at in passages], lookups)

    @property
    def tokens(self) -> set[int]:
        """The tokens of the text that are tested."""
        spans = [*self.passages, *((each.begin, each.end) for each in self.lookups)]
        return set(itertools.chain.from_iterable(range(*span) for span in spans))

    @torch.no_grad()
    def ask(self, cache: Any, model: Any, ids: Tensor, said: Tensor) -> Answers:
        """What the model says behind `said` [B, m], from this cache of the text `ids` [B, n]; nothing stays in it."""
        passages = [ids.new_zeros(len(ids), 0, dtype=torch.float64)]
        for begin, end in self.passages:
            likely = _likely(cache, model, said, ids[:, max(0, begin - BEFORE) : end])[:, begin - end :]
            passages.append(likely.mean(1, keepdim=True))
        lookups = [passages[0]]
        for first in range(0, len(self.lookups), PACK):
            pack = self.lookups[first : first + PACK]
            spoken = torch.cat([ids[:, each.key : each.end] for each in pack], 1)
            likely = _likely(cache, model, said, spoken)
            ends = torch.tensor([each.end - each.key for each in pack]).cumsum(0) - spoken.shape[1] + likely.shape[1]
            lookups.append(torch.stack([likely[:, end - ANSWER : end].sum(1).exp() for end in ends.tolist()], 1))
        return Answers(torch.cat(passages, 1), torch.cat(lookups, 1))


def _likely(cache: Any, model: Any, said: Tensor, spoken: Tensor) -> Tensor:  # [B, m] float64
    """Log-likelihoods of the last m tokens of `spoken`: all, or all but the first where nothing was said before it."""
    tokens = torch.cat([said, spoken], 1)
    known = min(spoken.shape[1], tokens.shape[1] - 1)
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    cache.activate_past_recording()
    out = model(tokens, past_key_values=cache, use_cache=True, **{"logits_to_keep": known + 1} if takes else {})
    cache.crop(-tokens.shape[1])
    rollback.end_recording(cache.slot_layers)
    logits = out.logits[:, -known - 1 : -1].float()
    return (logits.gather(2, spoken[:, -known:].unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)).double()


def surprise(ids: Tensor) -> Tensor:  # [B, n] float64
    """How little the rest of a text `ids` [B, n] says about each token: -log of its share behind the token before it.

    Counts leave out the token itself; behind a token that is there once, its share of all tokens counts.
    """
    ids = ids.cpu().long()
    before = torch.cat([torch.full_like(ids[:, :1], -1), ids[:, :-1]], 1)
    result = []
    for tokens, previous in zip(ids, before, strict=True):
        share = (_counts(tokens) - 1).clamp_min(0.5) / len(tokens)
        pairs = _counts(previous * (ids.max() + 1) + tokens) - 1
        result.append(-torch.log((pairs + share) / _counts(previous)))
    return torch.stack(result)


def _counts(x: Tensor) -> Tensor:  # [n] float64
    """How often each entry of x [n] is there."""
    _, number, count = torch.unique(x, return_inverse=True, return_counts=True)
    return count[number].double()


def unique_keys(ids: Tensor) -> list[int]:
    """For each place of a text `ids` [B, n]: how many tokens before it occur once, in every row; 0: not so few."""
    ids, tokens = ids.cpu().long(), ids.shape[1]
    shortest = torch.zeros(len(ids), tokens, dtype=torch.long)
    for row, own in zip(ids, shortest, strict=True):
        number = row  # of the run of `count` tokens that begins here
        for count in range(1, KEY[1] + 1):
            runs = tokens - count + 1
            if runs < 1:
                break
            if count > 1:
                number = torch.unique(number[:runs] * (row.max() + 1) + row[count - 1 :], return_inverse=True)[1]
            if count >= KEY[0]:
                once = torch.bincount(number)[number] == 1
                places = torch.arange(runs)[once] + count
                places = places[places < tokens]
                own[places] = torch.where(own[places] == 0, count, own[places])
    return torch.where((shortest > 0).all(0), shortest.amax(0), 0).tolist()


def _windows(risk: Tensor, length: int) -> Tensor:  # [n - length + 1]
    """The mean risk of the tokens of each window of any row, the largest of them."""
    total = torch.nn.functional.pad(risk.double().cpu().cumsum(1), (1, 0))
    return ((total[:, length:] - total[:, :-length]) / length).amax(0)


def _places(
    chance: random.Random, usable: Sequence[int], risks: Sequence[Tensor], count: int, length: int
) -> list[int]:
    """`count` beginnings of windows that do not overlap, if there are as many: half anywhere, half at risk."""
    ranked = []
    for risk in (each.tolist() for each in risks):
        order = sorted(usable, key=lambda at: -risk[at])
        ranked.append(order[: max(1, int(RISKY * len(order)))])
    taken: list[int] = []
    for number in range(count):
        # Every second one is risky, by each measure in turn; where no risky place is left, it is any.
        pools = [ranked[number // 2 % len(ranked)]] if number % 2 and ranked else []
        at = next((at for pool in [*pools, usable] if (at := _free(chance, pool, taken, length)) is not None), None)
        if at is None:
            break
        taken.append(at)
    return sorted(taken)


def _free(chance: random.Random, pool: Sequence[int], taken: Sequence[int], length: int) -> int | None:
    """One of the pool that overlaps none that is taken; None: there is none."""

    def is_free(at: int) -> bool:
        return all(abs(at - other) >= length for other in taken)

    for _ in range(TRIES if pool else 0):
        if is_free(at := chance.choice(pool)):
            return at
    free = [at for at in pool if is_free(at)]
    return chance.choice(free) if free else None
