"""A promise of the loss: the smallest cache from which the model still says its text (`rehearse:loss=2%`).

    loss of a passage   log p(passage | full cache) - log p(passage | compressed cache), by token
    loss of lookups     share of the probability of right answers that the compressed cache takes away
    within the promise  the mean over passages and the loss of lookups, each with its standard error, are at most
                        `loss`, and the 90% quantile over passages at most twice as much

RUNGS are caches from small to large. Bisection finds one that is within the promise, by one sample of passages and
lookups (`probes`). Then two other samples, which chose nothing, must agree, without standard errors; else it is one
rung larger, with new samples, until they do. So losses need not fall from rung to rung. A text that cannot be made
small ends on the last rung: every token, as it is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.memory import stored_bytes
from kvsketch.cache.replay.probes import Answers, Probes, surprise
from kvsketch.methods.allocation import winners
from kvsketch.methods.base import Method
from kvsketch.methods.waiting import at_newest, newest_slots
from kvsketch.slots import coding
from kvsketch.slots.bytes import token_bytes
from kvsketch.slots.codes import MANY, UNQUANTISED
from kvsketch.slots.tensors import plain

SHARES = ("1/32", "1/24", "1/16", "1/12", "1/8", "1/6", "1/4", "1/3", "1/2", "2/3", "1/1")
TYPICAL = SHARES.index("1/8")  # the rung that says which tokens most heads drop
CHECKS = 2  # samples that did not choose a cache and must agree with it
QUANTILE, TWICE = 0.9, 2.0  # of the passages, and how many times the promise it may be
KNOWN = 0.5  # probability of a right answer from which on a lookup counts as answered
CONFIDENCE = 0.95  # of the bound on lost lookups


@dataclass
class Rung:
    """A cache that was tried: its method, its share of the bytes of a full cache, and its loss in nats by token."""

    method: str
    bytes: float
    loss: float
    worst: float = 0.0  # the quantile over passages
    answers: float = 0.0  # the loss of lookups
    lost: int = 0  # lookups that the full cache answers and this one does not
    asked: int = 0  # lookups that the full cache answers


@dataclass
class Promise:
    """What was asked for, the caches that were tried, from small to large, and what checked the one that was kept."""

    loss: float
    kept: str = ""  # the method that was taken
    curve: list[Rung] = field(default_factory=list)
    checked: Rung | None = None  # what was kept, by samples that did not choose it; None: all tokens in 16 bits
    probed: float = 0.0  # share of the text's tokens in all samples

    @classmethod
    def of(cls, saved: dict[str, Any] | None) -> Promise | None:
        """What `asdict` made of one."""
        if saved is None:
            return None
        checked = saved.get("checked")
        curve = [Rung(**rung) for rung in saved["curve"]]
        own = None if checked is None else Rung(**checked)
        return cls(saved["loss"], saved["kept"], curve, own, saved.get("probed", 0.0))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        tried = ", ".join(f"{rung.loss:.1%} at {rung.bytes:.1%}" for rung in self.curve)
        said = f"limit of the loss {self.loss:.1%}: {self.kept} was chosen; losses at shares of bytes: {tried}"
        if self.checked is None:
            return said
        own = self.checked
        said += f"; {self.probed:.0%} of the text tested; loss in samples drawn after the choice {own.loss:.1%}"
        if not own.asked:
            return f"{said}; the full cache itself answered no lookup"
        bound = f"at most {most_lost(own.lost, own.asked):.1%} with {CONFIDENCE:.0%} confidence"
        return f"{said}, and {own.lost} of {own.asked} lookups lost: {bound}"


@dataclass(frozen=True)
class Loss:
    """What a cache loses against the full one in one sample or several."""

    passages: Tensor  # [B, K] float64, nats by token
    full: Tensor  # [B, M] float64: probabilities of right answers with the full cache
    small: Tensor  # and with this one

    @classmethod
    def between(cls, full: Answers, small: Answers) -> Loss:
        return cls(full.passages - small.passages, full.lookups, small.lookups)

    @classmethod
    def of_all(cls, losses: Sequence[Loss]) -> Loss:
        return cls(
            *(torch.cat(parts, 1) for parts in zip(*((x.passages, x.full, x.small) for x in losses), strict=True))
        )

    @property
    def mean(self) -> float:
        return float(self.passages.mean())

    @property
    def worst(self) -> float:
        return float(torch.quantile(self.passages.flatten(), QUANTILE, interpolation="higher"))

    @property
    def asked(self) -> int:
        """Lookups that the full cache answers."""
        return int((self.full >= KNOWN).sum())

    @property
    def lost(self) -> int:
        """Those of them that this one is more likely to get wrong, by far."""
        return int(((self.full >= KNOWN) & (self.small < self.full / 2)).sum())

    @property
    def answers(self) -> tuple[float, float]:
        """The loss of lookups, and its standard error; 0 where the model finds nothing in the full cache itself."""
        full, lost = self.full.flatten(), (self.full - self.small).flatten()
        if float(full.sum()) < 1:
            return 0.0, 0.0
        share = float(lost.sum() / full.sum())
        error = float((lost - share * full).std(correction=0)) / max(1, len(full) - 1) ** 0.5
        return share, error * len(full) / float(full.sum())

    def is_within(self, promised: float, errors: float) -> bool:
        """Whether it keeps the promise; `errors`: how many standard errors are added."""
        of_passages = self.passages.mean(0)
        error = float(of_passages.std(correction=0)) / max(1, len(of_passages) - 1) ** 0.5
        share, spread = self.answers
        return (
            self.mean + errors * error <= promised
            and share + errors * spread <= promised
            and self.worst <= TWICE * promised
        )


def most_lost(lost: int, asked: int) -> float:
    """The largest share of lost lookups that leaves so few of those asked with a probability of 1 - CONFIDENCE."""
    low, high = lost / asked, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        fewer = sum(math.comb(asked, k) * middle**k * (1 - middle) ** (asked - k) for k in range(lost + 1))
        low, high = (middle, high) if fewer > 1 - CONFIDENCE else (low, middle)
    return high


def rungs(method: Any) -> list[Method]:
    """The method without its promise, at budgets from small to large; the last loses nothing."""
    shares: list[Any] = [replace(method, loss=None, budget=share) for share in SHARES]
    many = [replace(shares[-1], bits=bits, key_bits=None, value_bits=None) for bits in (MANY, UNQUANTISED)]
    return [*shares, *(each for each in many if each.stored_bits != method.stored_bits)]


@torch.no_grad()
def keep(cache: Any, model: Any, ids: Tensor, said: Tensor) -> None:
    """Compresses a cache, whose method has scored the tokens `ids` [B, n], as far as the promise allows."""
    search = Search(cache, model, ids, said)
    number, best = search.agreed(*search.chosen())
    if best is None:
        sample = search.sample("last")
        search.note(number, search.loss(compressed(cache, search.tried[number]), sample), cache)
    else:
        for layer, other in zip(cache.slot_layers, best.slot_layers, strict=True):
            layer.table = other.table
            layer.use(other.method)
        cache.method = search.tried[number]
    search.promise.kept = str(search.tried[number])
    search.promise.curve.sort(key=lambda rung: rung.bytes)
    cache.promise = search.promise


class Search:
    """The search for the smallest cache of a text that is within a promise. `cache` itself stays full."""

    def __init__(self, cache: Any, model: Any, ids: Tensor, said: Tensor) -> None:
        self.cache, self.model, self.ids, self.said = cache, model, ids, said
        self.tried, self.promise = rungs(cache.method), Promise(float(cache.method.loss.share))
        tables = [layer.table for layer in cache.slot_layers]
        self.size = sum(token_bytes(table) * table.seen for table in tables)
        self.seed, self.risks = (
            tables[0].context.seed,
            [surprise(ids), dropped(self.tried[TYPICAL], tables, ids.shape[1])],
        )
        self.probed: set[int] = set()

    def sample(self, name: str) -> tuple[Probes, Answers]:
        """Probes, and what the full cache says of them."""
        probes = Probes.drawn(self.ids, self.risks, f"{self.seed} {name}")
        self.probed |= probes.tokens
        self.promise.probed = len(self.probed) / self.ids.shape[1]
        return probes, probes.ask(self.cache, self.model, self.ids, self.said)

    def trial(self, number: int) -> Any:
        return compressed(copy.deepcopy(self.cache), self.tried[number])

    def loss(self, trial: Any, sample: tuple[Probes, Answers]) -> Loss:
        probes, full = sample
        return Loss.between(full, probes.ask(trial, self.model, self.ids, self.said))

    def note(self, number: int, loss: Loss, trial: Any) -> Rung:
        """A point of the curve."""
        share = stored_bytes(trial.slot_layers) / self.size
        rung = Rung(str(self.tried[number]), share, loss.mean, loss.worst, loss.answers[0], loss.lost, loss.asked)
        self.promise.curve.append(rung)
        return rung

    def chosen(self) -> tuple[int, Any]:
        """The first rung within the promise, and its cache; None: it is the last, which loses nothing."""
        sample, best, low, high = self.sample("choice"), None, 0, len(self.tried) - 1
        while low < high:
            middle = (low + high) // 2
            trial = self.trial(middle)
            loss = self.loss(trial, sample)
            self.note(middle, loss, trial)
            if loss.is_within(self.promise.loss, errors=1):
                best, high = trial, middle
            else:
                low = middle + 1
        return low, best

    def agreed(self, number: int, trial: Any) -> tuple[int, Any]:
        """The first rung from this one on with which samples agree that did not choose it, and its cache."""
        while number < len(self.tried) - 1:
            trial = self.trial(number) if trial is None else trial
            checks = [self.loss(trial, self.sample(f"check {number} {each}")) for each in range(CHECKS)]
            rung = self.note(number, Loss.of_all(checks), trial)
            if all(check.is_within(self.promise.loss, errors=0) for check in checks):
                self.promise.checked = rung
                return number, trial
            number, trial = number + 1, None
        return number, None


def dropped(method: Any, tables: Sequence[Any], count: int) -> Tensor:  # [B, count]
    """The share of heads that drop each of the newest tokens, which have scores."""
    stays = winners(tables, [method.worth(t) for t in tables], [method.mean_slots(t) for t in tables], method.share)
    own = [at_newest(t, keep, newest_slots(t, count)).double() for t, keep in zip(tables, stays, strict=True)]
    return 1 - torch.stack([each.mean(1).cpu() for each in own]).mean(0)


def compressed(cache: Any, method: Method) -> Any:
    """The cache once this method has settled the tokens that have scores."""
    tables = [layer.table for layer in cache.slot_layers]
    cache.method = method
    with plain():
        for layer in cache.slot_layers:
            layer.use(method)
            coding.use_bits(layer.table, method.stored_bits)
        method.settle(tables)
    return cache
