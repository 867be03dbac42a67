"""Weighted attention, reference and kernel alike; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from formula import Attend, direct, make_inputs, needs_triton, relative_error

from kvsketch import ops
from kvsketch.ops.weighted_attention import reference
from kvsketch.ops.weighted_attention.plan import Device, Plan, best_splits, plan

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
NEG_INF = float("-inf")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


SHAPES = [  # slots, group, size, dtype
    (1, 1, 64, torch.float32),
    (63, 2, 80, torch.float32),
    (100, 4, 64, torch.bfloat16),
    (1000, 7, 64, torch.float32),
    (63, 8, 256, torch.bfloat16),
    (100, 7, 80, torch.float16),
    (1, 8, 128, torch.bfloat16),
    (100, 1, 256, torch.float32),
    (64, 4, 128, torch.float16),
    (63, 4, 96, torch.bfloat16),
]


@pytest.mark.parametrize(("slots", "group", "size", "dtype"), SHAPES)
def test_matches_the_formula(
    attend: Attend, device: torch.device, slots: int, group: int, size: int, dtype: torch.dtype
) -> None:
    inputs = make_inputs(device, slots, group, size, dtype, kv_heads=1, batch=2)
    result, expected = attend(*inputs.weighted), direct(*inputs.weighted)
    assert result.out.dtype == dtype
    assert result.out.shape == expected.out.shape
    assert relative_error(result.out, expected.out) < TOLERANCE[dtype]
    for actual, exact in ((result.log_sum_num, expected.log_sum_num), (result.log_sum_den, expected.log_sum_den)):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_without_weights_is_sdpa(attend: Attend, device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    inputs = make_inputs(device, slots=100, group=4, size=64, dtype=dtype)
    expected = F.scaled_dot_product_attention(*inputs.plain[:3], scale=inputs.scale, enable_gqa=True)
    torch.testing.assert_close(attend(*inputs.plain).out, expected, atol=tolerance, rtol=tolerance)


def test_integer_weights_are_copies(attend: Attend, device: torch.device) -> None:
    inputs = make_inputs(device, slots=20)
    copies = torch.randint(1, 5, (20,), generator=torch.Generator().manual_seed(1)).to(device)
    log_copies = copies.float().log().expand(1, 2, 20)
    tied = attend(inputs.q, inputs.k, inputs.v, log_copies, log_copies, inputs.scale).out
    separate = attend(inputs.q, inputs.k, inputs.v, log_copies, log_copies.clone(), inputs.scale).out
    k, v = (tensor.repeat_interleave(copies, 2) for tensor in (inputs.k, inputs.v))
    copied = attend(inputs.q, k, v, None, None, inputs.scale).out
    torch.testing.assert_close(tied, copied, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(separate, copied, atol=1e-6, rtol=1e-5)


def test_common_shift_cancels_and_numerator_shift_scales(attend: Attend, device: torch.device) -> None:
    inputs = make_inputs(device)
    q, k, v, num, den, scale = inputs.weighted
    out = attend(q, k, v, num, den, scale).out
    torch.testing.assert_close(attend(q, k, v, num + 30, den + 30, scale).out, out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(attend(q, k, v, num + 1.5, den, scale).out, out * 4.4816890703, atol=1e-5, rtol=1e-5)


def test_order_of_slots_is_irrelevant(attend: Attend, device: torch.device) -> None:
    inputs = make_inputs(device, slots=70)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3)).to(device)
    q, k, v, num, den, scale = inputs.weighted
    permuted = attend(q, k[:, :, order], v[:, :, order], num[:, :, order], den[:, :, order], scale).out
    torch.testing.assert_close(permuted, attend(*inputs.weighted).out, atol=1e-5, rtol=1e-5)


@needs_triton
@pytest.mark.parametrize("splits", [1, 3, 4, 9])
@pytest.mark.parametrize("block_n", [16, 64])
def test_every_plan_gives_the_same(device: torch.device, splits: int, block_n: int) -> None:
    from kvsketch.ops.weighted_attention import kernel

    inputs = make_inputs(device, slots=50, value_slots=43, kv_heads=1)
    launch = Plan(block_n, splits, warps=2, stages=3, overlap=False)
    result = kernel.weighted_attention(*inputs.weighted, launch=launch)
    expected = reference.weighted_attention(*inputs.weighted)
    for actual, exact in zip(result[:3], expected[:3], strict=True):
        torch.testing.assert_close(actual, exact, atol=1e-5, rtol=1e-5)


def test_slots_of_weight_zero_are_inert(attend: Attend, device: torch.device) -> None:
    inputs = make_inputs(device, slots=70)
    q, k, v, num, den, scale = inputs.weighted
    keep = torch.rand(70, generator=torch.Generator().manual_seed(4)).to(device) < 0.4
    keep[:33] = False  # a whole tile without weight
    num, den = (weights.masked_fill(~keep, NEG_INF) for weights in (num, den))
    expected = attend(q, k[:, :, keep], v[:, :, keep], num[:, :, keep], den[:, :, keep], scale)
    for actual, exact in zip(attend(q, k, v, num, den, scale)[:3], expected[:3], strict=True):
        torch.testing.assert_close(actual, exact, atol=1e-5, rtol=1e-5)


def test_numerator_and_denominator_may_use_different_slots(attend: Attend, device: torch.device) -> None:
    inputs = make_inputs(device, slots=64)
    inputs.log_num[:, :, 40:] = NEG_INF
    inputs.log_den[:, :, :40] = NEG_INF
    assert relative_error(attend(*inputs.weighted).out, direct(*inputs.weighted).out) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sign", [1, -1])
def test_huge_logits_stay_finite(attend: Attend, device: torch.device, dtype: torch.dtype, sign: int) -> None:
    inputs = make_inputs(device, slots=50, dtype=dtype, size=64)
    q, k = inputs.q.sign() * sign, inputs.k.sign() * torch.linspace(0.5, 1, 50, device=device, dtype=dtype)[:, None]
    k[:, :, 7] = q[:, ::2, 0]
    k[:, :, 8] = -q[:, ::2, 0]
    scale = 1e4 / 64
    logits = scale * torch.einsum("bhnd,bhsd->bhns", q.double(), k.double().repeat_interleave(2, 1))
    assert logits.max() >= 9.99e3
    assert logits.min() <= -9.99e3
    expected = torch.softmax(logits, -1) @ inputs.v.double().repeat_interleave(2, 1)
    for weights in (None, torch.zeros_like(inputs.log_num)):
        result = attend(q, k, inputs.v, weights, None, scale)
        assert all(tensor.isfinite().all() for tensor in result[:3])
        torch.testing.assert_close(result.out.double(), expected, atol=2e-2, rtol=2e-2)


def test_large_weights_do_not_overflow(attend: Attend, device: torch.device) -> None:
    inputs = make_inputs(device)
    q, k, v, num, den, scale = inputs.weighted
    expected = attend(q, k, v, num, den, scale).out
    torch.testing.assert_close(attend(q, k, v, num + 5e3, den + 5e3, scale).out, expected, atol=1e-2, rtol=1e-2)
    vanishing = attend(q, k, v, num - 5e3, den + 5e3, scale).out
    assert torch.equal(vanishing, torch.zeros_like(vanishing))


@pytest.mark.parametrize("group", [1, 2, 7])
def test_query_heads_read_their_own_kv_head(attend: Attend, device: torch.device, group: int) -> None:
    inputs = make_inputs(device, group=group, kv_heads=3, slots=20)
    inputs.v.copy_(torch.arange(3, device=device).view(1, 3, 1, 1).expand_as(inputs.v))
    expected = torch.arange(3, device=device).repeat_interleave(group).float().view(1, -1, 1, 1)
    out = attend(*inputs.plain).out
    torch.testing.assert_close(out, expected.expand_as(out))


@pytest.mark.parametrize("value_slots", [0, 1, 31, 32, 50])
def test_later_slots_may_carry_a_key_only(attend: Attend, device: torch.device, value_slots: int) -> None:
    inputs = make_inputs(device, slots=70, value_slots=value_slots)
    if value_slots == 0 and attend is not reference.weighted_attention:
        pytest.skip("the kernel is never given a cache without values")
    for arguments in (inputs.weighted, inputs.plain):
        result, expected = attend(*arguments), direct(*arguments)
        torch.testing.assert_close(result.out.double(), expected.out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(result.log_sum_den.double(), expected.log_sum_den, atol=1e-5, rtol=1e-5)


def test_numerator_weights_of_key_only_slots_are_ignored(attend: Attend, device: torch.device) -> None:
    inputs = make_inputs(device, slots=70, value_slots=45)
    expected = attend(*inputs.weighted).out
    inputs.log_num[:, :, 45:] = float("nan")
    torch.testing.assert_close(attend(*inputs.weighted).out, expected)


@pytest.mark.parametrize("empty", ["numerator", "denominator", "both", "tied"])
def test_empty_sums_give_zero(attend: Attend, device: torch.device, empty: str) -> None:
    inputs = make_inputs(device)
    none = torch.full_like(inputs.log_num, NEG_INF)
    num = inputs.log_num if empty == "denominator" else none
    den = inputs.log_den if empty == "numerator" else none if empty == "tied" else none.clone()
    result = attend(inputs.q, inputs.k, inputs.v, num, den, inputs.scale)
    assert torch.equal(result.out, torch.zeros_like(result.out))
    assert bool((result.log_sum_num == NEG_INF).all()) == (empty != "denominator")
    assert bool((result.log_sum_den == NEG_INF).all()) == (empty != "numerator")


def test_one_empty_head_leaves_the_others_alone(attend: Attend, device: torch.device) -> None:
    inputs = make_inputs(device)
    expected = attend(*inputs.weighted).out
    inputs.log_num[:, 0] = inputs.log_den[:, 0] = NEG_INF
    out = attend(*inputs.weighted).out
    assert torch.equal(out[:, :2], torch.zeros_like(out[:, :2]))
    torch.testing.assert_close(out[:, 2:], expected[:, 2:])


def test_views_of_larger_buffers(attend: Attend, device: torch.device) -> None:
    inputs = make_inputs(device, slots=37, queries=2, size=64, value_size=48, batch=2)
    k, v = (
        torch.full((2, 2, 90, 64), float("nan"), device=device),
        torch.full((2, 90, 2, 48), float("nan"), device=device),
    )
    weights = torch.full((2, 2, 2, 90), float("nan"), device=device)
    k[:, :, 5:42], v[:, 5:42] = inputs.k, inputs.v.transpose(1, 2)
    weights[0, :, :, 5:42], weights[1, :, :, 5:42] = inputs.log_num, inputs.log_den
    q = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    views = q, k[:, :, 5:42], v[:, 5:42].transpose(1, 2), weights[0, :, :, 5:42], weights[1, :, :, 5:42]
    assert not any(view.is_contiguous() for view in views)
    assert relative_error(attend(*views, inputs.scale).out, direct(*inputs.weighted).out) < 1e-5


def test_last_dimension_may_be_strided(attend: Attend, device: torch.device) -> None:
    inputs = make_inputs(device, slots=33)
    q, k, v = (tensor.mT.contiguous().mT for tensor in (inputs.q, inputs.k, inputs.v))
    strided = torch.stack([inputs.log_num, inputs.log_num], -1)[..., 0]
    result = attend(q, k, v, strided, inputs.log_den, inputs.scale).out
    assert relative_error(result, direct(*inputs.weighted).out) < 1e-5


@pytest.mark.parametrize("value_slots", [70, 40])
def test_slots_beyond_the_lengths_are_not_read(attend: Attend, device: torch.device, value_slots: int) -> None:
    inputs = make_inputs(device, slots=70, batch=2, value_slots=value_slots)
    lengths = torch.tensor([[70, 41], [0, 1]], dtype=torch.int32, device=device)
    expected = direct(*inputs.weighted, lengths=lengths)
    hidden = torch.arange(70, device=device) >= lengths[..., None]
    for tensor in (inputs.k, inputs.v, inputs.log_num, inputs.log_den):
        tensor[hidden[:, :, : tensor.shape[2]]] = float("nan")
    result = attend(*inputs.weighted, lengths=lengths, return_logits=True)
    torch.testing.assert_close(result.out.double(), expected.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result.log_sum_den.double(), expected.log_sum_den, atol=1e-5, rtol=1e-5)
    assert result.logits is not None
    shown = ~hidden.repeat_interleave(2, 1)[:, :, None]
    torch.testing.assert_close(result.logits[shown].double(), expected.logits[shown], atol=1e-5, rtol=1e-5)
    assert bool((result.logits[~shown] == NEG_INF).all())


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kind", ["bool", "bfloat16"])
def test_bias(attend: Attend, device: torch.device, heads: int, queries: int, kind: str) -> None:
    inputs = make_inputs(device, slots=40, group=3, batch=2, queries=3)
    generator = torch.Generator().manual_seed(5)
    shape = (2 if heads > 1 else 1, heads, queries, 40)
    visible = (torch.rand(shape, generator=generator) < 0.7).to(device)
    added = torch.randn(shape, generator=generator).to(device)
    if kind == "bool":
        bias, exact = visible, visible
    else:
        bias = added.to(getattr(torch, kind))
        exact = bias.masked_fill(~visible, NEG_INF)
        bias = bias.masked_fill(~visible, torch.finfo(bias.dtype).min)
    result, expected = attend(*inputs.weighted, bias=bias), direct(*inputs.weighted, bias=exact)
    assert relative_error(result.out, expected.out) < 1e-5


@pytest.mark.parametrize("hidden", ["finfo", "bool", "inf"])
def test_a_row_that_sees_nothing_is_zero(attend: Attend, device: torch.device, hidden: str) -> None:
    inputs = make_inputs(device, batch=2)
    if hidden == "bool":
        bias = torch.ones(2, 1, 1, 40, dtype=torch.bool, device=device)
        bias[1] = False
    else:
        bias = torch.zeros(2, 1, 1, 40, device=device)
        bias[1] = torch.finfo(torch.float32).min if hidden == "finfo" else NEG_INF
    out = attend(*inputs.plain, bias=bias).out
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert relative_error(out[0], direct(*inputs.plain).out[0]) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("splits", [1, 2])
def test_sink_logits(attend: Attend, device: torch.device, tied: bool, splits: int) -> None:
    inputs = make_inputs(device, slots=40)
    sinks = torch.tensor([0.5, NEG_INF, 30.0, -3.0], device=device)
    arguments = inputs.plain if tied else inputs.weighted
    options = {} if attend is reference.weighted_attention else {"launch": Plan(32, splits, 4, 2, overlap=False)}
    result, expected = attend(*arguments, sink_logits=sinks, **options), direct(*arguments, sink_logits=sinks)
    assert relative_error(result.out, expected.out) < 1e-5
    torch.testing.assert_close(result.log_sum_den.double(), expected.log_sum_den, atol=1e-5, rtol=1e-5)


def test_softcap_acts_before_the_weights(attend: Attend, device: torch.device) -> None:
    inputs = make_inputs(device)
    q, k, v, num, den, _ = inputs.weighted
    result, expected = attend(q, k, v, num, den, 2.0, softcap=3.0), direct(q, k, v, num, den, 2.0, softcap=3.0)
    assert relative_error(result.out, expected.out) < 1e-5
    saturated = attend(q, k, v, num, den, 1e4, softcap=3.0)
    assert saturated.out.isfinite().all()


@pytest.mark.parametrize("value_slots", [40, 21])
def test_logits(attend: Attend, device: torch.device, value_slots: int) -> None:
    inputs = make_inputs(device, slots=40, value_slots=value_slots, queries=2)
    visible = torch.rand(1, 4, 1, 40, generator=torch.Generator().manual_seed(6)).to(device) < 0.5
    options = {"softcap": 4.0, "bias": visible}
    result, expected = attend(*inputs.weighted, return_logits=True, **options), direct(*inputs.weighted, **options)
    assert result.logits is not None
    assert result.logits.dtype == torch.float32
    torch.testing.assert_close(result.logits.double(), expected.logits, atol=1e-5, rtol=1e-5)


def test_everything_at_once(attend: Attend, device: torch.device) -> None:
    inputs = make_inputs(device, slots=75, group=3, size=24, value_size=40, value_slots=50, batch=2, queries=2)
    options = {
        "bias": torch.randn(2, 6, 1, 75, generator=torch.Generator().manual_seed(7)).to(device),
        "softcap": 2.0,
        "sink_logits": torch.linspace(-1, 1, 6, device=device),
        "lengths": torch.tensor([[75, 60], [50, 7]], device=device),
    }
    result, expected = attend(*inputs.weighted, **options), direct(*inputs.weighted, **options)
    for actual, exact in zip(result[:3], expected[:3], strict=True):
        assert relative_error(actual, exact) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_queries(attend: Attend, device: torch.device, dtype: torch.dtype) -> None:
    inputs = make_inputs(device, slots=40, group=3, queries=13, kv_heads=1, dtype=dtype)
    causal = torch.ones(13, 40, dtype=torch.bool, device=device).tril(27).view(1, 1, 13, 40)
    result, expected = attend(*inputs.weighted, bias=causal), direct(*inputs.weighted, bias=causal)
    assert relative_error(result.out, expected.out) < TOLERANCE[dtype]


def test_states_of_two_halves_merge_to_the_whole(attend: Attend, device: torch.device) -> None:
    inputs = make_inputs(device, slots=60)
    q, k, v, num, den, scale = inputs.weighted
    whole = attend(*inputs.weighted)
    halves = [
        attend(q, k[:, :, part], v[:, :, part], num[:, :, part], den[:, :, part], scale)
        for part in (slice(0, 25), slice(25, 60))
    ]
    log_den = torch.logaddexp(halves[0].log_sum_den, halves[1].log_sum_den)
    out = sum(half.out * (half.log_sum_den - log_den).exp()[..., None] for half in halves)
    torch.testing.assert_close(log_den, whole.log_sum_den, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, whole.out, atol=1e-5, rtol=1e-5)


def test_reference_takes_queries_in_blocks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    inputs = make_inputs(device, slots=30, queries=11)
    bias = torch.randn(1, 4, 11, 30, generator=torch.Generator().manual_seed(8)).to(device)
    whole = reference.weighted_attention(*inputs.weighted, bias=bias, return_logits=True)
    monkeypatch.setattr(reference, "MAX_LOGITS", 4 * 30 * 3)
    blocks = reference.weighted_attention(*inputs.weighted, bias=bias, return_logits=True)
    for actual, exact in zip(blocks, whole, strict=True):
        torch.testing.assert_close(actual, exact)


def test_float64_is_computed_in_float64(device: torch.device) -> None:
    inputs = make_inputs(device, dtype=torch.float64)
    out = ops.weighted_attention(*inputs.weighted)
    assert out.dtype == torch.float64
    assert relative_error(out, direct(*inputs.weighted).out) < 1e-13


def test_no_slots_and_no_queries(device: torch.device) -> None:
    inputs = make_inputs(device, slots=5)
    out, (log_num, log_den) = ops.weighted_attention(
        inputs.q, inputs.k[:, :, :0], inputs.v[:, :, :0], None, None, 1.0, return_state=True
    )
    assert torch.equal(out, torch.zeros_like(inputs.q))
    assert bool((log_num == NEG_INF).all())
    assert bool((log_den == NEG_INF).all())
    assert ops.weighted_attention(inputs.q[:, :, :0], inputs.k, inputs.v, None, None, 1.0).shape == (1, 4, 0, 16)


def test_what_is_returned(device: torch.device) -> None:
    inputs = make_inputs(device)
    out = ops.weighted_attention(*inputs.weighted)
    with_state, state = ops.weighted_attention(*inputs.weighted, return_state=True)
    both, same_state, logits = ops.weighted_attention(*inputs.weighted, return_state=True, return_logits=True)
    assert torch.equal(out, with_state)
    assert torch.equal(out, both)
    assert torch.equal(state[1], same_state[1])
    assert logits.shape == (1, 4, 1, 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 3, 1, 16)}, "not a multiple of the 2 heads"),
        ({"q": torch.zeros(4, 1, 16)}, "q must have 4 dimensions"),
        ({"k": torch.zeros(1, 2, 40, 8)}, r"k must be \[1, heads, slots, 16\]"),
        ({"v": torch.zeros(1, 2, 41, 16)}, r"v must be \[1, 2, at most 40, size\]"),
        ({"v": torch.zeros(1, 2, 40, 16, dtype=torch.float16)}, "must share one dtype"),
        ({"log_num": torch.zeros(1, 4, 40)}, r"log_num must be \[1, 2, 40\]"),
        ({"log_den": torch.zeros(1, 2, 39)}, r"log_den must be \[1, 2, 40\]"),
        ({"bias": torch.zeros(1, 3, 1, 40)}, r"bias must be \[1 or 1, 1 or 2 or 4, 1 or 1, 40\]"),
        ({"bias": torch.zeros(1, 1, 1, 40, dtype=torch.int64)}, "bias must be boolean"),
        ({"lengths": torch.zeros(1)}, r"lengths must be \[1, 2\]"),
        ({"sink_logits": torch.zeros(2)}, r"sink_logits must be \[4\]"),
        ({"softcap": 0.0}, "softcap must be positive, got 0.0"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    inputs = make_inputs(torch.device("cpu"))
    arguments: dict[str, Any] = {name: getattr(inputs, name) for name in ("q", "k", "v", "log_num", "log_den", "scale")}
    with pytest.raises(ValueError, match=message):
        ops.weighted_attention(**(arguments | change))


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.delenv("KVSKETCH_KERNELS", raising=False)
    assert ops.kernel_for("weighted_attention", cpu) is None
    monkeypatch.setenv("KVSKETCH_KERNELS", "reference")
    assert ops.kernel_for("weighted_attention", cuda) is None
    monkeypatch.setenv("KVSKETCH_KERNELS", "fast")
    with pytest.raises(ValueError, match="KVSKETCH_KERNELS='fast' is not one of auto, reference"):
        ops.kernel_for("weighted_attention", cpu)


@needs_triton
def test_dispatch_finds_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsketch.ops.weighted_attention import kernel

    monkeypatch.setenv("KVSKETCH_KERNELS", "auto")
    assert ops.kernel_for("weighted_attention", torch.device("cuda")) is kernel
    inputs = make_inputs(torch.device("cpu"))
    assert kernel.supported(inputs.q, inputs.k, inputs.v)
    assert not kernel.supported(inputs.q.double(), inputs.k, inputs.v)
    wide = torch.zeros(1, 2, 1, 512)
    assert not kernel.supported(wide, wide, wide)


def test_missing_triton_warns_once(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delenv("KVSKETCH_KERNELS", raising=False)
    ops._load_kernel.cache_clear()
    try:
        for _ in range(2):
            assert ops.kernel_for("weighted_attention", torch.device("cuda")) is None
    finally:
        ops._load_kernel.cache_clear()
    assert [str(warning.message) for warning in recwarn if "Triton cannot be imported" in str(warning.message)] != []
    assert len(recwarn) == 1


@pytest.mark.parametrize("heads", [1, 8, 64, 96, 256])
@pytest.mark.parametrize("slots", [1, 100, 2048, 32768])
@pytest.mark.parametrize("slot_bytes", [64, 512, 2048])
def test_plans_are_launchable(heads: int, slots: int, slot_bytes: int) -> None:
    chosen = plan(heads, slots, slot_bytes, Device(multiprocessors=132, shared_bytes=227 * 1024, overlap=True))
    assert chosen.block_n in (16, 32, 64, 128)
    assert 1 <= chosen.splits <= max(1, -(-slots // chosen.block_n))
    assert (chosen.stages - 1) * chosen.block_n * slot_bytes <= 128 * 1024


def test_splits_fill_the_device_without_a_tail() -> None:
    assert best_splits(heads=256, tiles=512, resident=264) == 1
    assert best_splits(heads=8, tiles=512, resident=264) in (32, 33)
    waves = best_splits(heads=96, tiles=512, resident=264) * 96 / 264
    assert waves / -(-waves // 1) > 0.9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnTheGpu:
    @pytest.mark.parametrize(("batch", "slots"), [(1, 1000), (8, 2048), (3, 32768)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_default_plan(self, device: torch.device, batch: int, slots: int, dtype: torch.dtype) -> None:
        inputs = make_inputs(device, slots, group=4, size=128, dtype=dtype, batch=batch, kv_heads=8)
        for arguments in (inputs.plain, inputs.weighted):
            expected = reference.weighted_attention(*arguments).out
            assert relative_error(ops.weighted_attention(*arguments), expected) < TOLERANCE[dtype]

    @pytest.mark.parametrize("overlap", [False, True])
    def test_graph_replay_follows_lengths_and_contents(self, device: torch.device, overlap: bool) -> None:
        from kvsketch.ops.weighted_attention import kernel

        if overlap and torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("overlapping launches need a Hopper GPU")
        inputs = make_inputs(device, slots=1500, group=4, size=128, dtype=torch.bfloat16, batch=2)
        lengths = torch.full((2, 2), 1500, dtype=torch.int32, device=device)
        launch = Plan(64, 8, 4, 3, overlap)
        kernel.weighted_attention(*inputs.weighted, lengths=lengths, launch=launch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernel.weighted_attention(*inputs.weighted, lengths=lengths, launch=launch).out
        for seed, length in enumerate((1500, 3, 777)):
            fresh = make_inputs(device, slots=1500, group=4, size=128, dtype=torch.bfloat16, batch=2, seed=seed)
            for name in ("q", "k", "v", "log_num", "log_den"):
                getattr(inputs, name).copy_(getattr(fresh, name))
            lengths.fill_(length)
            graph.replay()
            expected = reference.weighted_attention(*fresh.weighted, lengths=lengths).out
            assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]
