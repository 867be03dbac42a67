"""One token folded into SubGen's structure: the kernel against the reference, step by step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kvsketch
from kvsketch.methods.subgen.slots import layout_of, state_of
from kvsketch.ops.fold_token import reference
from kvsketch.slots import LayerContext, SlotTable
from tests.ops.formula import needs_triton

CASES = {
    "small": "subgen:budget=40:sinks=2:recent=6:normalizer=clipped",
    "one_sum": "subgen:budget=40:sinks=2:recent=6",
    "one_sum_mixed": "subgen:budget=41:sinks=2:recent=6:sampling=mixed",
    "mixed": "subgen:budget=60:sinks=2:recent=6:sampling=mixed:normalizer=clipped",
    "one_mixed_sample": "subgen:budget=30:s=1:sampling=mixed",
    "copies_apart": "subgen:budget=60:sinks=2:recent=6:coalesce=false:delta=3.0:normalizer=clipped",
    "mixed_copies_apart": "subgen:budget=60:sinks=2:recent=6:coalesce=false:sampling=mixed",
    "many_slots": "subgen:budget=300:s=130:t=3:recent=20:normalizer=clipped",
    "share": "subgen:budget=30%:normalizer=clipped",
}


def random_tokens(
    count: int, seed: int, dtype: torch.dtype, device: torch.device, size: int = 24
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, 2, count, width, generator=generator) for width in (size, size + 8))
    return keys.to(device, dtype), values.to(device, dtype)


def filled_table(method: kvsketch.methods.Method, prompt: int, dtype: torch.dtype, device: torch.device) -> SlotTable:
    table = SlotTable(LayerContext(1, 2))
    keys, values = random_tokens(prompt, 0, dtype, device)
    table.append(keys, values)
    table.padding = torch.tensor([0, 17], device=device)
    method.compress(table, keys)
    return table


@needs_triton
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), ("small", torch.bfloat16), ("one_sum_mixed", torch.bfloat16)],
)
def test_kernel_equals_reference_at_every_step(case: str, dtype: torch.dtype, device: torch.device) -> None:
    from kvsketch.ops.fold_token import kernel

    method = kvsketch.parse_method(CASES[case])
    table = filled_table(method, 320, dtype, device)
    layout, changed = layout_of(table), False
    for step in range(3):
        keys, values = random_tokens(1, 100 + step, dtype, device)
        table.append(keys, values * (step % 4 > 0))
        other = copy.deepcopy(table)
        before = table.index.clone()
        reference.fold_token(state_of(table), layout, method.coalesce)
        kernel.fold_token(state_of(other), layout, method.coalesce)
        changed = changed or not torch.equal(before[:, :, layout.exact :], table.index[:, :, layout.exact :])
        for name, ours in vars(state_of(table)).items():
            if ours is not None:
                theirs = getattr(state_of(other), name)
                torch.testing.assert_close(theirs, ours, atol=2e-6, rtol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert changed or method.s == 1, "no sample changed: nothing was tested"


class NoHostSync(TorchDispatchMode):
    """Raises when an operation hands a tensor's value to the host, or has a shape that depends on data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(
            name in str(func) for name in ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero")
        ):
            raise AssertionError(f"{func} in a decode step")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES)
def test_a_step_stays_on_the_device_and_at_its_addresses(case: str, device: torch.device) -> None:
    method = kvsketch.parse_method(CASES[case])
    table = filled_table(method, 320, torch.float32, device)
    addresses = [tensor.data_ptr() for tensor in table.tensors()]
    for step in range(6):
        table.append(*random_tokens(1, step, torch.float32, device))
        with NoHostSync():
            method.compress(table, torch.empty(0))
    assert addresses == [tensor.data_ptr() for tensor in table.tensors()]


def test_the_check_for_host_values_works() -> None:
    with pytest.raises(AssertionError, match="decode step"), NoHostSync():
        bool((torch.arange(3) > 1).any())
