"""Documents of vLLM as `.kvs` files: those that requests have stored, and those that `kvsketch read` has written.

A file is that of a `CompressedCache` of the same model and method; its name is the document's. What a file says of the
text it holds (`about`) are the digest of its tokens, so that a prompt may begin with it; a file without one can only be
named. Weights are not compared: vLLM's are laid out in its own way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch

from kvsketch.methods.base import BudgetedMethod
from kvsketch.slots.layout import Layout
from kvsketch.slots.store import row_parts, table_of
from kvsketch.slots.table import SlotTable

log = logging.getLogger(f"vllm.{__name__}")
DIGEST = "vllm tokens"
LONGEST = 200  # characters of a file's name


@dataclass(frozen=True)
class Filed:
    """A document in a file."""

    path: Path
    tokens: int
    digest: str | None  # of its tokens


def path_of(folder: Path, name: str) -> Path:
    """Where a document of that name lies; ValueError for a name that no file can have."""
    file = quote(name, safe=" ")
    if not 0 < len(file) <= LONGEST:
        raise ValueError(f"a document's name of {len(file)} characters cannot be a file; use 1 to {LONGEST}")
    return folder / f"{file}.kvs"


def listed(folder: Path, config: Any, method: BudgetedMethod) -> dict[str, Filed]:
    """The documents in a folder that this model and method can read, by name; the others are named in the log."""
    result = {}
    for path in sorted(folder.glob("*.kvs")):
        try:
            cache, words = _opened(path, config, method)
        except (ValueError, OSError) as error:
            log.warning("kvsketch: %s is no document here: %s", path.name, error)
            continue
        result[unquote(path.stem)] = Filed(path, cache.tokens_seen, words.get(DIGEST))
    return result


def read(path: Path, config: Any, method: BudgetedMethod, device: torch.device) -> list[SlotTable]:
    """The tables of a document, on a device; ValueError says what is wrong with the file."""
    cache, _ = _opened(path, config, method)
    return [moved(layer.table, device) for layer in cache.slot_layers]


def _opened(path: Path, config: Any, method: BudgetedMethod) -> tuple[Any, dict[str, str]]:
    # Late: the plugin starts without what saves and loads.
    from kvsketch.cache import saving
    from kvsketch.cache.compressed import CompressedCache

    cache, words = CompressedCache.load(path, config), saving.about(path)
    if not isinstance(cache.method, BudgetedMethod) or replace(cache.method, budget=method.budget) != method:
        raise ValueError(f"it was read with {cache.method}, and documents are read with {method} here")
    tables = [layer.table for layer in cache.slot_layers]
    if any(table.exact or table.layout is None or table.settled != table.seen for table in tables):
        raise ValueError("it is kept whole, or has tokens that were not rehearsed; store a longer text")
    if tables[0].shape[0] != 1:
        raise ValueError(f"it has {tables[0].shape[0]} rows; a document is one text")
    most, heads = method.budget_size.tokens, sum(table.shape[1] for table in tables)
    held = sum(int(table.next_slot.sum()) for table in tables)
    if most is not None and held > most * heads:
        raise ValueError(f"it holds {held / heads:,.0f} tokens per head, and documents have {most} here")
    return cache, words


def write(
    path: Path, config: Any, method: BudgetedMethod, tables: Sequence[SlotTable], digest: str
) -> threading.Thread:
    """Writes a document that was just read, while the engine goes on: its tensors are on the host when this returns."""
    from kvsketch.cache.compressed import CompressedCache

    cache = CompressedCache(config, method)
    for layer, table in zip(cache.slot_layers, tables, strict=True):
        layer.table, layer.is_initialized = moved(table, torch.device("cpu")), True

    def save() -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            cache.save(path, {DIGEST: digest})
        except (OSError, ValueError) as error:
            log.warning("kvsketch: the document was not written to %s: %s", path, error)

    thread = threading.Thread(target=save, name="kvsketch document")
    thread.start()
    return thread


def moved(table: SlotTable, device: torch.device) -> SlotTable:
    """A packed table of one row, on a device."""
    assert table.layout is not None
    layout = Layout.of(table.layout.capacity.cpu(), bool(table.context.bits), device)
    parts = {name: part.to(device) for name, part in (table.parts.named() | row_parts(table)).items()}
    clock = torch.full((1,), table.seen, device=device)
    return table_of(table, parts, layout=layout, clock=clock, length=layout.most)
