"""GGUF files: the header, the conversion to safetensors, and what happens to damaged ones."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from rich.progress import Progress
from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerFast

from kvsketch import models
from kvsketch.models import convert, fetch, files
from kvsketch.models.gguf_header import read_metadata

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def byte_letters() -> list[str]:
    """The 256 printable stand-ins of byte-level vocabularies, in the order of the bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    return [letters[byte] for byte in range(256)]


def write_gguf(path: Path, add_bos: bool = True, chat_template: str | None = None) -> Path:
    """A small random Llama in float32 with a byte-level tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(261)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*byte_letters(), "ab", "<pad>", "<s>", "</s>", "de"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL])
    writer.add_token_merges(["a b", "d e"])
    writer.add_pad_token_id(257)
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    writer.add_add_bos_token(add_bos)
    if chat_template:
        writer.add_chat_template(chat_template)
    generator = torch.Generator().manual_seed(0)

    def add(name: str, *shape: int) -> None:
        tensor = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        writer.add_tensor(name, tensor.numpy())

    hidden, inner, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["hidden_size"] // 2
    add("token_embd.weight", 261, hidden)
    add("output.weight", 261, hidden)
    add("output_norm.weight", hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, rows in (("attn_q", hidden), ("attn_k", kv), ("attn_v", kv), ("attn_output", hidden)):
            add(f"blk.{layer}.{name}.weight", rows, hidden)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", hidden)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{name}.weight", inner, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf")


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were really converted, in order."""
    converted: list[Path] = []
    original = convert._write_converted

    def recorded(source: Path, folder: Path, stage: convert.Stage) -> None:
        converted.append(source)
        original(source, folder, stage)

    monkeypatch.setattr(convert, "_write_converted", recorded)
    return converted


def load(file: Path) -> tuple[torch.nn.Module, object]:
    return models.load(file, device="cpu", progress=False)


def test_header_gives_the_scalars_and_skips_the_arrays(file: Path) -> None:
    metadata = read_metadata(file)
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 2
    assert metadata["llama.rope.freq_base"] == 10_000.0
    assert metadata["tokenizer.ggml.eos_token_id"] == 259
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert "tokenizer.ggml.tokens" not in metadata


def test_weights_survive_the_conversion(file: Path, cache: Path) -> None:
    model, _ = load(file)
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(file).tensors}
    rounded = stored["blk.1.ffn_down.weight"].to(torch.bfloat16).to(torch.float32)
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, rounded)
    assert model.config.rope_parameters["rope_theta"] == 10_000.0


def test_the_tokenizer_has_the_special_tokens_of_the_file(file: Path, cache: Path) -> None:
    for _ in ("fresh", "from the converted copy"):
        _, tokenizer = load(file)
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")
        assert tokenizer("cab").input_ids == [258, ord("c"), 256]
        assert tokenizer.decode([ord("h"), ord("i"), 259], skip_special_tokens=True) == "hi"


def test_bos_is_added_only_where_the_file_asks_for_it(tmp_path: Path, cache: Path) -> None:
    _, tokenizer = load(write_gguf(tmp_path / "no-bos.gguf", add_bos=False))
    assert tokenizer("hi").input_ids == [ord("h"), ord("i")]


def test_the_chat_template_of_the_file_is_used(tmp_path: Path, cache: Path) -> None:
    template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    _, tokenizer = load(write_gguf(tmp_path / "chat.gguf", chat_template=template))
    assert models.encode_chat(tokenizer, "hi")["input_ids"].tolist() == [[258, ord("h"), ord("i"), 259]]


def test_a_file_is_converted_once(file: Path, cache: Path, conversions: list[Path]) -> None:
    first, _ = load(file)
    second, _ = load(file)
    assert conversions == [file]
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not list(cache.rglob("*.work"))
    assert not [path for path in cache.rglob("*") if path.suffix in (".bin", ".pt")]


def test_a_changed_file_is_converted_again(file: Path, cache: Path, conversions: list[Path]) -> None:
    load(file)
    os.utime(file, ns=(0, 0))
    load(file)
    assert len(conversions) == 2


@pytest.mark.parametrize("damage", ["shortened", "deleted", "record"])
def test_a_damaged_copy_is_made_again(file: Path, cache: Path, conversions: list[Path], damage: str) -> None:
    folder = models.resolve(file, progress=False)
    weights = folder / "model.safetensors"
    if damage == "shortened":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "deleted":
        weights.unlink()
    else:
        (folder / convert.RECORD).write_text("{ cut")
    load(file)
    assert len(conversions) == 2


def test_an_interrupted_conversion_leaves_no_copy(
    file: Path, cache: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, content: dict[str, object]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_json", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(file)
    assert [path.name for path in (cache / "converted").iterdir() if path.is_dir() and path.suffix != ".work"] == []
    load(file)
    assert len(conversions) == 2
    assert not list(cache.rglob("*.work"))


def test_a_built_in_model_needs_no_gguf_once_it_is_converted(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = models.card("smollm2-135m")
    convert.convert(file, card.name, card.sha256, progress=False)
    monkeypatch.setattr("kvsketch.models.loading.pull", lambda *arguments: pytest.fail("pulled again"))
    assert models.resolve(card.name) == cache / "converted" / card.name


def test_a_fetched_gguf_goes_once_it_is_converted_unless_asked_for(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = models.DEFAULT_MODEL
    card = dataclasses.replace(models.card(name), sha256=files.sha256_of(file))
    monkeypatch.setitem(models.CATALOG, name, card)
    monkeypatch.setattr(fetch, "_join_parts", lambda model, work, progress: Path(shutil.copy(file, work)))
    folder = models.resolve(name)
    assert "removed the GGUF file" in capsys.readouterr().err
    assert fetch.is_converted(name) and models.is_pulled(name) and not fetch.model_file(name).exists()
    for keep in (True, False):  # one that is here already stays
        assert models.resolve(name, keep_gguf=keep) == folder and fetch.has_gguf(name)
    assert fetch.disk_bytes(name) > fetch.gguf_bytes(name) > file.stat().st_size
    fetch.remove_gguf(name)
    assert fetch.is_converted(name) and not fetch.has_gguf(name)
    models.remove_model(name)
    assert not models.is_pulled(name) and fetch.disk_bytes(name) == 0


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.95])
def test_a_cut_file_is_reported(file: Path, cache: Path, share: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match=r"small\.gguf.*(not a GGUF file|cut short)"):
        load(file)
    assert not [path for path in cache.rglob("*") if path.name.endswith(".safetensors")]


def test_noise_behind_the_magic_is_reported(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "noise.gguf"
    file.write_bytes(b"GGUF" + bytes(range(256)) * 8)
    with pytest.raises(ValueError, match=r"header of .*noise\.gguf is damaged.*version"):
        load(file)


FORGED = {
    "a thousand blocks": ("block_count", 1_000, "claims llama.block_count=1000 and holds tensors of 2 blocks"),
    "a million blocks": ("block_count", 1_000_000, "claims llama.block_count=1000000 and holds tensors of 2 blocks"),
    "a wide model": ("embedding_length", 1 << 30, "no tensor wider than 261"),
    "many heads": ("attention.head_count", 1 << 30, "no tensor wider than 261"),
    "a huge vocabulary": ("vocab_size", 1 << 30, "no tensor wider than 261"),
}


@pytest.mark.parametrize("claim", FORGED)
def test_a_claim_beyond_the_file_is_refused_at_once(
    file: Path, cache: Path, conversions: list[Path], claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, value, reason = FORGED[claim]
    data, key = bytearray(file.read_bytes()), f"llama.{name}".encode()
    place = data.index(key) + len(key)
    assert data[place : place + 4] == (4).to_bytes(4, "little")  # a uint32
    data[place + 4 : place + 8] = value.to_bytes(4, "little")
    file.write_bytes(data)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *a, **k: pytest.fail("it was believed"))
    with pytest.raises(ValueError, match=reason):
        load(file)


@pytest.mark.parametrize(("place", "value"), [(8, 1 << 40), (16, 1 << 40), (24, 1 << 60), (8, 200)])
def test_counts_beyond_the_file_are_refused(file: Path, place: int, value: int) -> None:
    """Tensors, entries, bytes of a string: the reader comes to the end of the file and says so."""
    data = bytearray(file.read_bytes())
    data[place : place + 8] = value.to_bytes(8, "little")
    file.write_bytes(data)
    with pytest.raises(ValueError, match="damaged or cut short"):
        read_metadata(file)


def test_arrays_and_tensors_beyond_the_file_are_refused(file: Path) -> None:
    whole = file.read_bytes()
    for key, skipped in ((b"tokenizer.ggml.token_type", 8), (b"tokenizer.ggml.tokens", 16), (b"output.weight", 4)):
        data = bytearray(whole)
        # Behind the key: type and kind of an array, its count, the length of its first string; dimensions of a tensor.
        place = data.index(key) + len(key) + skipped
        data[place : place + 8] = (1 << 62).to_bytes(8, "little")
        file.write_bytes(data)
        with pytest.raises(ValueError, match="damaged or cut short"):
            read_metadata(file)
    file.write_bytes(whole.replace(b"llama.vocab_size", b"llama.head_count"))
    read_metadata(file)
    file.write_bytes(whole.replace(b"llama.rope.freq_base", b"llama.context_length"))
    with pytest.raises(ValueError, match="Duplicate"):
        read_metadata(file)


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o755, 0o644), (0o700, 0o600)])
def test_who_may_read_the_cache_folder_may_read_a_converted_model(
    file: Path, cache: Path, folder_mode: int, file_mode: int
) -> None:
    (cache / "converted").mkdir(parents=True)
    (cache / "converted").chmod(folder_mode)
    folder = models.resolve(file, progress=False)
    assert folder.stat().st_mode & 0o777 == folder_mode
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {file_mode}


def test_a_converted_model_that_cannot_be_read_names_the_way_out(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.resolve(file, progress=False)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).suffix != ".safetensors")
    with pytest.raises(models.FetchError, match=f"model.safetensors in {folder} cannot be read.*chmod.*KVSKETCH_HOME"):
        models.resolve(file, progress=False)


@pytest.mark.skipif(os.name != "posix", reason="needs links")
def test_a_conversion_does_not_write_through_planted_links(file: Path, cache: Path) -> None:
    name = f"small-{convert.identity_of(file)[:16]}"
    victims = cache / "victims"
    victims.mkdir(parents=True)
    (cache / "converted").mkdir()
    for planted in (f"{name}.work", name):
        (cache / "converted" / planted).symlink_to(victims)
    folder = models.resolve(file, progress=False)
    assert not list(victims.iterdir()) and not folder.is_symlink()


def test_a_log_file_gets_one_line_of_a_conversion_before_anything_is_read(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    original = convert._write_converted

    def recorded(*arguments: Any) -> None:
        said.append(capsys.readouterr().err)
        original(*arguments)

    monkeypatch.setattr(convert, "_write_converted", recorded)
    models.resolve(file)
    assert said == [f"converting {file.name} to safetensors: once, takes seconds to a few minutes\n"]
    assert capsys.readouterr().err == ""


def test_a_terminal_is_told_what_a_conversion_does(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer alone takes half a minute; each stage is shown when it begins."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown: list[str] = []
    reset = Progress.reset

    def watched(self: Progress, *arguments: Any, **options: Any) -> None:
        reset(self, *arguments, **options)
        self.refresh()
        shown.append(terminal.getvalue())

    monkeypatch.setattr(Progress, "reset", watched)
    models.resolve(file)
    for at, stage in enumerate(("reading the tokenizer", "reading the weights", "unpacking the weights", "writing")):
        assert stage in shown[at] and not any(stage in before for before in shown[:at])


def test_a_full_disk_while_converting_is_reported(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(models.FetchError, match=r"could not write the converted model.*No space left.*KVSKETCH_HOME"):
        load(file)


def test_a_tokenizer_that_spells_letter_by_letter_is_refused(file: Path) -> None:
    metadata = read_metadata(file)
    merging = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0}, [])))
    unigram = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(Unigram([("a", 0.0)])))
    convert.refuse_unigram(merging, {**metadata, "tokenizer.ggml.model": "llama"})
    convert.refuse_unigram(unigram, {**metadata, "tokenizer.ggml.model": "t5"})
    with pytest.raises(ValueError, match=r"transformers 5\.18 or newer"):
        convert.refuse_unigram(unigram, {**metadata, "tokenizer.ggml.model": "llama"})
