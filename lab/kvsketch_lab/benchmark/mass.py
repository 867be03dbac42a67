"""Attention mass, one layer: what H2O and Keyformer add to a prefill and to a decode step.

    kvsketch bench mass --out results/mass.jsonl
    kvsketch bench mass --tune --out results/mass-tune.jsonl

Shapes of Llama-3.1-8B: 32 layers, 32 query heads, 8 KV heads, head size 128, bfloat16. The share of prefill is the time
for all layers over that of a whole prefill with transformers' own cache, measured in the same process with random
weights. Results are first compared with the reference, at odd sizes and at the size measured; nothing is reported when
one differs. `--tune` times launch sizes instead.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsketch import ops
from kvsketch.ops import Noise
from kvsketch_lab.benchmark import runner
from kvsketch_lab.benchmark.device import Timing
from kvsketch_lab.benchmark.layers import HEAD_SIZE, KV_HEADS, LAYERS, QUERY_HEADS, SCALE, SIZES, OfPrefill
from kvsketch_lab.benchmark.runner import Fields, Trial, by_reference, relative_error, too_far
from kvsketch_lab.options import option

TOLERANCE = 5e-3
NOISE = Noise(seed=0, layer=0)
LIMITS = {"h2o, row sums given": 0.35, "keyformer": 0.90}
TILES = ((128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4), (128, 64, 4))


@dataclass(frozen=True)
class Inputs:
    """The queries and keys of one layer."""

    q: Tensor
    k: Tensor

    def mass(self, noise: Noise | None = None, **options: Any) -> Tensor:
        return ops.attention_mass(self.q, self.k, SCALE, noise=noise, **options)

    def attention(self) -> Tensor:
        return F.scaled_dot_product_attention(self.q, self.k, self.k, is_causal=True, scale=SCALE, enable_gqa=True)

    def row_sums(self) -> Tensor:  # [B, Hq, n]
        """What flash attention leaves beside its output."""
        k = self.k.repeat_interleave(self.q.shape[1] // self.k.shape[1], 1)
        if not self.q.is_cuda:
            hidden = torch.ones(self.q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
            return (self.q.float() @ k.float().mT * SCALE).masked_fill(hidden, float("-inf")).logsumexp(-1)
        return torch.ops.aten._scaled_dot_product_flash_attention(self.q, k, k, 0.0, True, scale=SCALE)[1]

    def slots(self) -> dict[str, Any]:
        """A bounded table in which the keys are stored in reverse and the first slot is empty."""
        columns, device = self.k.shape[2], self.k.device
        places = torch.arange(columns - 1, -1, -1, dtype=torch.int32, device=device)
        index = places.expand(self.k.shape[:3]).contiguous()
        index[:, :, 0] = -1
        return {"index": index, "seen": torch.tensor([columns], device=device)}


def error_against_reference(inputs: Inputs, mass: Tensor, noise: Noise | None, **options: Any) -> float:
    """Relative error; NaN when a number is."""
    return relative_error(mass, by_reference(lambda: inputs.mass(noise, **options)))


@dataclass
class Mass(OfPrefill):
    name, kind, operation, tuning_kind = "mass", "attention-mass", "attention_mass", "attention-mass-tune"
    title = "Attention mass, one layer of Llama-3.1-8B"
    columns = (
        "contender | tokens:,d | slots:,d | µs=median_us:,.1f | p10=p10_us:,.1f | p90=p90_us:,.1f | "
        "of prefill=share_of_prefill:.1% | limit:.0% | extra bytes=extra_bytes:,d"
    )
    tokens: int = option(32768, "tokens of the prompt", least=1)
    slots: int = option(2048, "slots of a decode step", least=1)
    tune: bool = option(False, "time launch sizes instead")

    def inputs(self, queries: int, columns: int, batch: int = 1) -> Inputs:
        normal = functools.partial(self.on.normal, self.on.generator(self.seed))
        q, k = normal(batch, QUERY_HEADS, queries, HEAD_SIZE), normal(batch, KV_HEADS, columns, HEAD_SIZE)
        return Inputs(q, k)

    def wrong(self) -> Iterator[str]:
        odd = 1000 if self.on.is_gpu else 70
        for noise, (queries, columns) in itertools.product((None, NOISE), ((1, odd), (63, odd), (odd, odd))):
            inputs = self.inputs(queries, columns, batch=2)
            cases: dict[str, dict[str, Any]] = {
                "plain": {},
                "padded": {"padding": torch.tensor([0, 37], device=self.device)},
                "slots": inputs.slots(),
                "max": {"reduce": "max"},
            }
            for name, options in cases.items():
                error = error_against_reference(inputs, inputs.mass(noise, **options), noise, **options)
                yield from too_far(f"{queries} queries, {columns} columns, {name}, noise {noise}", error, TOLERANCE)
        inputs = self.inputs(self.tokens, self.tokens)
        exact = by_reference(inputs.mass)
        yield from too_far(f"{self.tokens} tokens, h2o", relative_error(inputs.mass(), exact), TOLERANCE)
        given = inputs.mass(row_lse=inputs.row_sums())
        yield from too_far(f"{self.tokens} tokens, h2o, row sums given", relative_error(given, exact), TOLERANCE)
        error = error_against_reference(inputs, inputs.mass(NOISE), NOISE)
        yield from too_far(f"{self.tokens} tokens, keyformer", error, TOLERANCE)

    def cells(self) -> list[Fields]:
        return [{"tokens": self.tokens}, {"slots": self.slots}]

    def measure(self, tokens: int | None = None, slots: int | None = None) -> Iterator[Fields]:
        if tokens is None:
            assert slots is not None
            inputs = self.inputs(1, slots + 1)
            options = inputs.slots() | {"into": torch.zeros(inputs.k.shape[:3], device=self.device)}
            for name, noise in (("h2o step", None), ("keyformer step", NOISE)):
                timing = self.on.time([functools.partial(inputs.mass, noise, **options)])
                yield self.row(name, timing) | {"slots": slots}
            return
        inputs = self.inputs(tokens, tokens)
        into = torch.zeros(inputs.k.shape[:3], device=self.device)
        contenders: dict[str, Callable[[], object]] = {
            "attention itself": inputs.attention,
            "h2o, row sums given": functools.partial(inputs.mass, row_lse=inputs.row_sums(), into=into),
            "h2o": functools.partial(inputs.mass, into=into),
            "keyformer": functools.partial(inputs.mass, NOISE, into=into),
        }
        for name, call in contenders.items():
            call()
            extra = self.on.extra_bytes(call)
            timing = self.on.time([call], replays=10, least_calls=2)
            share = self.share_of_prefill(1e-3 * timing.median_us, tokens)
            yield (
                self.row(name, timing) | {"tokens": tokens} | share | {"extra_bytes": extra, "limit": LIMITS.get(name)}
            )

    def row(self, contender: str, timing: Timing) -> Fields:
        measured = {"operation": self.operation, "contender": contender, "batch": 1, "layers": LAYERS, **SIZES}
        return measured | {"dtype": self.on.dtype_name} | dataclasses.asdict(timing)

    def trials(self) -> Generator[Trial, list[Any], None]:
        from kvsketch.ops.attention_mass import Options, kernel
        from kvsketch.ops.attention_mass.kernel import Launches, MassLaunch

        inputs = self.inputs(self.tokens, self.tokens)
        row_lse, into = inputs.row_sums(), torch.zeros(inputs.k.shape[:3], device=self.device)
        launches = [MassLaunch(*size, *rest) for size in TILES for rest in itertools.product((2, 3), (None, 128))]
        # With row sums given only the second pass runs; the noise has no such sums, so both passes use the launch.
        for name, noise, lse in (
            ("column pass", None, row_lse),
            ("both passes", None, None),
            ("both passes", NOISE, None),
        ):
            options = Options(into, seen=self.tokens, noise=noise, row_lse=lse)

            def calls_of(launch: MassLaunch, options: Options = options) -> list[Callable[[], object]]:
                sizes = Launches(launch, launch)
                return [lambda: kernel.attention_mass(inputs.q, inputs.k, SCALE, options, sizes)]

            setting = {"contender": "keyformer" if noise else "h2o", "passes": name, "tokens": self.tokens}
            yield Trial(setting, launches, calls_of, {"replays": 3, "least_calls": 1})


command = functools.partial(runner.command, Mass)
