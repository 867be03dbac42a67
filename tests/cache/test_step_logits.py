"""A decode step reads its keys once: scores come from the logits that attention left, and are what they would be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import kvsketch
from kvsketch import CompressedCache, ops
from kvsketch.cache.layer import LayerView
from kvsketch.slots import SlotTable
from tests.helpers import zoo
from tests.helpers.common import also, generate, padded, with_budget

METHODS = [name for name, method in kvsketch.METHODS.items() if method.wants_logits]
Run = Callable[[Any, CompressedCache], Tensor]


def alone(model: Any, cache: CompressedCache) -> Tensor:
    return generate(model, zoo.tokens(2, 40), cache).sequences


def left_padded(model: Any, cache: CompressedCache) -> Tensor:
    ids, mask = padded(zoo.tokens(3, 40), [0, 12, 29])
    return generate(model, ids, cache, attention_mask=mask).sequences


def beams(model: Any, cache: CompressedCache) -> Tensor:
    return generate(model, zoo.tokens(2, 40), cache, num_beams=3, num_return_sequences=3).sequences


def lookup(model: Any, cache: CompressedCache) -> Tensor:
    ids = zoo.tokens(1, 6).repeat(1, 6)
    return model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=3, max_new_tokens=12, do_sample=False)


def assisted(model: Any, cache: CompressedCache) -> Tensor:
    draft = zoo.build("llama", num_hidden_layers=1)
    return model.generate(
        zoo.tokens(1, 40), past_key_values=cache, assistant_model=draft, max_new_tokens=12, do_sample=False
    )


def two_turns(model: Any, cache: CompressedCache) -> Tensor:
    text = torch.cat([generate(model, zoo.tokens(1, 40), cache).sequences, zoo.tokens(1, 9, seed=2)], 1)
    return generate(model, text, cache).sequences


def grown_from_a_short_prompt(model: Any, cache: CompressedCache) -> Tensor:
    """Exact at first: those steps have nothing to leave."""
    return generate(model, zoo.tokens(2, 10), cache, max_new_tokens=20).sequences


def without_masks(model: Any, cache: CompressedCache) -> Tensor:
    """As a captured step reads a left-padded batch."""
    ids, mask = padded(zoo.tokens(2, 45), [0, 12])
    with torch.no_grad():
        model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
        for layer in cache.slot_layers:
            layer.forward.mask_free = True
        for token in range(40, 45):
            out = model(
                ids[:, token : token + 1], attention_mask=mask[:, : token + 1], past_key_values=cache,
                position_ids=(mask[:, : token + 1].sum(1) - 1)[:, None],
            ).logits  # fmt: skip
    return out.argmax(-1)


def rows_change_before_a_draft_is_accepted(model: Any, cache: CompressedCache) -> Tensor:
    ids = zoo.tokens(2, 45)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        cache.activate_past_recording()
        for token in ids[:, 40:].split(1, 1):
            out = model(token, past_key_values=cache).logits
            cache.reorder_cache(torch.tensor([1, 0]))
    return out.argmax(-1)


SCENES: list[Run] = [
    alone, left_padded, beams, lookup, assisted, two_turns, grown_from_a_short_prompt, without_masks,
    rows_change_before_a_draft_is_accepted,
]  # fmt: skip


def tables_after(run: Run, family: str, method: str) -> tuple[Tensor, list[Any]]:
    model = zoo.build(family)
    cache = CompressedCache(model, method, seed=3)
    tokens = run(model, cache)
    for layer in cache.slot_layers:
        layer.compress_pending()
    return tokens, [layer.table for layer in cache.slot_layers]


def assert_same_with_and_without(run: Run, family: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, tables = tables_after(run, family, method)
    monkeypatch.setattr(kvsketch.METHODS[method.split(":")[0]], "wants_logits", False)
    expected, others = tables_after(run, family, method)
    assert tokens.tolist() == expected.tolist()
    for table, other in zip(tables, others, strict=True):
        assert not table.exact
        assert torch.equal(table.index, other.index)
        torch.testing.assert_close(table.state.score, other.state.score, atol=1e-5, rtol=1e-4)


# Every way to take a step with a plain and, in the thorough run, with a noisy score; every method where rows differ and
# where they grow.
EACH = (left_padded, grown_from_a_short_prompt)
CASES = [("h2o", run) for run in SCENES] + [(name, run) for name in METHODS if name != "h2o" for run in EACH]
CASES += also(*(("keyformer", run) for run in SCENES if run not in EACH))


@pytest.mark.parametrize(("name", "run"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_scores_are_those_of_a_second_reading(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_with_and_without(run, "llama", with_budget(name, 16), monkeypatch)


@pytest.mark.parametrize(("family", "run"), [("mpt", left_padded), ("gpt_oss", without_masks), ("gemma2", left_padded)])
@pytest.mark.parametrize("name", ["snapkv", "keyformer"])
def test_biases_sinks_and_soft_caps(name: str, family: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are of the plain logits: a bias or a sink is in the log-sum of attention, a soft cap in the logits."""
    assert_same_with_and_without(run, family, with_budget(name, 16), monkeypatch)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[bool]]]:
    """The calls of both operations, and whether the log-sum was given."""
    calls: dict[str, list[bool]] = {"attention_mass": [], "mass_from_logits": []}

    def noting(name: str) -> Callable[..., Tensor]:
        run = getattr(ops, name)

        def noted(*args: Any, **options: Any) -> Tensor:
            calls[name].append(options.get("row_lse") is not None)
            return run(*args, **options)

        return noted

    with monkeypatch.context() as patch:
        for name in calls:
            patch.setattr(ops, name, noting(name))
        yield calls


def step_calls(family: str, name: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, list[bool]]:
    """The calls of three decode steps."""
    model, ids = zoo.build(family, **changes), zoo.tokens(2, 43)
    cache = CompressedCache(model, with_budget(name, 16))
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        with counted(monkeypatch) as calls:
            for token in ids[:, 40:].split(1, 1):
                model(token, past_key_values=cache)
    return calls


@pytest.mark.parametrize("name", METHODS)
def test_keys_are_read_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = step_calls("llama", name, monkeypatch)
    assert calls == {"attention_mass": [], "mass_from_logits": [name != "keyformer"] * 6}
    monkeypatch.setattr(kvsketch.METHODS[name], "wants_logits", False)
    assert step_calls("llama", name, monkeypatch) == {"attention_mass": [False] * 6, "mass_from_logits": []}


def test_keys_are_read_again_where_the_logits_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_calls("mpt", "snapkv", monkeypatch) == {"attention_mass": [], "mass_from_logits": [False] * 6}
    capped = step_calls("gemma2", "snapkv", monkeypatch, attn_implementation="eager")
    assert capped["attention_mass"] and not capped["mass_from_logits"]


def test_logits_are_asked_for_by_those_who_want_them_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    attend = ops.weighted_attention

    def noting(*args: Any, **options: Any) -> Any:
        asked.append(options["return_logits"] or options["return_state"])
        return attend(*args, **options)

    monkeypatch.setattr(ops, "weighted_attention", noting)
    for name, wanted in (("streamingllm", False), ("subgen", False), ("h2o", True)):
        asked.clear()
        step_calls("llama", name, monkeypatch)
        assert asked == [wanted] * 6


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("name", ["h2o", "keyformer"])
def test_nothing_is_left_after_a_forward(name: str, drafting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(2, 42)
    cache = CompressedCache(model, with_budget(name, 16))
    left: list[tuple[LayerView, bool]] = []
    finish = LayerView.finish

    def noting(view: LayerView, *args: Any) -> None:
        left.append((view, view.row_logits is not None))
        finish(view, *args)

    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        size = cache.device_bytes
        if drafting:
            cache.activate_past_recording()
        monkeypatch.setattr(LayerView, "finish", noting)
        for token in ids[:, 40:].split(1, 1):
            model(token, past_key_values=cache)
            assert all(layer.table.forward.row_logits is None for layer in cache.slot_layers)
            assert cache.device_bytes == size
        assert [had for _, had in left] == [True] * 4
        assert all(view.row_logits is None for view, _ in left)
        copied = copy.deepcopy(cache)
        again = [model(ids[:, :1], past_key_values=c).logits for c in (cache, copied)]
    assert torch.equal(*again)


def test_a_failing_method_leaves_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 41)
    cache = CompressedCache(model, with_budget("h2o", 16))

    def fail(method: Any, table: SlotTable, queries: Tensor) -> None:
        assert table.forward.row_logits is not None
        raise RuntimeError("out of memory")

    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        monkeypatch.setattr(kvsketch.METHODS["h2o"], "compress", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(ids[:, 40:], past_key_values=cache)
    assert cache.slot_layers[0].table.forward.row_logits is None
