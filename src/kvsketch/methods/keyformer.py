"""Keyformer: H2O's score with Gumbel noise and a rising temperature."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.budget import Budget, Size, Tokens, clamp, row_prompts
from kvsketch.methods.capabilities import NOT_MEASURED, Capabilities
from kvsketch.methods.h2o import H2O
from kvsketch.methods.parameters import SEED, option
from kvsketch.methods.received import HeavyHitters
from kvsketch.slots.positions import TEXT
from kvsketch.slots.table import SlotTable

COMPATIBILITY = ("intended", "official")
LATER_THAN_ALL = 2.0**24


@dataclass(frozen=True)
class Keyformer(H2O):
    """Keeps the tokens with the largest summed softmax under noise and a rising temperature, and the recent ones.

        score(j) = sum over queries i that saw j of  softmax_j((scale * <q_i, k_j> + g_ij) / tau_t)
        tau_t = tau_init + (tau_end - tau_init) * min(t, horizon) / horizon

    g_ij is standard Gumbel noise, fresh for every query and token (`noise=false` turns it off), t counts generated
    tokens and is 0 for the prompt. Noise and temperature shape the score only; what the model reads is plain attention
    over the kept tokens. `horizon` is the number of tokens to be generated. Without noise and with tau_init = tau_end
    = 1 this is H2O.

    Adnan et al., Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative Inference (arXiv
    2403.09054). No guarantee: only the argmax of logits plus Gumbel noise follows the softmax, its mean does not, and
    the noise favours no position; early tokens score higher because more queries see them.

    Differs from the authors' code, which keeps everything and masks it: scores are per sequence and KV head, theirs
    per query head and summed over batch and beams; a share of the prompt leaves its padding out; padded queries do not
    score. Their mask is one column too wide: a token leaving the window is always dropped, so that the key tokens never
    change after the prompt. `compat=official` does the same, with recent - 1 stored and one incoming token as window.
    """

    name: ClassVar[str] = "keyformer"
    paper: ClassVar[str] = "arXiv 2403.09054"
    look: ClassVar[tuple[str, ...]] = ("#5e4fc0", "v")
    random: ClassVar[bool] = True
    counts_prompt: ClassVar[bool] = True
    wants_row_lse: ClassVar[bool] = False
    budget: Size | int | str = "60%"
    recent: Size | int | str = "30%"
    positions: str = field(default=TEXT, init=False, repr=False)
    seed: int = option(0, SEED)
    tau_init: float = option(1.0, "temperature of the score for the prompt")
    tau_end: float = option(2.0, "temperature after `horizon` generated tokens")
    horizon: int = option(128, "generated tokens over which the temperature rises: set it to max_new_tokens")
    noise: bool = option(True, "Gumbel noise on the logits of the score")
    compat: str = option(
        "intended", "official does what the released code does: key tokens stay those of the prompt", COMPATIBILITY
    )

    def __post_init__(self) -> None:
        for name in ("tau_init", "tau_end"):
            self._require(name, getattr(self, name) > 0, "a temperature above 0")
        self._require_whole("horizon", unit="tokens")
        super().__post_init__()

    @property
    def declared(self) -> Capabilities:
        return replace(super().declared, cache_positions=NOT_MEASURED)

    def observe(self, table: SlotTable, queries: Tensor) -> None:
        own = table.context
        noise = ops.Noise(self.seed + own.seed, own.layer_idx, own.first_head) if self.noise else None
        HeavyHitters(self.temperature(table), noise).add(table, queries)

    def temperature(self, table: SlotTable) -> ops.Temperature:
        """tau_t, from the last prompt on."""
        since = table.prompt_tokens if table.prompts is None else table.prompts
        return ops.Temperature(self.tau_init, self.tau_end, self.horizon, since)

    def worth(self, table: SlotTable) -> Tensor:
        score = super().worth(table)
        if self.compat == "intended":
            return score
        # Tokens that left the window after the prompt score below its key tokens, the oldest lowest.
        position, window = table.position_slots(), self.row_budget(table).recent + 1
        return torch.where(position < row_prompts(table) - window, score, position.float() - LATER_THAN_ALL)

    def allot(self, table: SlotTable, prompt: Tokens) -> Budget:
        total, sinks, recent = super().allot(table, prompt)
        # The official budget and window count the incoming token, which is not stored yet.
        incoming = int(self.compat == "official")
        return Budget(clamp(total - incoming, 1), sinks, clamp(recent - incoming, 0))
