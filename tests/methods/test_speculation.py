"""Speculation of a layer's query from the layer before: what it finds, on what it rests, how it follows the rows."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvsketch
from kvsketch import CompressedCache, models
from kvsketch.cache import rotary
from kvsketch.methods.infinigen import speculation
from kvsketch.methods.infinigen.state import Learned
from kvsketch.models import texts
from kvsketch.slots.table import ExactTable
from kvsketch_lab.evaluation.attention_protocol import Captured, capture
from kvsketch_lab.evaluation.speculation import QUERIES, recall
from tests.helpers import zoo
from tests.helpers.common import generate, padded

HEADS, GROUP, SIZE, PROMPT, STEPS = 2, 2, 16, 300, 8
BUDGET = 40
ANGLES = tuple(10000 ** (-2 * i / SIZE) for i in range(SIZE // 2))
TINY = "infinigen:budget=16:skip_layers=0:speculate=previous"


class Layers:
    """Two layers that read the same text."""

    def __init__(self, first: Captured, second: Captured, angles: tuple[float, ...] = ANGLES) -> None:
        self.first, self.second, self.angles = first, second, angles

    def recall(self, query: str) -> float:
        """With all channels, so that only the query decides what the second layer reads."""
        return recall((self.first, self.second), QUERIES[query], self.angles, BUDGET, STEPS, ratio=1.0)


def turn(still: Tensor) -> Tensor:
    """What a rotary embedding makes of vectors [1, heads, n, D] at positions 0..n-1."""
    position = torch.arange(still.shape[2]).view(1, 1, -1)
    return speculation.rotated(still, position, torch.tensor([ANGLES]), 1)


def planted(noise: float, seed: int = 0) -> Layers:
    """Queries of the second layer that are a linear map of all heads of the first, before both are rotated."""
    g = torch.Generator().manual_seed(seed)
    heads, total = HEADS * GROUP, PROMPT + STEPS
    first = torch.randn(1, total, heads * SIZE, generator=g) + 2 * torch.randn(heads * SIZE, generator=g)
    second = first @ torch.randn(heads * SIZE, heads * SIZE, generator=g) / (heads * SIZE) ** 0.5
    second = second + noise * torch.randn(second.shape, generator=g)
    keys = [torch.randn(1, HEADS, total, SIZE, generator=g) for _ in range(2)]
    queries = [turn(q.unflatten(2, (heads, SIZE)).transpose(1, 2)) for q in (first, second)]
    return Layers(*(Captured(q, k, k, 1.0, 0, 2) for q, k in zip(queries, keys, strict=True)))


def test_rotating_forth_and_back_keeps_a_query() -> None:
    queries = torch.randn(2, 3, 5, SIZE, generator=torch.Generator().manual_seed(0))
    position = torch.arange(10).view(2, 1, 5)
    for half in (SIZE // 2, 3, 0):
        angles = torch.tensor([ANGLES[:half]] * 2).view(2, half)
        there = speculation.rotated(queries, position, angles, 1)
        torch.testing.assert_close(speculation.rotated(there, position, angles, -1), queries, atol=1e-5, rtol=1e-5)
        assert (half == 0) == torch.equal(there, queries)


def test_identical_layers_are_read_alike() -> None:
    first = planted(0.0).first
    assert Layers(first, first).recall("own") == 1.0
    assert Layers(first, first).recall("previous") > 0.97


def test_a_linear_map_is_found_and_one_of_other_tokens_is_not() -> None:
    layers = planted(0.05)
    # A map of other tokens leaves the mean query, the same at every step; chance would be 39 of 300.
    assert layers.recall("previous") > max(0.9, 0.2 + layers.recall("previous, map of other tokens"))


def test_the_rotation_matters() -> None:
    layers = planted(0.05)
    assert layers.recall("previous, rotation unknown") < layers.recall("previous") - 0.2


def assert_angles_fit(model: Any) -> None:
    """In the first layer the same token has the same key everywhere, but for the rotation: without it, one vector."""
    cache = CompressedCache(model, "full")
    model(torch.full((1, 20), 7), past_key_values=cache)
    table = cache.slot_layers[0].table
    angles, keys = torch.tensor([table.rotary]), table.key_slots()
    assert table.layer_idx == 0 and angles.shape[1] > 0
    still = speculation.rotated(keys, torch.arange(20).view(1, 1, -1), angles, -1)
    torch.testing.assert_close(still, still[:, :, :1].expand_as(still), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(keys, keys[:, :, :1].expand_as(keys), atol=1e-3)


@pytest.mark.parametrize("family", sorted(f for f, (kind, _) in zoo.FAMILIES.items() if kind in rotary.FAMILIES))
def test_angles_are_those_of_the_family(family: str) -> None:
    model = zoo.build(family)
    kinds = getattr(model.config, "layer_types", None) or []
    if "sliding_attention" in kinds:  # where the first layer would not be compressed
        model = zoo.build(family, layer_types=["full_attention"] * len(kinds))
    assert_angles_fit(model)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_angles_of_stretched_contexts(rope: dict[str, Any]) -> None:
    config = copy.deepcopy(zoo.build("llama").config)
    config.rope_parameters = {"rope_theta": 10000.0, **rope}
    torch.manual_seed(0)
    assert_angles_fit(transformers.AutoModelForCausalLM.from_config(config))


def test_angles_that_change_with_the_text_are_not_known() -> None:
    config = copy.deepcopy(zoo.build("llama").config)
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}
    assert rotary.frequencies(config) == ()


def speculates(cache: CompressedCache) -> bool:
    """Whether the second layer has a map and the first has asked."""
    first, second = (layer.table.state_of(Learned) for layer in cache.slot_layers[:2])
    return second.map is not None and first.asked is not None


@pytest.mark.parametrize("family", ["gptj", "opt", "cohere"])
def test_other_families_speculate_without_angles(family: str) -> None:
    model = zoo.build(family)
    cache = CompressedCache(model, TINY)
    assert cache.slot_layers[0].table.rotary == ()
    generate(model, zoo.tokens(1, 40, 0), cache)
    assert speculates(cache)


def run(model: Any, ids: Tensor, method: str = TINY, **options: Any) -> tuple[Any, CompressedCache]:
    cache = CompressedCache(model, method)
    return generate(model, ids, cache, **options), cache


def test_a_row_alone_equals_that_row_in_a_left_padded_batch() -> None:
    model = zoo.build("llama")
    batch, mask = padded(zoo.tokens(3, 60, 1), [0, 9, 30])
    together, cache = run(model, batch, attention_mask=mask)
    assert speculates(cache)
    for row, pad in enumerate((0, 9, 30)):
        alone, _ = run(model, batch[row : row + 1, pad:])
        assert alone.sequences[0, -12:].tolist() == together.sequences[row, -12:].tolist()


@torch.no_grad()
def test_a_much_longer_prompt_gives_a_new_map_row_by_row() -> None:
    """Rows of 4 and 9 tokens, then 14 more for both: only the first has more than twice as many; then 90 for both."""
    model, ids = zoo.build("llama"), zoo.tokens(2, 113, 7)
    ids, mask = padded(ids, [5, 0])
    cache = CompressedCache(model, TINY)
    maps, tokens = [], []
    for start, end in ((0, 9), (9, 23), (23, 113)):
        positions = (mask[:, :end].cumsum(-1) - 1).clamp_min(0)[:, start:]
        model(ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache)
        state = cache.slot_layers[1].table.state
        maps.append(state.map.clone())
        tokens.append(state.tokens.tolist())
    assert tokens == [[4, 9], [14, 9], [90, 90]]
    changed = [(after != before).flatten(1).any(1).tolist() for before, after in itertools.pairwise(maps)]
    assert changed == [[True, False], [True, True]]


@torch.no_grad()
def test_beams_and_copies_take_the_noted_queries_along() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 40, 3)
    beams, cache = run(model, ids, num_beams=3, num_return_sequences=3, output_scores=True)
    for state in (layer.table.state for layer in cache.slot_layers):
        assert all(tensor.shape[0] == 3 for tensor in state.tensors())
    forced = beams.sequences[0:1]
    replay = CompressedCache(model, TINY)
    logits = [model(ids, past_key_values=replay).logits[:, -1]]
    branch = None
    for step, token in enumerate(forced[:, 40:-1].split(1, 1)):
        if step == 4:
            branch = copy.deepcopy(replay)
        logits.append(model(token, past_key_values=replay).logits[:, -1])
        if branch is not None:
            torch.testing.assert_close(model(token, past_key_values=branch).logits[:, -1], logits[-1])
            assert branch.slot_layers[1].table.previous is branch.slot_layers[0].table
    score = sum(float(x.log_softmax(-1)[0, t]) for x, t in zip(logits, forced[0, 40:].tolist(), strict=True))
    assert abs(score / len(logits) - float(beams.sequences_scores[0])) < 1e-4


def test_a_reset_cache_begins_anew_and_host_memory_changes_nothing() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(2, 40, 4)
    near, cache = run(model, ids)
    cache.reset()
    again = generate(model, ids, cache)
    far, _ = run(model, ids, f"{TINY}:offload=host")
    assert near.sequences.tolist() == again.sequences.tolist() == far.sequences.tolist()


@torch.no_grad()
def test_single_steps_stay_in_place() -> None:
    """A captured step needs every tensor where it was."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 40, 5)
    cache = CompressedCache(model, TINY)
    model(ids, past_key_values=cache)
    for layer in cache.slot_layers:
        layer.method.bound(layer.table, 80)
    model(ids[:, :1], past_key_values=cache)
    tables = [layer.table for layer in cache.slot_layers]
    before = [t.data_ptr() for table in tables for t in table.tensors()]
    for token in ids[:, 1:6].split(1, 1):
        model(token, past_key_values=cache)
    assert before == [t.data_ptr() for table in tables for t in table.tensors()]
    assert tables[0].state.prompt_queries is None, "the prompt's queries go once they are read"


def test_heads_divided_among_processes_are_refused() -> None:
    table = ExactTable(0, 2, head_group="tp")
    table.append(torch.zeros(1, 1, 30, 4), torch.zeros(1, 1, 30, 4))
    with pytest.raises(ValueError, match="speculate=own"):
        kvsketch.parse_method(TINY).compress(table, torch.zeros(1, 2, 30, 4))


def test_wrong_choice() -> None:
    with pytest.raises(ValueError, match="speculate=next is not valid; use own or previous"):
        kvsketch.parse_method("infinigen:speculate=next")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("pads", [[0, 0], [0, 9]], ids=str)
@pytest.mark.parametrize("place", ["none", "host"])
def test_captured_steps_say_what_eager_ones_say(pads: list[int], place: str) -> None:
    model = zoo.build("llama").cuda()
    ids, mask = padded(zoo.tokens(2, 40, 7), pads)
    inputs = {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}
    method = f"{TINY}:offload={place}"
    eager = generate(
        model, inputs["input_ids"], CompressedCache(model, method), attention_mask=inputs["attention_mask"]
    )
    captured = kvsketch.generate(model, inputs, CompressedCache(model, method), max_new_tokens=12, do_sample=False)
    assert captured.tolist() == eager.sequences.tolist()


@pytest.mark.real_model
def test_a_real_model_asks_in_a_layer_what_the_layer_before_lets_expect() -> None:
    """Recall of the true best tokens in two layers of SmolLM2, over all channels so that only the query matters."""
    model, tokenizer = models.load("smollm2-135m", dtype=torch.float32, device="cpu")
    ids = tokenizer(texts.document(), return_tensors="pt").input_ids[:, : 600 + STEPS]
    captured = capture(model, ids, (9, 10, 19, 20))
    for later in (10, 20):
        layers = Layers(captured[later - 1], captured[later], rotary.frequencies(model.config))
        speculated, mean = layers.recall("previous"), layers.recall("previous, map of other tokens")
        assert layers.recall("own") == 1.0 and speculated > 0.75 and speculated > mean + 0.05
