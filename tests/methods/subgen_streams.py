"""Streams of plain keys and values for the tests of SubGen's structure, and what is read from it."""

from __future__ import annotations

from dataclasses import replace

import torch
from scipy import stats
from torch import Tensor

from kvsketch.methods.subgen.sketch import Sketch, Tokens, fold
from kvsketch.ops.fold_token.reference import denominator_weights, norms, numerator_shares, numerator_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 0.5
LEAST_P = 1e-4  # chance of a false alarm of one chi-square check
SIGMAS = 4.0  # and of one mean: 6e-5


def stream(keys: Tensor, values: Tensor, heads: int = 1, start: int = 0) -> Tokens:
    """Tokens [n, D] as one row of `heads` equal heads."""
    position = torch.arange(start, start + len(keys), device=DEVICE)[None]
    keys, values = (t.to(DEVICE).expand(1, heads, *t.shape) for t in (keys, values))
    return Tokens(keys, values, position, position, torch.ones_like(position, dtype=torch.bool))


def part(tokens: Tokens, start: int, end: int) -> Tokens:
    cut = slice(start, end)
    rows = (tensor[:, cut] for tensor in (tokens.index, tokens.positions, tokens.valid))
    return Tokens(tokens.keys[:, :, cut], tokens.values[:, :, cut], *rows)


def run(
    tokens: Tokens,
    s: int,
    t: int,
    delta: float,
    policy: str = "grow",
    clusters: int = 1,
    block: int | None = None,
    mixed: bool = False,
) -> Sketch:
    sketch = Sketch.empty(tokens, s, clusters, t, mixed=mixed)
    sketch = replace(sketch, delta=torch.full_like(sketch.delta, delta))
    count = tokens.keys.shape[2]
    for start in range(0, count, block or count):
        sketch = fold(sketch, part(tokens, start, start + (block or count)), policy)
    return sketch


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def clustered(count: int, centers: int, size: int = 4, spread: float = 0.1, seed: int = 0) -> Tensor:
    """Keys around well separated centres, in random order."""
    middle = normal(centers, size, seed=seed) * 5
    which = torch.randint(centers, (count,), generator=torch.Generator().manual_seed(seed + 1))
    return middle[which] + spread * normal(count, size, seed=seed + 2)


def plan_of(sketch: Sketch) -> Tensor:
    return torch.cat([torch.zeros_like(sketch.sizes), sketch.sizes], 1)


def numerator(sketch: Sketch, query: Tensor, coalesce: bool = True) -> Tensor:  # [H, Dv]
    """z = sum of weight exp(scale <q, k>) v, in float64."""
    terms = numerator_terms(sketch, query, coalesce)
    return (terms[..., None] * sketch.values.double()).sum(2)[0]


def numerator_terms(sketch: Sketch, query: Tensor, coalesce: bool = True) -> Tensor:  # [1, H, s]
    """weight exp(scale <q, k>) of each sample, in float64."""
    mixed = sketch.folded is not None
    shares = numerator_shares(sketch.values, sketch.index, coalesce, mixed)
    squares = norms(sketch.values).square() if mixed else None
    weights = numerator_weights(sketch.mu, shares, plan_of(sketch), squares, sketch.folded)
    return (weights.double() + SCALE * (sketch.keys.double() @ query.to(DEVICE).double())).exp()


def denominator(sketch: Sketch, query: Tensor, coalesce: bool = True) -> Tensor:  # [H]
    """tau = sum of weight exp(scale <q, k>), in float64."""
    weights = denominator_weights(sketch.counts, sketch.den_index, plan_of(sketch), coalesce)
    scores = SCALE * (sketch.den_keys.double() @ query.to(DEVICE).double())
    return (weights.double() + scores).exp().sum((2, 3))[0]


def p_value(observed: Tensor, law: Tensor) -> float:
    """Chi-square of token frequencies against their probabilities; tokens of probability 0 must not occur."""
    counts = torch.bincount(observed.flatten().cpu().long(), minlength=len(law)).double()
    law = law.double() / law.double().sum()
    if counts[law == 0].any():
        return 0.0
    return float(stats.chisquare(counts[law > 0].numpy(), (law[law > 0] * counts.sum()).numpy()).pvalue)


def off_by(samples: Tensor, expected: float) -> float:
    """Distance of the mean from its expected value, in standard errors."""
    return float((samples.mean() - expected).abs() / (samples.std() / len(samples) ** 0.5))


def exact_terms(keys: Tensor, query: Tensor) -> Tensor:
    return (SCALE * keys.double() @ query.double()).exp()
