"""Attention to kept slots: against the definition, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsketch.ops import kept_attention
from kvsketch.ops.kept_attention import reference
from tests.ops.formula import needs_compiler, needs_triton, poison


def inputs(slots: int = 70, kept: int = 20, size: int = 16) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Three problems; the second keeps fewer slots, the last has hidden ones."""
    torch.manual_seed(slots)
    q, k, v = torch.randn(3, 37, size), torch.randn(3, slots, size) + 3.0, torch.randn(3, slots, 24)
    chosen = torch.stack([torch.randperm(slots)[:kept] for _ in range(3)])
    chosen[1, 5:] = -1
    hidden = torch.zeros(3, slots, dtype=torch.bool)
    hidden[2, :7] = True
    return q, k, v, chosen, hidden


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_attention_is_the_definition(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("KVSKETCH_KERNELS", kernels)
    q, k, v, kept, hidden = inputs()
    for limit in ({"cpu": 1}, reference.MAX_LOGITS):
        monkeypatch.setattr(reference, "MAX_LOGITS", limit)
        a, out, share = kept_attention(q, k, v, kept, 0.3, hidden)
        for n in range(3):
            p = (0.3 * q[n] @ k[n].T + torch.where(hidden[n], -torch.inf, 0.0)).softmax(-1)
            torch.testing.assert_close(out[n], p @ v[n])
            torch.testing.assert_close(a[n], p[:, kept[n]] * (kept[n] >= 0))
        assert (share == 1).all()


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_keys_as_they_are_held_and_mass_elsewhere(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("KVSKETCH_KERNELS", kernels)
    q, k, v, kept, hidden = inputs()
    rows = kept.clamp_min(0).unsqueeze(-1).expand(-1, -1, 16)
    held, sinks = k.gather(1, rows) + 0.1 * torch.randn(rows.shape), torch.randn(3, 4, 16)
    elsewhere = (0.3 * q @ sinks.mT).logsumexp(-1)
    a, out, share = kept_attention(q, k, v, kept, 0.3, hidden, held, elsewhere)
    for n in range(3):
        terms = (0.3 * q[n] @ k[n].T).exp() * ~hidden[n]
        mass, beside = terms.sum(-1, keepdim=True), (0.3 * q[n] @ sinks[n].T).exp().sum(-1, keepdim=True)
        torch.testing.assert_close(out[n], terms @ v[n] / mass)
        torch.testing.assert_close(share[n], (mass / (mass + beside)).squeeze(-1))
        seen = (0.3 * q[n] @ held[n].T).exp() / (mass + beside)
        torch.testing.assert_close(a[n], seen * (kept[n] >= 0))


@needs_triton
@pytest.mark.parametrize(("dtype", "jump"), [(torch.float32, 0.0), (torch.bfloat16, 0.0), (torch.float32, 300.0)])
def test_kernel_gives_the_reference(dtype: torch.dtype, jump: float, device: torch.device) -> None:
    """Also where later slots have logits that are larger than the first by more than a float32 can hold."""
    from kvsketch.ops.kept_attention import kernel

    q, k, v, kept, hidden = inputs()
    q[:, :, 0] = q[:, :, 0].abs() + 1.0
    k[:, 65:, 0] += jump
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    rows = kept.clamp_min(0).unsqueeze(-1).expand(-1, -1, 16).to(device)
    held, elsewhere = k.gather(1, rows) + 0.05, torch.full((3, 37), 20.0, device=device)
    for others in ((None, None, None), (hidden.to(device), held, elsewhere)):
        result = kernel.kept_attention(q, k, v, kept.to(device), 0.3, *others)
        expected = reference.kept_attention(q, k, v, kept.to(device), 0.3, *others)
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        for one, other in zip(result, expected, strict=True):
            torch.testing.assert_close(one.float(), other.float(), atol=tolerance, rtol=tolerance)


def test_shapes_that_do_not_fit_are_named() -> None:
    q, k, v, kept, hidden = inputs()
    with pytest.raises(ValueError, match=r"q, k, v and kept must be"):
        kept_attention(q[:, :, 1:], k, v, kept, 1.0)
    with pytest.raises(ValueError, match=r"hidden must be \[3, 70\], got \[2, 70\]"):
        kept_attention(q, k, v, kept, 1.0, hidden[1:])
    with pytest.raises(ValueError, match=r"elsewhere must be \[3, 37\], got \[2\]"):
        kept_attention(q, k, v, kept, 1.0, elsewhere=torch.zeros(2))


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("slots", "kept", "asked"), [(8, 3, 37), (16, 16, 5), (100, 33, 64), (257, 96, 50)])
def test_program_gives_the_reference(
    slots: int, kept: int, asked: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With logits that differ by more than a float32 can hold, and with one that is none."""
    from kvsketch.ops.kept_attention import native

    q, k, v, chosen, hidden = inputs(slots, kept)
    q = torch.randn(3, asked, 16)
    hidden[2] = False
    hidden[2, 1:3] = True
    k[0, 1] *= 50.0
    k[1, 2, 0] = float("nan")
    held = k.gather(1, chosen.clamp_min(0).unsqueeze(-1).expand(-1, -1, 16)) + 0.01
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    # A logit is a sum of 16 products, each of which a processor may round in its own way.
    rounding = [16 * 2.0**-24 * float((0.3 * q[n].abs() @ k[n].abs().mT).max()) for n in range(3)]
    for stored, elsewhere in ((None, None), (held, torch.randn(3, asked))):
        for unseen in (hidden, None):
            expected = reference.kept_attention(q, k, v, chosen, 0.3, unseen, stored, elsewhere)
            with monkeypatch.context() as patch:
                poison(patch)
                result = native.kept_attention(q, k, v, chosen, 0.3, unseen, stored, elsewhere)
            for ours, theirs in zip(result, expected, strict=True):
                assert ours[1].isnan().any() == theirs[1].isnan().any()
                for n in (0, 2):
                    torch.testing.assert_close(ours[n], theirs[n], atol=rounding[n], rtol=rounding[n])


@needs_compiler
def test_program_takes_keys_with_a_large_common_part() -> None:
    """Rounded to bfloat16, as a model has them, where one key is all that most queries see."""
    from kvsketch.ops.kept_attention import native

    q, k, v, chosen, _ = inputs(150, 60, 64)
    q, k = (10 * torch.randn(64) + torch.randn(3, n, 64) for n in (37, 150))
    k[:, 100] += 3.0 * q.mean(1) / 10
    q, k, v = (x.bfloat16().float() for x in (q, k, v))
    for ours, theirs in zip(
        native.kept_attention(q, k, v, chosen, 0.125, None, None, None),
        reference.kept_attention(*(x.double() for x in (q, k, v)), chosen, 0.125, None, None, None), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours, theirs.float(), atol=1e-4, rtol=1e-3)
