"""Products of few rows against torch; on a CPU the kernels run in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsketch.ops.common.device import Device
from kvsketch.ops.skinny_matmul import reference

kernel = pytest.importorskip("kvsketch.ops.skinny_matmul.kernel", reason="needs Triton")
# The sums are in fp32 on both sides; the outputs are rounded once, and Triton's interpreter truncates.
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
ROWS = [1, 2, 17]


def random(*shape: int, dtype: torch.dtype, device: torch.device, size: int = 1) -> Tensor:
    return (torch.randn(*shape, device=device) / size**0.5).to(dtype)


def close(ours: Tensor, exact: Tensor, roundings: int = 1) -> None:
    assert ours.dtype == exact.dtype and ours.shape == exact.shape
    tolerance = roundings * TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "rows", "biased"),
    [
        (torch.bfloat16, 1, (True, True, True)),
        (torch.bfloat16, 2, (False, False, False)),
        (torch.float16, 2, (True, False, True)),
        (torch.bfloat16, 17, (True, False, True)),
    ],
)
def test_three_weights_in_one_launch(
    device: torch.device, dtype: torch.dtype, rows: int, biased: tuple[bool, ...]
) -> None:
    x = random(rows, 1, 624, dtype=dtype, device=device)
    weights = [random(n, 624, dtype=dtype, device=device, size=624) for n in (100, 16, 33)]
    biases = [
        random(len(w), dtype=dtype, device=device) if with_one else None
        for w, with_one in zip(weights, biased, strict=True)
    ]
    for count in (1, 2, 3):
        ours = kernel.linears(x, weights[:count], biases[:count])
        exact = reference.linears(
            x.float(), [w.float() for w in weights[:count]], [b if b is None else b.float() for b in biases[:count]]
        )
        for one, other in zip(ours, exact, strict=True):
            close(one, other.to(dtype))


@pytest.mark.parametrize("rows", ROWS)
def test_a_product_is_rounded_before_it_joins_the_residual(device: torch.device, rows: int) -> None:
    x = random(rows, 1, 512, dtype=torch.bfloat16, device=device)
    weight = random(96, 512, dtype=torch.bfloat16, device=device, size=512)
    residual = random(rows, 1, 96, dtype=torch.bfloat16, device=device)
    ours = kernel.linear_onto(residual, x, weight, None)
    assert device.type == "cpu" or torch.equal(ours, residual + kernel.linears(x, [weight], [None])[0])
    close(ours, reference.linear_onto(residual, x, weight, None))


@pytest.mark.parametrize(("dtype", "rows"), [*((torch.bfloat16, rows) for rows in ROWS), (torch.float16, 2)])
def test_gated_linear(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    x = random(rows, 1, 528, dtype=dtype, device=device)
    gate, up = (random(70, 528, dtype=dtype, device=device, size=528) for _ in range(2))
    close(kernel.gated_linear(x, gate, up), reference.gated_linear(x, gate, up), roundings=3)


@pytest.mark.parametrize("shared_kilobytes", [64, 99, 163, 227])
def test_tiles_fit_the_shared_memory_of_the_device(shared_kilobytes: int) -> None:
    device = Device(multiprocessors=108, shared_bytes=shared_kilobytes * 1024, overlap=False)
    for rows in range(1, kernel.MOST_ROWS + 1):
        for outputs in (100, 4096, 6144, 28672, 128256):
            tile = kernel.tile_for(rows, outputs, device)
            assert tile.shared_bytes(rows) <= device.shared_bytes
            assert tile.stages >= 2 and tile.block_k >= 64
    roomy = Device(multiprocessors=132, shared_bytes=227 * 1024, overlap=True)
    assert kernel.tile_for(64, 4096, roomy).stages == 6, "nothing is taken away where there is room"


def test_what_the_kernel_takes(device: torch.device) -> None:
    weight = torch.zeros(1024, 1024, dtype=torch.bfloat16, device=device)
    x = torch.zeros(4, 1, 1024, dtype=torch.bfloat16, device=device)
    assert kernel.serves(x, weight)
    assert not kernel.serves(x.float(), weight.float())
    assert not kernel.serves(x, weight.half())
    assert not kernel.serves(x, weight.T)
    assert not kernel.serves(x, weight[:8])
    assert not kernel.serves(x.repeat(40, 1, 1), weight)
    assert not kernel.serves(x[..., :-8].contiguous(), weight[:, :-8].contiguous())
    with pytest.raises(ValueError, match="4 weights"):
        kernel.linears(x, [weight] * 4, [None] * 4)
