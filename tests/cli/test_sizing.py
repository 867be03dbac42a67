"""Users that a GPU holds: bytes as a real cache has them, and the arithmetic around."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from kvsketch import CompressedCache, advice, sizing
from kvsketch.cache.memory import sizes_of
from kvsketch.cli import app
from kvsketch.methods import parse_method
from kvsketch.models import CATALOG

METHODS = ["full", "full:bits=4", "rehearse:budget=50%", "snapkv:budget=64"]


EIGHT_BILLION = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, dtype="bfloat16",
)  # fmt: skip


def eight_billion() -> sizing.SizedModel:
    return sizing.SizedModel.of(EIGHT_BILLION)


@pytest.mark.parametrize("method", METHODS)
def test_a_user_takes_what_a_cache_takes(method: str) -> None:
    """A bound, and not a loose one: rows that wait to be rehearsed are counted, so a cache at rest is smaller."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, dtype="float32",
        )
    ).eval()  # fmt: skip
    sized = sizing.SizedModel.of(model.config)
    (plan,) = sizing.plans(sized, [method], sizing.Demand(600, 1), sizing.Gpu(10**9), {})
    cache = CompressedCache(model, method)
    with torch.no_grad():
        model(torch.randint(3, 60, (1, 600)), past_key_values=cache)
    assert cache.device_bytes <= plan.user_bytes <= (8 if "rehearse" in method else 1.25) * cache.device_bytes
    assert plan.weights == sum(p.nbytes for p in model.parameters())


def test_as_many_users_fit_as_memory_has_room_for() -> None:
    gpu = sizing.gpu_of("h200")
    for plan in sizing.plans(eight_billion(), METHODS, sizing.Demand(32768, 4), gpu, advice.speeds()):
        room = gpu.memory * (1 - sizing.RESERVE)
        assert plan.weights + plan.users_that_fit * plan.user_bytes <= room
        assert plan.weights + (plan.users_that_fit + 1) * plan.user_bytes > room
        assert plan.total_bytes == plan.weights + 4 * plan.user_bytes


def test_speed_is_that_of_the_records_on_their_own_gpu() -> None:
    """64 rows of 32k tokens: the benchmark's own cell, but for the room that tokens wait in."""
    (plan,) = sizing.plans(
        eight_billion(), ["rehearse:budget=50%"], sizing.Demand(32768, 64), sizing.GPUS["h200"], {"rehearse": 3.6e12}
    )
    read = plan.weights + 64 * plan.user_bytes
    assert plan.tokens_per_s == pytest.approx(64 * 3.6e12 / read)
    (slower,) = sizing.plans(
        eight_billion(), ["rehearse:budget=50%"], sizing.Demand(32768, 8), sizing.Gpu(80 * 10**9, 2400e9),
        {"rehearse": 3.6e12},
    )  # fmt: skip
    assert slower.tokens_per_s == pytest.approx(8 * 1.8e12 / (plan.weights + 8 * plan.user_bytes))


def test_users_of_one_document_hold_it_once() -> None:
    config, gpu = eight_billion(), sizing.gpu_of("80GB")
    (alone,) = sizing.plans(config, ["full:bits=4"], sizing.Demand(100_000, 50), gpu, {})
    (shared,) = sizing.plans(config, ["full:bits=4"], sizing.Demand(100_000, 50, 98_000), gpu, {})
    assert shared.document_bytes > 40 * shared.user_bytes
    assert shared.total_bytes == shared.weights + shared.document_bytes + 50 * shared.user_bytes
    assert alone.users_that_fit < 50 < shared.users_that_fit


def test_the_command_sizes_a_config_file(tmp_path: Path) -> None:
    EIGHT_BILLION.save_pretrained(tmp_path)
    line = ["recommend", "--model", str(tmp_path / "config.json"), "--context", "100000", "--gpu", "24GB"]
    done = CliRunner().invoke(app, [*line, "--users", "5", "--json"])
    assert done.exit_code == 0, done.output
    plans = {plan["method"]: plan for plan in json.loads(done.stdout)["plans"]}
    assert plans["full"]["users_that_fit"] == 0 and plans["rehearse:budget=20%:replay=exact"]["users_that_fit"] > 5
    said = CliRunner().invoke(app, line).output
    assert "does not fit" in said and "1 user of 100,000 tokens each" in said and "document and 1 user;" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give --memory for the cache of one sequence, or --gpu"),
        (["--gpu", "24GB", "--memory", "2GB"], "give --memory for the cache of one sequence, or --gpu"),
        (["--gpu", "gtx"], "use a size such as 24GB, or t4, l4"),
        (["--gpu", "24GB", "--users", "0"], "--users 0 is not possible"),
        (["--gpu", "24GB", "--document", "100"], "--document 100 is not possible; use 0 to 99 tokens"),
        (
            ["--gpu", "24GB", "--model", str(Path(__file__).parent)],
            "cli has no config.json; name a folder that has one",
        ),
        (
            ["--gpu", "24GB"],
            "--model nothing is no config.json, no folder with one, no hub name and none of smollm2-135m",
        ),
    ],
)
def test_a_mistake_is_one_line(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["recommend", "--model", "nothing", "--context", "100", *options])
    assert done.exit_code == 2 and said in done.output


@pytest.mark.parametrize("name", ["qwen2.5-coder-1.5b", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "gemma3-270m"])
def test_a_built_in_model_is_sized_by_its_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is on this machine, and nothing is fetched."""
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    sized = sizing.model_of(name)
    card = next(each for each in CATALOG.values() if name in (each.name, each.hub_repo))
    short, long = (sizes_of(sized.config(), tokens).full for tokens in (1000, 2000))
    assert (long - short) == 1000 * card.kv_bytes_per_token and sized.weights == 2 * card.parameters


@pytest.mark.parametrize("name", CATALOG)
@pytest.mark.parametrize("method", sizing.ACCOUNTS)
def test_without_torch_the_bytes_are_those_of_the_method(method: str, name: str) -> None:
    sized = sizing.model_of(name)
    assert str(parse_method(method)) == method
    for tokens in (40, 1000, 30_001):
        shape, sizes = replace(sized.shape, context=tokens), sizes_of(sized.config(), tokens)
        assert shape.full == sizes.full
        for more in (None, 0, 10):
            assert sizing.ACCOUNTS[method].bytes(shape, more) == sizes.bytes(parse_method(method), more)


def test_methods_that_are_given_are_sized_beside_each_other() -> None:
    sized, demand, gpu = sizing.model_of("gemma3-270m"), sizing.Demand(30_000, 2, 9000), sizing.gpu_of("24GB")
    quick = sizing.plans(sized, [*sizing.ACCOUNTS], demand, gpu, {})
    *same, own = sizing.plans(sized, [*sizing.ACCOUNTS, "snapkv:budget=64"], demand, gpu, {})
    assert same == quick and own.method == "snapkv:budget=64" and own.user_bytes < same[-1].user_bytes


def test_of_a_hub_name_only_the_config_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def fetched(name: str, file: str) -> str:
        asked.append((name, file))
        if name == "org/nothing":
            raise OSError("no network")
        EIGHT_BILLION.save_pretrained(tmp_path)
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetched)
    sized = sizing.model_of("org/model")
    assert asked == [("org/model", "config.json")] and sized.config().num_hidden_layers == 32
    assert 15e9 < sized.weights < 17e9
    with pytest.raises(ValueError, match=r"config.json of --model org/nothing could not be fetched .*no network"):
        sizing.model_of("org/nothing")
