"""The catalogue, loading by every form of spec, and what is refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvsketch import models


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small random Llama as a safetensors folder."""
    folder = tmp_path / "model"
    backend = Tokenizer(WordLevel({"hello": 0, "world": 1, "<unk>": 2, "</s>": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    config = LlamaConfig(vocab_size=4, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


class Trap:
    """A pickle that leaves a mark when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def set_trap(file: Path) -> Path:
    mark = file.parent / "opened"
    file.write_bytes(pickle.dumps(Trap(mark)))
    return mark


def test_the_default_model_comes_first() -> None:
    assert next(iter(models.CATALOG)) == models.DEFAULT_MODEL == "smollm2-135m"
    assert list(models.CATALOG) == ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m"]


@pytest.mark.parametrize(
    ("name", "kv_bytes"), [("smollm2-135m", 23_040), ("qwen2.5-coder-0.5b", 12_288), ("qwen2.5-coder-1.5b", 28_672)]
)
def test_cache_bytes_per_token(name: str, kv_bytes: int) -> None:
    assert models.card(name).kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize("card", models.CATALOG.values(), ids=lambda card: card.name)
def test_every_package_is_pinned_and_every_stranger_is_named(card: models.ModelCard) -> None:
    assert all(part.requirement.count("==") == 1 for part in card.parts)
    assert len({part.member for part in card.parts}) == len(card.parts)
    assert len(bytes.fromhex(card.sha256)) == 32
    assert ("strangers" in card.origin_note) == card.name.startswith("qwen")


def test_home_is_the_variable_or_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path))
    assert models.home() == tmp_path
    monkeypatch.delenv("KVSKETCH_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert models.home() == tmp_path / ".cache" / "kvsketch"


def test_a_folder_loads_ready_for_inference(folder: Path, cache: Path) -> None:
    model, tokenizer = models.load(folder, device="cpu")
    assert model.dtype == torch.float32
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert tokenizer("world hello").input_ids == [1, 0]
    assert not cache.exists()


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_is_a_name_or_a_dtype(folder: Path, dtype: str | torch.dtype) -> None:
    assert models.load(folder, dtype=dtype, device="cpu")[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int7"}, "'int7'; use one of: float32, bfloat16, float16"),
        ({"dtype": torch.int8}, r"torch\.int8; use one of"),
        ({"device": "toaster"}, "'toaster'; use cpu, cuda"),
        ({"source": "ftp"}, "'ftp'; the sources of a short name are: package, hub"),
    ],
)
def test_bad_options_name_the_good_ones(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.load(folder, **{"device": "cpu", **options})


def test_a_missing_gpu_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="'cuda' was asked for"):
        models.load(folder, device="cuda")


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("smollm3", ValueError, "unknown model 'smollm3'; did you mean 'smollm2-135m'. a model is .*org/name"),
        ("", ValueError, "unknown model ''"),
        ("a/b/c", ValueError, "unknown model 'a/b/c'"),
        ("./nowhere", FileNotFoundError, "there is no folder nowhere"),
        ("/no/where", FileNotFoundError, "there is no folder /no/where"),
        ("~/no-such-model-folder", FileNotFoundError, "there is no folder"),
        ("nowhere/model.gguf", FileNotFoundError, r"there is no file nowhere/model\.gguf"),
        ("model.bin", ValueError, r"model\.bin is a pickle"),
        (__file__, ValueError, r"test_models\.py is neither a \.gguf file nor a model folder"),
    ],
)
def test_bad_specs_say_what_a_spec_can_be(spec: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        models.load(spec, device="cpu")


def test_a_folder_of_pickles_is_refused_and_not_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    mark = set_trap(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only as pickles \(pytorch_model\.bin\)"):
        models.load(folder, device="cpu")
    assert not mark.exists()


def test_a_pickle_beside_safetensors_is_not_opened(folder: Path) -> None:
    mark = set_trap(folder / "pytorch_model.bin")
    models.load(folder, device="cpu")
    assert not mark.exists()


def test_an_index_cannot_smuggle_in_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    mark = set_trap(folder / "evil.bin")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "evil.bin"}}')
    with pytest.raises(ValueError, match=r"not safetensors: evil\.bin"):
        models.load(folder, device="cpu")
    assert not mark.exists()


def test_code_in_a_model_folder_is_never_run(folder: Path) -> None:
    mark = folder / "ran"
    (folder / "modeling_own.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    config = (
        '{"model_type": "own", "auto_map": {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"}}'
    )
    (folder / "config.json").write_text(config)
    with pytest.raises(ValueError, match="code that comes with a model is never run"):
        models.load(folder, device="cpu")
    assert not mark.exists()


def test_an_incomplete_folder_says_what_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.gguf")
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors weights; .*pass the file itself: .*weights\.gguf"):
        models.load(folder, device="cpu")
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        models.load(folder, device="cpu")


def test_damaged_safetensors_are_reported(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="a file in it is damaged"):
        models.load(folder, device="cpu")


def test_the_hub_is_asked_only_for_safetensors_and_texts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot_download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.update(name=name, patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    models.load("some-org/some.model", device="cpu")
    assert asked["name"] == "some-org/some.model"
    assert "*.safetensors" in asked["patterns"]
    assert not {"*.bin", "*.py", "*"} & set(asked["patterns"])
    assert models.resolve("qwen2.5-coder-0.5b", source="hub") == folder
    assert asked["name"] == "Qwen/Qwen2.5-Coder-0.5B-Instruct"


def test_an_unreachable_hub_names_the_models_that_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*arguments: object, **options: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError, match=r"'org/name'.*no route to host.*smollm2-135m"):
        models.load("org/name", device="cpu")


def test_chat_encoding_uses_the_template_where_there_is_one(folder: Path) -> None:
    _, tokenizer = models.load(folder, device="cpu")
    plain = models.encode_chat(tokenizer, "hello")
    assert plain["input_ids"].tolist() == [[0]]
    assert models.encode_chat(tokenizer, "hello", system="world")["input_ids"].tolist() == [[1, 0]]
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}world{% endif %}"
    )
    chat = models.encode_chat(tokenizer, "hello", system="world")
    assert chat["input_ids"].tolist() == [[1, 3, 0, 3, 1]]
    assert chat["attention_mask"].tolist() == [[1, 1, 1, 1, 1]]


@pytest.mark.real_model
def test_smollm2_loads_and_answers() -> None:
    model, tokenizer = models.load("smollm2-135m", device="cpu")
    card = models.card("smollm2-135m")
    assert model.config.model_type == card.architecture
    assert model.config.num_hidden_layers == card.layers
    assert model.config.num_attention_heads == card.query_heads
    assert model.config.num_key_value_heads == card.kv_heads
    assert model.config.head_dim == card.head_dim
    assert model.config.max_position_embeddings == card.context
    assert tokenizer.eos_token == "<|im_end|>"
    inputs = models.encode_chat(tokenizer, "What is the capital of France?")
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
