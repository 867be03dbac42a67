"""Queries, keys and values of the layers of a model for one text, from one forward."""

from __future__ import annotations

import json
from typing import Any

import torch

from kvsketch import models
from kvsketch_lab.evaluation import passages
from kvsketch_lab.evaluation.attention_protocol import Captured, capture

FORMS = "comma-separated numbers and ranges such as 0,7,14 or 2-, or all"


def layer_numbers(text: str, spec: str) -> list[int]:
    """The layers that `--layers` names: `0,7`, `2-27`, `2-` (to the last) or `all`; only those of full attention."""
    known = full_attention_layers(spec)
    result: list[int] = []
    try:
        for part in ("0-" if text == "all" else text).split(","):
            first, dash, last = part.strip().partition("-")
            if dash:
                result += [layer for layer in known if int(first) <= layer <= (int(last) if last else known[-1])]
            else:
                result.append(int(first))
    except ValueError:
        raise ValueError(f"--layers {text!r} is not a list of layers; use {FORMS}") from None
    absent = sorted(set(result) - set(known))
    if absent or not result:
        have = ", ".join(map(str, known))
        wrong = f"{absent} is not" if absent else "none is"
        raise ValueError(f"--layers {text!r}: {wrong} among the full-attention layers {have}")
    return list(dict.fromkeys(result))


def full_attention_layers(spec: str) -> list[int]:
    """Numbers of the layers of full attention, from the configuration of a model's name or folder."""
    config = json.loads((models.resolve(spec) / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    kinds = config.get("layer_types") or ["full_attention"] * int(config["num_hidden_layers"])
    return [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]


class TextCapture:
    """Captures texts one at a time and keeps the last one."""

    def __init__(self, tokens: int, layers: list[int]) -> None:
        self.tokens, self.layers = tokens, layers
        self._name = ""
        self._found: dict[int, Captured] = {}

    @torch.no_grad()
    def of(self, model: Any, tokenizer: Any, name: str) -> dict[int, Captured]:
        """Queries, keys and values of the layers for the first tokens of the text `name`."""
        if self._name != name:
            self._found = {}
            ids = passages.token_ids(tokenizer, name, self.tokens, model.device)
            self._name, self._found = name, capture(model, ids, self.layers)
        return self._found
