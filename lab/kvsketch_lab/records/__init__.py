"""Records of measurements: their format and files, which of them measure the same thing, and one estimator.

    stamp.py      a record: kind, command, commit, machine, versions, seed, time, data
    files.py      files of records: one reader, one writer
    identity.py   which records measure the same thing, and which of them counts
    held_out.py   what is kept out of all tuning
    estimate.py   means, perplexities and differences of two methods with their intervals, by a bootstrap over texts

This package does not depend on models, methods or pages; it imports torch only to describe the machine.
"""

from kvsketch_lab.records.estimate import (
    Difference,
    Estimate,
    Result,
    interval_text,
    mean,
    mean_over_texts,
    nested_mean,
    paired_difference,
    perplexity_deviation,
    text_of,
    unpaired_difference,
)
from kvsketch_lab.records.files import FAILED, Record, Writer, append, read, read_folder, write_whole
from kvsketch_lab.records.identity import budget_value, latest
from kvsketch_lab.records.stamp import command, commit, machine, make_record

__all__ = [
    "FAILED",
    "Difference",
    "Estimate",
    "Record",
    "Result",
    "Writer",
    "append",
    "budget_value",
    "command",
    "commit",
    "interval_text",
    "latest",
    "machine",
    "make_record",
    "mean",
    "mean_over_texts",
    "nested_mean",
    "paired_difference",
    "perplexity_deviation",
    "read",
    "read_folder",
    "text_of",
    "unpaired_difference",
    "write_whole",
]
