"""ClusterKV on plain keys: what the index holds, what a query reads, how generated tokens join."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvsketch
from kvsketch import CompressedCache, ops
from kvsketch.methods import ClusterKV
from kvsketch.methods.clusterkv import clusters
from kvsketch.slots import LayerContext, SlotTable, rollback
from tests.helpers import zoo
from tests.helpers.common import also, generate, padded, read_pieces

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, GROUP, SIZE = 2, 3, 8
SMALL = {"budget": 24, "sinks": 3, "skip_layers": 0, "recluster": 10, "recluster_into": 2, "tokens_per_cluster": 5}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def tokens_of(clusters: list[list[int]]) -> list[int]:
    return sorted(token for cluster in clusters for token in cluster)


class Run:
    """A table that a method indexes, beside all its keys and values."""

    def __init__(self, method: ClusterKV, tokens: int, batch: int = 1, padding: list[int] | None = None) -> None:
        self.method, self.table = method, SlotTable(LayerContext(0, 1, seed=5))
        self.table.forward.scale = SIZE**-0.5
        self.padding = padding or [0] * batch
        self.keys = self.values = normal(batch, HEADS, 0, SIZE)
        self.grow(tokens)

    def grow(self, tokens: int) -> None:
        seed = self.table.seen
        keys, values = (normal(len(self.padding), HEADS, tokens, SIZE, seed=seed + s) for s in (1, 2))
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.method.prepare(self.table, keys, values)
        self.table.append(keys, values)
        if self.table.padding is None and any(self.padding):
            self.table.padding = torch.tensor(self.padding, device=DEVICE)
        self.method.compress(self.table, normal(len(self.padding), HEADS * GROUP, tokens, SIZE))

    def clusters(self, row: int, head: int) -> list[list[int]]:
        """The tokens of each cluster, from the index."""
        state = self.table.state
        order = state.order[row, head].tolist()
        bounds = zip(state.offsets[row, head].tolist(), state.sizes[row, head].tolist(), strict=True)
        return [order[start : start + size] for start, size in bounds if size]

    def attend(self, query: Tensor) -> Tensor:
        out = self.method.attend(self.table, query)
        assert out is not None
        return out


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `ops.indexed_attention` was asked to read, call by call."""
    calls: list[dict[str, Any]] = []
    attend = ops.indexed_attention

    def recording(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, **options: Any) -> Any:
        calls.append({"rows": rows.clone(), "spans": options["spans"].clone()})
        return attend(q, k, v, rows, scale, **options)

    monkeypatch.setattr(ops, "indexed_attention", recording)
    return calls


def brute_force(run: Run, query: Tensor, completion: bool) -> tuple[Tensor, list[set[int]]]:
    """The definition in float64, one query head of row 0 at a time: output [heads, D] and the clustered tokens read."""
    method, seen = run.method, run.table.seen
    tail = run.table.state.tail
    outputs, chosen = [], []
    for h in range(HEADS * GROUP):
        q, keys, values = query[0, h, 0].double(), run.keys[0, h // GROUP].double(), run.values[0, h // GROUP].double()
        clusters = run.clusters(0, h // GROUP)
        clusters.sort(key=lambda c: -float(q @ keys[c].mean(0)))
        left = method.rows_read(run.table)
        always = [*range(method.sinks), *range(tail, seen)]
        slots = [(keys[i], values[i], 0.0) for i in always]
        read: set[int] = set()
        for cluster in clusters:
            taken, rest = cluster[:left], cluster[left:]
            left -= len(taken)
            read.update(taken)
            slots += [(keys[i], values[i], 0.0) for i in taken]
            if rest and completion:
                weight = float(torch.tensor(float(len(rest))).log())
                slots.append((keys[cluster].mean(0), values[rest].mean(0), weight))
        k, v, w = (torch.stack([torch.as_tensor(s[i], device=DEVICE) for s in slots]).double() for i in range(3))
        outputs.append((run.table.forward.scale * k @ q + w).softmax(0) @ v)
        chosen.append(read)
    return torch.stack(outputs), chosen


@pytest.mark.parametrize("tokens", [25, 63, 200])
def test_index_holds_every_token_but_the_sinks_once(tokens: int) -> None:
    run = Run(ClusterKV(**SMALL), tokens, batch=2, padding=[0, 11])
    for row, padding in enumerate(run.padding):
        real = tokens - padding
        for head in range(HEADS):
            clusters = run.clusters(row, head)
            assert tokens_of(clusters) == list(range(padding + 3, tokens))
            assert all(cluster == sorted(cluster) for cluster in clusters)
            assert len(clusters) <= max(1, round(real / 5))
    centroids, means = run.table.state.centroids, run.table.state.mean_values
    sizes = run.table.state.sizes
    cluster = int(sizes[1, 1].argmax())
    at = int(run.table.state.offsets[1, 1, cluster])
    members = run.table.state.order[1, 1, at : at + int(sizes[1, 1, cluster])].long()
    torch.testing.assert_close(centroids[1, 1, cluster], run.keys[1, 1, members].mean(0))
    torch.testing.assert_close(means[1, 1, cluster], run.values[1, 1, members].mean(0))


@pytest.mark.parametrize("completion", [False, True])
@pytest.mark.parametrize("generated", [0, 4, 23])
def test_attention_equals_brute_force(completion: bool, generated: int) -> None:
    run = Run(ClusterKV(**SMALL, completion=completion), 120)
    for _ in range(generated):
        run.grow(1)
    query = normal(1, HEADS * GROUP, 1, SIZE, seed=9)
    expected, _ = brute_force(run, query, completion)
    torch.testing.assert_close(run.attend(query)[0, :, 0].double(), expected, atol=1e-5, rtol=1e-4)
    other, _ = brute_force(run, query, not completion)
    assert not torch.allclose(run.attend(query)[0, :, 0].double(), other, atol=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("budget", [4, 24, 38, 120])
@pytest.mark.parametrize("share_in_group", [False, True])
def test_completion_is_exact_where_the_keys_of_a_cluster_are_equal(
    dtype: torch.dtype, tolerance: float, budget: int, share_in_group: bool
) -> None:
    """Also for the cluster that is read in part, whose values differ."""
    method = ClusterKV(**{**SMALL, "budget": budget, "tokens_per_cluster": 10, "share_in_group": share_in_group})
    points = normal(1, HEADS, 12, SIZE, seed=3).repeat_interleave(10, 2)
    keys = torch.cat([normal(1, HEADS, 3, SIZE, seed=4), points], 2).to(dtype)
    values = normal(1, HEADS, 123, SIZE, seed=5).to(dtype)
    table = SlotTable(LayerContext(0, 1))
    table.forward.scale = SIZE**-0.5
    table.append(keys, values)
    method.compress(table, normal(1, HEADS * GROUP, 123, SIZE).to(dtype))
    assert table.state.sizes[:, :, :12].eq(10).all(), "every run of equal keys is a cluster"
    query = normal(1, HEADS * GROUP, 1, SIZE, seed=9).to(dtype)
    expected = ops.weighted_attention(query.float(), keys.float(), values.float(), None, None, table.forward.scale)
    out = method.attend(table, query)
    assert out is not None
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def test_each_head_reads_its_budget_sinks_and_tail(reads: list[dict[str, Any]]) -> None:
    run = Run(ClusterKV(**SMALL), 120)
    for _ in range(7):
        run.grow(1)
    query = normal(1, HEADS * GROUP, 1, SIZE, seed=9)
    run.attend(query)
    _, chosen = brute_force(run, query, True)
    for head, rows in enumerate(reads[0]["rows"][0].tolist()):
        assert len(rows) == len(set(rows)) == 24 - 3, "exactly the budget, no token twice"
        assert set(rows) == chosen[head] and min(rows) >= 3
    assert reads[0]["spans"].tolist() == [[[0, 3], [120, 127]]]
    assert len({tuple(sorted(rows)) for rows in reads[0]["rows"][0, :GROUP].tolist()}) > 1, (
        "heads choose for themselves"
    )


def test_a_group_can_share_its_choice(reads: list[dict[str, Any]]) -> None:
    run = Run(ClusterKV(**SMALL, share_in_group=True), 120)
    run.attend(normal(1, HEADS * GROUP, 1, SIZE, seed=9))
    assert reads[0]["rows"].shape == (1, HEADS, 21)


def test_a_shared_choice_weighs_clusters_as_attention_does(reads: list[dict[str, Any]]) -> None:
    """Heads add up exp(scale <q, centroid>), normalised over the clusters that hold tokens."""
    run = Run(ClusterKV(**SMALL, share_in_group=True), 120)
    run.table.forward.scale = 0.05
    query = normal(1, HEADS * GROUP, 1, SIZE, seed=9) * 20
    run.attend(query)
    for kv in range(HEADS):
        clusters, keys = run.clusters(0, kv), run.keys[0, kv].double()
        centroids = torch.stack([keys[cluster].mean(0) for cluster in clusters])
        mass = (
            (run.table.forward.scale * query[0, kv * GROUP : kv * GROUP + GROUP, 0].double() @ centroids.T)
            .softmax(-1)
            .sum(0)
        )
        best = [token for c in mass.argsort(descending=True).tolist() for token in clusters[c]]
        assert set(reads[0]["rows"][0, kv].tolist()) == set(best[:21])


def test_one_key_per_cluster_finds_the_true_top_tokens(reads: list[dict[str, Any]]) -> None:
    run = Run(ClusterKV(**{**SMALL, "tokens_per_cluster": 1, "rounds": 1}), 90)
    query = normal(1, HEADS * GROUP, 1, SIZE, seed=9)
    run.attend(query)
    for head, rows in enumerate(reads[0]["rows"][0].tolist()):
        scores = run.keys[0, head // GROUP, 3:] @ query[0, head, 0]
        assert set(rows) == {i + 3 for i in scores.topk(21).indices.tolist()}


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_keys_lie_in_the_cluster_that_is_best_by_the_metric(metric: str) -> None:
    """After rounds enough, by the metric that was asked for and by no other."""
    run = Run(ClusterKV(**{**SMALL, "rounds": 60}, metric=metric), 120)
    misplaced = {"cosine": 0, "l2": 0}
    for head in range(HEADS):
        clusters, keys = run.clusters(0, head), run.keys[0, head].double()
        centroids = torch.stack([keys[cluster].mean(0) for cluster in clusters])
        for number, cluster in enumerate(clusters):
            cosines = torch.nn.functional.cosine_similarity(keys[cluster, None], centroids[None], dim=-1)
            misplaced["cosine"] += int((cosines.argmax(-1) != number).sum())
            misplaced["l2"] += int((torch.cdist(keys[cluster], centroids).argmin(-1) != number).sum())
    assert misplaced.pop(metric) == 0 and min(misplaced.values()) > 0


def test_within_the_budget_nothing_is_indexed() -> None:
    run = Run(ClusterKV(**SMALL), 24)
    assert run.method.attend(run.table, normal(1, HEADS * GROUP, 1, SIZE)) is None
    run.grow(1)
    assert run.method.is_indexed(run.table)


def test_generated_tokens_form_clusters_when_there_are_enough() -> None:
    run = Run(ClusterKV(**SMALL), 60)
    used = run.table.state.used
    for step in range(1, 10):
        run.grow(1)
        assert (run.table.state.tail, run.table.state.used) == (60, used)
        assert run.method.maintenance_due(run.table) == (step == 9)
    run.grow(1)
    assert (run.table.state.tail, run.table.state.used) == (70, used + 2)
    assert tokens_of(run.clusters(0, 0)) == list(range(3, 70)), "no token is lost"
    assert tokens_of(run.clusters(0, 0)[-2:]) == list(range(60, 70))


def test_a_second_turn_is_clustered_as_a_prompt_is() -> None:
    run = Run(ClusterKV(**SMALL), 60)
    used = run.table.state.used
    run.grow(4)
    assert run.table.state.tail == 60, "too few for clusters: they are read in full"
    run.grow(36)
    assert run.table.state.used == used + 40 // 5


def test_cropped_tokens_leave_the_index() -> None:
    run = Run(ClusterKV(**SMALL), 60)
    rollback.drop_newest(run.table, 5)
    run.keys, run.values = run.keys[:, :, :55], run.values[:, :, :55]
    run.grow(1)
    assert tokens_of(run.clusters(0, 0)) == list(range(3, 56))


def test_a_row_with_fewer_tokens_than_sinks() -> None:
    """Its first tokens are sinks, its next ones join the sinks that are missing, nothing is read twice."""
    run = Run(ClusterKV(**{**SMALL, "sinks": 9}), 40, batch=2, padding=[0, 35])
    for _ in range(12):
        run.grow(1)
    query = normal(2, HEADS * GROUP, 1, SIZE, seed=9)
    alone = run.keys[1:, :, 35:], run.values[1:, :, 35:]
    expected = ops.weighted_attention(query[1:], *alone, None, None, run.table.forward.scale)
    torch.testing.assert_close(run.attend(query)[1:], expected, atol=1e-5, rtol=1e-4)


def test_shares_give_each_row_its_own_budget(reads: list[dict[str, Any]]) -> None:
    run = Run(ClusterKV(**{**SMALL, "budget": "25%"}), 120, batch=2, padding=[0, 40])
    run.attend(normal(2, HEADS * GROUP, 1, SIZE, seed=9))
    assert [(rows >= 0).sum(-1).unique().tolist() for rows in reads[0]["rows"]] == [[30 - 3], [20 - 3]]


def test_skipped_layers_are_the_full_cache_to_the_bit() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    ours = generate(model, ids, CompressedCache(model, "clusterkv:budget=20:skip_layers=2"))
    theirs = generate(model, ids, DynamicCache(config=model.config))
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))
    selecting = generate(model, ids, CompressedCache(model, "clusterkv:budget=20:skip_layers=1"))
    assert not torch.equal(selecting.logits[-1], theirs.logits[-1])


@pytest.mark.parametrize("offload", ["none", "host"])
@pytest.mark.parametrize("pads", [[0, 10], *also([0, 0])], ids=str)
def test_quantised_slots_lie_cluster_by_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, offload: str, pads: list[int]
) -> None:
    """As with slots in the order of the text, through turns, clusters of new tokens, crop and files."""
    method = f"clusterkv:budget=24:sinks=12:skip_layers=0:recluster=8:recluster_into=2:bits=4:offload={offload}"
    model = zoo.build("llama").to(DEVICE)
    ids, mask = (t.to(DEVICE) for t in padded(zoo.tokens(2, 130), pads))
    steps = [(n, n + 1) for n in range(78, 98)]
    answers = []
    for arranged in (True, False):
        if not arranged:
            monkeypatch.setattr(clusters, "arrange", lambda table: None)
        cache = CompressedCache(model, method, prefill="stream", chunk=70)
        logits = [read_pieces(model, cache, ids, mask, [(0, 78), *steps])]
        table, state = cache.slot_layers[1].table, cache.slot_layers[1].table.state
        assert state.by_place == arranged and state.tail == 94
        if arranged:
            places = state.offsets[:, :, : state.used, None].long() + torch.arange(2, device=DEVICE)
            pairs = state.order.gather(2, places.flatten(2)).view(places.shape)[state.sizes[:, :, : state.used] > 1]
            assert (pairs[:, 0] < pairs[:, 1]).all() and (pairs[:, 1] - pairs[:, 0]).max() > 1
            if offload == "none":
                assert torch.equal(table.index_slots()[0, :, :94], state.order[0, :, :94].long())
        query = normal(2, 4, 1, 8, seed=3)
        logits.append(table.forward.scale * cache.method.rows_chosen(table, query).sort(-1).values)
        cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))
        cache.save(tmp_path / "cache")
        cache = CompressedCache.load(tmp_path / "cache", model)
        cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))
        if offload == "none":
            cache.crop(-3)
            logits.append(read_pieces(model, cache, ids, mask, [(95, 98)]))
        logits.append(read_pieces(model, cache, ids, mask, [(98, 115), *((n, n + 1) for n in range(115, 130))]))
        answers.append(logits)
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "text", ["clusterkv:budget=16", "clusterkv:rounds=0", "clusterkv:recluster=0", "clusterkv:sinks=-1"]
)
def test_bad_values_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=text.split(":")[1]):
        kvsketch.parse_method(text)


def test_more_rounds_of_k_means_make_tighter_clusters() -> None:
    def spread(rounds: int) -> float:
        """The mean cosine of keys to the mean direction of their cluster."""
        run = Run(ClusterKV(**{**SMALL, "tokens_per_cluster": 40, "rounds": rounds}), 800)
        units = torch.nn.functional.normalize(run.keys[0, 0].double(), dim=-1)
        near = [units[tokens] @ torch.nn.functional.normalize(units[tokens].mean(0), dim=0)
                for tokens in run.clusters(0, 0)]  # fmt: skip
        return float(torch.cat(near).mean())

    assert spread(1) + 0.005 < spread(4) and spread(4) < spread(20) + 0.005
