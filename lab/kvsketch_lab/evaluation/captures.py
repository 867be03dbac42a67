"""Queries, keys and values of the layers of a model for one text, from one forward."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from kvsketch import models
from kvsketch_lab.evaluation import passages
from kvsketch_lab.evaluation.attention_protocol import Captured, capture
from kvsketch_lab.evaluation.experiment import Cell, Experiment, ExperimentOptions, methods_option
from kvsketch_lab.options import option

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


@dataclass
class LayerOptions(ExperimentOptions):
    methods: str = methods_option("full")
    texts: str = passages.texts_option("1")
    tokens: int = option(8192, "tokens that are read", least=2)
    layers: str = option("all", "such as 0,7,14 or 2- or all")


class LayerExperiment(Experiment):
    """An experiment on what some layers compute for a text, which the model reads once."""

    options: LayerOptions

    def __init__(self, options: LayerOptions) -> None:
        super().__init__(options)
        self.layers = layer_numbers(options.layers, options.model)
        self._name, self._captured = "", dict[int, Captured]()

    @property
    def needed(self) -> list[int]:
        """The layers that are captured."""
        return self.layers

    @property
    def tokens(self) -> int:
        """Tokens of a text that are read: the prompt's, and those of the steps behind it."""
        return self.options.tokens + int(getattr(self.options, "steps", 0))

    @property
    def texts(self) -> list[str]:
        return passages.names(self.options.texts)

    def check(self) -> None:
        passages.require(self.tokenizer, self.texts, self.tokens)

    def alike(self, cell: Cell) -> Hashable:
        return cell.sample, cell.seed

    @torch.no_grad()
    def captured(self, name: str) -> dict[int, Captured]:
        """Queries, keys and values of the layers for a text; those of the last text are kept."""
        if self._name != name:
            self._captured = {}
            ids = passages.token_ids(self.tokenizer, name, self.tokens, self.model.device)
            self._name, self._captured = name, capture(self.model, ids, self.needed)
        return self._captured
