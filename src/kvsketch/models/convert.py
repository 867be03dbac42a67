"""Turn a GGUF file into a folder of bf16 safetensors, config and tokenizer, once; later starts take seconds."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsketch.models import files
from kvsketch.models.files import HOME_VARIABLE, FetchError

if TYPE_CHECKING:
    from kvsketch.models.gguf_header import Scalar

Stage = Callable[[str], None]  # is given the name of what begins
RECORD = "kvsketch.json"
# Part of every record: raise it when the conversion changes, and old copies are made again.
CONVERSION = 1
SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
}


def conversion_path(name: str) -> Path:
    """The path of the converted copy of a model, converted or not."""
    return files.home() / "converted" / name


def converted_folder(name: str, source: str) -> Path | None:
    """The folder of an earlier conversion of `source` (a hash), or None when there is none that is whole."""
    folder = conversion_path(name)
    record = files.read_json(folder / RECORD)
    if record.get("source") != source or record.get("conversion") != CONVERSION:
        return None
    if record.get("files") != _file_sizes(folder):
        return None
    hidden = [file.name for file in folder.iterdir() if not os.access(file, os.R_OK)]
    if hidden:
        raise FetchError(
            f"{', '.join(hidden)} in {folder} cannot be read; whoever converted the model can run "
            f"`chmod -R a+rX {folder}`, or set {HOME_VARIABLE} to a folder of your own"
        )
    return folder


def convert(gguf: Path, name: str, source: str, progress: bool = True) -> Path:
    """Return the safetensors folder of `gguf`, whose bytes `source` identifies, converting when there is none."""
    done = converted_folder(name, source)
    if done is not None:
        return done
    folder = conversion_path(name)
    with files.locked(folder):
        done = converted_folder(name, source)
        if done is not None:
            return done
        files.remove(folder.with_name(name + ".work"))
        work = files.work_folder(folder.with_name(name + ".work"))
        if progress:
            files.say(f"converting {_shown(gguf, name)} to safetensors: once, takes seconds to a few minutes")
        new = work / "new"
        with quiet_transformers(), _stages(progress) as stage:
            _write_converted(gguf, new, stage)
        record = {"source": source, "conversion": CONVERSION, "files": _file_sizes(new)}
        files.write_json(new / RECORD, record)
        files.let_read(new, folder.parent)
        files.remove(folder)
        files.place(new, folder)
        files.remove(work)
    return folder


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars, and restore its setting afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _shown(gguf: Path, name: str) -> str:
    """The model's name; of a file of the user's own, which is converted under a longer one, the file's."""
    return name if gguf.stem == name else gguf.name


@contextmanager
def _stages(progress: bool) -> Iterator[Stage]:
    """What is being done and for how long, in a terminal, with a bar while tensors are read; nothing in a log file.

    The caller names each stage. transformers shows a bar of its own, also in log files, whatever is set.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers import modeling_gguf_pytorch_utils as reading

    theirs = getattr(reading, "tqdm", None)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    shown = progress and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=None)

        def stage(name: str) -> None:
            bar.reset(task, total=None, description=name)

        def tensors(listed: Any, **_: Any) -> Iterator[Any]:
            bar.reset(task, total=len(listed), description="unpacking the weights")
            for tensor in listed:
                yield tensor
                bar.advance(task)

        if theirs is not None:
            reading.tqdm = tensors
        try:
            yield stage
        finally:
            if theirs is not None:
                reading.tqdm = theirs


def identity_of(file: Path) -> str:
    """A key for a user's file from path, size and time: hashing the data would take many seconds at every start."""
    stat = file.stat()
    return hashlib.sha256(f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()


def _file_sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.name != RECORD}


def _write_converted(gguf: Path, folder: Path, stage: Stage) -> None:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvsketch.models.gguf_header import read_metadata

    metadata = read_metadata(gguf)
    location: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    stage("reading the tokenizer")
    with _explained(gguf, metadata):
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **location)
    refuse_unigram(tokenizer, metadata)
    restore_special_tokens(tokenizer, metadata)
    stage("reading the weights")
    with _explained(gguf, metadata):
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), dtype=torch.bfloat16, **location, **_dequantise()
        )
    stage("writing")
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise FetchError(
            f"could not write the converted model to {folder} ({error}); free some space or set {HOME_VARIABLE} to "
            "another disk"
        ) from error


@contextmanager
def _explained(gguf: Path, metadata: dict[str, Scalar]) -> Iterator[None]:
    """Turns any error of transformers while it reads the file into a ValueError that says what to do."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        architecture = metadata.get("general.architecture", "unknown")
        raise ValueError(
            f"could not read {gguf} (architecture {architecture}): {error}. The file is damaged or cut short, or its "
            "architecture is not one that transformers reads from GGUF; fetch it again or use a safetensors folder"
        ) from error


def _dequantise() -> dict[str, Any]:
    """Releases with a GgufConfig keep the blocks quantised unless told otherwise; the older ones always unpack."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def refuse_unigram(tokenizer: Any, metadata: dict[str, Scalar]) -> None:
    """transformers before 5.18 rebuilds Gemma's merging tokenizer as a unigram one that spells words by letters."""
    from transformers import __version__

    rebuilt = type(tokenizer.backend_tokenizer.model).__name__
    if rebuilt == "Unigram" and metadata.get("tokenizer.ggml.model") == "llama":
        raise ValueError(
            f"transformers {__version__} rebuilds the tokenizer of this GGUF file wrongly; convert it with "
            "transformers 5.18 or newer (older ones can use the converted copy), or use a safetensors folder"
        )


def restore_special_tokens(tokenizer: Any, metadata: dict[str, Scalar]) -> None:
    """Give the tokenizer the special tokens that the file names, and the leading bos token if the file asks for it.

    transformers takes a wrong eos token from some files, and never adds bos; Gemma writes garbage without it.
    """
    from tokenizers import processors

    for attribute, key in SPECIAL_TOKENS.items():
        if key in metadata:
            setattr(tokenizer, attribute, tokenizer.convert_ids_to_tokens(int(metadata[key])))
    bos, number = tokenizer.bos_token, tokenizer.bos_token_id
    if metadata.get("tokenizer.ggml.add_bos_token") and number is not None and tokenizer("a").input_ids[0] != number:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, number)]
        )
