"""kvsketch fit: what is learned of a model once, for rehearse:replay=learned and basis=learned."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsketch.cli.generate import file_text
from kvsketch.cli.options import DeviceOption, DtypeOption
from kvsketch.cli.output import megabytes
from kvsketch.defaults import CHUNK
from kvsketch.plural import counted


def fit(
    model: Annotated[str, typer.Argument(help="Short name (`kvsketch models`), local folder, .gguf file or hub name.")],
    text: Annotated[list[Path], typer.Option(help="Text files or folders; not the texts that you will ask about.")],
    out: Annotated[
        Path | None, typer.Option(help="File for what is learned. Default: where caches look for it.")
    ] = None,
    length: Annotated[int, typer.Option(min=256, help="Tokens that are read and replayed at a time.")] = 2 * CHUNK,
    tokens: Annotated[
        int, typer.Option(min=256, help="Tokens of all texts together, from the start of each file.")
    ] = 131_072,
    again: Annotated[bool, typer.Option("--again", help="Fit again even if this model has a file.")] = False,
    bases_only: Annotated[
        bool, typer.Option("--bases-only", help="Learn the directions of basis=learned alone, in a fifth of the time.")
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Fit the maps of rehearse:replay=learned and the directions of basis=learned for a model, once.

    An interrupted fit goes on where it stopped.

    kvsketch fit qwen2.5-coder-1.5b --text books/ --text code.py
    """
    import kvsketch
    from kvsketch import models
    from kvsketch.cache import fitting, learning
    from kvsketch.cli.watching import fit_bar
    from kvsketch.decode.asking import repeat_instruction
    from kvsketch.models.files import locked

    files = [file for each in text for file in (sorted(each.iterdir()) if each.is_dir() else [each])]
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    identity = kvsketch.CompressedCache(loaded).identity.describe()
    path = out or fitting.default_path(identity)
    with locked(path):
        if path.is_file() and not again:
            print(f"{path} has what was learned of {model}; --again fits them again")
            return
        began = time.perf_counter()
        parts = _parts(tokenizer, files, length, tokens)
        beside = path.with_name(f"{path.name}.part")
        with fit_bar() as progress:
            learned = learning.learn(
                loaded, parts, repeat_instruction(tokenizer)[0], maps=not bases_only, beside=beside, progress=progress
            )
        fitting.save(path, learned, identity)
        beside.unlink(missing_ok=True)
    count = sum(ids.shape[1] for ids in parts)
    seconds = time.perf_counter() - began
    use = "rehearse:replay=learned" + (f":map={path}" if out else "")
    use = "basis=learned" if bases_only else use + ", basis=learned" * (learned.bases is not None)
    if out and bases_only:
        use = f"basis=learned looks for it at {fitting.default_path(identity)}"
    size = megabytes(path.stat().st_size)
    print(f"fitted to {counted(count, 'token')} in {seconds:.1f} s; wrote {path}, {size}; use {use}")


def _parts(tokenizer: Any, files: list[Path], length: int, tokens: int) -> list[Any]:
    """Token ids [1, n] of texts of up to `length` tokens: as many of every file, from its beginning."""
    from kvsketch.decode.asking import document_ids

    result = []
    for file in files:
        left = tokens // len(files)
        ids = document_ids(tokenizer, file_text(file))[:, :left]
        result += [part for part in ids.split(length, 1) if part.shape[1] >= min(256, length)]
    if not result:
        raise ValueError(f"--text has {counted(len(files), 'file')}, none with 256 tokens or more; use longer texts")
    return result
