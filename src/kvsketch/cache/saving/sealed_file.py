"""Tensors and text in one safetensors file that is either whole or refused.

safetensors checks that a file is as long as its header says and that every tensor lies inside. The header also carries
a SHA-256 over the whole file, in which the digits of the SHA-256 itself count as zeros: a change of any byte shows. It
guards against damage and mix-ups, not against someone who forges a file; but nothing in a safetensors file is ever run,
and `ranges` looks at every number that a kernel would take for a place.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import socket
import threading
from pathlib import Path

import psutil
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvsketch.models.files import place

UNSEALED = "0" * 64
SEAL = '"checksum":"{}"'  # as safetensors writes it; inside another text the quotes are escaped
LENGTH_BYTES = 8
# A layer takes some 4 kB. Parsed, a header takes two dozen times its size, and nothing is known of a file before that.
LONGEST_HEADER = 4_000_000
BLOCK = 1 << 20


def write(target: Path, tensors: dict[str, Tensor], text: dict[str, str]) -> None:
    """Writes a sealed file; at `target` is the old one or the new one, whatever happens meanwhile. A link stays one."""
    target = Path(os.path.realpath(target))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent}; create it, then save again")
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder; name a file in it instead")
    remove_leftovers(target)
    # A folder of its own: safetensors may put temporary files beside the one it writes.
    work = target.with_name(f"{_prefix(target)}{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        work.mkdir()
        save_file(_apart(tensors), work / "new", {**text, "checksum": UNSEALED})
        _seal(work / "new")
        # safetensors lets nobody else read; the user's own setting decides, as for any other file.
        (work / "new").chmod(work.stat().st_mode & 0o666)
        place(work / "new", target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            getattr(error, "errno", None) or _number(error),
            f"{reason}; {target} is as it was before. Free some space, or save to another disk or folder",
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _number(error: Exception) -> int:
    """The operating system's error number inside a message of safetensors; that of an I/O error where it has none."""
    result = re.search(r"os error (\d+)", str(error))
    return int(result[1]) if result else errno.EIO


def verified(path: Path) -> dict[str, str]:
    """The text of a sealed file whose bytes are those that were written; ValueError for any other file."""
    if _header_length(path) > LONGEST_HEADER:
        raise ValueError(
            f"{path} is no saved cache: it claims a header of {_header_length(path)} bytes; save the cache again"
        )
    try:
        with safe_open(path, framework="pt") as file:
            text: dict[str, str] = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is no saved cache, is damaged or cut short ({error}); save the cache again") from None
    if not re.fullmatch("[0-9a-f]{64}", text.get("checksum", "")):
        raise ValueError(f"{path} is no saved cache: its header has no checksum; save the cache with cache.save()")
    result = _checksum(path, text["checksum"])
    if result != text["checksum"]:
        raise ValueError(
            f"{path} is damaged or was changed: its SHA-256 is {result} and should be {text['checksum']}; save the "
            "cache again"
        )
    return text


def _header_length(path: Path) -> int:
    with path.open("rb") as file:
        return int.from_bytes(file.read(LENGTH_BYTES), "little")


def _checksum(path: Path, stated: str) -> str:
    with path.open("rb") as file:
        header = file.read(LENGTH_BYTES + _header_length(path))
        digest = hashlib.sha256(header.replace(SEAL.format(stated).encode(), SEAL.format(UNSEALED).encode()))
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _seal(path: Path) -> None:
    checksum = _checksum(path, UNSEALED)
    with path.open("r+b") as file:
        header = file.read(LENGTH_BYTES + _header_length(path))
        file.seek(header.index(SEAL.format(UNSEALED).encode()))
        file.write(SEAL.format(checksum).encode())


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in host memory, each alone in its storage, as safetensors wants them."""
    result: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        near = tensor.detach().cpu().contiguous()
        storage = near.untyped_storage()
        if storage.data_ptr() in taken or storage.nbytes() != near.numel() * near.element_size():
            near = near.clone()
        taken.add(near.untyped_storage().data_ptr())
        result[name] = near
    return result


def _prefix(target: Path) -> str:
    return f".{target.name}.{socket.gethostname()}."


def remove_leftovers(target: Path) -> None:
    """Removes what processes of this machine that are gone left of a save to the same file."""
    pattern = re.compile(re.escape(_prefix(target)) + r"(\d+)-\d+\.tmp")
    for path in target.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)
