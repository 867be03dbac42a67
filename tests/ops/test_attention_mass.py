"""Attention mass, reference and kernel alike; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvsketch import ops
from kvsketch.ops.attention_mass import Noise, Options, Temperature, reference, stream
from kvsketch.ops.common import dispatch
from tests.helpers.common import also
from tests.ops.formula import needs_triton, poison, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
NOISE = Noise(seed=5, layer=3)
TOLERANCE = {"cpu": 2e-5, "cuda": 2e-3}  # a GPU's fast logarithms; inputs are rounded once, for both sides
Measure = Callable[..., Tensor]


@dataclass
class Inputs:
    q: Tensor
    k: Tensor

    @property
    def scale(self) -> float:
        return 1.5 * self.q.shape[-1] ** -0.5


def make_inputs(
    device: torch.device, queries: int, columns: int, group: int = 2, size: int = 16,
    dtype: torch.dtype = torch.float32, batch: int = 1, kv_heads: int = 2,
) -> Inputs:  # fmt: skip
    generator = torch.Generator().manual_seed(queries * 1000 + columns)
    q = torch.randn(batch, kv_heads * group, queries, size, generator=generator)
    k = torch.randn(batch, kv_heads, columns, size, generator=generator)
    return Inputs(q.to(device, dtype), k.to(device, dtype))


def dense(
    q: Tensor, k: Tensor, scale: float, seen: int | None = None, index: Tensor | None = None,
    padding: Tensor | None = None, tau: float = 1.0, noise: Noise | None = None,
) -> Tensor:  # [B, Hq, S]  # fmt: skip
    """The definition, with the whole matrix, in float64, head by head."""
    batch, heads, queries, _ = q.shape
    columns, group = k.shape[2], heads // k.shape[1]
    seen = columns if seen is None else seen
    mass = torch.zeros(batch, heads, columns, dtype=torch.float64, device=q.device)
    for b in range(batch):
        pad = 0 if padding is None else int(padding[b])
        for h in range(heads):
            place = torch.arange(columns, device=q.device) if index is None else index[b, h // group].long()
            row = torch.arange(seen - queries, seen, device=q.device)[:, None]
            x = scale * (q[b, h].double() @ k[b, h // group].double().T)
            if noise is not None:
                u = reference.pair_uniform(noise, torch.tensor(h, device=q.device), row - pad, place - pad)
                x = x - torch.log(-torch.log(u.double()))
            visible = (place <= row) & (place >= pad) & (place >= 0) & (row >= pad)
            mass[b, h] = (x / tau).masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0).sum(0)
    return mass


@pytest.fixture(params=["reference", pytest.param("kernel", marks=needs_triton)])
def measure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """The operation by one implementation, whose new buffers hold NaN until they are written."""
    if request.param == "reference":
        monkeypatch.setenv("KVSKETCH_KERNELS", "reference")
    else:
        from kvsketch.ops.attention_mass import kernel

        poison(monkeypatch, -7)
        monkeypatch.setattr(dispatch, "kernel_for", lambda operation, device: kernel)
    return ops.attention_mass


CASES = [  # queries, columns, group, size, dtype, noise
    (1, 1, 1, 64, torch.float32, None),
    (1, 100, 7, 80, torch.bfloat16, NOISE),
    (1, 200, 2, 16, torch.float32, NOISE),
    (63, 63, 1, 16, torch.bfloat16, None),
    (63, 100, 4, 20, torch.float32, NOISE),
    (100, 100, 2, 80, torch.bfloat16, NOISE),
    (100, 163, 3, 96, torch.float16, None),
    (40, 300, 1, 256, torch.bfloat16, None),
]


@pytest.mark.parametrize(("queries", "columns", "group", "size", "dtype", "noise"), CASES)
def test_matches_the_formula(
    measure: Measure, device: torch.device, queries: int, columns: int, group: int, size: int, dtype: torch.dtype,
    noise: Noise | None,
) -> None:  # fmt: skip
    inputs = make_inputs(device, queries, columns, group, size, dtype, kv_heads=1, batch=1 + (queries < 64))
    mass = measure(inputs.q, inputs.k, inputs.scale, temperature=1.5, noise=noise)
    assert mass.dtype == torch.float32
    assert mass.shape == inputs.k.shape[:3]
    expected = dense(inputs.q, inputs.k, inputs.scale, tau=1.5, noise=noise).sum(1, keepdim=True)
    assert relative_error(mass, expected) < TOLERANCE[device.type]


@pytest.mark.parametrize("queries", [1, 9])
def test_slots_in_any_order(measure: Measure, device: torch.device, queries: int) -> None:
    """A table of slots, some of them empty or closed, gives what the same tokens give wherever they are stored."""
    inputs = make_inputs(device, queries, 70, batch=2)
    seen, index = torch.tensor([90], device=device), torch.empty(2, 2, 70, dtype=torch.int32, device=device)
    for b in range(2):
        for h in range(2):
            generator = torch.Generator().manual_seed(b * 2 + h)
            index[b, h] = torch.randperm(90, generator=generator)[:70].to(device)
            index[b, h, :3] = torch.tensor([-1, -2, -1])
    padding = torch.tensor([0, 11], device=device)
    mass = measure(inputs.q, inputs.k, inputs.scale, seen=seen, index=index, padding=padding, noise=NOISE)
    expected = dense(inputs.q, inputs.k, inputs.scale, 90, index, padding, noise=NOISE)
    assert relative_error(mass, expected.unflatten(1, (2, 2)).sum(2)) < TOLERANCE[device.type]
    assert (mass[:, :, :3] == 0).all()
    assert torch.equal(
        mass, measure(inputs.q, inputs.k, inputs.scale, seen=90, index=index, padding=padding, noise=NOISE)
    )


@pytest.mark.parametrize("noise", [None, NOISE])
def test_padding_and_batch_change_nothing(measure: Measure, device: torch.device, noise: Noise | None) -> None:
    inputs = make_inputs(device, 50, 50, batch=3)
    padding = torch.tensor([0, 17, 50], device=device)
    q, k = inputs.q.clone(), inputs.k.clone()
    for b, pad in enumerate(padding.tolist()):
        q[b, :, :pad], k[b, :, :pad] = float("nan"), float("nan")
    together = measure(q, k, inputs.scale, padding=padding, noise=noise)
    for b, pad in ((0, 0), (1, 17)):
        alone = measure(q[b : b + 1, :, pad:], k[b : b + 1, :, pad:], inputs.scale, noise=noise)
        torch.testing.assert_close(together[b, :, pad:], alone[0], atol=1e-5, rtol=1e-4)
        assert (together[b, :, :pad] == 0).all()
    assert (together[2] == 0).all()


@pytest.mark.parametrize("noise", [None, NOISE])
def test_chunks_add_up_and_shares_sum_to_one(measure: Measure, device: torch.device, noise: Noise | None) -> None:
    inputs = make_inputs(device, 60, 60)
    whole = measure(inputs.q, inputs.k, inputs.scale, noise=noise)
    torch.testing.assert_close(whole.sum(-1), torch.full((1, 2), 120.0, device=device), atol=1e-3, rtol=1e-5)
    parts = torch.zeros_like(whole)
    for start, end in ((0, 25), (25, 59), (59, 60)):
        chunk = parts[:, :, :end].contiguous()
        measure(inputs.q[:, :, start:end], inputs.k[:, :, :end], inputs.scale, noise=noise, into=chunk)
        parts[:, :, :end] = chunk
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-4)


def test_sums_of_attention_save_a_pass(measure: Measure, device: torch.device) -> None:
    inputs = make_inputs(device, 60, 60)
    logits = inputs.scale * (inputs.q @ inputs.k.repeat_interleave(2, 1).mT)
    row_lse = logits.masked_fill(~torch.ones(60, 60, device=device).tril().bool(), float("-inf")).logsumexp(-1)
    own = measure(inputs.q, inputs.k, inputs.scale)
    torch.testing.assert_close(measure(inputs.q, inputs.k, inputs.scale, row_lse=row_lse), own, atol=1e-5, rtol=1e-5)
    shifted = measure(inputs.q, inputs.k, inputs.scale, row_lse=row_lse + 1.0)
    torch.testing.assert_close(shifted * 2.718281828, own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("queries", [1, 30])
@pytest.mark.parametrize("noise", [None, NOISE])
def test_groups(measure: Measure, device: torch.device, queries: int, noise: Noise | None) -> None:
    """Query heads that share a KV head give what they give with a copy of it each, reduced afterwards."""
    inputs = make_inputs(device, queries, 30, group=3)
    copies = measure(inputs.q, inputs.k.repeat_interleave(3, 1), inputs.scale, noise=noise).unflatten(1, (2, 3))
    for reduce, expected in (("sum", copies.sum(2)), ("mean", copies.mean(2)), ("max", copies.amax(2))):
        mass = measure(inputs.q, inputs.k, inputs.scale, noise=noise, reduce=reduce)
        torch.testing.assert_close(mass, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("queries", [1, 20])
def test_temperature_follows_the_tokens_seen(measure: Measure, device: torch.device, queries: int) -> None:
    inputs = make_inputs(device, queries, 40)
    index = torch.arange(40, dtype=torch.int32, device=device).expand(1, 2, 40).contiguous()
    for since, tau in ((40, 1.0), (35, 1.5), (3, 2.0)):
        schedule = Temperature(1.0, 2.0, steps=10, since=since)
        options = {"seen": torch.tensor([40], device=device), "index": index, "noise": NOISE}
        annealed = measure(inputs.q, inputs.k, inputs.scale, temperature=schedule, **options)
        torch.testing.assert_close(annealed, measure(inputs.q, inputs.k, inputs.scale, temperature=tau, **options))
        by_row = schedule._replace(since=torch.tensor([since], device=device))
        assert torch.equal(annealed, measure(inputs.q, inputs.k, inputs.scale, temperature=by_row, **options))
    assert not torch.allclose(annealed, measure(inputs.q, inputs.k, inputs.scale, temperature=1.0, **options))


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("noise", [None, NOISE])
def test_huge_logits_stay_finite(measure: Measure, device: torch.device, queries: int, noise: Noise | None) -> None:
    inputs = make_inputs(device, queries, 40)
    for sign in (1.0, -1.0):
        q, k = inputs.q.abs() * 25, sign * inputs.k.abs() * 25
        assert 5e3 < (q @ k.repeat_interleave(2, 1).mT).abs().max() < 2e4
        # float32 holds a logit of 1e4 to 1e-3, so shares are that far off.
        total = measure(q, k, 1.0, noise=noise).sum(-1)
        torch.testing.assert_close(total, torch.full((1, 2), 2.0 * queries, device=device), atol=0.0, rtol=2e-3)


@needs_triton
def test_noise_has_the_same_bits_in_torch_and_triton(device: torch.device) -> None:
    from kvsketch.ops.attention_mass.kernel import signed
    from tests.ops.pair_kernel import fill

    rows, columns = torch.arange(100, 132, device=device), torch.arange(64, device=device) * 977
    expected = reference.pair_uniform(NOISE, torch.tensor(7, device=device), rows[:, None], columns)
    assert torch.equal(fill(signed(stream(NOISE)), 7, rows, columns), expected)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= tensor.numel():
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def largest_tensor(queries: int, noise: Noise | None) -> int:
    inputs = make_inputs(torch.device("cpu"), queries, queries, group=1, kv_heads=1)
    with Largest() as largest:
        options = Options(torch.zeros(1, 1, queries), seen=queries, noise=noise)
        reference.attention_mass(inputs.q, inputs.k, inputs.scale, options)
    return largest.numbers


@pytest.mark.parametrize("noise", [NOISE, *also(None)])
def test_no_matrix_is_ever_formed(monkeypatch: pytest.MonkeyPatch, noise: Noise | None) -> None:
    """Memory is a block of rows; without blocks the same check sees the matrix."""
    monkeypatch.setitem(reference.MAX_LOGITS, "cpu", 1 << 16)
    assert largest_tensor(2048, noise=noise) <= 1 << 16
    monkeypatch.setitem(reference.MAX_LOGITS, "cpu", 1 << 30)
    assert largest_tensor(2048, noise=noise) >= 2048 * 2048


@needs_triton
def test_kernel_buffers_grow_with_the_tokens(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    from kvsketch.ops.attention_mass import kernel

    sizes: list[int] = []
    allocate = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **o: sizes.append(allocate(*a, **o).numel()) or allocate(*a, **o))
    monkeypatch.setattr(dispatch, "kernel_for", lambda operation, device: kernel)
    inputs = make_inputs(device, 128, 128, group=1)
    ops.attention_mass(inputs.q, inputs.k, inputs.scale, noise=NOISE)
    assert sizes == [2 * 128] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("noise", [None, NOISE])
def test_long_prompts_need_little_memory(noise: Noise | None) -> None:
    q = torch.randn(1, 32, 32768, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 8, 32768, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mass = ops.attention_mass(q, k, 128**-0.5, noise=noise)
    assert torch.cuda.max_memory_allocated() - before < 6 * 4 * 32 * 32768
    torch.testing.assert_close(mass.sum(-1), torch.full((1, 8), 4.0 * 32768, device="cuda"), atol=0.0, rtol=1e-3)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "reduce": ({"reduce": "median"}, r"reduce='median' is not one of sum, mean, max"),
    "seen": ({"seen": 7}, r"seen follows from k; pass index"),
    "index": ({"index": torch.zeros(1, 2, 7, dtype=torch.int32)}, r"index needs seen"),
    "padding": ({"padding": torch.zeros(3, dtype=torch.int64)}, r"padding must be \[1\], got \[3\]"),
    "row_lse": ({"row_lse": torch.zeros(1, 4, 7), "noise": NOISE}, r"row_lse holds the sums of plain attention"),
    "temperature": ({"temperature": 0.0}, r"must have positive temperatures"),
    "into": ({"into": torch.zeros(1, 2, 7, dtype=torch.float64)}, r"into must be float32 \[1, 2, 7\], got"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    inputs = make_inputs(torch.device("cpu"), 7, 7)
    options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        ops.attention_mass(inputs.q, inputs.k, inputs.scale, **options)
    with pytest.raises(ValueError, match="7 queries need as many columns or more, not 3"):
        ops.attention_mass(inputs.q, inputs.k[:, :, :3], inputs.scale)
