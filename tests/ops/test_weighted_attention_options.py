"""Key-only slots, empty sums, views, lengths, bias, sinks, softcap and logits, by reference and kernel alike."""

from __future__ import annotations

import pytest
import torch

from tests.ops.formula import Attend, by_kernel, direct, make_inputs, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
NEG_INF = float("-inf")


@pytest.mark.parametrize("value_slots", [0, 1, 31, 32, 50])
def test_later_slots_may_carry_a_key_only(attend: Attend, device: torch.device, value_slots: int) -> None:
    inputs = make_inputs(device, slots=70, value_slots=value_slots)
    if value_slots == 0 and attend is by_kernel:
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


@pytest.mark.parametrize(
    ("heads", "queries", "kind"), [(1, 1, "bool"), (2, 3, "bfloat16"), (6, 1, "bfloat16"), (6, 3, "bool")]
)
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


@pytest.mark.parametrize("hidden", ["float16", "float32", "bool", "inf"])
def test_a_row_that_sees_nothing_is_zero(attend: Attend, device: torch.device, hidden: str) -> None:
    inputs = make_inputs(device, batch=2)
    if hidden == "bool":
        bias = torch.ones(2, 1, 1, 40, dtype=torch.bool, device=device)
        bias[1] = False
    else:
        dtype = torch.float32 if hidden == "inf" else getattr(torch, hidden)
        bias = torch.zeros(2, 1, 1, 40, device=device, dtype=dtype)
        bias[1] = NEG_INF if hidden == "inf" else torch.finfo(dtype).min
    out = attend(*inputs.plain, bias=bias).out
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert relative_error(out[0], direct(*inputs.plain).out[0]) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("splits", [1, 2])
def test_sink_logits(attend: Attend, device: torch.device, tied: bool, splits: int) -> None:
    inputs = make_inputs(device, slots=40)
    sinks = torch.tensor([0.5, NEG_INF, 30.0, -3.0], device=device)
    arguments = inputs.plain if tied else inputs.weighted
    options = {"splits": splits} if attend is by_kernel else {}
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
    assert relative_error(result.out, expected.out) < (1e-5 if dtype == torch.float32 else 1e-2)
