"""Makes an environment with a wheel and what its metadata asks for, out of packages that are already installed here.

    python -m scripts.wheel_environment dist/kvsketch-0.3.0-py3-none-any.whl build/wheel/env

Packages that the wheel needs, directly or through others, are links to the ones of this interpreter. What the wheel
forgets to ask for is missing there, as it would be after `pip install`, and nothing is fetched or copied.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement


def main(wheel: Path, folder: Path) -> None:
    venv.create(folder, clear=True)
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip())
    for needed in closure(asked_for(wheel)):
        link(needed, packages)


def asked_for(wheel: Path) -> list[str]:
    """The requirements in a wheel's metadata."""
    with ZipFile(wheel) as files:
        name = next(n for n in files.namelist() if n.endswith(".dist-info/METADATA"))
        lines = files.read(name).decode().splitlines()
    return [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]


def closure(requirements: list[str]) -> list[Distribution]:
    """The installed distributions that meet the requirements, and those that these need in turn."""
    found: dict[tuple[str, str], Distribution] = {}
    open_: list[tuple[str, str]] = [(text, "") for text in requirements]
    while open_:
        text, extra = open_.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in requirement.extras or {""}:
            key = (requirement.name.lower(), wanted)
            if key in found:
                continue
            found[key] = here = distribution(requirement.name)
            if not requirement.specifier.contains(here.version, prereleases=True):
                raise SystemExit(f"{text} is asked for, {here.version} is installed")
            open_ += [(further, wanted) for further in here.requires or []]
    return list(found.values())


def link(package: Distribution, folder: Path) -> None:
    """Links the modules and the metadata of an installed package into another folder of packages."""
    for name in {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__", "bin")}:
        target = folder / name
        if not target.exists():
            target.symlink_to(Path(str(package.locate_file(name))).resolve())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
