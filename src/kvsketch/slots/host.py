"""Keys and values of one layer in host memory: pinned where a GPU reads them, plain tensors elsewhere.

Pinned memory is mapped page by page and registered with CUDA, because torch's own pinned allocator rounds every
request up to a power of two. Kernels read it through the host's address.
"""

from __future__ import annotations

import functools
import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

GIB = 1 << 30


class HostStore:
    """Tensors [R, H, capacity, n], of which the first `length` tokens are written: keys and values, or their codes and
    steps.
    """

    def __init__(self, like: Sequence[Tensor], rows: int, capacity: int, device: torch.device | None = None) -> None:
        """An empty store for tokens whose keys and values consist of tensors like these, [B, H, tokens, n].

        device: the one that reads it, else that of these tensors.
        """
        self.device, self.length, self.capacity = device or like[0].device, 0, capacity
        require_host_memory(rows * capacity * sum(t.shape[1] * t.shape[3] * t.element_size() for t in like))
        self.parts = [self._allocate((rows, t.shape[1], capacity, t.shape[3]), t.dtype) for t in like]
        self._written: Any = None  # the event after copies that run beside the device's own work

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device.type != "cuda":
            return torch.empty(shape, dtype=dtype)
        _release_retired()
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        # All cores touch the pages first; CUDA would otherwise allocate them one by one while it pins them.
        tensor = torch.frombuffer(buffer, dtype=dtype).view(shape).zero_()
        cuda = torch.cuda.cudart()
        error = int(cuda.cudaHostRegister(tensor.data_ptr(), len(buffer), 0))
        if error:
            raise MemoryError(
                f"CUDA cannot pin {len(buffer) / GIB:.2f} GiB of host memory (error {error}); {_free_text()}. "
                f"Free host memory or use offload=none."
            )
        weakref.finalize(self, _retire, self.device, tensor.data_ptr(), buffer)
        return tensor

    @property
    def rows(self) -> int:
        """R, the texts that it holds."""
        return self.parts[0].shape[0]

    def write(self, start: int, tokens: Sequence[Tensor], side_stream: bool = False) -> None:
        """Copies tokens [R, H, n, D] to places [start, start + n); `side_stream`: on a side stream."""
        if self.device.type != "cuda":
            self._copy_in(start, tokens)
        elif side_stream:
            stream, current = _side_stream(self.device), torch.cuda.current_stream(self.device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._copy_in(start, tokens)
                self._written = stream.record_event()
            for tensor in tokens:
                tensor.record_stream(stream)
        else:
            self.wait()
            self._copy_in(start, tokens)
        self.length = start + tokens[0].shape[2]

    def _copy_in(self, start: int, tokens: Sequence[Tensor]) -> None:
        for far, near in zip(self.parts, tokens, strict=True):
            for row in range(far.shape[0]):
                for head in range(far.shape[1]):
                    # One head at a time: only a contiguous copy needs no staging buffer.
                    place = far[row, head, start : start + near.shape[2]]
                    place.copy_(near[row, head], non_blocking=True)

    def read(self, rows: list[int], into: Sequence[Tensor]) -> None:
        """Copies all tokens of the named store rows to the first places of tensors [B, H, tokens, n], the first so
        many of its own.
        """
        self.wait()
        for far, near in zip(self.parts, into, strict=False):
            for to, row in enumerate(rows):
                for head in range(far.shape[1]):
                    near[to, head, : self.length].copy_(far[row, head, : self.length], non_blocking=True)

    def moved(self, rows: list[int], capacity: int) -> HostStore:
        """A store of its own with the named rows of this one, and room for `capacity` tokens."""
        self.synchronize()
        other = HostStore(self.parts, len(rows), capacity, self.device)
        other.length = self.length
        for far, near in zip(self.parts, other.parts, strict=True):
            for to, row in enumerate(rows):
                near[to, :, : self.length] = far[row, :, : self.length]
        return other

    def wait(self) -> None:
        """Makes the current stream wait for what was written on the side stream."""
        if self._written is not None:
            torch.cuda.current_stream(self.device).wait_event(self._written)
            self._written = None

    def synchronize(self) -> None:
        """The host may read the store."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._written = None

    def __deepcopy__(self, memo: dict[int, Any]) -> HostStore:
        return self.moved(list(range(self.rows)), self.capacity)


def require_host_memory(needed: int) -> None:
    """Raises MemoryError when `needed` bytes of host memory are not there."""
    if needed > free_host_memory():
        raise MemoryError(
            f"offload=host needs {needed / GIB:.2f} GiB of host memory for keys and values; {_free_text()}. "
            f"Use a shorter prompt, fewer rows or beams, free host memory, or offload=none."
        )


def free_host_memory() -> int:
    """Bytes that the machine, and the control group this process runs in, can still give."""
    machine, group = int(psutil.virtual_memory().available), _group_memory()
    return machine if group is None else min(machine, group)


def _group_memory(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container may still take, page cache that can go included; None without a limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get("inactive_file", 0))


def _free_text() -> str:
    return f"{free_host_memory() / GIB:.2f} GiB are free"


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


_retired: list[tuple[torch.device, int, mmap.mmap]] = []  # pinned memory that no store holds any more


def _retire(device: torch.device, address: int, buffer: mmap.mmap) -> None:
    """Frees pinned memory; during a graph capture, which forbids that, it is freed at the next call."""
    _retired.append((device, address, buffer))
    if not torch.cuda.is_current_stream_capturing():
        _release_retired()


def _release_retired() -> None:
    """Takes memory back from CUDA once nothing on the device can still read it; then its pages go."""
    while _retired:
        device, address, _buffer = _retired.pop()
        torch.cuda.synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(address)
