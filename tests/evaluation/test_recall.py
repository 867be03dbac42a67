"""Recall of the true top tokens and hit rates: by brute force, at the limits, resumable, on a tiny and a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch import ops
from kvsketch.methods import parse_method
from kvsketch.methods.recall import RecallingMethod
from kvsketch.models import texts
from kvsketch.slots import LayerContext, SlotTable
from kvsketch_lab import records
from kvsketch_lab.evaluation import attention_protocol, recall, selections
from kvsketch_lab.evaluation.attention_protocol import Captured
from kvsketch_lab.evaluation.selections import Choice
from tests.helpers import tiny, zoo
from tests.helpers.experiments import run_experiment

CONTEXT, STEPS = 240, 12
SMALL = "clusterkv:tokens_per_cluster=6:sinks=4:completion=false"
METHODS = (SMALL, f"{SMALL}:share_in_group=true", "quest:page=4", "infinigen", "infinigen:alpha=100", "snapkv:window=8")


@pytest.fixture(scope="module")
def layer() -> Captured:
    return attention_protocol.capture(zoo.build("qwen2"), zoo.tokens(1, CONTEXT + STEPS), [1])[1]


def chosen(text: str, layer: Captured) -> tuple[Any, Any, Choice]:
    method = selections.readable(parse_method(text))
    table = selections.table_of(method, layer, CONTEXT)
    return method, table, selections.choose(method, table, layer.queries[:, :, CONTEXT:])


@pytest.mark.parametrize("text", METHODS)
def test_recall_by_brute_force(layer: Captured, text: str) -> None:
    _, _, choice = chosen(f"{text}:budget=48", layer)
    ranks = selections.true_ranks(layer, CONTEXT, 60)
    result = selections.recall(choice.rows, ranks, 48)
    held, most = selections.mass(choice.rows, layer, CONTEXT, 48)
    queries, keys = layer.queries[0, :, CONTEXT:].double(), layer.keys[0, :, :CONTEXT].double()
    for head in range(4):
        for step in range(STEPS):
            scores = keys[head // 2] @ queries[head, step]
            best = set(scores.sort(descending=True).indices[:48].tolist())
            read = [row for row in choice.rows[head, step].tolist() if row >= 0]
            assert len(read) == len(set(read)) <= 48
            assert float(result[head, step]) == pytest.approx(len(best & set(read)) / 48)
            weights = torch.softmax(layer.scale * scores, 0)
            assert float(held[head, step]) == pytest.approx(float(weights[read].sum()), abs=1e-5)
            assert float(most[head, step]) == pytest.approx(float(weights[list(best)].sum()), abs=1e-5)
    assert 0.05 < float(result.mean()) < 0.999


@pytest.mark.parametrize("text", METHODS)
def test_what_is_counted_is_what_is_read(layer: Captured, text: str) -> None:
    method, table, choice = chosen(f"{text}:budget=48", layer)
    queries = layer.queries[:, :, CONTEXT:]
    if isinstance(method, RecallingMethod):
        answers = [method.attend(table, query.contiguous()) for query in queries.split(1, 2)]
        out = torch.cat([answer for answer in answers if answer is not None], 2)
    else:
        keys, values = table.key_slots(), table.value_slots()
        out = ops.weighted_attention(queries, keys, values, table.log_den, table.log_den, table.forward.scale)
    visible = torch.zeros(4, STEPS, CONTEXT + 1, dtype=torch.bool).scatter_(2, choice.rows.long() % (CONTEXT + 1), True)
    keys, values = (t[:, :, :CONTEXT].repeat_interleave(2, 1) for t in (layer.keys, layer.values))
    scores = (queries @ keys.mT * layer.scale).masked_fill(~visible[None, :, :, :CONTEXT], float("-inf"))
    torch.testing.assert_close(out, scores.softmax(-1) @ values, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("text", METHODS)
def test_recall_is_one_when_everything_is_read(layer: Captured, text: str) -> None:
    ranks = selections.true_ranks(layer, CONTEXT, CONTEXT)
    _, _, choice = chosen(f"{text}:budget={CONTEXT}", layer)
    assert selections.recall(choice.rows, ranks, CONTEXT).eq(1).all()
    if text == METHODS[0]:
        _, _, choice = chosen("clusterkv:sinks=0:tokens_per_cluster=1:completion=false:budget=32", layer)
        assert float(selections.recall(choice.rows, ranks, 32).mean()) > 0.999, "a cluster for every key"


def test_methods_that_keep_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="subgen keeps no tokens"):
        selections.readable(parse_method("subgen"))


def sets(taken: torch.Tensor, step: int) -> set[int]:
    return set(taken[step].nonzero().flatten().tolist())


def test_cluster_hits_by_brute_force() -> None:
    taken = torch.randint(0, 3, (2, 20, 9), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    for steps in (1, 2, 3):
        by_clusters, by_tokens = selections.cluster_hits(taken, steps)
        for head in range(2):
            wanted, weighted = [], []
            for now in range(steps, 20):
                before = set().union(*(sets(taken[head], now - back) for back in range(1, steps + 1)))
                again = sets(taken[head], now) & before
                wanted.append(len(again) / len(sets(taken[head], now)))
                weighted.append(float(taken[head, now, list(again)].sum() / taken[head, now].sum()))
            assert float(by_clusters[head]) == pytest.approx(sum(wanted) / len(wanted))
            assert float(by_tokens[head]) == pytest.approx(sum(weighted) / len(weighted))


def test_cluster_hits_at_the_limits() -> None:
    same = torch.tensor([3, 0, 2], dtype=torch.int32).expand(1, 6, 3)
    assert [float(share) for share in selections.cluster_hits(same, 1)] == [1.0, 1.0]
    apart = torch.eye(6, dtype=torch.int32)[None]
    assert [float(share) for share in selections.cluster_hits(apart, 2)] == [0.0, 0.0]
    back_and_forth = torch.eye(2, dtype=torch.int32).repeat(3, 1)[None]
    assert float(selections.cluster_hits(back_and_forth, 1)[0]) == 0.0
    assert float(selections.cluster_hits(back_and_forth, 2)[0]) == 1.0


@pytest.mark.parametrize("text", [SMALL, "quest:page=4", "infinigen"])
def test_the_hot_set_holds_what_the_last_steps_read(layer: Captured, text: str) -> None:
    method, _, choice = chosen(f"{text}:budget=48", layer)
    first = method.sinks
    rows = [[set(choice.rows[h, s].tolist()) - set(range(-1, first)) for s in range(STEPS)] for h in range(4)]
    shares = []
    for keep in (1, 2):
        hits = reads = 0
        for head in range(4):
            group = [rows[head // 2 * 2 + other] for other in (0, 1)]
            for step in range(1, STEPS):
                held = set().union(*(each[back] for each in group for back in range(max(0, step - keep), step)))
                hits += len(rows[head][step] & held)
                reads += len(rows[head][step])
        counted = selections.hot_set_hits(method, layer, CONTEXT, keep)
        assert counted is not None and counted[1] == reads
        assert hits <= counted[0] <= reads, "places that no step needs keep older rows"
        shares.append(counted[0] / reads)
    assert shares[0] <= shares[1]
    again = layer._replace(queries=layer.queries[:, :, CONTEXT : CONTEXT + 1].expand(-1, -1, CONTEXT + STEPS, -1))
    same = selections.hot_set_hits(method, again, CONTEXT, 1)
    assert same is not None and same[0] == same[1] > 0
    roomy = selections.readable(parse_method(f"{text}:budget={CONTEXT + 1}"))
    assert selections.hot_set_hits(roomy, layer, CONTEXT, 1) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tiny_model(tmp_path_factory.mktemp("tiny"))


def run(folder: Path, out: Path, *line: str) -> list[dict[str, Any]]:
    common = ["--model", str(folder), "--device", "cpu", "--out", str(out)]
    assert run_experiment(recall.Recall, [*common, *line]) == 0
    return list(records.read(out / "recall.jsonl"))


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"{n} green bottles hang on the wall, and {n * n} more. " for n in range(30))
    monkeypatch.setattr(texts, "speeches", lambda: ("first",))
    monkeypatch.setattr(texts, "document", lambda name: text)
    line = ["--tokens", "240", "--steps", "8", "--layers", "all", "--hot-budgets", "40", "--budgets", "40,1/2"]
    line += ["--methods", "clusterkv,quest", "--clusters", "24"]
    result = run(folder, tmp_path, *line)
    data = [record["data"] for record in result]
    paper = "clusterkv:tokens_per_cluster=10:recluster_into=4:rounds=20:completion=false"
    assert [(each["method"], each["budget"]) for each in data] == [
        (method, budget) for method in ("clusterkv", "quest", paper) for budget in ("40", "1/2")
    ]
    for each in data:
        assert set(each["recall_by_head"]) == {"0", "1"} and len(each["recall_by_head"]["1"]) == 4
        assert each["budget_tokens"] == (40 if each["budget"] == "40" else 120)
        assert each["tokens_read"] <= each["budget_tokens"] + 8
        assert ("hot_set_hits" in each) == (each["budget"] == "40")
        assert ("cluster_hits" in each) == ("clusters" in each) == each["method"].startswith("clusterkv")
    assert data[-1]["clusters"] <= 24
    (tmp_path / "recall.jsonl").unlink()
    records.append(tmp_path / "recall.jsonl", *result[1:4])
    resumed = run(folder, tmp_path, *line)
    assert sorted(json.dumps(record["data"], sort_keys=True) for record in resumed) == sorted(
        json.dumps(each, sort_keys=True) for each in data
    )
    with pytest.raises(ValueError, match="--clusters 300 is outside 1 to 240"):
        run(folder, tmp_path, *line[:-1], "300")
    with pytest.raises(ValueError, match="use --budgets-in tokens"):
        run(folder, tmp_path, *line, "--budgets-in", "bytes")
    with pytest.raises(ValueError, match=r"--layers '1,7': \[7\] is not among the full-attention layers 0, 1"):
        run(folder, tmp_path, "--layers", "1,7")


@pytest.mark.real_model
def test_a_real_model(tmp_path: Path) -> None:
    line = ["--tokens", "200", "--steps", "4", "--layers", "10", "--budgets", "50", "--hot-budgets", "50"]
    line += ["--methods", "clusterkv,quest,infinigen:alpha=100"]
    result = {record["data"]["method"]: record["data"] for record in run(Path("smollm2-135m"), tmp_path, *line)}
    assert all(50 / 200 < each["recall"] < 1.0 for each in result.values()), "better than reading at random"
    assert all(0.0 < each["hot_set_hits"]["1"] <= each["hot_set_hits"]["2"] <= 1.0 for each in result.values())
    assert 0.0 < result["clusterkv"]["cluster_hits"]["1"] <= 1.0


@pytest.mark.parametrize(
    "text",
    [
        "quest:page=8",
        "infinigen",
        "clusterkv:sinks=4:completion=false",
        "clusterkv:sinks=4:completion=false:share_in_group=true",
    ],
)
def test_rows_chosen_are_what_a_query_reads(text: str) -> None:
    """Attention over the chosen rows alone is the answer of the method, in a row with left padding too."""
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(2, 2, 90, 8, generator=generator) for _ in range(2))
    queries = torch.randn(2, 4, 90, 8, generator=generator)
    method = parse_method(f"{text}:budget=24:skip_layers=0")
    table = SlotTable(LayerContext(0, 1))
    table.forward.scale, table.padding = 0.3, torch.tensor([0, 9])
    for start, end in ((0, 80), (80, 81)):
        table.append(keys[:, :, start:end], values[:, :, start:end])
        if end == 80:
            assert method.rows_chosen(table, queries[:, :, :1]) is None, "without an index everything is read"
            method.compress(table, queries[:, :, start:end])
    rows = method.rows_chosen(table, queries[:, :, 80:81])
    assert rows is not None and 24 <= rows.shape[2] < 81
    read = torch.zeros(2, rows.shape[1], 82, dtype=torch.bool).scatter_(2, rows.long() + 1, True)[:, :, 1:]
    bias = read.repeat_interleave(4 // rows.shape[1], 1).unsqueeze(2)
    expected = ops.weighted_attention(
        queries[:, :, 80:81], keys[:, :, :81], values[:, :, :81], None, None, 0.3, bias=bias
    )
    torch.testing.assert_close(method.attend(table, queries[:, :, 80:81]), expected)
