"""The way of a token is short: how many files a step goes through, and how often it goes from one to another.

A ceiling is a little above what is reached. Who passes it has sent the reader of a step somewhere else: ask the
question once per forward, or when the layer gets its method.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvsketch

SOURCE = str(Path(kvsketch.__file__).parent)
LAYERS = 2
# by method: files of a step, and changes of file in a layer
CEILINGS = {
    "full": (15, 54), "streamingllm:budget=64": (18, 50), "snapkv:budget=64": (20, 66), "h2o:budget=64": (22, 75),
    "rehearse:budget=1/2:replay=virtual": (25, 145),
}  # fmt: skip
KEY_FILES = 8


def way(run: Callable[[], object]) -> list[str]:
    """The files of the package whose lines run, in order, without those that follow themselves."""
    lines: list[str] = []

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines.append(frame.f_code.co_filename)
        return local

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(SOURCE) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return [file for file, _ in itertools.groupby(lines)]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, vocab_size=100, num_hidden_layers=LAYERS, max_position_embeddings=4096)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same operations on every machine."""
    monkeypatch.setenv("KVSKETCH_KERNELS", "reference")
    with torch.no_grad():
        yield


def stepped(model: Any, method: str) -> tuple[kvsketch.CompressedCache, Callable[[], object]]:
    """A cache after a prompt and two tokens, and the next step."""
    cache, ids = kvsketch.CompressedCache(model, method), torch.arange(300).view(1, -1) % 100
    kvsketch.prefill(model, ids, cache)

    def step() -> object:
        return model(ids[:, :1], past_key_values=cache)

    step()
    step()
    return cache, step


@pytest.mark.parametrize("method", CEILINGS)
def test_a_step_is_short(model: Any, method: str) -> None:
    cache, step = stepped(model, method)
    files = way(step)
    assert cache.tokens_seen == 303
    most_files, most_changes = CEILINGS[method]
    assert len(set(files)) <= most_files, sorted(set(files))
    assert (len(files) - 1) / LAYERS <= most_changes


def test_a_key_goes_through_few_files_to_its_first_kernel(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsketch.ops.slot_update import reference

    cache, _ = stepped(model, "snapkv:budget=64")

    class Reached(Exception):
        pass

    def written(*args: Any) -> None:
        raise Reached

    monkeypatch.setattr(reference, "write_token", written)
    token = torch.zeros(1, 2, 1, 16)

    def update() -> None:
        with pytest.raises(Reached):
            cache.update(token, token, 0)

    files = way(update)
    assert SOURCE + "/cache/compressed.py" in files and SOURCE + "/slots/table.py" in files
    assert len(set(files)) + 1 <= KEY_FILES, sorted(set(files))  # and the kernel's own


def test_the_tracer_sees_a_longer_way(model: Any) -> None:
    short, long = (way(stepped(model, method)[1]) for method in ("full", "snapkv:budget=64"))
    assert len(short) < len(long) and len(set(short)) < len(set(long))
