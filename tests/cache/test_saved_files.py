"""Every file that is not as `save` wrote it is refused with a reason, and nothing is built from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvsketch import CompressedCache
from kvsketch.cache.saving import sealed_file
from tests.helpers import zoo


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "prompt.kvs"
    model = zoo.build("llama")
    cache = CompressedCache(model, "streamingllm:budget=8:sinks=2")
    with torch.no_grad():
        model(zoo.tokens(1, 40), past_key_values=cache)
    cache.save(path)
    return path


def test_any_changed_byte_is_noticed(saved: Path, tmp_path: Path) -> None:
    model, content = zoo.build("llama"), saved.read_bytes()
    CompressedCache.load(saved, model)
    path = tmp_path / "changed.kvs"
    header = 8 + int.from_bytes(content[:8], "little")
    for number, place in enumerate([*range(header - 400, header + 10), *range(0, len(content), 31), len(content) - 1]):
        changed = bytes([content[place] ^ (1 << number % 8)])
        path.write_bytes(content[:place] + changed + content[place + 1 :])
        with pytest.raises(ValueError, match=r"changed\.kvs .*(again|cache\.save)"):
            CompressedCache.load(path, model)


def test_a_cut_or_lengthened_file_is_noticed(saved: Path, tmp_path: Path) -> None:
    model, content = zoo.build("llama"), saved.read_bytes()
    path = tmp_path / "cut.kvs"
    for length in [0, 1, 7, 8, 9, 500, *range(1000, len(content), 501), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut\.kvs is no saved cache, is damaged or cut short"):
            CompressedCache.load(path, model)
    path.write_bytes(content + b"\0")
    with pytest.raises(ValueError, match="damaged"):
        CompressedCache.load(path, model)


def test_other_files_are_named(saved: Path, tmp_path: Path) -> None:
    model = zoo.build("llama")
    with pytest.raises(FileNotFoundError, match=r"none\.kvs"):
        CompressedCache.load(tmp_path / "none.kvs", model)
    save_file({"a": torch.zeros(3)}, tmp_path / "weights.safetensors")
    save_file({"a": torch.zeros(3)}, tmp_path / "other.safetensors", {"format": "pt"})
    sealed_file.write(tmp_path / "sealed.safetensors", {"a": torch.zeros(3)}, {"kind": "else"})
    (tmp_path / "text.txt").write_text("A text that is longer than the length of a header.")
    for file in tmp_path.iterdir():
        with pytest.raises(ValueError, match=f"{file.name} is no saved cache"):
            CompressedCache.load(file, model)


WRONG_MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "layers": ("llama", {"num_hidden_layers": 3}, "num_hidden_layers is 2 in the file and 3 here"),
    "heads": ("llama", {"num_key_value_heads": 4}, "num_key_value_heads is 2 in the file and 4 here"),
    "family": ("qwen3", {}, "model_type is llama in the file and qwen3 here"),
    "positions": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        r"rope_parameters is .*10000.* in the file and .*500000.* here",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_MODELS)
def test_another_model_is_refused(wrong: str, saved: Path) -> None:
    family, changes, reason = WRONG_MODELS[wrong]
    with pytest.raises(ValueError, match=f"belongs to another model: .*{reason}.*its own model"):
        CompressedCache.load(saved, zoo.build(family, **changes))


def test_other_weights_and_dtypes_are_refused_and_a_moved_model_is_not(saved: Path) -> None:
    with pytest.raises(ValueError, match="dtype is float32 in the file and bfloat16 here"):
        CompressedCache.load(saved, zoo.build("llama").to(torch.bfloat16))
    tuned = zoo.build("llama")
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight += 0.01
    with pytest.raises(ValueError, match="the same shape, but other weights"):
        CompressedCache.load(saved, tuned)
    moved = zoo.build("llama")
    moved.config._name_or_path = "elsewhere"
    assert CompressedCache.load(saved, moved).tokens_seen == 40
    assert CompressedCache.load(saved, moved.config).tokens_seen == 40


def resealed(source: Path, target: Path, change: Any) -> Path:
    """A copy with a right checksum whose text `change` has rewritten."""
    text = sealed_file.verified(source)
    content = json.loads(text["cache"])
    change(text, content)
    text.pop("checksum")
    sealed_file.write(target, load_file(source), {**text, "cache": json.dumps(content)})
    return target


def test_another_version_and_an_unknown_method_say_what_to_do(saved: Path, tmp_path: Path) -> None:
    model, path = zoo.build("llama"), tmp_path / "prompt.kvs"
    with pytest.raises(ValueError, match=r"has format 2, written by kvsketch .* reads format 3: use that version"):
        CompressedCache.load(resealed(saved, path, lambda text, content: text.update(version="2")), model)
    with pytest.raises(ValueError, match=r"a method that kvsketch .* does not know: unknown method 'best'.*snapkv"):
        CompressedCache.load(resealed(saved, path, lambda text, content: content.update(method="best")), model)


MISFITS: dict[str, Any] = {
    "no layers": lambda text, content: content.update(layers=[]),
    "no model": lambda text, content: content.pop("model"),
    "unknown option": lambda text, content: content["options"].update(colour="red"),
    "another class": lambda text, content: content["layers"][0].update({"class": "DynamicLayer"}),
    "a negative count": lambda text, content: content["layers"][0]["table"].update(seen=-1),
    "one layer ahead": lambda text, content: content["layers"][0]["table"].update(seen=41),
    "a longer table": lambda text, content: content["layers"][0]["table"].update(length=99),
    "a field less": lambda text, content: content["layers"][0]["table"].pop("clock"),
    "keys as index": lambda text, content: content["layers"][0]["table"].update(index={"tensor": "0.table.keys"}),
    "no such tensor": lambda text, content: content["layers"][0]["table"].update(keys={"tensor": "nowhere"}),
    "a method overwritten": lambda text, content: content["layers"][0]["layer"].update(update=3),
    "a later state": lambda text, content: content["layers"][0]["table"]["state"].update(version=2),
    "an unknown state": lambda text, content: content["layers"][0]["table"]["state"]["fields"].update(a=1),
    "no description": lambda text, content: content.clear(),
    "a fraction of a count": lambda text, content: content["layers"][0]["table"].update(settled=12.5),
    "more decided than read": lambda text, content: content["layers"][0]["table"].update(settled=41),
    "bits that nobody chooses": lambda text, content: content["layers"][0]["table"].update(chosen_bits=5),
    "half of the bits": lambda text, content: content["layers"][0]["table"].update(chosen_bits=4.0),
    "a scale in words": lambda text, content: content["layers"][0]["table"].update(scale="large"),
    "memory for part of a token": lambda text, content: content["layers"][0]["table"].update(room=99.5),
    "a fraction of a layer's count": lambda text, content: content["layers"][0]["layer"].update(seen_before=1.5),
    "a negative count of a layer": lambda text, content: content["layers"][0]["layer"].update(read_before=-1),
    "another recording": lambda text, content: content["layers"][0]["layer"].update(recording="maybe"),
    "a seed that is no number": lambda text, content: content["options"].update(seed=0.5),
    "part of a text": lambda text, content: content["read"].update(tokens=1.5),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_description_that_does_not_fit_is_refused(misfit: str, saved: Path, tmp_path: Path) -> None:
    path = resealed(saved, tmp_path / "prompt.kvs", MISFITS[misfit])
    with pytest.raises(ValueError, match=r".{20}"):
        CompressedCache.load(path, zoo.build("llama"))
