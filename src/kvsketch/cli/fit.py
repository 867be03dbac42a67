"""kvsketch fit: what is learned of a model once, for rehearse:replay=learned and basis=learned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvsketch.cli.generate import file_text
from kvsketch.cli.options import DeviceOption, DtypeOption
from kvsketch.defaults import CPU_FIT_LENGTH, CPU_FIT_TOKENS, FIT_LENGTH, FIT_TOKENS
from kvsketch.plural import counted


def fit(
    model: Annotated[str, typer.Argument(help="Short name (`kvsketch models`), local folder, .gguf file or hub name.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text files or folders, not those that you will ask about. Default: Python's documentation and code, "
            "and made-up records."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for what is learned. Default: where caches look for it.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=256,
            help=f"Tokens that are read and replayed at a time. Default: {FIT_LENGTH:,}; {CPU_FIT_LENGTH:,} on a CPU "
            "without --text.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=256,
            help=f"Tokens of all texts together, from the start of each. Default: {FIT_TOKENS:,}; {CPU_FIT_TOKENS:,} "
            "on a CPU without --text.",
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Fit again even if this model has a file.")] = False,
    bases_only: Annotated[
        bool, typer.Option("--bases-only", help="Learn the directions of basis=learned alone, in a fifth of the time.")
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Fit the maps of rehearse:replay=learned and the directions of basis=learned for a model, once.

    An interrupted fit goes on where it stopped.

    kvsketch fit qwen2.5-coder-1.5b

    kvsketch fit qwen2.5-coder-1.5b --text books/ --text code.py
    """
    import kvsketch
    from kvsketch import models
    from kvsketch.cache import fitting
    from kvsketch.cli.first_fit import learned_to_file, own_texts
    from kvsketch.models.files import locked

    files = [file for each in text or () for file in (sorted(each.iterdir()) if each.is_dir() else [each])]
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    identity = kvsketch.CompressedCache(loaded).identity.describe()
    path = out or fitting.default_path(identity)
    with locked(path):
        if path.is_file() and not again:
            print(f"{path} has what was learned of {model}; --again fits them again")
            return
        if text:
            parts = _parts(tokenizer, files, length or FIT_LENGTH, tokens or FIT_TOKENS)
        else:
            parts = own_texts(tokenizer, loaded.device, tokens, length)
        told = learned_to_file(loaded, tokenizer, parts, path, identity, maps=not bases_only)
    bases = fitting.is_there(path, maps=False, bases=True)
    use = "rehearse:replay=learned" + (f":map={path}" if out else "")
    use = "basis=learned" if bases_only else use + ", basis=learned" * bases
    if out and bases_only:
        use = f"basis=learned looks for it at {fitting.default_path(identity)}"
    print(f"{told}; use {use}")


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
