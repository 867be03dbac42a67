"""Hot rows, reference and kernel alike; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.hot_rows import CALLS, COPIES, HITS, OLDEST, READS, Buffer, HotPlaces, Store, new_places, reference
from tests.ops.formula import needs_triton
from tests.ops.recall_inputs import normal


class Case:
    """A store, hot places and a buffer whose first slots are the tail."""

    def __init__(
        self, device: torch.device, batch: int = 2, heads: int = 2, tokens: int = 60, entries: int = 16, keep: int = 1,
        size: int = 8, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.shape = batch, heads, tokens
        rows = torch.arange(batch, dtype=torch.int32).flip(0)
        keys, values = normal(batch, heads, tokens, size, dtype=dtype), normal(batch, heads, tokens, size + 3, seed=1)
        if device.type == "cuda":
            keys, values = keys.pin_memory(), values.to(dtype).pin_memory()
        self.store = Store(keys, values.to(dtype) if device.type != "cuda" else values, rows.to(device))
        self.hot = new_places(batch, heads, tokens, entries * keep, device)
        slots = 5 + entries * keep
        self.buffer = Buffer(
            torch.zeros(batch, heads, slots, size, dtype=dtype, device=device),
            torch.zeros(batch, heads, slots, size + 3, dtype=dtype, device=device),
            first_tail=2,
            first_hot=5,
        )
        self.tail = torch.full((batch,), tokens, dtype=torch.int32, device=device)

    def copy(self) -> Case:
        other = object.__new__(Case)
        other.shape, other.store, other.tail = self.shape, self.store, self.tail
        other.hot = HotPlaces(*(t.clone() for t in self.hot))
        other.buffer = self.buffer._replace(keys=self.buffer.keys.clone(), values=self.buffer.values.clone())
        return other

    def call(self, implementation: ModuleType, rows: Tensor) -> Tensor:
        return implementation.hot_rows(rows, self.tail, self.hot, self.store, self.buffer)

    def assert_served(self, rows: Tensor, slots: Tensor) -> None:
        """Every slot of a stored token holds that token's key and value."""
        batch, heads, _ = self.shape
        for b in range(batch):
            for h in range(heads):
                group = rows.shape[1] // heads
                wanted = rows[b, h * group : (h + 1) * group].flatten().tolist()
                result = slots[b, h * group : (h + 1) * group].flatten().tolist()
                far = int(self.store.row[b])
                for token, slot in zip(wanted, result, strict=True):
                    assert (slot >= self.buffer.first_hot) == (0 <= token < int(self.tail[b]))
                    if slot >= self.buffer.first_hot:
                        assert torch.equal(self.buffer.keys[b, h, slot].cpu(), self.store.keys[far, h, token])
                        assert torch.equal(self.buffer.values[b, h, slot].cpu(), self.store.values[far, h, token])


def random_lists(case: Case, lists: int, entries: int, step: int, span: int | None = None) -> Tensor:
    """Lists without repetition, some entries -1; `span`: tokens near a place that moves with the step."""
    batch, heads, tokens = case.shape
    generator = torch.Generator().manual_seed(step)
    choices = min(span or tokens, tokens)
    rows = torch.stack(
        [torch.randperm(choices, generator=generator)[:entries] for _ in range(batch * heads * lists)]
    ).view(batch, heads * lists, entries)
    rows = (rows + 3 * step) % tokens if span else rows
    rows = torch.where(torch.rand(rows.shape, generator=generator) < 0.1, -1, rows)
    return rows.int().to(case.tail.device)


@pytest.mark.parametrize(
    ("lists", "entries", "dtype"), [(1, 1, torch.float32), (4, 9, torch.bfloat16), (2, 63, torch.float32)]
)
def test_every_row_is_served(
    implementation: ModuleType, device: torch.device, lists: int, entries: int, dtype: torch.dtype
) -> None:
    case = Case(device, tokens=100, entries=lists * entries, dtype=dtype)
    for step in range(4):
        rows = random_lists(case, lists, entries, step, span=70)
        case.assert_served(rows, case.call(implementation, rows))


@needs_triton
@pytest.mark.parametrize("keep", [1, 3])
def test_kernel_equals_reference(device: torch.device, keep: int) -> None:
    from kvsketch.ops.hot_rows import kernel

    one = Case(device, batch=1, entries=24, keep=keep)
    other = one.copy()
    for step in range(OLDEST + 10 if keep > 1 else 10):
        # Long after a place was read last its age no longer counts.
        rows = random_lists(one, 3, 8, step, span=None if step % 20 == 0 else 9)
        assert torch.equal(one.call(reference, rows), other.call(kernel, rows))
        for a, b in zip((*one.hot, *one.buffer[:2]), (*other.hot, *other.buffer[:2]), strict=True):
            assert torch.equal(a, b)


def test_codes_come_with_their_steps(implementation: ModuleType, device: torch.device) -> None:
    case = Case(device, batch=1, entries=24)
    keys, values = (normal(1, 2, 60, n).view(torch.uint8) for n in (2, 3))
    steps = (normal(1, 2, 60, 1, seed=3, dtype=torch.float16), normal(1, 2, 60, 1, seed=4, dtype=torch.float16))
    far = [t.pin_memory() if device.type == "cuda" else t for t in (keys, values, *steps)]
    near = [torch.zeros(1, 2, 29, t.shape[3], dtype=t.dtype, device=device) for t in far]
    case.store = case.store._replace(keys=far[0], values=far[1], steps=(far[2], far[3]))
    case.buffer = case.buffer._replace(keys=near[0], values=near[1], steps=(near[2], near[3]))
    for step in range(3):
        rows = random_lists(case, 3, 8, step, span=20)
        slots = case.call(implementation, rows)
        case.assert_served(rows, slots)
        for h in range(2):
            for token, slot in zip(rows[0, 3 * h].tolist(), slots[0, 3 * h].tolist(), strict=True):
                if token >= 0:
                    assert [float(n[0, h, slot]) for n in near[2:]] == [float(f[0, h, token]) for f in far[2:]]


@needs_triton
def test_parts_of_the_lists_and_blocks_of_places(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All missing, none missing, tokens that several lists name in other parts, more rows than programs that copy."""
    from kvsketch.ops.hot_rows import kernel

    for name, value in (("BLOCK", 64), ("HOT_BLOCK", 128), ("COPY_ROWS", 4), ("COPY_PROGRAMS", 3)):
        monkeypatch.setattr(kernel, name, value)
    one = Case(device, tokens=400, entries=300, batch=1)
    one.tail.fill_(390)
    other = one.copy()
    apart = torch.arange(300, dtype=torch.int32, device=device).view(1, 3, 100)
    alike = apart[:, :1].flip(2) + 300
    calls = [apart, apart.flip(2), alike.expand(1, 3, 100), *(random_lists(one, 3, 100, s)[:, :3] for s in range(3))]
    for rows in calls:
        rows = torch.cat([rows, rows.roll(1, 1)], 1)
        assert torch.equal(one.call(reference, rows), other.call(kernel, rows))
        for a, b in zip((*one.hot, *one.buffer[:2]), (*other.hot, *other.buffer[:2]), strict=True):
            assert torch.equal(a, b)


def test_tail_tokens_need_no_place(implementation: ModuleType, device: torch.device) -> None:
    case = Case(device, batch=1, heads=1)
    case.tail.fill_(50)
    rows = torch.tensor([[[49, 50, -1, 52]]], dtype=torch.int32, device=device)
    slots = case.call(implementation, rows)
    assert slots.tolist() == [[[5, 2, -1, 4]]]
    assert case.hot.counts[0, 0, READS] == 1


def test_what_counts_as_a_hit(implementation: ModuleType, device: torch.device) -> None:
    """The first call misses; a token that two lists name is two reads and one copy."""
    case = Case(device, batch=1, heads=1, entries=8)
    first = torch.tensor([[[1, 2, 3], [3, 4, -1]]], dtype=torch.int32, device=device)
    case.call(implementation, first)
    assert case.hot.counts[0, 0].tolist() == [1, 5, 0, 4]
    case.call(implementation, torch.tensor([[[4, 9, 3], [9, 8, 7]]], dtype=torch.int32, device=device))
    counts = case.hot.counts[0, 0]
    assert (counts[CALLS], counts[READS], counts[HITS], counts[COPIES]) == (2, 11, 2, 7)


def test_the_longest_unread_goes(implementation: ModuleType, device: torch.device) -> None:
    case = Case(device, batch=1, heads=1, entries=4)
    for tokens in ([0, 1, 2, 3], [1, 3, -1, -1], [2, 1, -1, -1], [7, -1, -1, -1]):
        case.call(implementation, torch.tensor([[tokens]], dtype=torch.int32, device=device))
    assert sorted(case.hot.token_of.flatten().tolist()) == [1, 2, 3, 7]
    case.call(implementation, torch.tensor([[[8, -1, -1, -1]]], dtype=torch.int32, device=device))
    assert sorted(case.hot.token_of.flatten().tolist()) == [1, 2, 7, 8]


def test_arguments_that_do_not_fit(device: torch.device) -> None:
    case = Case(device, entries=4)
    rows = torch.zeros(2, 2, 5, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="do not fit 4 hot places"):
        ops.hot_rows(rows, case.tail, case.hot, case.store, case.buffer)
    with pytest.raises(ValueError, match="int32"):
        ops.hot_rows(rows.long(), case.tail, case.hot, case.store, case.buffer)
    with pytest.raises(ValueError, match="tail must be int32"):
        ops.hot_rows(rows[..., :4], case.tail.long(), case.hot, case.store, case.buffer)
    short = case.buffer._replace(keys=case.buffer.keys[:, :, :6])
    with pytest.raises(ValueError, match="do not fit 6 slots"):
        ops.hot_rows(rows[..., :4], case.tail, case.hot, case.store, short)
