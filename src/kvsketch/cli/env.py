"""kvsketch env: what this installation runs on."""

from __future__ import annotations

import dataclasses

from rich.table import Table

from kvsketch.cli.options import JsonOption
from kvsketch.cli.output import print_json, remarks, results


def env(as_json: JsonOption = False) -> None:
    """Show versions, tested ranges, devices, kernels and downloaded models."""
    from kvsketch.environment import describe

    result = describe()
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("kvsketch", result.kvsketch)
    for package, version in result.versions.items():
        oldest, newest = result.tested[package]
        table.add_row(package, f"{version or 'not installed'}  (tested {oldest} to {newest})")
    table.add_row("GPU", ", ".join(result.gpus) or "none")
    table.add_row("CPU threads", str(result.cpu_threads))
    table.add_row("kernels", result.kernels)
    table.add_row("KVSKETCH_HOME", result.home)
    table.add_row("models here", ", ".join(result.models) or "none; `kvsketch models pull smollm2-135m` fetches one")
    results().print(table)
    for warning in result.warnings:
        remarks().print(f"warning: {warning}", markup=False)
