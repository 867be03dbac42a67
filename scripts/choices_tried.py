"""Other ways for rehearse to choose tokens and keys: tried, and not methods of the package.

    kvsketch eval facts --methods scripts.choices_tried:ChoicesTried:choose=gram --budgets-in tokens --budgets 1/8 ...

choose=scores    as rehearse does: all heads share one budget, and the tokens with the largest scores win
choose=quota     `quota` of the budget is spread evenly over segments of 128 tokens of each head, the rest by scores
choose=gram      heads keep as many tokens as by scores; which of twice as many, the cost of a drop says, in two rounds
choose=gram-all  the same for the tokens of all heads together, costs relative to the outputs of a head
choose=curves    tokens by scores; how many a head keeps, the errors of refits to a quarter up to four times as many say
move=N           the kept keys take N steps of Adam on the output error of the repeated queries, if held-back queries
                 see less error then

The cost of dropping slot j, where all others are fitted again: |B_j|^2 / [(A'A + r I)^-1]_jj, with B = diag(w) V' the
fitted rows (`kvsketch.methods.rehearse.refit` has A, w and V').

Texts of one chunk and one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch.methods import Rehearse
from kvsketch.methods.allocation import largest
from kvsketch.methods.parameters import option
from kvsketch.methods.rehearse.problems import LayerProblems
from kvsketch.methods.rehearse.rebuild import Rebuild
from kvsketch.methods.rehearse.refit import HELD_BACK, RIDGES, WEIGHT_STEPS, Slots, fitted_weights, refit
from kvsketch.methods.waiting import ALWAYS, NEG_INF, Waiting, newest_keys, newest_slots, newest_values
from kvsketch.slots import SlotTable
from kvsketch.slots.codes import PlainSlots

SEGMENT, ROUNDS = 128, 2
SIZES = (1 / 4, 1 / 2, 1.0, 2.0, 4.0)  # of what a head keeps by scores
SPEED = 0.02  # of a step of Adam, by the deviation of a head's keys


@dataclass(frozen=True)
class ChoicesTried(Rehearse):
    name: ClassVar[str] = "choices-tried"

    choose: str = option("scores", "how tokens are chosen", ("scores", "quota", "gram", "gram-all", "curves"))
    quota: float = option(0.2, "part of the budget that is spread over segments, with choose=quota")
    move: int = option(0, "steps that kept keys take")

    def chosen(self, tables: Sequence[SlotTable], chunk: int) -> list[Tensor]:
        keep = super().chosen(tables, chunk)
        if not keep:
            return keep
        heads = [Heads.of(table) for table in tables]
        worth = [self.worth(table)[0] for table in tables]  # [H, S]
        counts = [stays[0].sum(-1) for stays in keep]  # [H]
        if self.choose == "quota":
            each = round(self.quota * sum(int(c.sum()) for c in counts) / sum(len(c) for c in counts))
            worth = [spread(own, each) for own in worth]
            keep = best(worth, sum(int(c.sum()) for c in counts))
        elif self.choose == "curves":
            counts = by_curves(heads, worth, counts)
            keep = [largest(own, count.unsqueeze(-1)) for own, count in zip(worth, counts, strict=True)]
        elif self.choose != "scores":
            keep = by_gram(heads, worth, counts, together=self.choose == "gram-all")
        else:
            keep = [stays[0] for stays in keep]
        if self.move:
            for table, own, stays in zip(tables, heads, keep, strict=True):
                table.keys_before = own.keys.unsqueeze(0)  # type: ignore[attr-defined]
                moved = torch.stack([own.moved(head, stays[head], self.move) for head in range(len(stays))])
                table.parts["keys"] = PlainSlots(moved.unsqueeze(0).to(table.key_slots().dtype))
        return [stays.unsqueeze(0) for stays in keep]

    @property
    def rebuild(self) -> Rebuild:
        return MovedRebuild(self) if self.move else super().rebuild


class MovedRebuild(Rebuild):
    """Fits what is kept to what the queries saw of the keys before they moved."""

    def problems(self, table: SlotTable, slots: Tensor, marks: Tensor, behind: int) -> LayerProblems:
        result = super().problems(table, slots, marks, behind)
        held = newest_keys(table, slots, behind)
        before = table.keys_before  # type: ignore[attr-defined]
        return result._replace(keys=before[:, :, -result.keys.shape[2] :].to(result.keys.dtype), held=held)


@dataclass(frozen=True)
class Heads:
    """What the heads of a layer repeat: one row, one chunk."""

    queries: Tensor  # [H, Q, D]
    keys: Tensor  # [H, S, D]
    values: Tensor  # [H, S, Dv]
    scale: float

    @classmethod
    def of(cls, table: SlotTable) -> Heads:
        state = table.state_of(Waiting)
        assert state.again is not None and state.chunks is not None
        if len(state.again) > 1 or state.again.shape[2] > 1 or state.chunks[0].sum() != table.length:
            raise ValueError("choices-tried takes one text of one chunk; use fewer tokens, or chunk=4096")
        slots = newest_slots(table, table.length)
        keys, values = newest_keys(table, slots), newest_values(table, slots)
        return cls(state.again[0, :, 0].float(), keys[0].float(), values[0].float(), table.forward.scale)

    def slots(self, head: int, stays: Tensor, held: Tensor | None = None) -> Slots:
        kept = stays.nonzero().view(1, -1)
        return Slots(
            self.keys[head : head + 1], self.values[head : head + 1], kept, self.scale,
            held=None if held is None else held.unsqueeze(0),
        )  # fmt: skip

    def drop_costs(self, head: int, stays: Tensor) -> Tensor:  # [K]
        """What each kept slot would cost, as a part of the head's outputs."""
        slots = self.slots(head, stays)
        a, target, share = slots.seen_by(self.queries[head : head + 1])
        w = fitted_weights(a.mT @ a, a, share, WEIGHT_STEPS)[0].double()
        a, target, plain = a[0].double(), target[0].double(), slots.plain()[0].double()
        gram = a.mT @ a
        ridge = RIDGES[1] * gram.diagonal().mean()
        inverse = torch.linalg.inv(gram + ridge * torch.eye(len(gram), dtype=gram.dtype))
        fitted = inverse @ (a.mT @ ((a @ w).unsqueeze(1) * target) + ridge * w.unsqueeze(1) * plain)
        return fitted.square().sum(-1) / inverse.diagonal() / target.square().sum()

    def error(self, head: int, stays: Tensor) -> float:
        """Error of held-back queries after a refit, as a part of their outputs."""
        q, slots = self.queries[head : head + 1], self.slots(head, stays)
        fitted = refit(q, slots)
        behind = q[:, q.shape[1] - q.shape[1] // HELD_BACK :]
        return float(output_error(behind, slots, fitted.log_weights.exp(), fitted.values.float()))

    def moved(self, head: int, stays: Tensor, steps: int) -> Tensor:  # [S, D]
        """The keys of a head, of which those that stay have moved."""
        q, slots, keys = self.queries[head : head + 1], self.slots(head, stays), self.keys[head]
        fit = q.shape[1] - q.shape[1] // HELD_BACK
        fitted = refit(q, slots)
        w, values = fitted.log_weights.exp(), fitted.values.float()
        start = keys[stays]
        with torch.enable_grad():
            own = start.clone().requires_grad_()
            adam = torch.optim.Adam([own], lr=SPEED * float(start.std()))
            for _ in range(steps):
                adam.zero_grad()
                output_error(q[:, :fit], slots._replace(held=own.unsqueeze(0)), w, values).backward()
                adam.step()
        # The gate sees what is stored in the end: refitted to the moved keys.
        own = own.detach()
        again = refit(q, self.slots(head, stays, own))
        after = output_error(q[:, fit:], self.slots(head, stays, own), again.log_weights.exp(), again.values.float())
        before = output_error(q[:, fit:], slots, w, values)
        result = keys.clone()
        result[stays] = own if after < before else start
        return result


def output_error(q: Tensor, slots: Slots, w: Tensor, values: Tensor) -> Tensor:
    """|outputs with weights [1, K] and values [1, K, Dv] - those of all slots|^2, as a part of these."""
    held = slots.keys[:, slots.kept[0]] if slots.held is None else slots.held
    logits, whole = slots.scale * q @ held.mT, slots.scale * q @ slots.keys.mT
    wanted = whole.softmax(-1) @ slots.values
    return ((logits + w.log().unsqueeze(1)).softmax(-1) @ values - wanted).square().sum() / wanted.square().sum()


def spread(worth: Tensor, each: int) -> Tensor:  # [H, S]
    """Worth of slots, where the best of each segment stay: `each` in a head."""
    heads, size = worth.shape
    segments = -(-size // SEGMENT)
    padded = torch.nn.functional.pad(worth, (0, segments * SEGMENT - size), value=NEG_INF).view(
        heads, segments, SEGMENT
    )
    free = padded.masked_fill(padded == ALWAYS, NEG_INF)
    stays = largest(free, -(-each // segments)).view(heads, -1)[:, :size]
    return worth.masked_fill(stays, ALWAYS)


def best(worth: Sequence[Tensor], total: int) -> list[Tensor]:
    """Which slots [H, S] of each layer are the best of all."""
    won = largest(torch.cat([own.flatten() for own in worth]), total)
    return [part.view(own.shape) for part, own in zip(won.split([own.numel() for own in worth]), worth, strict=True)]


def by_gram(heads: Sequence[Heads], worth: Sequence[Tensor], counts: Sequence[Tensor], together: bool) -> list[Tensor]:
    """Which slots stay, the cheapest of twice as many dropped in rounds."""
    total = sum(int(count.sum()) for count in counts)
    keep = best(worth, 2 * total) if together else within(worth, [2 * count for count in counts])
    for number in range(ROUNDS):
        part = 2 ** (1 - (number + 1) / ROUNDS)
        costs = []
        for own, stays, known in zip(heads, keep, worth, strict=True):
            cost = torch.full_like(known, NEG_INF)
            for head in range(len(stays)):
                cost[head, stays[head]] = own.drop_costs(head, stays[head]).float()
            costs.append(cost.masked_fill(stays & (known == ALWAYS), ALWAYS))
        keep = best(costs, round(part * total)) if together else within(costs, [(part * c).long() for c in counts])
    return keep


def within(worth: Sequence[Tensor], counts: Sequence[Tensor]) -> list[Tensor]:
    return [largest(own, count.unsqueeze(-1)) for own, count in zip(worth, counts, strict=True)]


def by_curves(heads: Sequence[Heads], worth: Sequence[Tensor], counts: Sequence[Tensor]) -> list[Tensor]:
    """How many slots each head keeps, so that the errors of all have the least sum."""
    total = sum(int(count.sum()) for count in counts)
    sizes, errors = [], []  # of each head, by SIZES
    for own, known, count in zip(heads, worth, counts, strict=True):
        fewest, most = (known == ALWAYS).sum(-1), (known > NEG_INF).sum(-1)
        for head in range(len(known)):
            tried = [min(int(most[head]), max(int(fewest[head]), round(size * int(count[head])))) for size in SIZES]
            sizes.append(tried)
            errors.append([own.error(head, largest(known[head], n)) for n in tried])
    size, error = torch.tensor(sizes, dtype=torch.float64), torch.tensor(errors, dtype=torch.float64)
    # A refit to more slots that errs more is noise.
    error = error.cummin(1).values
    chosen = least_sum(lambda price: (error + price * size).argmin(1, keepdim=True), size, total)
    result = chosen.long().split([len(count) for count in counts])
    return list(result)


def least_sum(pick: Callable[[float], Tensor], size: Tensor, total: int) -> Tensor:  # [A]
    """Sizes [A] of each head: `pick` at the price at which all together are `total`, mixed of the two nearest."""
    low, high = -12.0, 2.0  # logarithms of the price: at the first too many, at the second too few
    for _ in range(60):
        middle = (low + high) / 2
        if float(size.gather(1, pick(10**middle)).sum()) > total:
            low = middle
        else:
            high = middle
    few, many = (size.gather(1, pick(10**at)).squeeze(1) for at in (high, low))
    part = (total - few.sum()) / (many.sum() - few.sum()).clamp_min(1)
    return few + part.clamp(0, 1) * (many - few)
