"""kvsketch env: what this installation runs on."""

from __future__ import annotations

import dataclasses

from rich.table import Table

from kvsketch.cli.options import JsonOption
from kvsketch.cli.output import print_json, remarks, results


def env(as_json: JsonOption = False) -> None:
    """Show versions, tested ranges, devices, kernels and fetched models."""
    from kvsketch.environment import describe

    found = describe()
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("kvsketch", found.kvsketch)
    for package, version in found.versions.items():
        oldest, newest = found.tested[package]
        table.add_row(package, f"{version or 'not installed'}  (tested {oldest} to {newest})")
    table.add_row("GPU", ", ".join(found.gpus) or "none")
    table.add_row("CPU threads", str(found.cpu_threads))
    table.add_row("kernels", found.kernels)
    table.add_row("KVSKETCH_HOME", found.home)
    table.add_row("models here", ", ".join(found.models) or "none; `kvsketch models pull smollm2-135m` fetches one")
    results().print(table)
    for warning in found.warnings:
        remarks().print(f"warning: {warning}", markup=False)
