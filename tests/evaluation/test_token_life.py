"""Token life: shares against a plain count, what recall methods read, and the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch import CompressedCache, models, parse_method
from kvsketch.models import texts
from kvsketch_lab import records
from kvsketch_lab.evaluation import token_life
from kvsketch_lab.evaluation.token_life import marked, noting_reads, residence, spread, views
from tests.helpers.experiments import run_experiment
from tests.helpers.tiny import save_tiny_model

SENTENCES = ["It is a long time since the Union was formed. "] * 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return models.load(folder, dtype=torch.float32, device="cpu")[0]


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(1, 200, (1, 48), generator=torch.Generator().manual_seed(3))


def life(model: Any, ids: torch.Tensor, method: str, chunk: int = 1) -> torch.Tensor:
    reads: token_life.Reads = {}
    with torch.no_grad():
        cache = CompressedCache(model, noting_reads(parse_method(method), reads))
        return residence(model, cache, ids, chunk, reads)


def test_the_full_cache_keeps_every_token(model: Any, ids: torch.Tensor) -> None:
    assert torch.equal(life(model, ids, "full"), torch.ones(2, 2, 48))


def test_streaming_keeps_sinks_and_a_window(model: Any, ids: torch.Tensor) -> None:
    shares = life(model, ids, "streamingllm:budget=12:sinks=4")
    # A token outside the sinks stays for the 8 steps from its own on, or to the end.
    expected = torch.tensor([1.0 if t < 4 else min(8, 48 - t) / (48 - t) for t in range(48)])
    torch.testing.assert_close(shares, expected.expand(2, 2, 48))


def test_steps_of_several_tokens_count_as_one(model: Any, ids: torch.Tensor) -> None:
    shares = life(model, ids, "streamingllm:budget=12:sinks=4", chunk=16)
    # Three steps; after the first the last 8 of its tokens are left, after the second they are gone.
    expected = torch.zeros(48)
    expected[:4] = 1
    expected[8:16], expected[24:32], expected[40:] = 1 / 3, 1 / 2, 1
    torch.testing.assert_close(shares, expected.expand(2, 2, 48))


@pytest.mark.parametrize("method", ["quest:budget=16:page=4", "infinigen:budget=8", "clusterkv:budget=12:sinks=2"])
def test_recall_methods_count_what_is_read(model: Any, ids: torch.Tensor, method: str) -> None:
    text = f"{method}:skip_layers=1" + (":recluster=4:recluster_into=2" if "clusterkv" in method else "")
    shares = life(model, ids, text)
    assert torch.equal(shares[0], torch.ones(2, 48)), "the first layer reads everything"
    assert shares[1].min() < 0.9 and torch.all(shares[1][:, -1] == 1), "a query always reads its own token"


def test_what_is_noted_changes_no_output(model: Any, ids: torch.Tensor) -> None:
    def logits(method: Any) -> torch.Tensor:
        cache = CompressedCache(model, method)
        with torch.no_grad():
            steps = [model(token, past_key_values=cache).logits for token in ids.split(1, dim=1)]
        return torch.cat(steps, 1)

    method = parse_method("quest:budget=16:page=4:skip_layers=0")
    assert torch.equal(logits(noting_reads(method, {})), logits(method))


def test_views_are_cut_not_rounded() -> None:
    shares = torch.full((9, 4, 3), 0.999)
    shares[:, :, 0] = 1.0
    result = views(shares, list(range(9)))
    assert [(each["layer"], each["head"]) for each in result[:3]] == [(None, None), (0, 0), (0, 3)]
    assert len(result) == 1 + 6 * 2 and result[-1]["layer"] == 8
    assert all(each["shares"] == [1.0, 0.99, 0.99] for each in result)
    assert spread(30, 6) == [0, 6, 12, 17, 23, 29] and spread(3, 6) == [0, 1, 2]


def test_the_passkey_is_found_where_tokens_cut_it() -> None:
    assert marked(["key is 4", "82", "13. It", " 48", "213"], "48213") == [0, 1, 2, 3, 4]
    assert marked(["no key"], "48213") == []


def test_the_experiment_writes_small_records_and_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(texts, "sentences", lambda *_: list(SENTENCES))
    options = ["--model", str(folder), "--methods", "full,snapkv,quest", "--budgets", "1/4", "--tokens", "400"]
    options += ["--chunk", "50", "--out", str(tmp_path), "--dtype", "float32", "--device", "cpu"]
    assert run_experiment(token_life.TokenLife, options) == 0
    assert run_experiment(token_life.TokenLife, options) == 0
    path = tmp_path / "token_life.jsonl"
    rows = path.read_text(encoding="utf-8").splitlines()
    result = {record["data"]["method"]: record["data"] for record in records.read(path)}
    assert len(rows) == 1 + 3 and list(result) == ["full", "snapkv", "quest"]
    assert "failed" not in result["snapkv"], result["snapkv"]
    assert all(len(row) < 300_000 for row in rows)
    words = result["snapkv"]["words"]
    spelt = "".join(words[at] for at in result["snapkv"]["marked"])
    assert spelt == spelt[:5] * 2 and spelt.isdigit()
    assert result["full"]["score"] == 1.0 and result["snapkv"]["mean_share"] < 1
    assert result["snapkv"]["tokens_stored"] <= len(words) // 4
    assert [result[name]["measures"] for name in ("snapkv", "quest")] == ["stored", "read"]
    assert len(result["snapkv"]["views"]) == 1 + 2 * 2


@pytest.mark.parametrize(("option", "value"), [("--tokens", "10"), ("--chunk", "0")])
def test_impossible_options_say_what_to_use(option: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{option} {value}.*use"):
        run_experiment(token_life.TokenLife, [option, value, "--out", str(tmp_path)])
