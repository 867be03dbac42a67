"""What this installation runs on, and whether the tests have passed on such versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass, field

from packaging.version import Version

# Oldest and newest release on which the test suite has passed.
TESTED = {
    "python": ("3.11", "3.12"),
    "torch": ("2.11.0", "2.13.0"),
    "transformers": ("5.15.0", "5.22.2"),
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
    import torch

    from kvsketch import __version__, models

    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {package: installed(package) for package in ("torch", "transformers", "triton")}
    return Environment(
        kvsketch=__version__,
        versions=versions,
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        cpu_threads=torch.get_num_threads(),
        kernels=kernels_in_use(),
        home=str(models.home()),
        models=[name for name in models.CATALOG if models.is_pulled(name)],
        warnings=[warning for package, version in versions.items() if (warning := untested(package, version))],
    )


def kernels_in_use() -> str:
    """Which half of `ops` a model on the default device would run."""
    import torch

    from kvsketch.ops import kernel_for

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kernel_for("weighted_attention", device) is not None:
        return "Triton"
    if device.type == "cpu":
        return "torch reference: no GPU"
    if os.environ.get("KVSKETCH_KERNELS") == "reference":
        return "torch reference: KVSKETCH_KERNELS=reference"
    return "torch reference: Triton cannot be imported"


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
