"""What the operations are tested with: inputs, the definition term by term, and the measure of error."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch.ops.codec import Codec, CodedSlots, encode
from kvsketch.ops.common import native
from kvsketch.ops.weighted_attention import Arguments, Attended, reference

Attend = Callable[..., Attended]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
needs_compiler = pytest.mark.skipif(
    torch.cuda.is_available() or native.library() is None, reason="programs in C run on a CPU with a compiler"
)


def poison(monkeypatch: pytest.MonkeyPatch, integer: int = 3) -> None:
    """New buffers hold NaN, or an unlikely integer, until they are written."""
    allocate = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        buffer = allocate(*args, **kwargs)
        return buffer.fill_(float("nan") if buffer.is_floating_point() else integer)

    monkeypatch.setattr(torch, "empty", poisoned)


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    log_num: Tensor
    log_den: Tensor

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    @property
    def weighted(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.log_num, self.log_den, self.scale

    @property
    def plain(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, None, None, self.scale


def make_inputs(
    device: torch.device,
    slots: int = 40,
    group: int = 2,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    kv_heads: int = 2,
    queries: int = 1,
    value_slots: int | None = None,
    value_size: int | None = None,
    seed: int = 0,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    value_slots = slots if value_slots is None else value_slots
    q = normal(batch, kv_heads * group, queries, size)
    k = normal(batch, kv_heads, slots, size)
    v = normal(batch, kv_heads, value_slots, value_size or size)
    log_num, log_den = normal(batch, kv_heads, slots), normal(batch, kv_heads, slots)
    return Inputs(q.to(device, dtype), k.to(device, dtype), v.to(device, dtype), log_num.to(device), log_den.to(device))


def direct(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_num: Tensor | None,
    log_den: Tensor | None,
    scale: float,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Attended:
    """The definition, term by term in float64, without any care for overflow."""
    group = q.shape[1] // k.shape[1]
    slots, value_slots = k.shape[2], v.shape[2]

    def per_query_head(tensor: Tensor) -> Tensor:
        return tensor.double().repeat_interleave(group, 1)

    s = scale * torch.einsum("bhnd,bhsd->bhns", q.double(), per_query_head(k))
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    factor = torch.ones_like(s)
    if bias is not None:
        bias = bias.repeat_interleave(group, 1) if bias.shape[1] == k.shape[1] else bias
        factor = factor * (bias.double() if bias.dtype == torch.bool else bias.double().exp())
    if lengths is not None:
        factor = factor * per_query_head(torch.arange(slots, device=q.device) < lengths[..., None])[:, :, None]
    zeros = torch.zeros(k.shape[:3], device=q.device)
    terms_num, terms_den = (
        s.exp() * factor * per_query_head(zeros if weights is None else weights).exp()[:, :, None]
        for weights in (log_num, log_den)
    )
    num = torch.einsum("bhns,bhsd->bhnd", terms_num[..., :value_slots], per_query_head(v))
    den = terms_den.sum(-1)
    if sink_logits is not None:
        den = den + sink_logits.double().exp()[:, None]
    out = torch.where(den[..., None] > 0, num / den[..., None], 0.0)
    return Attended(out, terms_num[..., :value_slots].sum(-1).log(), den.log(), s)


def by_reference(*arguments: Any, **options: Any) -> Attended:
    """The reference, with the arguments of the operation."""
    return reference.weighted_attention(Arguments(*arguments, **options))


def by_native(*arguments: Any, **options: Any) -> Attended:
    """The program in C, with the arguments of the operation; calls that it leaves to the reference are skipped."""
    from kvsketch.ops.weighted_attention import native as program

    call = Arguments(*arguments, **options)
    if not program.supported(call):
        pytest.skip("a call for the reference")
    return program.weighted_attention(call)


def by_kernel(
    *arguments: Any, block_n: int = 32, splits: int = 2, warps: int = 4, stages: int = 2, overlap: bool = False,
    **options: Any,
) -> Attended:  # fmt: skip
    """The kernel, with the arguments of the operation and a plan."""
    from kvsketch.ops.weighted_attention import kernel

    return kernel.weighted_attention(
        Arguments(*arguments, **options), kernel.Plan(block_n, splits, warps, stages, overlap)
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected; NaN in either makes it NaN, which no bound accepts."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def quantised(x: Tensor, bits: int, exact: int = 4) -> Tensor | CodedSlots:
    """Vectors [B, H, S, D] in so many bits around their mean; exact ones lie anywhere, and one is overwritten."""
    if bits == 16:
        return x
    codec, center = Codec(bits, x.shape[-1]), x.float().mean(2)
    at = torch.arange(exact, device=x.device).expand(*x.shape[:2], -1) * 7 % x.shape[2]
    rotated = codec.rotated(x.gather(2, at.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])).float() - center.unsqueeze(2))
    at = at.int().clone()
    at[:, 0, -1:] = -1
    return CodedSlots(codec, center, rotated, at, *encode(x, center, codec))


def in_pages(parts: list[Tensor | CodedSlots], rows: list[int], count: int) -> tuple[Tensor, list[Tensor | CodedSlots]]:
    """A pool of so many pages, which lie apart and hold nan, and keys and values whose row b is page rows[b] of it."""
    names = ("center", "exact", "exact_at", "codes", "steps")
    held = [[p] if isinstance(p, Tensor) else [getattr(p, name) for name in names] for p in parts]
    sizes = [part[0].nbytes for each in held for part in each]
    starts = [sum(-(-size // 64) * 64 for size in sizes[:n]) for n in range(len(sizes))]
    pool = torch.full((count, starts[-1] + sizes[-1] + 128), 255, dtype=torch.uint8, device=held[0][0].device)
    pool = pool[:, : pool.shape[1] // 64 * 64].contiguous()
    result, place = [], iter(zip(starts, sizes, strict=True))
    for like, each in zip(parts, held, strict=True):
        planes = []
        for part in each:
            start, size = next(place)
            plane = pool[:, start : start + size].view(part.dtype).unflatten(1, part.shape[1:])
            plane[rows] = part
            planes.append(plane)
        result.append(planes[0] if isinstance(like, Tensor) else CodedSlots(like.codec, *planes))
    return pool, result
