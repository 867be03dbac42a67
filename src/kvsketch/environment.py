"""What this installation runs on, and whether the tests have passed on such versions. Does not import torch."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import warnings
from dataclasses import dataclass, field

from packaging.version import Version

from kvsketch.compiler import programs

# Oldest and newest release on which the test suite has passed.
TESTED = {
    "python": ("3.11", "3.12"),
    "torch": ("2.11.0", "2.13.0"),
    "transformers": ("5.15.0", "5.23.0"),
    "triton": ("3.6.0", "3.9.0"),
}


@dataclass(frozen=True)
class Environment:
    """Versions, devices, kernels, models, and what deserves a warning."""

    kvsketch: str
    versions: dict[str, str | None]
    gpus: list[str]
    cpu_threads: int
    kernels: str
    home: str
    models: list[str]
    warnings: list[str]
    tested: dict[str, tuple[str, str]] = field(default_factory=lambda: dict(TESTED))


def describe() -> Environment:
    """Looks at the running interpreter and machine."""
    from kvsketch import __version__, models

    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {package: installed(package) for package in ("torch", "transformers", "triton")}
    gpus = gpu_names()
    return Environment(
        kvsketch=__version__,
        versions=versions,
        gpus=gpus,
        cpu_threads=cpu_threads(),
        kernels=kernels_in_use(bool(gpus)),
        home=str(models.home()),
        models=[name for name in models.CATALOG if models.is_pulled(name)],
        warnings=[warning for package, version in versions.items() if (warning := untested(package, version))]
        + ([] if gpus or _only_references() or not (warning := programs().warning) else [warning]),
    )


def gpu_names() -> list[str]:
    """The NVIDIA GPUs that torch can use here, as their driver names them."""
    if "+cpu" in (installed("torch") or ""):
        return []
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return []
    count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    result = []
    for number in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), number)
        driver.cuDeviceGetName(name, len(name), device)
        result.append(name.value.decode())
    return result


def cpu_threads() -> int:
    """Threads that torch may run on a CPU: OMP_NUM_THREADS, or one for each CPU of this process."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given):
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kernels_in_use(gpu: bool) -> str:
    """Which half of `ops` a model on the default device would run."""
    if _only_references():
        return "torch reference: KVSKETCH_KERNELS=reference"
    if gpu:
        return "Triton" if importlib.util.find_spec("triton") else "torch reference: Triton cannot be imported"
    made = programs()
    return f"C, compiled by {made.compiler}" if made.library else f"torch reference: no GPU, and {made.absent}"


def _only_references() -> bool:
    choice = os.environ.get("KVSKETCH_KERNELS", "auto")
    if choice not in ("auto", "reference"):
        raise ValueError(f"KVSKETCH_KERNELS={choice!r} is not one of auto, reference; unset it or use one.")
    return choice == "reference"


def installed(package: str) -> str | None:
    """The installed version of a package, None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def untested(package: str, version: str | None) -> str | None:
    """A warning if `version` is outside the tested range; patch releases of the newest version count as tested."""
    if version is None:
        return None
    oldest, newest = (Version(bound) for bound in TESTED[package])
    result = Version(Version(version).base_version)
    if oldest <= result and result.release[:2] <= newest.release[:2]:
        return None
    return f"{package} {version} is outside the tested range {oldest} to {newest}"


@functools.cache
def warn_of_untested() -> None:
    """Warns the caller's caller of a torch or transformers outside the tested range, once in a process."""
    for package in ("torch", "transformers"):
        if told := untested(package, installed(package)):
            advice = "if an answer looks wrong, compare it with the method 'full', or install a tested version"
            warnings.warn(f"kvsketch: {told}; {advice}", stacklevel=3)
