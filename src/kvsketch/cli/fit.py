"""kvsketch fit: the maps of a model for rehearse:replay=learned."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsketch.cli.generate import file_text
from kvsketch.cli.options import DeviceOption, DtypeOption
from kvsketch.cli.output import megabytes
from kvsketch.defaults import CHUNK


def fit(
    model: Annotated[str, typer.Argument(help="Short name (`kvsketch models`), local folder, .gguf file or hub name.")],
    text: Annotated[list[Path], typer.Option(help="Text files, or folders of them, unlike those of later questions.")],
    out: Annotated[
        Path | None, typer.Option(help="Where the maps go; unless given, where caches look for them.")
    ] = None,
    length: Annotated[int, typer.Option(min=256, help="Tokens that are read and repeated at a time.")] = 2 * CHUNK,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of all texts, the first of every file.")] = 131_072,
    again: Annotated[bool, typer.Option("--again", help="Fit again where there are maps of this model.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Learn how a model repeats texts, once, so that rehearse:replay=learned chooses as if it had repeated a new one.

    kvsketch fit qwen2.5-coder-1.5b --text books/ --text code.py
    """
    import kvsketch
    from kvsketch import models
    from kvsketch.cache import fitting
    from kvsketch.decode.asking import repeat_instruction
    from kvsketch.models.files import locked

    files = [file for each in text for file in (sorted(each.iterdir()) if each.is_dir() else [each])]
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    identity = kvsketch.CompressedCache(loaded).identity.describe()
    path = out or fitting.default_path(identity)
    with locked(path):
        if path.is_file() and not again:
            print(f"{path} has the maps of {model}; --again fits them again")
            return
        began = time.perf_counter()
        parts = _parts(tokenizer, files, length, tokens)
        instruction = repeat_instruction(tokenizer)[0]

        def read(method: Any) -> None:
            for ids in parts:
                cache = kvsketch.CompressedCache(loaded, method)
                kvsketch.prefill(loaded, ids.to(loaded.device), cache, instruction=instruction)

        fitting.save(path, fitting.fit(read), identity)
    count = sum(ids.shape[1] for ids in parts)
    seconds = time.perf_counter() - began
    use = "rehearse:replay=learned" + (f":map={path}" if out else "")
    print(f"fitted to {count:,} tokens in {seconds:.1f} s; wrote {path}, {megabytes(path.stat().st_size)}; use {use}")


def _parts(tokenizer: Any, files: list[Path], length: int, tokens: int) -> list[Any]:
    """Token ids [1, n] of texts of up to `length` tokens: as many of every file, from its beginning."""
    from kvsketch.decode.asking import document_ids

    result = []
    for file in files:
        left = tokens // len(files)
        ids = document_ids(tokenizer, file_text(file))[:, :left]
        result += [part for part in ids.split(length, 1) if part.shape[1] >= min(256, length)]
    if not result:
        raise ValueError(f"--text has {len(files)} file(s), none with 256 tokens or more; use longer texts")
    return result
