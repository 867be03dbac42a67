"""The experiment on quantisation measures what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvsketch import CompressedCache
from kvsketch_lab import records
from kvsketch_lab.evaluation import bit_stores, bits
from kvsketch_lab.report.bits import tables
from tests.helpers import zoo
from tests.helpers.experiments import run_experiment
from tests.helpers.tiny import save_tiny_model

BIG = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def test_the_codec_with_all_its_parts_is_ours() -> None:
    """What is taken apart is the codec that tables use, and taking a part away changes what comes back."""
    model, ids = zoo.build("llama", **BIG), zoo.tokens(1, 120)
    whole, ours = DynamicCache(config=model.config), CompressedCache(model, "full:bits=4")
    with torch.no_grad():
        for cache in (whole, ours):
            model(ids, past_key_values=cache)
    keys = whole.layers[1].keys
    read = bit_stores.Ours("full:bits=4", model.config).read_back(ours, 1)[0]
    taken = bit_stores.Taken("codec:bits=4", None).coded(keys)
    # Tables code in integers: now and then a number falls on the other side of a level, and its vector moves a little.
    torch.testing.assert_close(taken, read, atol=2e-3, rtol=0)
    assert ((taken - read).abs().amax(-1) > 1e-5).float().mean() < 0.02
    result = [bit_stores.Taken(f"codec:bits=4:{part}=no", None).coded(keys) for part in bit_stores.PARTS]
    assert all(not torch.allclose(each, read, atol=1e-3) for each in result)


def test_fp8_holds_a_byte_for_each_number_and_goes_on() -> None:
    model, ids = zoo.build("llama", **BIG), zoo.tokens(1, 120)
    kind = bit_stores.store("fp8", model.config)
    cache, exact = kind.new(model), DynamicCache(config=model.config)
    with torch.no_grad():
        for each in (cache, exact):
            model(ids[:, :100], past_key_values=each)
        assert kind.bytes(cache) == 2 * 2 * 2 * 100 * 16
        keys = exact.layers[0].keys
        assert torch.equal(kind.read_back(cache, 0)[0], keys.to(torch.float8_e4m3fn).float())
        logits = [model(ids[:, 100:], past_key_values=each).logits[0].float() for each in (exact, cache)]
    assert 0 < bits.divergence(*logits) < 0.1 and cache.get_seq_length() == 120
    wanted = torch.nn.functional.kl_div(
        logits[1].log_softmax(-1), logits[0].log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert bits.divergence(*logits) == pytest.approx(float(wanted), rel=1e-4)


def test_records_say_what_quantisation_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bit_stores, "_installed", lambda module: False)
    model, dropping = save_tiny_model(tmp_path / "tiny"), "rehearse:budget=1/2"
    stores = f"full,full:bits=8,full:bits=auto,full:bits=2,codec:bits=2:center=no,hqq:bits=4,{dropping}"
    options = ["--model", str(model), "--texts", "1", "--tokens", "192", "--steps", "32", "--methods", stores]
    assert run_experiment(bits.Bits, [*options, "--out", str(tmp_path)]) == 0
    assert "skipped: hqq:bits=4, hqq is not installed" in capsys.readouterr().err
    read = records.read_folder(tmp_path)
    result: dict[str, dict[str, Any]] = {record["data"]["method"]: record["data"] for record in read}
    assert result["full"]["error"] == 0 and abs(result["full"]["kl"]) < 1e-6
    assert result["full"]["device_bytes"] == result["full"]["full_bytes"] > result["full:bits=2"]["device_bytes"]
    for name in ("error", "kl", "again_kl"):
        assert 0 < result["full:bits=8"][name] < result["full:bits=2"][name]
    assert "device_bytes" not in result["codec:bits=2:center=no"] and result["full:bits=2"]["step_ms"] > 0
    assert "error" not in result[dropping] and result[dropping]["kl"] > 0
    assert result[dropping]["device_bytes"] < result["full:bits=8"]["device_bytes"]
    assert result["full:bits=2"]["device_bytes"] < result["full:bits=auto"]["device_bytes"]
    page = tables(read)
    assert "### tiny" in page and "| `full:bits=2` |" in page and page.count("| 2 |") == 2


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "snapkv:bits=5",
        "full:bits=5",
        "quanto:bits=3",
        "codec:bits=5",
        "codec:bits=4:hadamard=no",
        "fp8:bits=8",
    ],
)
def test_a_store_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="use "):
        bit_stores.store(text, None)
