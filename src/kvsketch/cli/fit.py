"""kvsketch fit: what is learned of a model once: maps, directions, and the threshold of `kvsketch serve --doubtful`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvsketch.cli.generate import file_text
from kvsketch.cli.options import DeviceOption, DtypeOption
from kvsketch.cli.output import remarks
from kvsketch.defaults import CPU_FIT_LENGTH, CPU_FIT_TOKENS, FIT_LENGTH, FIT_TOKENS
from kvsketch.doubt_threshold import CATCH, DoubtThreshold, chosen, fewest_lost, require_catch
from kvsketch.plural import counted

MOST_TIMES = 4  # as many questions about doubt, where few answers are lost


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
    doubt_only: Annotated[
        bool, typer.Option("--doubt-only", help="Choose the threshold of doubt alone; the rest of a file stays.")
    ] = False,
    doubt_questions: Annotated[
        int,
        typer.Option(
            min=0,
            help="Questions that choose the threshold of doubt: codes hidden in the texts. Up to "
            f"{MOST_TIMES} times as many are asked until enough answers are lost to compression. 0: none.",
        ),
    ] = 120,
    catch: Annotated[
        float, typer.Option(help="Share of the answers lost to compression that the threshold of doubt is to catch.")
    ] = CATCH,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Fit what kvsketch learns of a model, once: the maps of rehearse:replay=learned, the directions of basis=learned,
    and the threshold of doubt of `kvsketch serve --doubtful retry`.

    An interrupted fit goes on where it stopped. What the model's file has stays unless --again.

    kvsketch fit qwen2.5-coder-1.5b

    kvsketch fit qwen2.5-coder-1.5b --text books/ --text code.py
    """
    import kvsketch
    from kvsketch import models
    from kvsketch.cache.replay import fitting
    from kvsketch.cli.first_fit import learned_to_file, own_texts
    from kvsketch.models import fit_texts
    from kvsketch.models.files import locked

    require_catch(catch)
    if bases_only and doubt_only:
        raise ValueError("--bases-only and --doubt-only exclude each other; leave one out")
    if doubt_only and not doubt_questions:
        raise ValueError("--doubt-only with --doubt-questions 0 learns nothing; ask questions, such as 120")
    files = [file for each in text or () for file in (sorted(each.iterdir()) if each.is_dir() else [each])]
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    cache = kvsketch.CompressedCache(loaded)
    identity = cache.identity.describe()
    path = out or fitting.default_path(identity)
    with locked(path):
        known = _known(path, cache, again)
        lacks = known.bases is None if bases_only else known.maps is None
        learns_rest = not doubt_only and (again or lacks)
        learns_doubt = doubt_questions > 0 and not bases_only and (again or known.doubt is None)
        if not learns_rest and not learns_doubt:
            print(f"{path} has what was learned of {model}; --again fits them again")
            return
        if learns_rest:
            if text:
                parts = _parts(tokenizer, files, length or FIT_LENGTH, tokens or FIT_TOKENS)
            else:
                parts = own_texts(tokenizer, loaded.device, tokens, length)
            told = learned_to_file(loaded, tokenizer, parts, path, identity, maps=not bases_only, doubt=known.doubt)
            known = fitting.read(path, cache.identity)
            use = "rehearse:replay=learned" + (f":map={path}" if out else "")
            use = "basis=learned" if bases_only else use + ", basis=learned" * (known.bases is not None)
            if out and bases_only:
                use = f"basis=learned looks for it at {fitting.default_path(identity)}"
            print(f"{told}; use {use}")
        if learns_doubt:
            whole = [file_text(file) for file in files] or list(fit_texts.texts().values())
            found = _threshold(loaded, tokenizer, whole, doubt_questions, catch)
            if found is None:
                # Questions were too few; the file keeps what it has.
                return
            fitting.save(path, known._replace(doubt=found), identity)
            print(f"wrote the threshold of doubt, {found.value:.3f}, to {path}; {_about(found)}")


def _known(path: Path, cache: Any, again: bool) -> Any:
    """What the file of a model has; with `again` one that cannot be read has nothing."""
    from kvsketch.cache.replay import fitting

    try:
        return fitting.read(path, cache.identity)
    except ValueError:
        if not again:
            raise
        return fitting.Learned(None, None)


def _threshold(model: Any, tokenizer: Any, whole: list[str], questions: int, catch: float) -> DoubtThreshold | None:
    """The threshold of doubt; None, and a line that says why, where the questions choose none."""
    from kvsketch.cli.progress import fit_bar
    from kvsketch.compare import doubt
    from kvsketch.models.texts import DOORS

    first = -(-questions // len(DOORS))
    some = doubt.pieces(tokenizer, whole, MOST_TIMES * first)
    with fit_bar("pieces of text") as progress:
        told = doubt.ask(
            model, tokenizer, some, first=first, fewest_lost=fewest_lost(catch), progress=progress
        )  # fmt: skip
    try:
        return chosen(told, catch, doubt.METHODS)
    except ValueError as error:
        remarks().print(f"no threshold of doubt: {error}", markup=False, soft_wrap=True)
        return None


def _about(found: DoubtThreshold) -> str:
    return (
        f"of {found.answers} answers {found.lost} were lost, {found.caught} of these have this doubt or more, and "
        f"{found.asked_again} of all; use it with `kvsketch serve --doubtful retry`"
    )


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
