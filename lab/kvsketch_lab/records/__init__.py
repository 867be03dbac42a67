"""Records of measurements: their format and files, which of them measure the same thing, and one estimator.

    stamp.py      a record: kind, command, commit, machine, versions, seed, time, data
    files.py      files of records: one reader, one writer
    identity.py   which records measure the same thing, and which of them counts
    estimate.py   means, differences and perplexities with their bootstrap intervals

This package does not depend on models, methods or pages; it imports torch only to describe the machine.
"""

from kvsketch_lab.records.estimate import Estimate, difference, estimate, mean, mean_text, perplexity_deviation
from kvsketch_lab.records.files import FAILED, Record, Writer, append, read, read_folder, write_whole
from kvsketch_lab.records.identity import budget_value, identity, latest
from kvsketch_lab.records.stamp import command, commit, machine, make_record, versions

__all__ = [
    "FAILED",
    "Estimate",
    "Record",
    "Writer",
    "append",
    "budget_value",
    "command",
    "commit",
    "difference",
    "estimate",
    "identity",
    "latest",
    "machine",
    "make_record",
    "mean",
    "mean_text",
    "perplexity_deviation",
    "read",
    "read_folder",
    "versions",
    "write_whole",
]
