"""How keys and values cluster: radius curves, cluster counts and query norms by definition; pictures; the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch.models import texts
from kvsketch_lab import records
from kvsketch_lab.evaluation import captures, clusterability
from kvsketch_lab.evaluation.attention_protocol import Captured
from tests.helpers import tiny
from tests.helpers.experiments import run_experiment


def vectors(count: int, seed: int = 0) -> torch.Tensor:  # [1, 2, count, 8]
    return torch.randn(1, 2, count, 8, generator=torch.Generator().manual_seed(seed))


def planted(parts: int, members: int) -> torch.Tensor:
    """Two heads of tight clusters, in the order of a stream that visits them in turn."""
    centers = 10 * vectors(parts, 1)
    return centers.repeat(1, 1, members, 1) + 0.01 * vectors(parts * members, 2)


def test_the_radius_is_that_of_the_greedy_choice_and_never_rises() -> None:
    points = vectors(40)
    result = clusterability.radius_curve(points, [1, 2, 4, 8, 16, 32, 64])
    assert list(result) == ["1", "2", "4", "8", "16", "32"], "no more centers than points"
    for head in range(2):
        distance = torch.cdist(points[0, head], points[0, head])
        chosen = [0]
        for k in (1, 2, 4, 8, 16, 32):
            while len(chosen) < k:
                chosen.append(int(distance[chosen].amin(0).argmax()))
            assert result[str(k)][head] == pytest.approx(float(distance[chosen].amin(0).max()), abs=1e-3)
        curve = [radius[head] for radius in result.values()]
        assert curve == sorted(curve, reverse=True)


def test_planted_clusters_are_counted() -> None:
    points = planted(parts=8, members=12)
    assert clusterability.cluster_counts(points, [0.05])["0.05"] == [8, 8]
    radius = clusterability.radius_curve(points, [1, 4, 8])
    assert all(last < 0.2 < middle for last, middle in zip(radius["8"], radius["4"], strict=True))


def test_wider_clusters_are_fewer() -> None:
    points = vectors(64)
    counts = clusterability.cluster_counts(points, [1e-6, 0.5, 1.0, 2.0, 10.0])
    assert counts["1e-06"] == [64, 64] and counts["10"] == [1, 1]
    by_head = list(zip(*counts.values(), strict=True))
    assert all(list(head) == sorted(head, reverse=True) for head in by_head)
    wanted = points[0].double().sub(points[0].double().mean(1, keepdim=True)).square().sum(-1).mean(1).sqrt()
    torch.testing.assert_close(clusterability.spread(points).double(), wanted)


def test_query_norms() -> None:
    queries = vectors(100)
    norms = queries[0].double().norm(dim=-1)
    result = clusterability.query_norms(queries)
    half = 1.96 * float(norms.std()) / 200**0.5
    assert result["mean"] == pytest.approx(float(norms.mean()), abs=1e-4) and result["queries"] == 200
    assert (result["low"], result["high"]) == pytest.approx((result["mean"] - half, result["mean"] + half), abs=1e-4)
    assert result["runs"] == pytest.approx([float(norms[:, :64].mean()), float(norms[:, 64:].mean())], abs=1e-4)
    assert result["by_head"] == pytest.approx(norms.mean(1).tolist(), abs=1e-4)
    layers = [{"sample": "a", "seed": 0, "query_norm": {"runs": runs}} for runs in ([1.0, 2.0], [3.0, 6.0])]
    other = [{"sample": "b", "seed": 0, "query_norm": {"runs": [7.0]}}]
    assert clusterability.run_means(layers + other) == [2.0, 4.0, 7.0], "layers of a text are one sample"


def test_a_picture_marks_the_greedy_centers() -> None:
    pytest.importorskip("sklearn")
    points = planted(parts=16, members=4)
    layer = Captured(points, points, vectors(64), 1.0, 3, 4)
    result = clusterability.picture(layer, 1, 64, 0)
    assert result["head"] == 1 and result["tokens"] == list(range(64))
    assert sorted(center % 16 for center in result["keys"]["centers"]) == list(range(16)), "one in each cluster"
    assert result["keys"]["centers"][0] == 0 and len(result["values"]["centers"]) == 16
    for part in ("keys", "values"):
        assert len(result[part]["points"]) == 64 and all(len(point) == 2 for point in result[part]["points"])
    assert clusterability.picture(layer, 1, 20, 0)["tokens"] == torch.linspace(0, 63, 20).round().int().tolist()
    assert clusterability.picture(layer, 1, 64, 0) == result, "the seed decides"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_layers_by_name(folder: Path) -> None:
    assert captures.layer_numbers("all", str(folder)) == [0, 1]
    assert captures.layer_numbers("1-", str(folder)) == [1]
    assert captures.layer_numbers("1,0-1", str(folder)) == [1, 0]
    with pytest.raises(ValueError, match=r"--layers '5': \[5\] is not among the full-attention layers 0, 1"):
        captures.layer_numbers("5", str(folder))
    with pytest.raises(ValueError, match="--layers 'first' is not a list of layers; use comma-separated numbers"):
        captures.layer_numbers("first", str(folder))


def run(folder: Path, out: Path, *line: str, code: int = 0) -> list[dict[str, Any]]:
    common = ["--model", str(folder), "--device", "cpu", "--out", str(out)]
    assert run_experiment(clusterability.Clusterability, [*common, *line]) == code
    return list(records.read(out / "clusterability.jsonl"))


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"{n} green bottles hang on the wall, and {n * n} more. " for n in range(30))
    monkeypatch.setattr(texts, "speeches", lambda: ("first", "second"))
    monkeypatch.setattr(texts, "document", lambda name: text)
    line = ["--tokens", "100", "--points", "40", "--pictures", "1", "--most-centers", "32"]
    first = run(folder, tmp_path, *line, "--layers", "1")
    result = run(folder, tmp_path, *line)
    assert [record["data"]["layer"] for record in result] == [1, 0], "layer 1 is not measured again"
    assert result[0] == first[0]
    assert [len(record["data"].get("tsne", {}).get("tokens", [])) for record in result] == [40, 0]
    for data in (record["data"] for record in result):
        assert data["query_norm"]["queries"] == 4 * 100
        assert list(data["keys"]["radius"]) == ["1", "2", "4", "8", "16", "32"]
        assert all(len(counts) == 2 for counts in data["values"]["clusters"].values())
        assert len(json.dumps(data)) < 20_000
    more = run(folder, tmp_path, *line, "--texts", "2", "--pictures", "")
    assert len(more) == 5, "layer 0 of the first text has no picture either way"
    with pytest.raises(ValueError, match="--texts 3 is outside 1 to 2"):
        run(folder, tmp_path, "--texts", "3")


def test_a_text_that_is_too_short_is_said_so(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "document", lambda name: "too short")
    with pytest.raises(ValueError, match="mine has 9 tokens, not 100; use fewer tokens or a longer text"):
        run(folder, tmp_path, "--texts", "mine", "--tokens", "100", "--layers", "0")
    assert not list(tmp_path.iterdir()), "nothing is written of what cannot be measured"


@pytest.mark.real_model
def test_a_real_model(tmp_path: Path) -> None:
    line = ["--tokens", "128", "--layers", "15", "--points", "60", "--most-centers", "64"]
    data = run(Path("smollm2-135m"), tmp_path, *line)[0]["data"]
    assert 5.0 < data["query_norm"]["low"] < data["query_norm"]["high"] < 40.0
    for part in ("keys", "values"):
        assert len(data[part]["spread"]) == 3 and min(data[part]["spread"]) > 0
        curves = zip(*data[part]["radius"].values(), strict=True)
        assert all(list(curve) == sorted(curve, reverse=True) for curve in curves)
    assert len(data["tsne"]["keys"]["points"]) == 60
