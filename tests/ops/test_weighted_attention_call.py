"""How a call of weighted attention is checked, dispatched and planned."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from kvsketch import ops
from kvsketch.ops.common import dispatch
from kvsketch.ops.common.device import Device
from kvsketch.ops.weighted_attention import Arguments
from tests.ops.formula import make_inputs, needs_triton


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 3, 1, 16)}, "not a multiple of the 2 heads"),
        ({"q": torch.zeros(4, 1, 16)}, r"q must be \[batch, heads, length, size\]"),
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
    assert kernel.supported(Arguments(*inputs.weighted))
    assert not kernel.supported(Arguments(inputs.q.double(), *inputs.weighted[1:]))
    wide = torch.zeros(1, 2, 1, 512)
    assert not kernel.supported(Arguments(wide, wide, wide, None, None, 1.0))


def test_missing_triton_warns_once(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delenv("KVSKETCH_KERNELS", raising=False)
    dispatch._load_kernel.cache_clear()
    try:
        for _ in range(2):
            assert ops.kernel_for("weighted_attention", torch.device("cuda")) is None
    finally:
        dispatch._load_kernel.cache_clear()
    assert [str(warning.message) for warning in recwarn if "Triton cannot be imported" in str(warning.message)] != []
    assert len(recwarn) == 1


@needs_triton
@pytest.mark.parametrize("heads", [1, 8, 64, 96, 256])
@pytest.mark.parametrize("slots", [1, 100, 2048, 32768])
@pytest.mark.parametrize("slot_bytes", [64, 512, 2048])
def test_plans_are_launchable(heads: int, slots: int, slot_bytes: int) -> None:
    from kvsketch.ops.weighted_attention.kernel import plan

    chosen = plan(heads, slots, slot_bytes, Device(multiprocessors=132, shared_bytes=227 * 1024, overlap=True))
    assert chosen.block_n in (16, 32, 64, 128)
    assert 1 <= chosen.splits <= max(1, -(-slots // chosen.block_n))
    assert (chosen.stages - 1) * chosen.block_n * slot_bytes <= 128 * 1024


@needs_triton
def test_splits_fill_the_device_without_a_tail() -> None:
    from kvsketch.ops.weighted_attention.kernel import best_splits

    assert best_splits(heads=256, tiles=512, resident=264) == 1
    assert best_splits(heads=8, tiles=512, resident=264) in (32, 33)
    waves = best_splits(heads=96, tiles=512, resident=264) * 96 / 264
    assert waves / -(-waves // 1) > 0.9
