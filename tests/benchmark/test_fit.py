"""`kvsketch bench fit`: what a fit of a tiny model takes, and what it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch.models import texts
from kvsketch_lab.benchmark import runner
from kvsketch_lab.benchmark.fit import Fit
from kvsketch_lab.records import read
from tests.helpers.tiny import save_tiny_model

FEW: dict[str, Any] = {"device": "cpu", "dtype": "float32", "length": 256, "texts": 1, "tokens": 160, "steps": 40}
METHOD = "rehearse:budget=1/2:chunk=64:sinks=2:recent=4"


def test_a_fit_is_compared_with_the_virtual_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speech = "".join(f"The harbour of {number} has {number * number} ships. " for number in range(99))
    monkeypatch.setattr(texts, "speeches", lambda: ("1901-Held-1", "1907-Held-1", "1910-Tuned-1"))
    monkeypatch.setattr(texts, "document", lambda name="": speech * (1 + ("1907" in name) + 2 * ("1910" in name)))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    out = tmp_path / "fit.jsonl"
    fit = Fit(model=str(save_tiny_model(tmp_path / "tiny")), methods=METHOD, fit_tokens=(0, 256), out=str(out), **FEW)
    assert runner.run(fit) == 0
    virtual, learned = (record["data"] for record in read(out))
    assert virtual["samples"] == learned["samples"] == ["1907-Held-1"]  # the longest of those that are held out
    assert "fit_s" not in virtual and learned["fit_s"] > 0
    assert virtual["full_again_nll"] == learned["full_again_nll"]
    assert virtual["share"] == pytest.approx(learned["share"], rel=0.05) and learned["share"] < 1
    assert virtual["kl"] != learned["kl"] and min(virtual["kl"], learned["kl"], virtual["again_kl"]) > 0
    with pytest.raises(ValueError, match=r"rehearse:replay=exact is no rehearse without a replay"):
        Fit(methods="rehearse:replay=exact").check_options()
    with pytest.raises(ValueError, match=r"--steps 100 is more than half of --tokens 160"):
        Fit(tokens=160, steps=100).check_options()
