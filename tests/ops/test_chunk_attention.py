"""Chunk attention, reference and kernel alike; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.chunk_attention import Arguments, Past, reference
from kvsketch.ops.common.device import TileLaunch
from kvsketch.ops.weighted_attention import Attended
from tests.ops.formula import needs_triton, poison, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
NEG_INF = float("-inf")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
Attend = Callable[[Arguments], Attended]


@pytest.fixture(params=["reference", pytest.param("kernel", marks=needs_triton)])
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attend:
    """Chunk attention by one implementation, whose new buffers hold NaN until they are written."""
    poison(monkeypatch)
    if request.param == "reference":
        return reference.chunk_attention
    from kvsketch.ops.chunk_attention import kernel

    def in_small_tiles(call: Arguments) -> Attended:
        assert kernel.supported(call)
        tile = 16 if call.q.shape[2] * call.k.shape[2] < 1000 else 32 if call.q.shape[2] < 500 else 128
        return kernel.chunk_attention(call, TileLaunch(2 * tile, tile, 4, 2))

    return in_small_tiles


def make_call(
    device: torch.device,
    queries: int,
    before: int = 0,
    slots: int = 0,
    group: int = 2,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    kv_heads: int = 1,
    keys_only: int = 0,
    tied: bool = False,
    **options: Any,
) -> Arguments:
    generator = torch.Generator().manual_seed(queries + 7 * slots + group)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    heads = (batch, kv_heads)
    q = normal(batch, kv_heads * group, queries, size).to(device, dtype)
    k, v = (normal(*heads, before + queries, size).to(device, dtype) for _ in range(2))
    past = None
    if slots:
        keys = normal(*heads, slots, size).to(device, dtype)
        values = normal(*heads, slots - keys_only, size).to(device, dtype)
        log_num, log_den = (normal(*heads, slots).to(device) for _ in range(2))
        past = Past(keys, values, log_num, log_num if tied else log_den)
    return Arguments(q, k, v, size**-0.5, past, **options)


def direct(call: Arguments) -> Attended:
    """The definition, sum by sum in float64, without any care for overflow."""
    q, k, v, scale, past, hidden, softcap, sink_logits, clip = call
    group = q.shape[1] // k.shape[1]

    def per_query_head(tensor: Tensor) -> Tensor:
        return tensor.double().repeat_interleave(group, 1)

    def exps(keys: Tensor) -> Tensor:
        x = scale * q.double() @ per_query_head(keys).mT
        return (x if softcap is None else softcap * torch.tanh(x / softcap)).exp()

    tokens, queries = k.shape[2], q.shape[2]
    causal = torch.ones(queries, tokens, device=q.device).tril(tokens - queries)
    if hidden is not None:
        causal = causal * (torch.arange(tokens, device=q.device) >= hidden.view(-1, 1, 1, 1))
    own = exps(k) * causal
    num, weight, den = own @ per_query_head(v), own.sum(-1), own.sum(-1)
    if past is not None:
        of_slots, count = exps(past.keys), past.values.shape[2]
        ones = torch.zeros(past.keys.shape[:3], device=q.device)
        log_num, log_den = (per_query_head(ones if w is None else w).exp()[:, :, None] for w in past[2:])
        in_num = (of_slots * log_num)[..., :count]
        num, weight = num + in_num @ per_query_head(past.values), weight + in_num.sum(-1)
        den = den + (of_slots * log_den).sum(-1)
    by = den if clip is None else torch.minimum(torch.maximum(den, weight * torch.e**-clip), weight * torch.e**clip)
    sink = 0.0 if sink_logits is None else sink_logits.double().exp()[:, None]
    out = torch.where((by + sink > 0)[..., None], num / (by + sink)[..., None], 0.0)
    return Attended(out, weight.log(), (den + sink).log())


def assert_close(actual: Attended, expected: Attended, dtype: torch.dtype) -> None:
    assert actual.out.dtype == dtype and actual.out.shape == expected.out.shape
    assert relative_error(actual.out, expected.out) < TOLERANCE[dtype]
    for own, exact in zip(actual[1:3], expected[1:3], strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own.double(), exact, atol=1e-4, rtol=1e-4)


SHAPES = [  # queries, tokens before them, slots, group, size, dtype
    (1, 0, 1, 1, 64, torch.float32),
    (63, 0, 100, 2, 80, torch.float32),
    (100, 0, 63, 4, 64, torch.bfloat16),
    (100, 63, 0, 7, 64, torch.float32),
    (63, 0, 1, 8, 256, torch.bfloat16),
    (33, 100, 40, 7, 80, torch.float16),
    (100, 0, 300, 1, 128, torch.bfloat16),
    (1, 100, 63, 4, 96, torch.bfloat16),
    (257, 0, 0, 1, 16, torch.float32),
]


@pytest.mark.parametrize(
    ("queries", "before", "slots", "group", "size", "dtype", "tied"),
    [*((*shape, number % 2 == 0) for number, shape in enumerate(SHAPES)), (*SHAPES[1], True)],
)
def test_matches_the_formula(
    attend: Attend,
    device: torch.device,
    queries: int,
    before: int,
    slots: int,
    group: int,
    size: int,
    dtype: torch.dtype,
    tied: bool,
) -> None:
    call = make_call(device, queries, before, slots, group, size, dtype, tied=tied)
    assert_close(attend(call), direct(call), dtype)


def test_a_thousand_queries(attend: Attend, device: torch.device) -> None:
    call = make_call(device, 1000, slots=100, keys_only=30, group=1)
    assert_close(attend(call), direct(call), torch.float32)


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0},
    "sinks": {"sink_logits": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "clip": {"clip": 0.2},
    "clip and sinks": {"clip": 0.0, "sink_logits": torch.tensor([0.5, -1.0, 3.0, 0.0])},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("keys_only", [0, 13])
def test_options(attend: Attend, device: torch.device, option: str, keys_only: int) -> None:
    options = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in OPTIONS[option].items()}
    call = make_call(device, 40, 5, 50, kv_heads=2, keys_only=keys_only, **options)
    plain = direct(call._replace(softcap=None, sink_logits=None, clip=None))
    assert relative_error(plain.out, direct(call).out) > 0.01, "an option without effect would test nothing"
    assert_close(attend(call), direct(call), torch.float32)


@pytest.mark.parametrize("slots", [0, 20])
def test_hidden_tokens_are_not_seen(attend: Attend, device: torch.device, slots: int) -> None:
    hidden = torch.tensor([0, 3, 37, 60], device=device)
    call = make_call(device, 45, 15, slots, batch=4, hidden=hidden)
    result = attend(call)
    assert_close(result, direct(call), torch.float32)
    if slots == 0:
        assert (result.out[3] == 0).all() and (result.log_sum_den[3] == NEG_INF).all()
    # Whatever hidden tokens hold, nothing changes.
    other = call._replace(k=call.k.clone(), v=call.v.clone())
    other.k[2, :, :37], other.v[2, :, :37] = 1e4, -1e4
    torch.testing.assert_close(attend(other).out, result.out)


def test_empty_slots_and_strides(attend: Attend, device: torch.device) -> None:
    """Slots of weight zero are inert, and tensors may be slices of larger ones."""
    call = make_call(device, 50, 10, 40, batch=2, kv_heads=2)
    assert call.past is not None
    keep = torch.rand(40, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    num, den = (w.masked_fill(~keep, NEG_INF) for w in call.past[2:])
    wide = [torch.nn.functional.pad(t, (0, 0, 0, 9)) for t in (call.q, call.k, call.v, *call.past[:2])]
    q, k, v, keys, values = (w[:, :, :-9] for w in wide)
    sliced = call._replace(q=q, k=k, v=v, past=Past(keys, values, num, den))
    kept = call._replace(past=Past(*(t[:, :, keep] for t in call.past)))
    for actual, exact in zip(attend(sliced), attend(kept), strict=True):
        torch.testing.assert_close(actual, exact, atol=1e-5, rtol=1e-5)


def test_a_chunk_is_what_its_tokens_are_one_by_one(attend: Attend, device: torch.device) -> None:
    """The definition through the operation that decoding uses."""
    call = make_call(device, 12, 0, 30, batch=2, kv_heads=2)
    assert call.past is not None
    whole = attend(call).out
    weight = torch.zeros(2, 2, 12, device=device)
    for i in range(12):
        seen = slice(0, i + 1)
        keys, values = (
            torch.cat([past, new[:, :, seen]], 2) for past, new in zip(call.past[:2], call[1:3], strict=True)
        )
        num, den = (torch.cat([w, weight[:, :, seen]], 2) for w in call.past[2:])
        one = ops.weighted_attention(call.q[:, :, i : i + 1], keys, values, num, den, call.scale)
        torch.testing.assert_close(whole[:, :, i : i + 1], one, atol=1e-5, rtol=1e-5)


def test_extreme_logits_stay_finite(attend: Attend, device: torch.device) -> None:
    call = make_call(device, 40, 0, 40, size=64, dtype=torch.bfloat16)
    big = call._replace(q=call.q * 100, k=call.k * 100, scale=1.0)
    assert big.past is not None
    result = attend(big._replace(past=big.past._replace(keys=big.past.keys * 100, log_den=big.past.log_num)))
    assert result.out.isfinite().all() and result.log_sum_den.isfinite().all()


BAD: dict[str, tuple[Callable[[Arguments], Arguments], str]] = {
    "more queries than tokens": (lambda c: c._replace(k=c.k[:, :, :3], v=c.v[:, :, :3]), "the 5 queries"),
    "values": (lambda c: c._replace(v=c.v[:, :, 1:]), "same tokens"),
    "hidden": (lambda c: c._replace(hidden=torch.zeros(3)), r"hidden must be \[1\]"),
    "weights": (lambda c: c._replace(past=c.past._replace(log_num=c.past.log_num[..., 1:])), "log_num must be"),
    "sizes": (lambda c: c._replace(past=c.past._replace(values=c.past.values[..., 1:])), "the slots must"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    change, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        ops.chunk_attention(*change(make_call(torch.device("cpu"), 5, 0, 4))[:4], **_options(change))


def _options(change: Callable[[Arguments], Arguments]) -> dict[str, Any]:
    call = change(make_call(torch.device("cpu"), 5, 0, 4))
    return {"past": call.past, "hidden": call.hidden}
