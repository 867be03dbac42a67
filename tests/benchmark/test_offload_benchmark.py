"""The offload benchmark without its timings: what it compares, and what it reports when tokens differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch import CompressedCache, records
from kvsketch.benchmark import offload
from tests.helpers import zoo
from tests.helpers.common import generate


def test_locality_slows_the_choice_down() -> None:
    """The same queries read fewer new tokens when scores remember the past, and offloading changes no token."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 200)
    rates = []
    for locality in (0.0, 0.9):
        near, far = offload.variants("clusterkv:budget=24:sinks=2:skip_layers=0:tokens_per_cluster=4", locality)
        caches = [CompressedCache(model, method) for method in (near, far)]
        texts = [generate(model, ids, cache, max_new_tokens=20).sequences.tolist() for cache in caches]
        assert texts[0] == texts[1]
        rates.append(caches[1].hit_rate)
    assert rates[0] < rates[1]


def test_locality_is_for_clusterkv() -> None:
    with pytest.raises(ValueError, match="not quest"):
        offload.variants("quest", 0.5)


def test_differing_tokens_are_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(model: Any, methods: Any, batch: int, prompt: Any, steps: int) -> offload.Result:
        return offload.Result(
            str(methods[0]), batch, prompt.shape[1], device_ms=2.0, host_ms=3.0, host_p10_ms=2.9, host_p90_ms=3.1,
            hit_rate=0.5, copied_bytes=1e6,
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(offload, "DEVICE", "cpu")
    monkeypatch.setattr(offload, "build", lambda *_: None)
    monkeypatch.setattr(offload, "measure", measure)
    monkeypatch.setattr(offload, "same_tokens", lambda model, near, *_: near.name == "clusterkv")
    out = tmp_path / "offload.jsonl"
    assert offload.main(["--prompt", "64", "--locality", "0,0.5", "--out", str(out)]) == 1
    data = [record["data"] for record in records.read(out)]
    assert [(d["method"], d["ratio"], d["failed"]) for d in data] == [
        ("clusterkv", 1.5, None),
        ("clusterkv:locality=0.5", 1.5, None),
        ("quest", None, "offloaded tokens differ"),
    ]
