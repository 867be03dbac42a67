"""Attention mass from logits that attention has left equals that from the keys, reference and kernel alike.

On a CPU the kernel runs in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.attention_mass import Noise, Options, Temperature, reference
from kvsketch.ops.common import dispatch
from tests.ops.formula import Attend, needs_triton, poison, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
NAN, NEG_INF = float("nan"), float("-inf")
NOISE = Noise(seed=5, layer=3, first_head=1)
RISING = Temperature(1.0, 2.0, steps=100, since=1010)
TOLERANCE = {"cpu": 2e-5, "cuda": 2e-3}  # a GPU's fast logarithms
Measure = Callable[..., Tensor]


@dataclass
class Step:
    """A bounded table at a decode step: tokens in any order, empty and closed slots, rows with left padding."""

    q: Tensor
    k: Tensor
    index: Tensor
    padding: Tensor
    seen: Tensor
    scale: float = 0.4

    @property
    def hidden(self) -> Tensor:  # [B, H, S]
        return self.index < self.padding.view(-1, 1, 1).clamp_min(0)

    @property
    def logits(self) -> Tensor:  # [B, Hq, S]
        """NaN where nobody may look."""
        group = self.q.shape[1] // self.k.shape[1]
        s = self.scale * (self.q @ self.k.repeat_interleave(group, 1).mT)[:, :, 0]
        return s.masked_fill(self.hidden.repeat_interleave(group, 1), NAN)

    @property
    def row_lse(self) -> Tensor:  # [B, Hq]
        return self.logits.nan_to_num(NEG_INF, neginf=NEG_INF).logsumexp(-1)

    @property
    def options(self) -> dict[str, Any]:
        return {"seen": self.seen, "index": self.index, "padding": self.padding}

    def from_keys(self, into: Tensor, **options: Any) -> Tensor:
        return reference.attention_mass(self.q, self.k, self.scale, Options(into, **self.options, **options))


def make_step(device: torch.device, slots: int, group: int, batch: int = 2, heads: int = 2) -> Step:
    generator = torch.Generator().manual_seed(slots * 10 + group)
    q = torch.randn(batch, heads * group, 1, 8, generator=generator)
    k = torch.randn(batch, heads, slots, 8, generator=generator)
    index = torch.stack([torch.randperm(1060, generator=generator)[:slots] for _ in range(batch * heads)])
    index = index.view(batch, heads, slots).to(torch.int32)
    if slots > 3:
        index[:, :, 1:3] = torch.tensor([-1, -2], dtype=torch.int32)
    padding = torch.arange(batch) * 200
    seen = torch.tensor([1060])
    return Step(*(t.to(device) for t in (q, k, index, padding, seen)))


@pytest.fixture(params=["reference", pytest.param("kernel", marks=needs_triton)])
def measure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """The operation by one implementation, whose new buffers hold NaN until they are written."""
    if request.param == "reference":
        monkeypatch.setenv("KVSKETCH_KERNELS", "reference")
    else:
        from kvsketch.ops.attention_mass import kernel

        poison(monkeypatch)
        monkeypatch.setattr(dispatch, "kernel_for", lambda operation, device: kernel)
    return ops.mass_from_logits


SOFTMAX: dict[str, dict[str, Any]] = {
    "log-sum known": {},
    "log-sum unknown": {},
    "softened": {"temperature": RISING},
    "noisy": {"temperature": RISING, "noise": NOISE},
}


@pytest.mark.parametrize(
    ("slots", "group", "softmax"), [*((100, 7, softmax) for softmax in SOFTMAX), (1, 1, "noisy"), (300, 4, "noisy")]
)
def test_equals_the_mass_from_keys(
    measure: Measure, device: torch.device, slots: int, group: int, softmax: str
) -> None:
    step, options = make_step(device, slots, group), SOFTMAX[softmax]
    row_lse = step.row_lse if softmax == "log-sum known" else None
    old = torch.rand(step.index.shape, generator=torch.Generator().manual_seed(1)).to(device)
    for reduce, fade in (("sum", 1.0), ("mean", 0.75), ("max", 0.0)):
        expected = step.from_keys(old.clone(), reduce=reduce, fade=fade, **options)
        into = old.clone()
        mass = measure(step.logits, **step.options, row_lse=row_lse, reduce=reduce, into=into, fade=fade, **options)
        assert mass is into
        assert relative_error(mass, expected) < TOLERANCE[device.type]
        assert torch.equal(mass[step.hidden], fade * old[step.hidden])


@pytest.mark.parametrize("softmax", SOFTMAX)
def test_rows_that_see_nothing_add_nothing(measure: Measure, device: torch.device, softmax: str) -> None:
    step = make_step(device, 70, 3)
    step.padding[1] = 1060
    row_lse = step.row_lse if softmax == "log-sum known" else None
    assert row_lse is None or (row_lse[1] == NEG_INF).all()
    mass = measure(step.logits, **step.options, row_lse=row_lse, **SOFTMAX[softmax])
    assert (mass[1] == 0).all()
    torch.testing.assert_close(mass[0].sum(-1), torch.full((2,), 3.0, device=device), atol=1e-4, rtol=1e-5)


def test_the_clock_is_read_on_the_device(measure: Measure, device: torch.device) -> None:
    step = make_step(device, 70, 2)
    options = {"index": step.index, "noise": NOISE, "temperature": RISING}
    now = measure(step.logits.nan_to_num(), seen=step.seen, **options)
    assert torch.equal(now, measure(step.logits.nan_to_num(), seen=1060, **options))
    assert not torch.allclose(now, measure(step.logits.nan_to_num(), seen=1061, **options))


def test_rows_may_have_temperatures_of_their_own(measure: Measure, device: torch.device) -> None:
    step = make_step(device, 70, 2)
    options = {"index": step.index, "noise": NOISE, "seen": step.seen}
    since = torch.tensor([1010, 1055], device=device)
    mass = measure(step.logits.nan_to_num(), temperature=RISING._replace(since=since), **options)
    for row, number in enumerate(since.tolist()):
        alone = measure(step.logits.nan_to_num(), temperature=RISING._replace(since=number), **options)
        assert torch.equal(mass[row], alone[row])
    assert not torch.equal(mass[0], alone[0])


def test_what_weighted_attention_leaves(attend: Attend, device: torch.device) -> None:
    """The numerator's sum is that of the slots in use, with a sink logit in the denominator or without."""
    step = make_step(device, 100, 4)
    log_den = torch.where(step.hidden, NEG_INF, 0.0)
    for sink_logits in (None, torch.ones(8, device=device)):
        left = attend(step.q, step.k, step.k, log_den, log_den, step.scale, sink_logits=sink_logits, return_logits=True)
        mass = ops.mass_from_logits(left.logits[:, :, 0], row_lse=left.log_sum_num[:, :, 0], **step.options)
        expected = step.from_keys(torch.zeros_like(mass))
        assert relative_error(mass, expected) < TOLERANCE[device.type]


@pytest.mark.parametrize("implementation", ["reference", pytest.param("kernel", marks=needs_triton)])
def test_noise_follows_the_number_of_the_head_in_the_whole_model(implementation: str, device: torch.device) -> None:
    measure = import_module(f"kvsketch.ops.attention_mass.{implementation}").mass_from_logits
    logits = torch.zeros(1, 12, 40, device=device)
    index = torch.arange(40, dtype=torch.int32, device=device).expand(1, 4, 40)

    def mass(heads: int, first: int) -> Tensor:
        into = torch.zeros(1, heads, 40, device=device)
        return measure(logits[:, : 3 * heads], Options(into, 40, index[:, :heads], noise=Noise(5, 3, first)))

    assert torch.equal(mass(4, 0)[:, 2:], mass(2, 2))
    assert not torch.equal(mass(2, 0), mass(2, 2))


@pytest.mark.parametrize("softmax", ["log-sum known", "noisy"])
def test_huge_logits_stay_finite(measure: Measure, device: torch.device, softmax: str) -> None:
    step = make_step(device, 40, 2)
    step.scale = 2e3
    assert 1e4 < step.logits.nan_to_num().abs().max() < 1e5
    row_lse = step.row_lse if softmax == "log-sum known" else None
    mass = measure(step.logits, **step.options, row_lse=row_lse, **SOFTMAX[softmax])
    # float32 holds such a logit to 4e-3.
    torch.testing.assert_close(mass.sum(-1), torch.full((2, 2), 2.0, device=device), atol=0.0, rtol=1e-2)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "logits": ({"logits": torch.zeros(1, 4, 1, 7)}, r"logits must be float32 \[batch, heads, slots\]"),
    "dtype": ({"logits": torch.zeros(1, 4, 7).double()}, r"logits must be float32 .*, got torch.float64"),
    "heads": ({"logits": torch.zeros(1, 3, 7)}, r"logits has 3 heads, which is not a multiple of the 2 heads of index"),
    "index": ({"index": torch.zeros(1, 2, 6)}, r"index must be \[1, 2, 7\], got \[1, 2, 6\]"),
    "row_lse": ({"row_lse": torch.zeros(1, 4, 1)}, r"row_lse must be \[1, 4\], got \[1, 4, 1\]"),
    "noise": ({"row_lse": torch.zeros(1, 4), "noise": NOISE}, r"row_lse holds the sums of plain attention"),
    "into": ({"into": torch.zeros(1, 2, 7).double()}, r"into must be float32"),
    "reduce": ({"reduce": "median"}, r"reduce='median' is not one of sum, mean, max"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    options, message = WRONG[name]
    given = {"logits": torch.zeros(1, 4, 7), "index": torch.zeros(1, 2, 7, dtype=torch.int32), "seen": 7, **options}
    with pytest.raises(ValueError, match=message):
        ops.mass_from_logits(**given)
