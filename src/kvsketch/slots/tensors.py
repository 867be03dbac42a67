"""Moves of slot tensors, [B, H, slots, ...], that a table is made of."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def plain() -> contextlib.AbstractContextManager[Any]:
    """Inside the block, new tensors hold no gradient and can be changed in place later, in any mode.

    Costs nothing under `torch.no_grad`. Tensors made under `torch.inference_mode` could not be changed outside it.
    """
    if torch.is_inference_mode_enabled():
        return _outside_inference_mode()
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


@contextlib.contextmanager
def _outside_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def owned(tensor: Tensor) -> Tensor:
    """The tensor itself if it fills its storage, else a copy, so that the measured bytes are the real ones."""
    tensor = tensor.clone() if tensor.is_inference() else tensor.detach()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.contiguous() if not tensor.is_contiguous() else tensor.clone()


def copies(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Copies of tensors that fill storages of their own, by id, for `copy.deepcopy`; of others there are none."""
    result = {id(tensor): tensor for tensor in tensors}
    storages = Counter(tensor.untyped_storage().data_ptr() for tensor in result.values())
    made: dict[int, Tensor] = {}
    pairs: dict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for number, tensor in result.items():
        storage = tensor.untyped_storage()
        if storages[storage.data_ptr()] == 1 and storage.nbytes() == tensor.nbytes > 0:
            made[number] = torch.empty_like(tensor)
            for held, new in zip(pairs[tensor.device, tensor.dtype], (made[number], tensor), strict=True):
                held.append(new)
    for targets, values in pairs.values():
        torch._foreach_copy_(targets, values)
    return made


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors one after the other; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def grown(buffer: Tensor, used: int, capacity: int) -> Tensor:
    grown = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[3])
    grown[:, :, :used] = buffer[:, :, :used]
    return grown


def inserted(tensor: Tensor | None, at: int, new: Tensor) -> Tensor:
    assert tensor is not None
    return torch.cat([tensor[:, :, :at], new, tensor[:, :, at:]], 2)


def removed(tensor: Tensor, start: int, end: int) -> Tensor:
    return torch.cat([tensor[:, :, :start], tensor[:, :, end:]], 2)


def filled(tensor: Tensor, count: int, value: float = 0) -> Tensor:
    return torch.cat([tensor, tensor.new_full((*tensor.shape[:2], count, *tensor.shape[3:]), value)], 2)


def gather_slots(tensor: Tensor, slots: Tensor) -> Tensor:
    slots = slots.view(*slots.shape, *[1] * (tensor.dim() - 3)).expand(-1, -1, -1, *tensor.shape[3:])
    return tensor.gather(2, slots)


def rows_of(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """x [B, H, S, D] as rows [R, D] of the same memory, and how far apart those of neighbours in B, H and S are.

    Tensors of a model have their heads between the tokens; a copy is made only where numbers of a row are not together.
    """
    size, sizes = x.shape[3], x.shape[:3]
    if x.stride(3) != 1 or any(stride % size for stride in x.stride()[:3]):
        x = x.contiguous()
    row, head, slot = (stride // size for stride in x.stride()[:3])
    count = 1 + (sizes[0] - 1) * row + (sizes[1] - 1) * head + (sizes[2] - 1) * slot
    return x.as_strided((count, size), (size, 1)), (row, head, slot)


def uploaded(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Tensors of the host on devices; those of a kind in one go, without waiting for what the device has to do yet."""
    result = [*tensors]
    for device, dtype in {(device, tensor.dtype) for device, tensor in zip(devices, tensors, strict=True)}:
        if device.type != "cuda":
            continue
        numbers = [n for n, tensor in enumerate(tensors) if (devices[n], tensor.dtype) == (device, dtype)]
        flat = [tensors[n].flatten() for n in numbers]
        # Kernels are compiled for addresses that are multiples of 16 bytes, as those of whole tensors are.
        flat = [torch.nn.functional.pad(part, (0, -len(part) % 16)) for part in flat]
        near = torch.cat(flat).pin_memory().to(device, non_blocking=True).split([len(part) for part in flat])
        for n, part in zip(numbers, near, strict=True):
            result[n] = part[: tensors[n].numel()].view(tensors[n].shape)
    return result


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one dtype on the host (synchronises with the GPU once)."""
    return fetching(tensors)()


def fetching(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Asks for tensors of one dtype; the call that it returns waits for them, and for nothing launched since."""
    here = tensors[0].device
    if here.type == "cpu":
        return lambda: [*tensors]
    shapes = [tensor.shape for tensor in tensors]
    flat = torch.cat([tensor.to(here).flatten() for tensor in tensors])
    near, asked = flat.to("cpu", non_blocking=here.type == "cuda"), None
    if here.type == "cuda":
        asked = torch.cuda.Event()
        asked.record(torch.cuda.current_stream(here))

    def answer() -> list[Tensor]:
        if asked is not None:
            asked.synchronize()
        parts = near.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    return answer


def wide(tensor: Tensor) -> Tensor:
    """The same memory in numbers of 8 bytes where a slot has several: kernels copy numbers, not bytes."""
    wide = tensor.dim() == 2 and tensor.shape[1] * tensor.element_size() % 8 == 0
    return tensor.view(torch.int64) if wide else tensor
