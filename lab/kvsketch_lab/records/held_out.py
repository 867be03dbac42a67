"""What is kept out of all tuning, and what pages report: the one place that says so.

Methods, defaults and thresholds are chosen on seeds below 100 and on the messages on the State of the Union of years
that end in 0, 1, 5 or 6. Seeds from 100 on ask other questions, about messages of the other years: the tables of bytes
and answers hold these alone.
"""

from __future__ import annotations

FIRST_SEED = 100
TUNED_YEARS = "0156"  # last digits


def is_held_out_seed(seed: int | None) -> bool:
    """Whether records of this seed are for reporting."""
    return seed is not None and seed >= FIRST_SEED


def is_held_out_text(name: str) -> bool:
    """Whether a message such as `1907-Roosevelt-1` is for reporting."""
    return name[:4].isdigit() and name[3] not in TUNED_YEARS
