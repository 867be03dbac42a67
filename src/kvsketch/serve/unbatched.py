"""Decode steps of a request that shares no tables with others."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from kvsketch.decode.captured import Step, impossible, turn_of
from kvsketch.decode.sampling import Draw
from kvsketch.serve.schedule import Run
from kvsketch.serve.tokens import Tokens


class OwnDraw:
    """The sampler of a captured step of one request; `logits` are those of the last token."""

    def __init__(self, draw: Draw, mode: int) -> None:
        self.draw, self.mode = draw, mode
        self.logits = torch.zeros(draw.said.shape, device=draw.said.device)

    def before_step(self) -> None:
        pass

    def choose(self, logits: Tensor) -> Tensor:
        self.logits.copy_(logits)
        return self.draw.choose(logits, self.mode)


class UnbatchedSteps:
    """Takes steps with the cache of one request, as a captured graph where that is possible."""

    def __init__(self, model: Any, fused: bool) -> None:
        self.model, self.fused = model, fused
        self.device = torch.device(model.device)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def take(self, run: Run, capture: bool) -> Tokens:
        """The next token of a run. `capture`: it will take all its steps by itself, and a graph pays."""
        assert run.token is not None
        with turn_of(self.device):
            if run.step is None and capture and impossible(self.model, run.cache, {}) is None:
                own: Any = OwnDraw(run.draw, run.mode)
                longest = run.cache.tokens_seen + run.ticket.request.max_new_tokens - run.launched + 1
                run.logits = own.logits
                run.step = Step(self.model, run.cache, own, run.token, longest, self.fused)
            if run.step is not None:
                run.step.run()
                run.token = run.step.token
            else:
                position = torch.full_like(run.token, run.cache.tokens_seen)
                options: dict[str, Any] = {"position_ids": position} if self.takes_positions else {}
                out = self.model(run.token.clamp_min(0), past_key_values=run.cache, use_cache=True, **options)
                run.logits = out.logits[:, -1]
                run.token = run.draw.choose(run.logits, run.mode)
        assert run.logits is not None
        return Tokens.of([run], run.token, [0], run.logits)
