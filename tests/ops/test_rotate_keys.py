"""Keys rotated by the tokens that are gone: the reference against complex numbers, the kernel against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.rotate_keys import TURN, reference, whole_turns
from tests.ops.formula import needs_triton, poison


def angles(half: int) -> tuple[float, ...]:
    return tuple(10000.0 ** (-i / half) for i in range(half))


def table(slots: int, seen: int, dtype: torch.dtype = torch.float32, size: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Keys with a large common part, as real ones have, distinct tokens in any order, some slots empty or closed."""
    g = torch.Generator().manual_seed(slots)
    places = min(seen, 3 * slots)
    index = torch.stack([torch.randperm(places, generator=g)[:slots] for _ in range(6)]).view(2, 3, slots).int()
    index *= seen // places
    index[torch.rand(index.shape, generator=g) < 0.1] = -1
    index[1, 2, : slots // 2] = -2
    keys = (20 * torch.randn(1, 3, 1, size, generator=g) + torch.randn(2, 3, slots, size, generator=g)).to(dtype)
    return keys, index, torch.tensor([seen])


def by_hand(keys: Tensor, index: Tensor, seen: int, half: int) -> Tensor:
    """One slot after the other, as complex numbers in float64."""
    out, angle = keys.double().clone(), torch.tensor(angles(half), dtype=torch.float64)
    for b, h in ((b, h) for b in range(keys.shape[0]) for h in range(keys.shape[1])):
        tokens = index[b, h].tolist()
        for slot, token in enumerate(tokens):
            if token >= 0:
                gone = sum(1 for other in range(token + 1, seen) if other not in tokens)
                z = torch.complex(out[b, h, slot, :half], out[b, h, slot, half : 2 * half])
                z = z * torch.polar(torch.ones_like(angle), gone * angle)
                out[b, h, slot, : 2 * half] = torch.cat([z.real, z.imag])
    return out


@pytest.mark.parametrize("half", [12, 5])
@pytest.mark.parametrize("slots", [1, 7, 30])
def test_reference_is_the_formula(slots: int, half: int) -> None:
    keys, index, seen = table(slots, seen=60)
    turns = whole_turns(angles(half), keys.device)
    expected = by_hand(keys, index, 60, half)
    torch.testing.assert_close(ops.rotate_keys(keys.double(), index, seen, turns), expected, atol=1e-7, rtol=1e-9)
    torch.testing.assert_close(ops.rotate_keys(keys, index, seen, turns).double(), expected, atol=1e-4, rtol=1e-5)
    half_precision = ops.rotate_keys(keys.bfloat16(), index, seen, turns).double()
    expected = by_hand(keys.bfloat16(), index, 60, half)
    torch.testing.assert_close(half_precision, expected, atol=1e-4, rtol=2**-8)


def test_nothing_gone_is_nothing_rotated() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        keys, _, _ = table(9, 9, dtype)
        index = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(i)) for i in range(6)])
        rotated = ops.rotate_keys(
            keys, index.view(2, 3, 9).int(), torch.tensor([9]), whole_turns(angles(12), keys.device)
        )
        assert torch.equal(rotated, keys)


def test_a_hundred_million_positions_are_rotated_as_exactly_as_one() -> None:
    gone, angle = 100_000_003, angles(12)
    keys = torch.randn(1, 1, 1, 24, generator=torch.Generator().manual_seed(0))
    ours = ops.rotate_keys(keys, torch.zeros(1, 1, 1).int(), torch.tensor([gone + 1]), whole_turns(angle, keys.device))
    exact = torch.tensor([math.fmod(a * gone, 2 * math.pi) for a in angle], dtype=torch.float64)
    z = torch.complex(keys[..., :12].double(), keys[..., 12:].double()) * torch.polar(torch.ones_like(exact), exact)
    # The angles are kept to 2^-41 turns each, so that 10^8 positions err by 3e-4.
    torch.testing.assert_close(ours.double(), torch.cat([z.real, z.imag], -1), atol=1e-3, rtol=0)
    in_floats = torch.tensor(angle) * gone
    assert (in_floats.double() - torch.tensor(angle, dtype=torch.float64) * gone).abs().max() > 1.0
    assert TURN == 1 << 40


def test_arguments_that_do_not_fit_are_named() -> None:
    keys, index, seen = table(4, 8)
    turns = whole_turns(angles(12), keys.device)
    for wrong, message in (
        ((keys, index[:, :1], seen, turns), "for each slot"),
        ((keys, index, seen, turns.repeat(2)), "half at most 12"),
        ((keys, index, seen.repeat(2), turns), "one whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.rotate_keys(*wrong)


@needs_triton
@pytest.mark.parametrize(
    ("slots", "half", "dtype"),
    [(1, 12, torch.float32), (63, 5, torch.float16), (100, 12, torch.bfloat16), (300, 5, torch.float32)],
)
def test_kernel_is_the_reference(
    device: torch.device, slots: int, half: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvsketch.ops.rotate_keys import kernel

    keys, index, seen = (t.to(device) for t in table(slots, 3 * slots + 1_000_000, dtype))
    keys = torch.nn.functional.pad(keys, (0, 3))[..., :24]  # a view
    turns = whole_turns(angles(half), device)
    expected = reference.rotate_keys(keys, index, seen, turns)
    poison(monkeypatch)
    ours = kernel.rotate_keys(keys, index, seen, turns)
    # One unit in the last place: Triton's interpreter cuts bfloat16 off where a GPU rounds.
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=rounding)
    assert kernel.supported(keys) and not kernel.supported(keys.double())
