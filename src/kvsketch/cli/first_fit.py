"""The first fit of a model: `read`, `chat` and `serve` learn once what their method asks for (`kvsketch fit`).

    method     one that names no replay gets replay=auto: learned with maps of the model, else virtual
    seconds    a text is read and timed; a fit that would take longer than `LONGEST` does not run by itself, and
               none does on a CPU
    texts      those that Python brings along (`models.fit_texts`)

One process fits at a time, the others wait for its file. What an interrupted fit has added up stays for the next.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache import learning
from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.replay import fitting
from kvsketch.cache.streaming import prefill
from kvsketch.cli.options import Fit
from kvsketch.cli.output import megabytes, remarks
from kvsketch.cli.progress import fit_bar
from kvsketch.decode.asking import repeat_instruction
from kvsketch.defaults import CPU_FIT_LENGTH, CPU_FIT_TOKENS, FIT_LENGTH, FIT_TOKENS
from kvsketch.doubt_threshold import DoubtThreshold
from kvsketch.methods import Method, parse_method
from kvsketch.methods.rehearse import AUTO, with_replay
from kvsketch.models import fit_texts
from kvsketch.models.files import locked
from kvsketch.plural import counted

LONGEST = 180.0  # seconds of a fit that runs by itself
PROBE, WARM_UP = 128, 16  # tokens that a CPU reads in the time that counts, and before
READINGS = 7  # how often as long as one reading a fit takes, replays and sums included


def with_auto(text: str) -> Method:
    """The method of a text; where it is rehearse and the text names no replay, that is learned if it can be."""
    return with_replay(text, parse_method(text), AUTO)


def own_texts(
    tokenizer: Any, device: torch.device, tokens: int | None = None, length: int | None = None
) -> list[Tensor]:
    """Token ids [1, n] of the texts that Python brings along, as many as a fit on the device takes unless given."""
    usual = (CPU_FIT_TOKENS, CPU_FIT_LENGTH) if device.type == "cpu" else (FIT_TOKENS, FIT_LENGTH)
    return fit_texts.parts(tokenizer, tokens or usual[0], length or usual[1])


def fit_first(model: Any, tokenizer: Any, method: Method, name: str, wanted: Fit) -> None:
    """Fits the model if the method asks for what is not there; says what it does, what it costs, and why not."""
    maps, bases = fitting.asks_for(method)
    bases = bases and learning.has_directions(model)
    if not (maps or bases) or fitting.named_file(method):
        return
    identity = CompressedCache(model).identity.describe()
    path = fitting.default_path(identity)
    if fitting.is_there(path, maps, bases):
        return
    instead = "replay is virtual, which keeps less of what is asked about at an eighth of the bytes and below"
    if wanted == Fit.NEVER:
        _say(f"--fit never: {instead}")
        return
    if wanted == Fit.AUTO and not by_itself(model.device):
        return
    parts = own_texts(tokenizer, model.device)
    seconds = seconds_of_fit(model, parts)
    if wanted == Fit.AUTO and seconds > LONGEST:
        _say(f"{instead}; `kvsketch fit {name}` changes that, once, in about {_minutes(seconds)} on this machine")
        return
    what = f"fitting {name} to {counted(_tokens(parts), 'token')}, once, about {_minutes(seconds)}"
    _say(f"{what}; --fit never leaves it out")
    try:
        with locked(path):
            if not fitting.is_there(path, maps, bases):
                doubt = fitting.known_doubt(path)
                _say(learned_to_file(model, tokenizer, parts, path, identity, doubt=doubt))
    except (OSError, RuntimeError, ValueError) as error:
        _say(f"the fit failed ({error}); {instead}")


def by_itself(device: torch.device) -> bool:
    """Whether such a device fits without being asked: what a CPU can take in minutes gave no more right answers."""
    return device.type != "cpu"


def learned_to_file(
    model: Any,
    tokenizer: Any,
    parts: Sequence[Tensor],
    path: Path,
    identity: dict[str, Any],
    maps: bool = True,
    doubt: DoubtThreshold | None = None,
) -> str:
    """Learns from parts of texts and writes the file, which the caller has locked; what it did, in words.

    `doubt`: the threshold that the file has and keeps.
    """
    began = time.perf_counter()
    beside = path.with_name(f"{path.name}.part")
    with fit_bar() as progress:
        said = repeat_instruction(tokenizer)[0]
        learned = learning.learn(model, parts, said, maps=maps, beside=beside, progress=progress)
    fitting.save(path, learned._replace(doubt=doubt), identity)
    beside.unlink(missing_ok=True)
    seconds = time.perf_counter() - began
    count, size = counted(_tokens(parts), "token"), megabytes(path.stat().st_size)
    return f"fitted to {count} in {seconds:.1f} s; wrote {path}, {size}"


def seconds_of_fit(model: Any, parts: Sequence[Tensor]) -> float:
    """About how long a fit takes, from the time of reading a text."""
    for tokens in probe_lengths(model.device, parts[0].shape[1]):
        ids = parts[0][:, :tokens].to(model.device)
        began = time.perf_counter()
        prefill(model, ids, CompressedCache(model)).sum().item()
    return (time.perf_counter() - began) / ids.shape[1] * READINGS * _tokens(parts)


def probe_lengths(device: torch.device, part: int) -> tuple[int, int]:
    """Tokens of a text that is read first, and of the one whose reading is timed.

    A GPU takes as long for a short text as for one of thousands of tokens, and its first reading of a length compiles
    and loads what it launches: it reads a whole part of the fit twice.
    """
    return (WARM_UP, PROBE) if device.type == "cpu" else (part, part)


def _tokens(parts: Sequence[Tensor]) -> int:
    return sum(ids.shape[1] for ids in parts)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def _say(text: str) -> None:
    remarks().print(text, markup=False, soft_wrap=True, style="dim")
