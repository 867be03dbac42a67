"""Ends with an error unless two wheels hold the same files: for `make release`.

python scripts/same_files.py ONE.whl OTHER.whl
"""

from __future__ import annotations

import sys
import zipfile


def contents(path: str) -> dict[str, int]:
    with zipfile.ZipFile(path) as file:
        return {each.filename: each.CRC for each in file.infolist()}


def main(one: str, other: str) -> None:
    first, second = contents(one), contents(other)
    if differing := sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name)):
        sys.exit(f"{one} and {other} differ in {', '.join(differing[:10])}")
    print(f"{len(first)} files")


if __name__ == "__main__":
    main(*sys.argv[1:])
