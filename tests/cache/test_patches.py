"""Wrappers around transformers come out again, also from under those of others, and leave its own functions."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.llama import modeling_llama
from transformers.models.mpt.modeling_mpt import MptAttention
from transformers.models.phi3.modeling_phi3 import Phi3ForCausalLM

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache import attention
from kvsketch.cache.patches import Patch
from kvsketch.decode import fused as fusion
from tests.helpers import zoo
from tests.helpers.common import generate

SEAMS: dict[str, tuple[str, Any, str]] = {
    "attention": ("llama", AttentionInterface, "get_interface"),
    "gptj": ("gptj", GPTJAttention, "_attn"),
    "mpt": ("mpt", MptAttention, "forward"),
    "phi3": ("phi3", Phi3ForCausalLM, "prepare_inputs_for_generation"),
}


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    kvsketch.uninstall()
    yield
    kvsketch.uninstall()


def assert_compresses(model: Any) -> None:
    cache = CompressedCache(model, "streamingllm:budget=8")
    generate(model, zoo.tokens(1, 20), cache)
    assert cache.tokens_stored == 8


@pytest.mark.parametrize("seam", SEAMS)
def test_one_call_takes_a_seam_out(seam: str) -> None:
    family, owner, name = SEAMS[seam]
    model, original = zoo.build(family), getattr(owner, name)
    assert_compresses(model)
    assert getattr(owner, name) is not original
    kvsketch.uninstall()
    assert getattr(owner, name) is original
    assert_compresses(model)


@pytest.mark.parametrize("declared", [True, False], ids=["with __wrapped__", "without"])
@pytest.mark.parametrize("seam", SEAMS)
def test_wrappers_of_others_stay_and_ours_passes_on(seam: str, declared: bool) -> None:
    family, owner, name = SEAMS[seam]
    model, ids, original = zoo.build(family), zoo.tokens(1, 20), getattr(owner, name)
    expected = generate(model, ids, None).logits
    assert_compresses(model)
    ours, calls = getattr(owner, name), []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return ours(*args, **kwargs)

    if declared:
        theirs = functools.wraps(ours)(theirs)
    setattr(owner, name, theirs)
    try:
        kvsketch.uninstall()
        assert getattr(owner, name) is theirs
        result = generate(model, ids, None).logits
        assert calls and all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
        assert_compresses(model)
        kvsketch.uninstall()
        assert getattr(owner, name) is theirs
    finally:
        setattr(owner, name, ours)
    assert_compresses(model)
    kvsketch.uninstall()
    setattr(owner, name, original)


def test_a_wrapper_that_somebody_put_away_comes_back() -> None:
    model, original = zoo.build("llama"), AttentionInterface.get_interface
    assert_compresses(model)
    AttentionInterface.get_interface = original
    assert_compresses(model)
    attention.uninstall()
    assert AttentionInterface.get_interface is original


def test_an_inherited_function_is_inherited_again() -> None:
    class Base:
        def tell(self) -> str:
            return "base"

    class Child(Base):
        pass

    patch = Patch(Child, "tell", lambda original, self: original(self) + " and child")
    patch.install()
    assert Child().tell() == "base and child" and Base().tell() == "base"
    patch.hold()
    patch.remove()
    assert Child().tell() == "base and child"
    patch.release()
    assert Child().tell() == "base" and "tell" not in vars(Child)


def test_many_threads_hold_one_patch() -> None:
    owner = SimpleNamespace(tell=lambda: 1)
    tell, patch = owner.tell, Patch(owner, "tell", lambda original: original() + 1)

    def work() -> None:
        for _ in range(200):
            patch.hold()
            assert owner.tell() == 2
            patch.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert owner.tell is tell and patch.holders == 0


FUSED: list[Callable[[], Any]] = [
    lambda: modeling_llama.LlamaDecoderLayer.forward,
    lambda: modeling_llama.LlamaMLP.forward,
    lambda: modeling_llama.LlamaRMSNorm.forward,
    lambda: modeling_llama.apply_rotary_pos_emb,
]


def test_fused_classes_are_transformers_own_outside_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "can_fuse", lambda model: True)
    model, token = zoo.build("llama"), zoo.tokens(1, 1)
    own = [function() for function in FUSED]
    with torch.no_grad():
        expected = model(token).logits
        with fusion.fused(model):
            wrapped = [function() for function in FUSED]
            with fusion.fused(model):
                pass
            assert [function() for function in FUSED] == wrapped
        assert not {id(function) for function in own} & {id(function) for function in wrapped}
        with pytest.raises(KeyError), fusion.fused(model):
            raise KeyError
        assert [function() for function in FUSED] == own
        assert torch.equal(model(token).logits, expected)


def test_a_model_runs_transformers_own_code_after_captured_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused steps run the model's own modules on a CPU, through the same wrappers."""
    from kvsketch.decode import captured as decoding
    from tests.decode.test_decoding import RunInsteadOfReplay

    monkeypatch.setattr(fusion, "can_fuse", lambda model: True)
    monkeypatch.setattr(decoding, "impossible", lambda *args: None)
    monkeypatch.setattr(decoding.Step, "_record", lambda step: RunInsteadOfReplay(step))
    model, ids = zoo.build("llama"), zoo.tokens(1, 30)
    own, before = [function() for function in FUSED], generate(model, ids, None)
    fused: list[bool] = []

    def watched(original: Any, *args: Any, **kwargs: Any) -> Any:
        fused.append(modeling_llama.LlamaMLP.forward is not own[1])
        return original(*args, **kwargs)

    watch = Patch(modeling_llama.LlamaForCausalLM, "forward", watched)
    watch.install()
    kvsketch.generate(model, ids, CompressedCache(model, "h2o:budget=12:recent=4"), max_new_tokens=9, do_sample=False)
    watch.remove()
    assert fused.count(True) == 8 and fused[0] is False
    assert [function() for function in FUSED] == own
    after = generate(model, ids, None)
    assert all(torch.equal(a, b) for a, b in zip(before.logits, after.logits, strict=True))
