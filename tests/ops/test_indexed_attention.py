"""Indexed attention, reference and kernel alike; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.codec import Codec, CodedSlots, encode
from kvsketch.ops.common.device import Device
from kvsketch.ops.indexed_attention import Arguments, Extra, Spans, reference
from kvsketch.ops.weighted_attention import Attended
from tests.ops.formula import needs_triton, poison, relative_error
from tests.ops.pairwise import Case, pairwise
from tests.ops.recall_inputs import normal

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
Attend = Callable[..., Attended]
NEG_INF = float("-inf")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(params=["reference", pytest.param("kernel", marks=needs_triton)])
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attend:
    """Indexed attention by one implementation, whose new buffers hold NaN until they are written."""
    poison(monkeypatch)
    if request.param == "reference":
        return reference.indexed_attention
    from kvsketch.ops.indexed_attention import kernel

    small = kernel.Plan(block_n=16, list_splits=2, span_splits=1, extra_splits=2, warps=4, stages=2, overlap=False)
    return lambda call: kernel.indexed_attention(call, launch=small)


def make_call(
    device: torch.device,
    group: int = 2,
    rows: int = 21,
    slots: int = 60,
    size: int = 16,
    value_size: int | None = None,
    heads: int = 2,
    batch: int = 2,
    extras: int = 0,
    spans: bool = True,
    shared: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Arguments:
    """Lists of distinct rows of which a tenth is -1, two spans, and extra weights of which a twentieth is -inf.

    With extra slots, every second list has read a part of one of them, some tenth of its rows.
    """
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    value_size, query_heads = value_size or size, heads * group
    lists = heads if shared else query_heads
    listed = torch.rand(batch, lists, slots, generator=generator).argsort(-1)[..., :rows]
    skipped = torch.rand(listed.shape, generator=generator) < 0.1
    skipped[..., rows // 3 : rows // 3 + rows // 8] = False
    listed = listed.masked_fill(skipped, -1)
    edges = torch.tensor([[[3, 7], [slots - 5, slots]], [[0, 0], [slots - 9, slots - 2]]]).repeat(batch, 1, 1)[:batch]
    always = Spans(edges.to(device, torch.int32), 12) if spans else None
    extra = None
    if extras:
        weight = torch.rand(batch, query_heads, extras, generator=generator) * 3
        weight[torch.rand(weight.shape, generator=generator) < 0.05] = NEG_INF
        cut = torch.tensor([extras // 2, rows // 3, rows // 3 + rows // 8]).repeat(batch, lists, 1)
        cut[:, 1::2] = torch.tensor([-1, 0, 0])
        extra = Extra(
            tensor(batch, heads, extras, size), tensor(batch, heads, extras, value_size), weight.to(device),
            cut.to(device, torch.int32),
        )  # fmt: skip
    q, k, v = (
        tensor(batch, query_heads, 1, size),
        tensor(batch, heads, slots, size),
        tensor(batch, heads, slots, value_size),
    )
    return Arguments(q, k, v, listed.to(device, torch.int32), size**-0.5, always, extra)


def direct(call: Arguments) -> Attended:
    """The definition, term by term in float64, without any care for overflow."""
    group = call.q.shape[1] // call.k.shape[1]
    outs, nums, dens = [], [], []
    for b in range(call.q.shape[0]):
        for head in range(call.q.shape[1]):
            q, kv = call.q[b, head, 0].double(), head // group
            slots = [row for row in call.rows[b, head * call.rows.shape[1] // call.q.shape[1]].tolist() if row >= 0]
            if call.spans is not None:
                always = [slot for start, end in call.spans.edges[b].tolist() for slot in range(start, end)]
                slots += always[: call.spans.most]
            k, v = call.k[b, kv, slots].double(), call.v[b, kv, slots].double()
            weights = torch.zeros(len(slots), device=q.device).double()
            if call.extra is not None:
                k = torch.cat([k, call.extra.k[b, kv].double()])
                v = torch.cat([v, call.extra.v[b, kv].double()])
                weights = torch.cat([weights, call.extra.log_weight[b, head].double()])
            s = call.scale * k @ q
            if call.softcap is not None:
                s = call.softcap * torch.tanh(s / call.softcap)
            terms = (s + weights).exp()
            num, apart = terms.sum(), torch.zeros_like(v[0] if len(v) else call.v[0, 0, 0]).double()
            if call.extra is not None and call.extra.cut is not None:
                listed = head * call.rows.shape[1] // call.q.shape[1]
                slot, start, end = call.extra.cut[b, listed].tolist()
                rows = call.rows[b, listed, start:end].tolist()
                if slot >= 0:
                    apart = (call.v[b, kv, rows].double() - call.extra.v[b, kv, slot].double()).sum(0)
                    apart = apart * s[len(s) - call.extra.k.shape[2] + slot].exp()
            den = num if call.sink_logits is None else num + call.sink_logits[head].double().exp()
            outs.append((terms @ v - apart) / den if num > 0 else torch.zeros_like(apart))
            nums.append(num.log())
            dens.append(den.log())
    shape = (*call.q.shape[:2], 1)
    return Attended(torch.stack(outs).view(*shape, -1), torch.stack(nums).view(shape), torch.stack(dens).view(shape))


def check(attend: Attend, call: Arguments) -> None:
    call.check()
    actual, expected = attend(call), direct(call)
    assert actual.out.dtype == call.q.dtype
    assert relative_error(actual.out, expected.out) < TOLERANCE[call.q.dtype]
    for log_sum, exact in ((actual.log_sum_num, expected.log_sum_num), (actual.log_sum_den, expected.log_sum_den)):
        assert log_sum.dtype == torch.float32
        torch.testing.assert_close(log_sum.double(), exact, atol=1e-4, rtol=1e-4)


def test_what_is_not_finite_is_not_hidden(attend: Attend, device: torch.device) -> None:
    """Keys of which some overflow make nothing of the output of those who read them; others are as they were."""
    call = make_call(device)
    wanted = attend(call).out
    keys = call.k.clone()
    keys[1, 0, 55] = float("nan")  # in a span
    result = attend(replace(call, k=keys)).out
    assert result[1, :2].isnan().all()
    assert torch.equal(result[0], wanted[0]) and torch.equal(result[1, 2:], wanted[1, 2:])


@pytest.mark.parametrize(
    ("group", "rows", "size", "extras", "dtype", "shared"),
    [
        (1, 1, 64, 0, torch.float32, False),
        (2, 37, 80, 33, torch.float32, False),
        (4, 50, 64, 5, torch.bfloat16, True),
        (7, 40, 32, 20, torch.float32, True),
        (8, 33, 128, 17, torch.float16, False),
    ],
)
def test_matches_the_formula(
    attend: Attend,
    device: torch.device,
    group: int,
    rows: int,
    size: int,
    extras: int,
    dtype: torch.dtype,
    shared: bool,
) -> None:
    check(attend, make_call(device, group, rows, size=size, extras=extras, dtype=dtype, shared=shared, batch=1))


@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("extras", [0, 9])
def test_softcap_sinks_and_other_value_sizes(attend: Attend, device: torch.device, spans: bool, extras: int) -> None:
    call = make_call(device, group=3, value_size=24, spans=spans, extras=extras)
    sinks = torch.linspace(-2, 4, 6, device=device)
    check(attend, replace(call, softcap=0.7, sink_logits=sinks, scale=2.0))


def test_large_store_of_one_row_each(attend: Attend, device: torch.device) -> None:
    check(attend, make_call(device, rows=1000, slots=1000, batch=1, heads=1, group=1, spans=False))


def test_reading_every_row_is_plain_attention(attend: Attend, device: torch.device) -> None:
    call = make_call(device, rows=60, spans=False)
    rows = torch.stack([torch.randperm(60, generator=torch.Generator().manual_seed(i)) for i in range(8)]).view(
        2, 4, 60
    )
    out = attend(replace(call, rows=rows.int().to(device))).out
    expected = F.scaled_dot_product_attention(call.q, call.k, call.v, scale=call.scale, enable_gqa=True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("softcap", "budgets"), [(None, (1, 38, 60)), (0.7, (25,))])
def test_completion_is_exact_where_clusters_are_points(
    attend: Attend, device: torch.device, softcap: float | None, budgets: tuple[int, ...]
) -> None:
    """Six keys, ten tokens each, whose values differ: whatever is read of them, one slot stands for the rest."""
    call = make_call(device, spans=False)
    points = call.k[:, :, :6]
    call = replace(call, k=points.repeat_interleave(10, 2), softcap=softcap)
    means = call.v.unflatten(2, (6, 10)).mean(3)
    labels = torch.arange(60, device=device).expand(2, 2, 60).int() // 10
    order, sizes, offsets = ops.cluster_index(labels, 6)
    full = ops.weighted_attention(call.q, call.k, call.v, None, None, call.scale, softcap=softcap)
    scores = normal(2, 4, 6).to(device)
    for budget in budgets:
        rows, _, unread, cut = ops.select_clusters(scores, sizes, offsets, order, budget)
        completed = replace(call, rows=rows, extra=Extra(points, means, unread, cut))
        torch.testing.assert_close(attend(completed).out, full, atol=1e-5, rtol=1e-5)
        incomplete = (attend(replace(completed, extra=None)).out - full).abs().max()
        assert (float(incomplete) > 0.01) == (budget < 60)


def test_weights_of_a_group_may_be_shared(attend: Attend, device: torch.device) -> None:
    call = make_call(device, group=3, extras=20, shared=True)
    assert call.extra is not None
    shared = call.extra.log_weight[:, ::3].contiguous()
    each = replace(call, extra=call.extra._replace(log_weight=shared.repeat_interleave(3, 1)))
    together = replace(call, extra=call.extra._replace(log_weight=shared))
    torch.testing.assert_close(attend(together).out, attend(each).out, atol=1e-6, rtol=1e-5)


def test_known_scores_spare_the_keys_of_extra_slots(attend: Attend, device: torch.device) -> None:
    call = make_call(device, extras=8)
    assert call.extra is not None
    scores = (call.q.view(2, 2, 2, -1) @ call.extra.k.mT).view(2, 4, 8)
    known = call.extra._replace(k=torch.full_like(call.extra.k, float("nan")), scores=scores)
    check(lambda _: attend(replace(call, extra=known)), call)


def test_nothing_to_read_gives_zero(attend: Attend, device: torch.device) -> None:
    call = make_call(device, extras=8)
    assert call.extra is not None
    rows = call.rows.clone()
    rows[:, 1] = -1
    weight = call.extra.log_weight.clone()
    weight[:, 1] = NEG_INF
    assert call.extra.cut is not None and bool((call.extra.cut[:, 1, 0] == -1).all())
    call = replace(call, rows=rows, spans=None, extra=call.extra._replace(log_weight=weight))
    result, expected = attend(call), direct(call)
    assert bool((result.out[:, 1] == 0).all()) and bool((result.log_sum_den[:, 1] == NEG_INF).all())
    torch.testing.assert_close(result.out.double(), expected.out, atol=1e-5, rtol=1e-5)


def test_rows_that_are_not_chosen_may_hold_anything(attend: Attend, device: torch.device) -> None:
    call = make_call(device, rows=10)
    read = torch.zeros(2, 2, 60, dtype=torch.bool, device=device)
    for b in range(2):
        for head in range(4):
            read[b, head // 2, call.rows[b, head][call.rows[b, head] >= 0].long()] = True
        assert call.spans is not None
        for start, end in call.spans.edges[b].tolist():
            read[b, :, start:end] = True
    # Slot 0 stands in for the rows that are skipped.
    read[:, :, 0] = True
    k, v = (tensor.masked_fill(~read[..., None], float("nan")) for tensor in (call.k, call.v))
    torch.testing.assert_close(attend(replace(call, k=k, v=v)).out, attend(call).out)


def test_a_row_alone_equals_the_row_in_a_batch(attend: Attend, device: torch.device) -> None:
    call = make_call(device, extras=8)
    assert call.spans is not None and call.extra is not None
    alone = Arguments(
        call.q[1:], call.k[1:], call.v[1:], call.rows[1:], call.scale,
        Spans(call.spans.edges[1:], 12), Extra(*(tensor[1:] for tensor in call.extra if tensor is not None)),
    )  # fmt: skip
    torch.testing.assert_close(attend(alone).out[0], attend(call).out[1], atol=1e-6, rtol=1e-6)


def test_spans_end_at_their_bound(attend: Attend, device: torch.device) -> None:
    call = make_call(device)
    assert call.spans is not None
    check(attend, replace(call, spans=call.spans._replace(most=6)))


@pytest.mark.parametrize("sign", [1, -1])
def test_large_logits_stay_finite(attend: Attend, device: torch.device, sign: int) -> None:
    call = make_call(device, extras=8)
    result = attend(replace(call, q=call.q * sign * 1e4))
    assert bool(result.out.isfinite().all()) and bool(result.log_sum_den.isfinite().all())


def test_strided_stores(attend: Attend, device: torch.device) -> None:
    call = make_call(device, extras=8)
    k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (call.k, call.v))
    torch.testing.assert_close(attend(replace(call, k=k, v=v)).out, attend(call).out)


@needs_triton
@pytest.mark.parametrize(("rows", "splits"), [(50, (1, 1, 1)), (50, (4, 2, 3)), (260, (2, 1, 1))])
@pytest.mark.parametrize("shared", [False, True])
def test_every_plan_gives_the_same(
    device: torch.device, rows: int, splits: tuple[int, int, int], shared: bool
) -> None:  # fmt: skip
    from kvsketch.ops.indexed_attention import kernel

    call = make_call(device, rows=rows, slots=rows + 10, extras=40, shared=shared, batch=1)
    result = kernel.indexed_attention(call, launch=kernel.Plan(16, *splits, warps=2, stages=3, overlap=False))
    for actual, exact in zip(result, reference.indexed_attention(call), strict=True):
        torch.testing.assert_close(actual, exact, atol=1e-5, rtol=1e-5)


@needs_triton
def test_each_piece_of_each_head_is_read_once(device: torch.device) -> None:
    from tests.ops.piece_kernel import count_kernel

    counts = torch.zeros(131, 2, dtype=torch.int32, device=device)
    count_kernel[(counts.numel(),)](counts, 2)
    assert bool((counts == 1).all())


@needs_triton
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("rows", [0, 1, 1024, 4096])
@pytest.mark.parametrize(("spans", "extras"), [(0, 1), (337, 0), (337, 6553)])
def test_plans_are_launchable(batch: int, rows: int, spans: int, extras: int) -> None:
    from kvsketch.ops.indexed_attention.kernel import plan

    for coded, slot_bytes in ((0, 512), (512, 128)):
        chosen = plan(8 * batch, 4, rows, spans, extras, slot_bytes, Device(132, 227 * 1024, True), coded)
        assert chosen.block_n in (16, 32, 64, 128)
        assert 1 <= chosen.pieces <= 128
        for slots, splits in ((rows, chosen.list_splits), (spans, chosen.span_splits), (extras, chosen.extra_splits)):
            assert (splits > 0) == (slots > 0)


def test_what_is_returned(device: torch.device) -> None:
    call = make_call(device, extras=8)
    assert call.spans is not None and call.extra is not None
    names = {"spans": call.spans.edges, "max_span": 12}
    names |= dict(zip(("extra_k", "extra_v", "extra_log_weight", "extra_cut", "extra_scores"), call.extra, strict=True))
    out = ops.indexed_attention(call.q, call.k, call.v, call.rows, call.scale, **names)
    again, state = ops.indexed_attention(call.q, call.k, call.v, call.rows, call.scale, return_state=True, **names)
    assert torch.equal(out, again) and relative_error(out, direct(call).out) < 1e-5
    torch.testing.assert_close(state[0], state[1])
    half = ops.indexed_attention(call.q.double(), call.k.double(), call.v.double(), call.rows, call.scale, **names)
    assert half.dtype == torch.float64 and relative_error(half, direct(call).out) < 1e-13


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 4, 2, 16)}, "q must hold one query, got 2"),
        ({"q": torch.zeros(1, 3, 1, 16)}, "not a multiple of the 2 heads"),
        ({"v_store": torch.zeros(1, 2, 29, 16)}, "must fit q"),
        ({"k_store": torch.zeros(1, 2, 30, 16).half()}, "must share one dtype"),
        ({"rows": torch.zeros(1, 3, 5).int()}, r"rows must be \[1, 4 or 2, rows\]"),
        ({"rows": torch.zeros(1, 4, 5).long()}, "rows must be int32"),
        ({"spans": torch.zeros(1, 2).int()}, r"spans must be int32 \[1, spans, 2\]"),
        ({"spans": torch.zeros(1, 1, 2).int()}, "max_span=0 must be"),
        ({"extra_k": torch.zeros(1, 2, 3, 8)}, r"extra_k must be \[1, 2, slots, 16\]"),
        ({"extra_v": torch.zeros(1, 2, 4, 16)}, r"extra_v must be \[1, 2, 3, 16\]"),
        ({"extra_log_weight": torch.zeros(1, 4, 4)}, r"extra_log_weight must be \[1, 4 or 2, 3\]"),
        ({"extra_log_weight": None}, "extra_k, extra_v and extra_log_weight belong together"),
        ({"extra_cut": torch.zeros(1, 2, 3).int()}, r"extra_cut must be int32 \[1, 4, 3\]"),
        ({"extra_scores": torch.zeros(1, 4, 4)}, r"extra_scores must be float32 \[1, 4, 3\]"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"sink_logits": torch.zeros(2)}, r"sink_logits must be \[4\]"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(1, 4, 1, 16), "k_store": torch.zeros(1, 2, 30, 16), "v_store": torch.zeros(1, 2, 30, 16),
        "rows": torch.zeros(1, 4, 5).int(), "scale": 1.0, "extra_k": torch.zeros(1, 2, 3, 16),
        "extra_v": torch.zeros(1, 2, 3, 16), "extra_log_weight": torch.zeros(1, 4, 3),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        ops.indexed_attention(**(arguments | change))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnTheGpu:
    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize(("batch", "rows", "extras"), [(1, 1024, 1638), (8, 512, 100), (1, 2000, 0)])
    def test_default_plan(
        self, device: torch.device, batch: int, rows: int, extras: int, dtype: torch.dtype, shared: bool
    ) -> None:
        call = make_call(device, 4, rows, 5000, 128, heads=8, batch=batch, extras=extras, dtype=dtype, shared=shared)
        out = dispatched(call)
        assert relative_error(out, reference.indexed_attention(call).out) < TOLERANCE[dtype]

    def test_a_store_in_pinned_memory_reads_like_one_on_the_device(self, device: torch.device) -> None:
        call = make_call(device, 4, 1024, 5000, 128, heads=8, batch=2, extras=60, dtype=torch.bfloat16)
        pinned = replace(call, k=call.k.cpu().pin_memory(), v=call.v.cpu().pin_memory())
        assert torch.equal(dispatched(pinned), dispatched(call))

    def test_graph_replay_follows_rows_spans_and_weights(self, device: torch.device) -> None:
        def fresh(seed: int) -> Arguments:
            return make_call(device, 4, 500, 3000, 128, heads=8, extras=200, dtype=torch.bfloat16, seed=seed)

        call = fresh(0)
        dispatched(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = dispatched(call)
        for seed in (1, 2):
            other = fresh(10 * seed)
            assert (
                call.spans is not None
                and call.extra is not None
                and other.spans is not None
                and other.extra is not None
            )
            for mine, theirs in zip(
                (call.q, call.k, call.v, call.rows, call.spans.edges, *call.extra),
                (other.q, other.k, other.v, other.rows, other.spans.edges - seed, *other.extra),
                strict=True,
            ):
                if mine is not None:
                    mine.copy_(theirs)
            graph.replay()
            assert relative_error(out, reference.indexed_attention(call).out) < TOLERANCE[torch.bfloat16]


def dispatched(call: Arguments) -> Tensor:
    """The call through `kvsketch.ops`."""
    names: dict[str, Any] = {}
    if call.spans is not None:
        names |= {"spans": call.spans.edges, "max_span": call.spans.most}
    if call.extra is not None:
        names |= dict(
            zip(("extra_k", "extra_v", "extra_log_weight", "extra_cut", "extra_scores"), call.extra, strict=True)
        )
    return ops.indexed_attention(call.q, call.k, call.v, call.rows, call.scale, **names)


SWITCHES: dict[str, tuple[Any, ...]] = {
    "bits": (4, 16), "dtype": (torch.bfloat16, torch.float16, torch.float32), "group": (4, 3, 1),
    "extras": ("none", "slots", "cut", "scored"), "shared": (False, True), "spans": (True, False),
    "exact": (True, False), "softcap": (None, 5.0), "sinks": (False, True), "size": (32, 48),
}  # fmt: skip


def possible(case: Case) -> bool:
    """4-bit rows are read in half precision, and by one Hadamard matrix."""
    return not (case.get("bits") == 4 and (case.get("dtype") == torch.float32 or case.get("size") == 48))


@needs_triton
@pytest.mark.parametrize("case", pairwise(SWITCHES, possible), ids=lambda case: "-".join(map(str, case.values())))
def test_every_pair_of_switches(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsketch.ops.indexed_attention import kernel

    dtype, extras = case["dtype"], 0 if case["extras"] == "none" else 9
    batch = 2 if case["bits"] == 4 else 1  # other tests have batches of 16 bits
    call = make_call(
        device, case["group"], rows=30, size=case["size"], value_size=2 * case["size"], extras=extras,
        shared=case["shared"], spans=case["spans"], dtype=dtype, batch=batch,
    )  # fmt: skip
    if call.extra is not None and case["extras"] == "slots":
        call = replace(call, extra=call.extra._replace(cut=None))
    elif call.extra is not None and case["extras"] == "scored":
        call = replace(call, extra=call.extra._replace(scores=normal(batch, 2 * case["group"], 9, seed=3).to(device)))
    sinks = normal(2 * case["group"], seed=4).to(device) if case["sinks"] else None
    call = replace(call, softcap=case["softcap"], sink_logits=sinks)
    if case["bits"] == 4:
        k, v = (in_four_bits(x, call.rows, case["exact"]) for x in (call.k + 9.0, call.v + 1.0))
        call = replace(call, k=k, v=v)
    assert kernel.supported(call)
    expected = reference.indexed_attention(call)
    poison(monkeypatch)
    small = kernel.Plan(
        16, list_splits=2, span_splits=int(case["spans"]), extra_splits=2 * (extras > 0), warps=1, stages=2,
        overlap=False,
    )  # fmt: skip
    result = kernel.indexed_attention(call, small)
    assert relative_error(result.out, expected.out) < TOLERANCE[dtype]
    torch.testing.assert_close(result.log_sum_num, expected.log_sum_num, atol=0.02, rtol=2e-3)
    torch.testing.assert_close(result.log_sum_den, expected.log_sum_den, atol=0.02, rtol=2e-3)


def in_four_bits(x: Tensor, rows: Tensor, exact: bool) -> CodedSlots:
    """Of the exact slots one is in the spans, one is listed, one is gone."""
    codec, center = Codec(4, x.shape[-1]), x.float().mean(2)
    listed = rows.view(2, 2, -1)[:, :, :1].clamp_min(7)
    at = torch.cat([torch.ones_like(listed), listed, torch.full_like(listed, -1)], 2)[:, :, : 3 * exact]
    values = 3 * normal(2, 2, 3, x.shape[-1], seed=5).to(x.device)[:, :, : 3 * exact]
    return CodedSlots(codec, center, values, at, *encode(x, center, codec))
