"""Virtual replay: against the definition with all its matrices, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsketch.ops import replay_scores
from kvsketch.ops.replay_scores import reference
from tests.helpers.common import also
from tests.ops.formula import needs_compiler, needs_triton, poison


def inputs(
    batch: int = 2, heads: int = 2, group: int = 3, count: int = 70, size: int = 16, sinks: int = 4
) -> list[Tensor]:
    torch.manual_seed(count)
    shapes = [(heads * group, count), (heads * group, count), (heads, count), (heads, sinks)]
    return [torch.randn(batch, h, n, size) for h, n in shapes]


def direct(
    again: Tensor, q: Tensor, k: Tensor, sinks: Tensor, scale: float, pads: list[int], copies: Tensor | None = None
) -> Tensor:
    batch, query_heads, count, _ = q.shape
    group = query_heads // k.shape[1]
    scores = torch.zeros(batch, k.shape[1], count)
    for b in range(batch):
        for h in range(query_heads):
            for i in range(pads[b], count):
                keys = k[b, h // group]
                copied = keys if copies is None else copies[b, h // group]
                first = scale * keys[pads[b] :] @ again[b, h, i]
                rest = torch.cat(
                    [scale * sinks[b, h // group] @ again[b, h, i], scale * copied[pads[b] : i + 1] @ q[b, h, i]]
                )
                p = torch.cat([first, rest]).softmax(0)[: count - pads[b]]
                held = scores[b, h // group, pads[b] :]
                held.copy_(torch.maximum(held, p))
    return scores


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_scores_are_the_definition(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("KVSKETCH_KERNELS", kernels)
    monkeypatch.setattr(reference, "MAX_LOGITS", {"cpu": 200})
    values = inputs(count=23)
    hidden = torch.tensor([0, 5])
    expected = direct(*values, 0.4, [0, 5])
    torch.testing.assert_close(replay_scores(*values, 0.4, hidden=hidden), expected, atol=1e-6, rtol=1e-5)
    assert (expected[1, :, :5] == 0).all() and expected.max() <= 1
    copies = torch.randn_like(values[2])
    result = replay_scores(*values, 0.4, hidden=hidden, copies=copies)
    torch.testing.assert_close(result, direct(*values, 0.4, [0, 5], copies), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_sums_of_the_first_reading_stand_for_the_copy(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("KVSKETCH_KERNELS", kernels)
    monkeypatch.setattr(reference, "MAX_LOGITS", {"cpu": 200})
    for sinks in (4, 0):
        again, q, k, before = inputs(count=23, sinks=sinks)
        later = torch.full((23, 23), -torch.inf).triu(1)
        known = (0.4 * q @ k.repeat_interleave(3, 1).mT + later).logsumexp(-1)
        result = replay_scores(again, q, k, before, 0.4, known=known)
        torch.testing.assert_close(result, direct(again, q, k, before, 0.4, [0, 0]), atol=1e-6, rtol=1e-5)
        # The copy is not read.
        torch.testing.assert_close(replay_scores(again, torch.zeros_like(q), k, before, 0.4, known=known), result)


@needs_compiler
@pytest.mark.parametrize(("count", "size"), [(1, 16), (7, 24), (16, 64), (33, 80), (130, 20)])
@pytest.mark.parametrize("threads", [1, 3])
def test_program_gives_the_reference(monkeypatch: pytest.MonkeyPatch, count: int, size: int, threads: int) -> None:
    """Also where logits differ by more than a float32 can hold."""
    from kvsketch.ops.replay_scores import native

    values = inputs(batch=1, heads=4, group=2, count=count, size=size)
    values[2][:, :, count // 2] *= 40.0
    expected = reference.replay_scores(*values, 0.5, 1, 0, None, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    poison(monkeypatch)
    torch.testing.assert_close(native.replay_scores(*values, 0.5, 1, 0, None, None), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_chunks_know_nothing_of_each_other(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """Two chunks of one call; the second row's padding reaches into the second, and the first looks at no sinks."""
    monkeypatch.setenv("KVSKETCH_KERNELS", kernels)
    again, q, k, sinks = inputs(count=46)
    result = replay_scores(again, q, k, sinks, 0.4, chunks=2, bare=1, hidden=torch.tensor([5, 30]))
    for number, pads in enumerate(([5, 23], [0, 7])):
        own = slice(23 * number, 23 * number + 23)
        parts = again[:, :, own], q[:, :, own], k[:, :, own]
        expected = direct(*parts, sinks[:, :, : 4 * number], 0.4, pads)
        torch.testing.assert_close(result[:, :, own], expected, atol=1e-6, rtol=1e-5)
    of_rows = replay_scores(again, q, k, sinks, 0.4, chunks=2, bare=torch.tensor([1, 2]), hidden=torch.tensor([5, 30]))
    torch.testing.assert_close(of_rows[:1], result[:1])
    torch.testing.assert_close(of_rows[1:, :, 23:], direct(*parts, sinks[:, :, :0], 0.4, [0, 7])[1:])


@needs_triton
@pytest.mark.parametrize(
    ("count", "group", "size", "sinks", "dtype", "hidden", "chunks", "jump", "copied"),
    [
        (140, 3, 16, 4, torch.float32, [0, 75], 2, 0.0, False),
        (140, 3, 16, 4, torch.float32, [0, 75], 2, 0.0, True),
        (1, 1, 64, 0, torch.float32, None, 1, 0.0, True),
        (130, 2, 80, 4, torch.bfloat16, None, 1, 0.0, True),
        (140, 1, 16, 4, torch.float32, [0, 3], 1, 400.0, False),
        (130, 2, 64, 192, torch.bfloat16, None, 1, 0.0, False),
        (70, 1, 16, 65, torch.float32, [0, 3], 1, 400.0, True),
        *also(
            (1, 1, 64, 0, torch.float32, None, 1, 0.0, False),
            (130, 2, 80, 4, torch.bfloat16, None, 1, 0.0, False),
            (140, 1, 16, 4, torch.float32, [0, 3], 1, 400.0, True),
            (130, 2, 64, 192, torch.bfloat16, None, 1, 0.0, True),
            (70, 1, 16, 65, torch.float32, [0, 3], 1, 400.0, False),
        ),
    ],
)
def test_kernel_gives_the_reference(
    count: int, group: int, size: int, sinks: int, dtype: torch.dtype, hidden: list[int] | None, chunks: int,
    jump: float, copied: bool, device: torch.device,
) -> None:  # fmt: skip
    """Also where some tokens have logits that are larger than others by more than a float32 can hold (`jump`)."""
    from kvsketch.ops.replay_scores import kernel

    values = [x.to(device, dtype) for x in inputs(count=count, group=group, size=size, sinks=sinks)]
    values[2][:, :, -3:, 0] += jump
    pads = None if hidden is None else torch.tensor(hidden, device=device)
    bare = chunks - 1 if pads is None else torch.tensor([chunks - 1, chunks], device=device)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    copies = torch.randn_like(values[2]) if copied else None
    result = kernel.replay_scores(*values, 0.3, chunks, bare, pads, copies)
    expected = reference.replay_scores(*values, 0.3, chunks, bare, pads, copies)
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


def test_shapes_that_do_not_fit_are_named() -> None:
    again, q, k, sinks = inputs()
    with pytest.raises(ValueError, match=r"again must be \[2, 6, 70, 16\]"):
        replay_scores(again[:, :, 1:], q, k, sinks, 1.0)
    with pytest.raises(ValueError, match="70 tokens do not make 3 equal chunks"):
        replay_scores(again, q, k, sinks, 1.0, chunks=3)
