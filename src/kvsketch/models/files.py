"""Files that are either absent or whole: a cache folder, a lock per file, pinned hashes, atomic placement.

A file is built in a work folder beside its target, checked, moved into place with one rename, and only then recorded.
If a process dies at any step, the next one finds a whole file or none. The cache folder may be shared: only its user
can write into a work folder, links are never followed for writing, and whoever can read the cache folder can read its
files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import platformdirs
from filelock import FileLock, Timeout

HOME_VARIABLE = "KVSKETCH_HOME"


class FetchError(OSError):
    """A file could not be downloaded, or differs from the pinned one."""


class WrongHashError(FetchError):
    """A file was downloaded completely, but its hash is not the pinned one."""


def home() -> Path:
    """The folder of downloaded and converted files: $KVSKETCH_HOME, or kvsketch in the user's cache folder."""
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_cache_path("kvsketch", appauthor=False, opinion=False)


def say(message: str) -> None:
    """One line for the person waiting; standard output stays free for results."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of `target`; the operating system frees it when the process dies."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(target) + ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"another process is preparing {target.name}; waiting for it")
            lock.acquire()
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise FetchError(
            f"cannot write to {target.parent} ({error.strerror}); set {HOME_VARIABLE} to a folder that you can write to"
        ) from error
    try:
        yield
    finally:
        lock.release()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a file, a folder with its contents, or a link (not its target); does nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_on_disk(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; 0 where there is nothing."""
    return sum(each.stat().st_size for each in (path, *path.rglob("*")) if is_plain_file(each))


def create(path: Path) -> BinaryIO:
    """A new file, open for writing; an existing file or link of that name is removed first."""
    remove(path)
    return path.open("xb")


def is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def work_folder(path: Path) -> Path:
    """The folder `path`, made so that only this user can write in it; one that is so already is kept with its files."""
    try:
        if not _is_private(path):
            remove(path)
            path.mkdir(mode=0o700)
    except OSError as error:
        raise FetchError(
            f"cannot work in {path} ({error.strerror}); remove it, or set {HOME_VARIABLE} to a folder of your own"
        ) from error
    return path


def _is_private(path: Path) -> bool:
    try:
        result = path.lstat()
    except FileNotFoundError:
        return False
    own = os.name != "posix" or (result.st_uid == os.geteuid() and not result.st_mode & 0o022)
    return stat.S_ISDIR(result.st_mode) and own


def let_read(path: Path, like: Path) -> None:
    """Gives `path` and its files the readers of the folder `like`; safetensors writes files only its user can read."""
    readers = like.stat().st_mode
    for each in (path, *path.rglob("*")):
        each.chmod((readers & 0o555) | 0o700 if each.is_dir() else (readers & 0o444) | 0o600)


def place(source: Path, target: Path) -> None:
    """Move a finished file or folder to its final name in one step that survives a power cut."""
    for path in (source, *source.rglob("*")):
        if path.is_file():
            _flush(path)
    os.replace(source, target)
    _flush(target.parent)


def write_json(path: Path, content: dict[str, object]) -> None:
    partial = path.with_name(path.name + ".tmp")
    try:
        with create(partial) as file:
            file.write((json.dumps(content, indent=1) + "\n").encode())
        place(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, object]:
    """The content of a record, or nothing when it is missing or unreadable."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def record_of(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def is_verified(target: Path, sha256: str) -> bool:
    """Whether `target` was hashed to `sha256` before and still has the same size and time; does not read the file."""
    return target.is_file() and read_json(record_of(target)) == _record(target, sha256)


def _record(target: Path, sha256: str) -> dict[str, object]:
    stat = target.stat()
    return {"sha256": sha256, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def obtain(target: Path, sha256: str, build: Callable[[Path], Path]) -> Path:
    """Return `target` with the pinned bytes; `build(work_folder)` makes the file if it is missing.

    `build` may leave finished pieces in the work folder: it is kept when the build is interrupted or fails, and
    removed when the file is in place or its hash is wrong.
    """
    if is_verified(target, sha256):
        return target
    with locked(target):
        if is_verified(target, sha256):
            return target
        work = target.with_name(target.name + ".work")
        if not (target.is_file() and sha256_of(target) == sha256):
            target.unlink(missing_ok=True)
            built = build(work_folder(work))
            actual = sha256_of(built)
            if actual != sha256:
                shutil.rmtree(work)
                raise WrongHashError(
                    f"{target.name} has the wrong SHA-256 and was deleted: expected {sha256}, got {actual}. "
                    "The download was damaged or its source has changed: try again, and if it repeats, do not use it"
                )
            let_read(built, target.parent)
            place(built, target)
        # The record is written last: once it exists, the work folder is not used again.
        shutil.rmtree(work, ignore_errors=True)
        write_json(record_of(target), _record(target, sha256))
    return target
