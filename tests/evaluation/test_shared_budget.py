"""Mixtures of best tokens and samples keep the slots and the weights that they say, and the study measures them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvsketch.cache import rotary
from kvsketch.methods import Method
from kvsketch.methods.waiting import Waiting
from kvsketch.slots.table import SlotTable
from kvsketch_lab import records
from kvsketch_lab.evaluation import attention_protocol, mixtures, shared_budget
from kvsketch_lab.evaluation.attention_protocol import PREFIX, Captured
from kvsketch_lab.evaluation.mixtures import parse_contender
from kvsketch_lab.evaluation.shared_budget import Asked
from tests.helpers import zoo
from tests.helpers.experiments import run_experiment
from tests.helpers.tiny import save_tiny_model

CONTEXT, QUERIES, SEED = 448, 32, 5
MIXTURES = (
    "mixture:top=0",
    "mixture:top=0:score=votes:floor=0",
    "mixture:top=1/2",
    "mixture:top=3/4:rest=uniform",
    "mixture:top=1/2:share=layer",
    "mixture:top=1/2:refit=full",
)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return zoo.build("qwen2")


@pytest.fixture(scope="module")
def layers(model: torch.nn.Module) -> list[Captured]:
    return list(attention_protocol.capture(model, zoo.tokens(1, CONTEXT + QUERIES), [0, 1]).values())


@pytest.fixture(scope="module")
def angles(model: torch.nn.Module) -> tuple[float, ...]:
    return rotary.frequencies(model.config)


def total(rate: int) -> int:
    return PREFIX.reads(CONTEXT, rate)


def compressed(
    text: str, rate: int, layers: list[Captured], angles: tuple[float, ...], seed: int = SEED
) -> tuple[Method, list[SlotTable]]:
    """Tables of all layers after a contender has read the context."""
    method = attention_protocol.configured(text, total(rate), CONTEXT, PREFIX, parse_contender)
    tables = [attention_protocol.new_table(layer, seed, angles) for layer in layers]
    for table, layer in zip(tables, layers, strict=True):
        attention_protocol.add(method, table, layer, 0, CONTEXT)
    method.settle(tables)
    return method, tables


def kept(tables: list[SlotTable]) -> list[dict[int, float]]:
    """The weight of each token that is kept, by its place in the text, for each layer and head."""
    result = []
    for table in tables:
        weights = table.log_weights()[1]
        assert weights is not None
        for index, own in zip(table.index_slots()[0], weights[0].exp(), strict=True):
            result.append({int(at): float(weight) for at, weight in zip(index, own, strict=True) if at >= 0})
    return result


def same(one: list[SlotTable], other: list[SlotTable]) -> bool:
    return all(a == pytest.approx(b, rel=1e-6) for a, b in zip(kept(one), kept(other), strict=True))


@pytest.mark.parametrize("text", MIXTURES)
@pytest.mark.parametrize("rate", [4, 16])
def test_slots_sum_to_the_budget(layers: list[Captured], angles: tuple[float, ...], text: str, rate: int) -> None:
    heads = kept(compressed(text, rate, layers, angles)[1])
    assert sum(map(len, heads)) == len(heads) * total(rate)
    assert len({len(head) for head in heads}) > 1, "heads differ, or nothing is shared"
    always = {*range(PREFIX.sinks), *range(CONTEXT - PREFIX.recent, CONTEXT)}
    assert all(always <= head.keys() for head in heads)


@pytest.mark.parametrize("text", [text for text in MIXTURES if "refit" not in text])
def test_weights_sum_to_the_tokens(layers: list[Captured], angles: tuple[float, ...], text: str) -> None:
    heads = kept(compressed(text, 8, layers, angles)[1])
    always = PREFIX.sinks + PREFIX.recent
    for head in heads:
        # Without a floor a head may win nothing, and nothing stands for its tokens.
        assert sum(head.values()) == pytest.approx(CONTEXT if len(head) > always else always, rel=1e-4)
    assert any(len(head) > always for head in heads)


@pytest.mark.parametrize("rate", [3, 4, 8])
@pytest.mark.parametrize("rest", ["balance", "uniform"])
def test_a_sample_in_equal_heads_is_that_of_the_library(
    layers: list[Captured], angles: tuple[float, ...], rest: str, rate: int
) -> None:
    """Same tokens, same weights: what is compared differs by the division and the best tokens alone."""
    ours = compressed(f"mixture:top=0:share=head:rest={rest}", rate, layers, angles)[1]
    theirs = compressed("balancekv" if rest == "balance" else "uniform", rate, layers, angles)[1]
    assert same(ours, theirs)
    assert not same(ours, compressed(f"mixture:top=0:share=head:rest={rest}", rate, layers, angles, SEED + 1)[1])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("mixture:top=100%:floor=0", "rehearse:bits=16:refit=none"),
        ("mixture:top=100%:score=votes", "snapkv:share=model"),
        ("mixture:top=100%:floor=0:share=layer", "rehearse:bits=16:refit=none:share=layer"),
    ],
)
def test_the_best_tokens_alone_are_those_of_the_library(
    layers: list[Captured], angles: tuple[float, ...], ours: str, theirs: str
) -> None:
    assert same(*(compressed(text, 4, layers, angles)[1] for text in (ours, theirs)))


def test_a_refit_of_the_best_tokens_is_rehearse(layers: list[Captured], angles: tuple[float, ...]) -> None:
    asked = [layer.queries[:, :, CONTEXT:] for layer in layers]
    outs = []
    for text in ("mixture:top=100%:floor=0:refit=full", "rehearse:bits=16"):
        method, tables = compressed(text, 8, layers, angles)
        outs.append([attention_protocol.from_slots(method, *each) for each in zip(tables, asked, strict=True)])
    for one, other in zip(*outs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_best_tokens_are_exact_and_the_rest_of_a_head_is_sampled(
    layers: list[Captured], angles: tuple[float, ...]
) -> None:
    tables = [attention_protocol.new_table(layer, SEED, angles) for layer in layers]
    method = attention_protocol.configured("mixture:top=3/4", total(8), CONTEXT, PREFIX, parse_contender)
    for table, layer in zip(tables, layers, strict=True):
        attention_protocol.add(method, table, layer, 0, CONTEXT)
    worth = torch.cat([_score(table)[0] for table in tables])[:, PREFIX.sinks : CONTEXT - PREFIX.recent]
    method.settle(tables)
    for head, own in zip(kept(tables), worth, strict=True):
        room = len(head) - PREFIX.sinks - PREFIX.recent
        best = (own.topk(room * 3 // 4).indices + PREFIX.sinks).tolist()
        assert all(head[at] == 1.0 for at in best)
        others = [weight for at, weight in head.items() if weight > 1.5]
        assert others and len(others) <= room - len(best)


def _score(table: SlotTable) -> Tensor:
    score = table.state_of(Waiting).score
    assert score is not None
    return score.clone()


@pytest.mark.parametrize("draw", [mixtures.balanced, mixtures.uniform])
def test_heads_have_numbers_of_their_own(layers: list[Captured], draw: mixtures.Draw) -> None:
    """Also none, one, and more than there are."""
    layer = layers[0]
    table = attention_protocol.new_table(layer, SEED)
    table.append(layer.keys[:, :, :CONTEXT], layer.values[:, :, :CONTEXT])
    among = torch.ones(table.shape, dtype=torch.bool)
    among[:, 1, 100:] = False
    for counts in ([0, 1], [37, 100], [CONTEXT, 63], [111, 2], [300, 500]):
        weights = draw(table, among, torch.tensor(counts).view(1, 2, 1), 0)
        stays = weights > float("-inf")
        assert not (stays & ~among).any()
        assert stays.sum(-1)[0].tolist() == [min(a, b) for a, b in zip(counts, (CONTEXT, 100), strict=True)]
        for count, own, tokens in zip(counts, weights[0].exp(), (CONTEXT, 100), strict=True):
            assert float(own.sum()) == pytest.approx(tokens if count else 0, rel=1e-4)


def test_a_sample_without_its_weights_is_worse(layers: list[Captured], angles: tuple[float, ...]) -> None:
    """What is measured reads the weights; in the mean over seeds, for one draw may be lucky."""
    asked, before, after = [Asked.of(layer, CONTEXT, angles) for layer in layers], 0.0, 0.0
    for seed in range(4):
        method, tables = compressed("mixture:top=0", 8, layers, angles, seed)
        before += sum(sum(own.errors(method, table)) for own, table in zip(asked, tables, strict=True))
        for table in tables:
            table.bounded.log_den.clamp_(max=0.0)
        after += sum(sum(own.errors(method, table)) for own, table in zip(asked, tables, strict=True))
    assert after > 1.1 * before > 0


def test_everything_kept_is_exact(layers: list[Captured], angles: tuple[float, ...]) -> None:
    for text in ("mixture:top=0", "mixture:top=1/2:score=votes"):
        method, tables = compressed(text, 1, layers, angles)
        for table, layer in zip(tables, layers, strict=True):
            assert max(Asked.of(layer, CONTEXT, angles).errors(method, table)) < 1e-5


def test_replayed_queries_are_not_those_of_a_refit() -> None:
    torch.manual_seed(0)
    queries, (keys, values) = torch.randn(1, 4, 1400, 8), torch.randn(2, 1, 2, 1400, 8)
    layer, angles = Captured(queries, keys, values, 0.3, 0, 1), (1.0, 0.3, 0.1, 0.03)
    table = attention_protocol.new_table(layer, SEED, angles)
    attention_protocol.add(parse_contender("rehearse:bits=16:sinks=16"), table, layer, 0, 1400)
    fitted = table.state_of(Waiting).again
    assert fitted is not None
    asked = shared_budget.replayed(layer, 1400, angles)
    assert asked.shape == (1, 2, shared_budget.ASKED, 8)
    for own, others in zip(asked[0], fitted[0].flatten(1, 2), strict=True):
        apart = torch.cdist(own, others, compute_mode="donot_use_mm_for_euclid_dist")
        assert float(apart.min()) > 1e-4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mixture:top=3", "top=3 is not valid; use a share such as 1/2 or 20%, or 0"),
        ("mixture:rest=best", "rest=best is not valid; use balance or uniform"),
        ("mixture:score=votes:refit=full", "refit=full is not valid; use none, where score is votes"),
        ("mixtur", "did you mean 'mixture'"),
    ],
)
def test_mistakes_name_the_choices(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_contender(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods", "rehearse"], "write rehearse:bits=16"),
        (["--methods", "quest"], "evict or summarise; quest does not"),
        (["--budgets", "512"], "one in so many tokens, such as 1/8"),
        (["--budgets-in", "bytes"], "use --budgets-in tokens"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    with pytest.raises(ValueError, match=said):
        run_experiment(shared_budget.SharedBudget, ["--model", str(model), "--out", str(tmp_path), *options])


def test_a_record_for_each_contender_and_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    methods = "balancekv,mixture:top=0,mixture:top=1/2:rest=uniform,rehearse:bits=16:refit=none"
    line = ["--model", str(model), "--tokens", "256", "--steps", "16", "--texts", "1", "--seeds", "0,1"]
    line += ["--budgets", "1/4", "--methods", methods, "--out", str(tmp_path)]
    assert run_experiment(shared_budget.SharedBudget, line) == 0
    made = [(each["data"], each["seed"]) for each in records.read(tmp_path / "shared_budget.jsonl")]
    assert [seed for _, seed in made] == [0, 1, 0, 1, 0, 1, 0], "a method without draws is measured once"
    for data, _ in made:
        assert data["slots"] == data["budget_tokens"] == PREFIX.reads(256, 4)
        assert 0 < data["later"] < 2 and 0 < data["replay"] < 2 and data["fewest"] <= data["most"]
    first, second = (data["later"] for data, _ in made[2:4])
    assert first != second, "seeds draw other samples"
    assert "slots of a head" in capsys.readouterr().out
