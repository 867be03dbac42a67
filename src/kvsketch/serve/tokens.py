"""Tokens of a decode step on their way to the host, and what grammars make of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from kvsketch.decode.sampling import Draw
from kvsketch.serve.requests import Likely
from kvsketch.serve.schedule import Run


@dataclass
class Tokens:
    """Tokens of one step on their way to the host."""

    runs: list[Run]
    values: Tensor  # [n] on the host, there after `event`
    scores: tuple[Tensor, ...]  # those of `log_probabilities`, where a run asks for them
    event: Any
    told: bool = False  # whether grammars know them

    @classmethod
    def of(cls, runs: list[Run], tokens: Tensor, places: list[int], logits: Tensor) -> Tokens:
        """`tokens` [n, 1] and `logits` [n, vocabulary] on the device, of which `places` belong to the runs."""
        at = _to_device(torch.tensor(places), tokens.device)
        chosen = tokens.index_select(0, at)
        requests = [run.ticket.request for run in runs]
        wanted = any(each.doubt or each.logprobs is not None for each in requests)
        most = max(each.logprobs or 0 for each in requests)
        scores = log_probabilities(logits.index_select(0, at), chosen, most) if wanted else ()
        values, *rest = (_to_host(each) for each in (chosen[:, 0], *scores))
        event = torch.cuda.Event() if tokens.device.type == "cuda" else None
        if event is not None:
            event.record()
        return cls(runs, values, tuple(rest), event)

    def tell(self) -> None:
        """Tells the grammars of the runs their tokens, once."""
        if not self.told and any(run.guide is not None for run in self.runs):
            for run, token, _ in self.read():
                if run.guide is not None:
                    run.guide.put(token)
        self.told = True

    def read(self) -> Iterator[tuple[Run, int, Likely | None]]:
        if self.event is not None:
            self.event.synchronize()
        likely = map(_likely, self.runs, *(each.tolist() for each in self.scores)) if self.scores else repeat(None)
        return zip(self.runs, self.values.tolist(), likely, strict=False)


def log_probabilities(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of `tokens` [n, 1] and of the `most` likeliest tokens, and these; [n], [n, most], [n, most]."""
    scores = logits.float()
    total = scores.logsumexp(-1, keepdim=True)
    top = scores.topk(min(most, scores.shape[1]))
    return (scores.gather(1, tokens.clamp_min(0)) - total)[:, 0], top.values - total, top.indices


def _likely(run: Run, logprob: float, values: list[float], ids: list[int]) -> Likely:
    most = run.ticket.request.logprobs or 0
    return Likely(logprob, tuple(zip(ids[:most], values[:most], strict=True)))


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def guide_rows(runs: list[Run], on_the_way: Iterable[Tokens], draw: Draw) -> None:
    """Tells grammars the tokens on the way, and the sampler what may follow them."""
    if all(run.guide is None for run in runs):
        return
    for tokens in on_the_way:
        tokens.tell()
    for run in runs:
        if run.guide is not None:
            draw.allowed[run.row or 0].copy_(_to_device(run.guide.allowed(), draw.allowed.device))
