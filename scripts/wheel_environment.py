"""Makes an environment with wheels and what their metadata asks for, out of packages that are already installed here.

    python -m scripts.wheel_environment build/wheel/env dist/kvsketch-0.3.0-py3-none-any.whl

Packages that the wheels need, directly or through others, are links to the ones of this interpreter. What a wheel
forgets to ask for is missing there, as it would be after `pip install`, and nothing is fetched or copied.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Sequence
from email import message_from_bytes
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def main(folder: Path, wheels: Sequence[Path]) -> None:
    venv.create(folder, clear=True)
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", *wheels], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip())
    for needed in closure(dict(asked_for(wheel) for wheel in wheels)):
        link(needed, packages)


def asked_for(wheel: Path) -> tuple[str, list[str]]:
    """The name and the requirements in a wheel's metadata."""
    with ZipFile(wheel) as files:
        name = next(n for n in files.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(files.read(name))
    return canonicalize_name(metadata["Name"]), metadata.get_all("Requires-Dist") or []


def closure(wheels: dict[str, list[str]]) -> list[Distribution]:
    """The installed distributions that the wheels need, and those that these need in turn."""
    result: dict[tuple[str, str], Distribution] = {}
    seen: set[tuple[str, str]] = set()
    open_ = [(text, "") for requirements in wheels.values() for text in requirements]
    while open_:
        text, extra = open_.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in requirement.extras or {""}:
            key = (canonicalize_name(requirement.name), wanted)
            if key in seen:
                continue
            seen.add(key)
            if key[0] in wheels:
                open_ += [(further, wanted) for further in wheels[key[0]]]
                continue
            result[key] = here = distribution(requirement.name)
            if not requirement.specifier.contains(here.version, prereleases=True):
                raise SystemExit(f"{text} is asked for, {here.version} is installed")
            open_ += [(further, wanted) for further in here.requires or []]
    return list(result.values())


def link(package: Distribution, folder: Path) -> None:
    """Links the modules and the metadata of an installed package into another folder of packages."""
    for name in {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__", "bin")}:
        target = folder / name
        if not target.exists():
            target.symlink_to(Path(str(package.locate_file(name))).resolve())


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
