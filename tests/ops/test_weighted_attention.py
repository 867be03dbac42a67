"""Weighted attention, reference and kernel alike; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvsketch import ops
from kvsketch.ops.weighted_attention import reference
from tests.ops.formula import Attend, by_kernel, by_reference, direct, make_inputs, needs_triton, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
NEG_INF = float("-inf")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


SHAPES = [  # slots, group, size, dtype
    (1, 1, 64, torch.float32),
    (63, 2, 80, torch.float32),
    (100, 4, 64, torch.bfloat16),
    (300, 7, 64, torch.float32),
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
    inputs = make_inputs(device, slots=50, value_slots=43, kv_heads=1)
    result = by_kernel(*inputs.weighted, block_n=block_n, splits=splits, warps=2, stages=3)
    expected = by_reference(*inputs.weighted)
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
    whole = by_reference(*inputs.weighted, bias=bias, return_logits=True)
    monkeypatch.setattr(reference, "MAX_LOGITS", 4 * 30 * 3)
    blocks = by_reference(*inputs.weighted, bias=bias, return_logits=True)
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnTheGpu:
    @pytest.mark.parametrize(("batch", "slots"), [(1, 1000), (8, 2048), (3, 32768)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_default_plan(self, device: torch.device, batch: int, slots: int, dtype: torch.dtype) -> None:
        inputs = make_inputs(device, slots, group=4, size=128, dtype=dtype, batch=batch, kv_heads=8)
        for arguments in (inputs.plain, inputs.weighted):
            expected = by_reference(*arguments).out
            assert relative_error(ops.weighted_attention(*arguments), expected) < TOLERANCE[dtype]

    @pytest.mark.parametrize("overlap", [False, True])
    def test_graph_replay_follows_lengths_and_contents(self, device: torch.device, overlap: bool) -> None:
        if overlap and torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("overlapping launches need a Hopper GPU")
        inputs = make_inputs(device, slots=1500, group=4, size=128, dtype=torch.bfloat16, batch=2)
        lengths = torch.full((2, 2), 1500, dtype=torch.int32, device=device)
        launch = {"block_n": 64, "splits": 8, "stages": 3, "overlap": overlap}
        by_kernel(*inputs.weighted, lengths=lengths, **launch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = by_kernel(*inputs.weighted, lengths=lengths, **launch).out
        for seed, length in enumerate((1500, 3, 777)):
            fresh = make_inputs(device, slots=1500, group=4, size=128, dtype=torch.bfloat16, batch=2, seed=seed)
            for name in ("q", "k", "v", "log_num", "log_den"):
                getattr(inputs, name).copy_(getattr(fresh, name))
            lengths.fill_(length)
            graph.replay()
            expected = by_reference(*fresh.weighted, lengths=lengths).out
            assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]
