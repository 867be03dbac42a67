"""H2O keeps what the definition keeps, and its score is the attention each token received."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache.row_sums import RowSums
from kvsketch.methods import H2O
from kvsketch.slots import LayerContext, SlotTable, rollback
from tests.helpers import zoo
from tests.methods.heavy_hitters import kept, random_stream, simulate, tables

SCHEDULES = {
    "prompt_then_tokens": [40] + [1] * 25,
    "short_prompt": [5] + [1] * 40,
    "chunks": [9, 14, 1, 1, 12, 1, 1, 1, 7],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("group", [1, 3])
def test_keeps_what_the_definition_keeps(schedule: str, group: int) -> None:
    method = H2O(budget=16, recent=5)
    stream = random_stream(SCHEDULES[schedule], group=group)
    for table, expected in zip(tables(method, stream), simulate(method, stream), strict=True):
        for ours, theirs in zip(kept(table), expected, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(abs(ours[j] - theirs[j]) < 1e-4 for j in theirs)


def test_a_heavy_hitter_outlives_every_other_token() -> None:
    stream = random_stream([30, *[1] * 40], heads=1, group=1)
    # Every query points at token 3, which is no sink and soon not recent.
    stream.keys[0, 0, 3] = stream.queries[0, 0].mean(0) * 0 + 4.0
    stream.queries += 1.0
    for table in tables(H2O(budget=8), stream):
        assert 3 in kept(table)[0]
    assert sorted(kept(table)[0])[-4:] == [66, 67, 68, 69]


def test_scores_of_an_exact_table_sum_to_the_queries() -> None:
    stream = random_stream([20, 1, 1, 6], group=2)
    for table, end in zip(tables(H2O(budget=64), stream), stream.ends, strict=True):
        assert table.exact
        torch.testing.assert_close(table.state.score.sum(-1), torch.full((1, 2), 2.0 * end))


def test_left_padding_neither_scores_nor_is_scored() -> None:
    stream = random_stream([40, *[1] * 12], batch=3)
    padding = [0, 13, 27]
    for method in (H2O(budget=12, recent=4), H2O(budget="40%", recent="30%")):
        *_, together = tables(method, stream, padding)
        for row, pad in enumerate(padding):
            alone = random_stream([40 - pad, *[1] * 12])
            alone.keys, alone.queries = stream.keys[row : row + 1, :, pad:], stream.queries[row : row + 1, :, pad:]
            *_, table = tables(method, alone)
            for ours, theirs in zip(kept(together, row), kept(table), strict=True):
                assert ours.keys() == theirs.keys()
                assert all(abs(ours[j] - theirs[j]) < 1e-4 for j in theirs)


@pytest.mark.parametrize("budget", [12, 64])
def test_rejected_drafts_leave_no_trace(budget: int) -> None:
    """A forward of five tokens of which three are taken back scores as the two that stay."""
    stream, method = random_stream([30, 2]), H2O(budget=budget, recent=4)
    *_, expected = tables(method, stream)
    table = next(tables(method, random_stream([30, 2])))
    drafts = torch.cat([stream.keys[:, :, 30:], torch.randn(1, 2, 3, 8)], 2)
    table.append(drafts, drafts)
    rollback.drop_newest(table, 3)
    method.compress(table, stream.queries[:, :, 30:])
    assert kept(table) == kept(expected)


def test_a_decode_step_works_in_place() -> None:
    steps = tables(H2O(budget=12), random_stream([30, *[1] * 5]))
    table = next(steps)
    tensors = [t for t in table.tensors() if t is not table.padding]
    before = [t.data_ptr() for t in tensors]
    for table in steps:
        assert [t.data_ptr() for t in table.tensors()] == before


def test_bytes_follow_the_formula() -> None:
    """Per KV head e k (d + dv) for keys and values and 4 k for the score; index and weights are within 2% of that."""
    budget, size = 512, 128
    keys = torch.randn(1, 2, 700, size).bfloat16()
    table = SlotTable(LayerContext(layer_idx=0, num_layers=1))
    table.append(keys, keys.clone())
    H2O(budget=budget).compress(table, torch.randn(1, 4, 700, size).bfloat16())
    assert sum(t.nbytes for t in table.tensors()) == pytest.approx(2 * budget * (2 * 2 * size + 4), rel=0.02)


def test_row_sums_that_attention_left_are_used() -> None:
    method, stream = H2O(budget=64), random_stream([20])
    table = next(tables(method, stream))
    plain = table.state.score.clone()
    logits = stream.scale * (stream.queries @ stream.keys.repeat_interleave(2, 1).mT)
    row_lse = logits.masked_fill(~torch.ones(20, 20).tril().bool(), float("-inf")).logsumexp(-1)
    for shift in (0.0, 1.0):
        table.state.score = None
        table.forward.note_attention(row_lse + shift)
        method.observe(table, stream.queries)
        torch.testing.assert_close(table.state.score * torch.tensor(shift).exp(), plain)


def test_defaults_and_choices() -> None:
    method = H2O()
    assert (str(method.budget), str(method.recent), method.sinks, str(method)) == ("1024", "50%", 0, "h2o")
    with pytest.raises(ValueError, match=r"h2o: gqa_reduce=max is refused, it always means sum"):
        kvsketch.parse_method("h2o:gqa_reduce=max")


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_row_sums_of_the_models_own_attention_give_the_same_scores(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums come out of the fused attention kernel; the scores must be those of our own two passes."""
    model = zoo.build("llama", num_hidden_layers=1, head_dim=64).to(device, torch.bfloat16)
    ids = zoo.tokens(2, 300).to(device)
    given, scores, logits = [], [], []
    mass = kvsketch.ops.attention_mass

    def noting(*args: Any, **options: Any) -> Any:
        given.append(options.get("row_lse") is not None)
        return mass(*args, **options)

    monkeypatch.setattr(kvsketch.ops, "attention_mass", noting)
    for wanted in (True, False):
        monkeypatch.setattr(kvsketch.METHODS["h2o"], "wants_row_lse", wanted)
        cache = CompressedCache(model, "h2o:budget=400")
        with torch.no_grad():
            logits.append(model(ids, past_key_values=cache).logits)
        scores.append(cache.slot_layers[0].table.state.score)
    assert given == [True, False] or device == "cuda", "on a GPU the kernel may keep its sums to itself"
    assert torch.equal(*logits)
    torch.testing.assert_close(*scores, atol=2e-3, rtol=2e-2)


def test_wrong_row_sums_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that returns something else, base-2 logarithms say, costs a second pass and not the scores."""
    model, ids = zoo.build("llama", num_hidden_layers=1), zoo.tokens(1, 50)
    scores = []
    for factor in (1.0, 1.4427):
        dispatch = RowSums.__torch_dispatch__

        def scaled(self: Any, *args: Any, _of: Any = dispatch, _by: float = factor, **options: Any) -> Any:
            result = _of(self, *args, **options)
            self.row_lse = None if self.row_lse is None else self.row_lse * _by
            return result

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(RowSums, "__torch_dispatch__", scaled)
            cache = CompressedCache(model, "h2o:budget=100")
            model(ids, past_key_values=cache)
        scores.append(cache.slot_layers[0].table.state.score)
    torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-5)
