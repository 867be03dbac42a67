"""What two theorems promise of the attention output, with numbers.

SubGen     Eq. (3)   |z - attn| <= eps |softmax|_2 |V|_op     with s = O(d / eps^2) samples
BalanceKV  Eq. (2)   |z - attn| <= eps |softmax|_2 |V|_F      with sets of O*(1 / eps) tokens
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods import parse_method
from kvsketch.slots import LayerContext, SlotTable
from tests.helpers.common import also

SCALE = 0.25


def clustered(count: int, seed: int, size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Keys of norm near 1 around 12 centres, values of several norms, and 64 queries, [1, 1, n, D] each."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.nn.functional.normalize(torch.randn(12, size, generator=generator), dim=-1)
    keys = centres[torch.randint(12, (count,), generator=generator)]
    keys = keys + 0.02 * torch.randn(count, size, generator=generator)
    values = torch.randn(count, size, generator=generator) * 2 ** torch.randn(count, 1, generator=generator)
    queries = torch.nn.functional.normalize(torch.randn(64, size, generator=generator), dim=-1)
    return keys[None, None], values[None, None], queries[None, None]


def epsilon(method: str, seed: int, norm: str, count: int = 4096) -> float:
    """The error of a method in what its theorem measures it in, root mean square over queries."""
    keys, values, queries = clustered(count, seed)
    table = SlotTable(LayerContext(0, 1, seed))
    table.forward.scale = SCALE
    table.append(keys, values)
    parse_method(method).compress(table, queries)
    given = (table.key_slots(), table.value_slots(), *table.log_weights())
    out = ops.weighted_attention(queries, *given, SCALE)
    softmax = torch.softmax(SCALE * queries @ keys.mT, -1)
    spectral = torch.linalg.matrix_norm(values[0, 0], 2 if norm == "op" else "fro")
    error = (out - softmax @ values).norm(dim=-1) / (softmax.norm(dim=-1) * spectral)
    return float(error.square().mean().sqrt())


def over_seeds(method: str, norm: str, seeds: int = 4) -> float:
    return sum(epsilon(method, seed, norm) for seed in range(seeds)) / seeds


@pytest.mark.parametrize("samples", [128, 512])
def test_the_error_of_subgen_is_at_most_sqrt_d_over_s(samples: int) -> None:
    """eps / sqrt(d / s) is below 1, and about the same for every s: the bound has the right power."""
    method = (
        f"subgen:normalizer=paper:budget={samples + 24 * 17}:s={samples}:t=16:clusters=24:delta=0.4:sinks=0:recent=0"
    )
    ratio = over_seeds(method, "op") / (16 / samples) ** 0.5
    assert 0.7 < ratio < 1.0


@pytest.mark.parametrize("seeds", [2, *also(4)])
def test_the_error_of_balancekv_falls_faster_than_that_of_a_sample(seeds: int) -> None:
    """Four times the batch: a third of eps or less, where four times the sample has a half.

    With c=theory, which makes the promise hold for certain, the walk is nearly a coin, and eps is worse than that of a
    sample of as many tokens: 30 ln(n / delta) is above 300, the largest sum that a batch of 256 can have.
    """
    walk = [over_seeds(f"balancekv:form=paper:block={block}:sinks=0:recent=0", "fro", seeds) for block in (64, 256)]
    sure = over_seeds("balancekv:form=paper:block=256:sinks=0:recent=0:c=theory", "fro", seeds)
    sample = over_seeds("uniform:budget=1373:sinks=0:recent=0", "fro", seeds)
    assert walk[1] < walk[0] / 3 and walk[1] < sample / 2
    assert sure > sample
