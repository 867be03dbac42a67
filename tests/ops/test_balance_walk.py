"""The balancing walk, reference and kernel alike; on a CPU the kernel runs in Triton's interpreter.

Signs are chaotic: one rounding that flips a sign changes all later ones. So a result is checked step by step: given the
signs before it, each sign must be the one the rule names, unless the rule is within rounding of changing its mind.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.balance_walk import Arguments, Walked, reference
from kvsketch.ops.random import hash_combine, to_uniform
from tests.ops.formula import needs_triton, poison

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
Walk = Callable[..., Walked]


@pytest.fixture(params=["reference", pytest.param("kernel", marks=needs_triton)])
def walk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Walk:
    """The walk by one implementation, whose new buffers hold NaN until they are written."""
    poison(monkeypatch)
    module = importlib.import_module(f"kvsketch.ops.balance_walk.{request.param}")

    def run(k: Tensor, v: Tensor | None, slots: Tensor, scale: float, temp: float = 1.0, **options: Any) -> Walked:
        return module.balance_walk(Arguments(k, v, slots, scale * temp, **options))

    return run


def blocks(
    device: torch.device,
    count: int,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
    heads: int = 1,
    number: int = 1,
    missing: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and blocks of slots in random order, some places without a token."""
    generator = torch.Generator().manual_seed(seed)
    slots = number * count + 5
    k, v = (torch.randn(1, heads, slots, size, generator=generator) for _ in range(2))
    order = torch.stack([torch.randperm(slots, generator=generator)[: number * count] for _ in range(heads)])
    order[torch.rand(order.shape, generator=generator) < missing] = -1
    return k.to(device, dtype), v.to(device, dtype), order.view(1, heads, number, count).to(device)


def gram(k: Tensor, v: Tensor | None, slots: Tensor, scale: float, center: bool, constant: float) -> Tensor:
    """exp(scale <k, k>) (<v, v> + constant) of the tokens of one block, in float64, divided by its bound R^2."""
    at = slots[slots >= 0]
    keys = k[at].double()
    keys = keys - keys.mean(0) if center else keys
    exponent = scale * keys @ keys.T
    inner = torch.ones_like(exponent) if v is None else v[at].double() @ v[at].double().T + constant
    return (exponent - exponent.diagonal().max()).exp() * inner / inner.diagonal().max()


def draws(slots: Tensor, state: int, head: int, number: int) -> Tensor:
    chained = hash_combine(hash_combine(torch.tensor(state), head), number)
    return to_uniform(hash_combine(hash_combine(chained, number >> 32), torch.arange(slots.shape[-1])))


def assert_follows_the_rule(
    signs: Tensor, g: Tensor, uniforms: Tensor, name: str, c: float, rounding: float = 1e-4
) -> None:
    """Every sign is the one its rule names, given the signs before it."""
    signs = signs.double()
    y = (g.tril(-1) * signs).sum(-1)
    size = (g.tril(-1).abs()).sum(-1)
    if name == "greedy":
        sure = y.abs() > rounding * size
        up = y < 0
        coins = y.abs() <= 1e-9 * size
        assert torch.equal(signs[coins] > 0, uniforms[coins] < 0.5), "a fair coin decides a tie"
    else:
        probability = 0.5 - y / (2 * c)
        sure = (uniforms - probability).abs() > rounding
        up = uniforms < probability
    assert torch.equal(signs[sure] > 0, up[sure])
    assert sure.double().mean() > 0.8, "the rule must be sure often enough for the test to mean something"


SHAPES = [  # tokens, size, dtype, center, values, walk
    (1, 64, torch.float32, True, True, "random"),
    (63, 16, torch.float32, True, True, "greedy"),
    (70, 80, torch.bfloat16, True, True, "greedy"),
    (140, 64, torch.bfloat16, True, True, "random"),
    (130, 24, torch.float16, False, False, "random"),
    (100, 128, torch.float32, False, True, "greedy"),
    (70, 256, torch.bfloat16, True, False, "greedy"),
    (33, 96, torch.float16, True, True, "random"),
]


@pytest.mark.parametrize(("count", "size", "dtype", "center", "values", "name"), SHAPES)
def test_every_sign_follows_the_rule(
    walk: Walk, device: torch.device, count: int, size: int, dtype: torch.dtype, center: bool, values: bool, name: str
) -> None:
    number = 2 if count < 64 else 1
    k, v, slots = blocks(device, count, size, dtype, heads=2, number=number, missing=0.1 if count > 1 else 0.0)
    used = v if values else None
    result = walk(k, used, slots, size**-0.5, state=77, walk=name, c=0.5, center=center, constant=0.3)
    assert result.signs.shape == slots.shape and result.signs.dtype == torch.int8
    assert torch.equal(result.signs == 0, slots < 0), "exactly the missing tokens have no sign"
    for head in range(2):
        for block in range(number):
            place = slots[0, head, block].cpu()
            g = gram(k[0, head].cpu(), v[0, head].cpu() if values else None, place, size**-0.5, center, 0.3)
            signs = result.signs[0, head, block].cpu()[place >= 0]
            assert_follows_the_rule(signs, g, draws(place, 77, head, block)[place >= 0], name, 0.5)


def test_the_check_rejects_a_wrong_walk(device: torch.device) -> None:
    """A walk that looks at half of its past fails the check that the implementations pass."""
    k, v, slots = blocks(torch.device("cpu"), 100)
    g = gram(k[0, 0], v[0, 0], slots[0, 0, 0], 0.25, True, 0.0)
    forgetful = g.tril(-1) * (torch.arange(100)[:, None] - torch.arange(100) < 50)
    uniforms = draws(slots[0, 0, 0], 0, 0, 0)
    signs, _ = reference.walk_blocks(
        forgetful[None], torch.ones(1, 100, dtype=torch.bool), uniforms[None], "greedy", 1.0
    )
    with pytest.raises(AssertionError):
        assert_follows_the_rule(signs[0], g, uniforms, "greedy", 1.0)


@needs_triton
@pytest.mark.parametrize("name", ["greedy", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_and_reference_agree_bit_for_bit(device: torch.device, dtype: torch.dtype, name: str) -> None:
    from kvsketch.ops.balance_walk import kernel

    k, v, slots = blocks(device, 100, 64, dtype, heads=2, missing=0.05)
    weights = 2.0 ** torch.randint(0, 4, k.shape[:3], generator=torch.Generator().manual_seed(1)).to(device)
    options = dict(weights=weights, state=3_000_000_000, walk=name, c=0.2, constant=0.025)
    call = Arguments(k, v, slots, 0.125 * 0.5, **options)
    ours, expected = kernel.balance_walk(call), reference.balance_walk(call)
    assert torch.equal(ours.signs, expected.signs)
    assert name == "greedy" or torch.equal(ours.failed, expected.failed)


def test_draws_alone_decide_where_nothing_is_to_be_balanced(walk: Walk, device: torch.device) -> None:
    """With zero values every y is zero: the signs show the uniforms, which must be those of `ops.random`."""
    k, v, slots = blocks(device, 40, heads=2, number=2)
    ids = torch.tensor([[[5, (3 << 32) + 5], [1 << 31, 40]]], device=device)
    for name in ("greedy", "random"):
        signs = walk(k, torch.zeros_like(v), slots, 0.25, state=11, ids=ids, walk=name).signs.cpu()
        for head in range(2):
            for number in range(2):
                uniforms = draws(slots[0, head, number], 11, head, int(ids[0, head, number]))
                assert torch.equal(signs[0, head, number] > 0, uniforms < 0.5)


@pytest.mark.parametrize("norm", [20.0, 60.0, 300.0])
def test_large_keys_do_not_overflow(walk: Walk, device: torch.device, norm: float) -> None:
    """exp(|k|^2 / sqrt(d)) reaches e^318 at |k| = 60; the normalised Gram matrix never exceeds 1."""
    k, v, slots = blocks(device, 64, 128, torch.bfloat16)
    k = k / k.norm(dim=-1, keepdim=True) * norm
    for center in (True, False):
        result = walk(k, v, slots, 128**-0.5, walk="random", center=center)
        assert (result.signs.abs() == 1).all()
        assert not result.failed.any(), "|y| would be infinite or NaN"
    copies = k[:, :, :1].expand(1, 1, 64, 128)
    signs = walk(
        copies, v[:, :, :1].expand(1, 1, 64, 128), torch.arange(64, device=device).view(1, 1, 1, 64), 1.0
    ).signs
    assert abs(int(signs.sum())) <= 1


@pytest.mark.parametrize("norm", [45.0, 60.0])
def test_greedy_rows_do_not_underflow(walk: Walk, device: torch.device, norm: float) -> None:
    """bf16 keys of one norm around a large common part: exp(scale (<k_j, k_l> - |k|^2)) is zero in float32 for all l.

    Shifted by its largest term, each row still says which sign works against the sum.
    """
    generator = torch.Generator().manual_seed(0)
    _, v, slots = blocks(device, 100, 64, torch.bfloat16, missing=0.1)
    k = torch.nn.functional.normalize(torch.randn(v.shape, generator=generator), dim=-1) * norm
    k = (k + 12 * torch.randn(64, generator=generator)).to(device, torch.bfloat16)
    place = slots[0, 0, 0].cpu()
    at = place[place >= 0]
    keys, values = (x[0, 0].cpu()[at].double() for x in (k, v))
    exponent = 0.125 * (keys - keys.mean(0)) @ (keys - keys.mean(0)).T
    earlier = exponent.masked_fill(torch.ones_like(exponent).triu().bool(), float("-inf"))
    assert (earlier.amax(-1) - exponent.diagonal())[1:].max() < -90, "float32 ends at exp(-88), with denormals at -104"
    g = (exponent - earlier.amax(-1, keepdim=True)).tril(-1).exp() * (values @ values.T + 0.1)
    g[0] = 0.0
    signs = walk(k, v, slots, 0.125, state=5, walk="greedy", constant=0.1).signs[0, 0, 0].cpu()[place >= 0]
    assert_follows_the_rule(signs, g, draws(place, 5, 0, 0)[place >= 0], "greedy", 1.0, rounding=0.02)


def test_ids_that_differ_in_any_of_64_bits_have_their_own_draws(walk: Walk, device: torch.device) -> None:
    """Zero values make every sign a coin: 100 coins of two blocks agree in 50 +- 5 places, not in all."""
    k, v, slots = blocks(device, 100)
    slots = slots.expand(1, 1, 5, 100)
    ids = torch.tensor([[[5, 5 + (1 << 32), 5 + (1 << 38), 5 + (1 << 60), 5 + (1 << 31)]]], device=device)
    signs = walk(k, torch.zeros_like(v), slots, 0.25, state=3, ids=ids).signs[0, 0].cpu()
    for one in range(5):
        for other in range(one):
            assert 25 < int((signs[one] == signs[other]).sum()) < 75


def test_missing_places_change_nothing(walk: Walk, device: torch.device) -> None:
    """Neither the mean nor a sum sees a missing place: the walk over the rest is the same, up to its first coin."""
    k, v, slots = blocks(device, 50, seed=3)
    gaps = torch.full((1, 1, 1, 81), -1, device=device)
    places = torch.randperm(81, generator=torch.Generator().manual_seed(0))[:50].sort().values.to(device)
    gaps[0, 0, 0, places] = slots[0, 0, 0]
    plain = walk(k, v, slots, 0.25).signs[0, 0, 0]
    spread = walk(k, v, gaps, 0.25).signs[0, 0, 0, places]
    assert torch.equal(plain * plain[0], spread * spread[0])


def test_centred_walks_ignore_a_common_shift_of_the_keys(walk: Walk, device: torch.device) -> None:
    k, v, slots = blocks(device, 60)
    moved = k + torch.randn(16, generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(walk(k, v, slots, 0.25).signs, walk(moved, v, slots, 0.25).signs)
    assert not torch.equal(walk(k, v, slots, 0.25, center=False).signs, walk(moved, v, slots, 0.25, center=False).signs)


def test_weights_multiply_values_and_the_constant_is_a_value_coordinate(walk: Walk, device: torch.device) -> None:
    k, v, slots = blocks(device, 60, size=32)
    weights = 2.0 ** torch.randint(0, 3, k.shape[:3], generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(walk(k, v, slots, 0.2, weights=weights).signs, walk(k, v * weights[..., None], slots, 0.2).signs)
    more = torch.cat([v, torch.full((*v.shape[:3], 1), 0.25, device=device)], -1)
    assert torch.equal(walk(k, v, slots, 0.2, constant=0.0625).signs, walk(k, more, slots, 0.2).signs)


def test_a_large_constant_balances_the_counts(walk: Walk, device: torch.device) -> None:
    k, v, slots = blocks(device, 128, number=2)
    imbalance = {c: walk(k * 0.1, v, slots, 0.25, constant=c).signs.sum(-1).abs().max() for c in (0.0, 1e4)}
    assert imbalance[1e4] <= 2 < imbalance[0.0]


def test_failures_are_reported_and_raised(device: torch.device) -> None:
    k, v, slots = blocks(device, 64)
    v = v * 0 + 1
    with pytest.raises(RuntimeError, match=r"c=0.01.*larger c"):
        ops.balance_walk(k * 0.1, v, slots, 0.25, walk="random", c=0.01, on_fail="raise")
    ops.balance_walk(k * 0.1, v, slots, 0.25, walk="random", c=64.0, on_fail="raise")
    ops.balance_walk(k * 0.1, v, slots, 0.25, walk="random", c=0.01)


def test_bad_arguments_name_the_choices(device: torch.device) -> None:
    k, v, slots = blocks(device, 8)
    for options, message in (
        (dict(walk="lazy"), "greedy, random"),
        (dict(c=0.0), "positive"),
        (dict(on_fail="retry"), "clip, raise"),
        (dict(weights=torch.ones(1, 1, 3)), r"weights must be \[1, 1, 13\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.balance_walk(k, v, slots, 0.25, **options)
    with pytest.raises(ValueError, match="int64"):
        ops.balance_walk(k, v, slots.int(), 0.25)
    with pytest.raises(ValueError, match="slots, size"):
        ops.balance_walk(k[0], v, slots, 0.25)
