"""What the command lines of benchmarks share."""

from __future__ import annotations

import argparse
import sys

import torch


def without_gpu(name: str) -> bool:
    """Whether torch sees no GPU; says so on standard error, with the benchmark's name."""
    if torch.cuda.is_available():
        return False
    print(f"The {name} benchmark needs an NVIDIA GPU; torch sees none here.", file=sys.stderr)
    return True


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """The options of a command line, `--out` and `--seed` among them."""
    parser.add_argument("--out", default=None, help="file that the records are added to")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def whole_numbers(text: str) -> list[int]:
    """`1,8,64`, for an option that takes such a list; empty: none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is not a whole number above 0; write them as 1,8,64")
    return [int(part) for part in parts]
