"""Two processes that share a model give the tokens of one, for every method: gloo on a CPU.

The usual run takes one method of each kind, and those that draw or that combine numbers of all heads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvsketch.methods import parse_method
from kvsketch.slots import heads as parallel
from tests.helpers import zoo
from tests.helpers.common import also
from tests.helpers.tensor_parallel_worker import METHODS, PROCESSES, VOCABULARY, converse, load

ROOT = Path(__file__).parents[2]
Results = dict[str, Any]
# Like one of the others where processes share a model: what a head keeps depends on that head alone.
ALIKE = ("streamingllm", "snapkv:budget=24:sinks=2", "pyramidkv", "kcenter", "expected")
ALIKE += (
    "balancekv:budget=40",
    "balancekv:budget=24:sinks=2:recent=4:form",
    "clusterkv",
    "infinigen:budget=24",
    "subgen:budget=40",
)
USUAL = [method for method in METHODS if not method.startswith(ALIKE) or "share=" in method]
CASES = [*USUAL, *also(*(method for method in METHODS if method not in USUAL))]


def save_model(folder: Path, kv_heads: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=512,
        pad_token_id=0,
        # Logits far apart: the processes add up the same numbers in another order.
        initializer_range=0.4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "divisible", kv_heads=2)
    save_model(folder / "single_head", kv_heads=1)
    return folder


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> list[str]:
    """The methods of the tests that run."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    cases = {call.params["method"] for call in calls if call is not None and "method" in call.params}
    return [method for method in METHODS if method in USUAL or method in cases]


@pytest.fixture(scope="module")
def processes(folder: Path, chosen: list[str]) -> list[Results]:
    """What two processes found; one launch for all tests."""
    command = [sys.executable, "-m", "tests.helpers.tensor_parallel_worker", str(folder), *chosen]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": ""}
    ended = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    said = [ended.stderr, *(file.read_text() for file in folder.glob("process_*.txt"))]
    assert ended.returncode == 0, "\n".join(each[-4000:] for each in said)
    return [json.loads((folder / f"process_{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.fixture(scope="module")
def alone(folder: Path, chosen: list[str]) -> Results:
    """What one process finds."""
    model = load(folder / "divisible")
    return {method: converse(model, method) for method in chosen}


@pytest.mark.parametrize("method", CASES)
def test_two_processes_give_the_tokens_of_one(method: str, alone: Results, processes: list[Results]) -> None:
    for process in processes:
        assert process[method]["tokens"] == alone[method]["tokens"]


@pytest.mark.parametrize("method", CASES)
def test_each_process_keeps_what_one_keeps_for_its_heads(method: str, alone: Results, processes: list[Results]) -> None:
    rows, layers = len(alone[method]["tokens"]), len(alone[method]["kept"])
    for number, process in enumerate(processes):
        assert process[method]["heads"] == [[number]] * layers
        for layer, kept in enumerate(alone[method]["kept"]):
            assert process[method]["kept"][layer] == [kept[2 * row + number] for row in range(rows)]


@pytest.mark.parametrize("method", ["uniform", "keyformer", "subgen", "balancekv"])
def test_heads_draw_differently(method: str, alone: Results) -> None:
    """Or the test above would accept processes that count their heads from zero."""
    text = next(text for text in METHODS if text.startswith(method))
    assert parse_method(text).random
    assert all(kept[0] != kept[1] for kept in alone[text]["kept"])


@pytest.mark.parametrize("method", CASES)
def test_processes_share_the_memory(method: str, alone: Results, processes: list[Results]) -> None:
    """Each holds half of the heads, and as many slots of a head as one process would."""
    stored = [process[method]["tokens_stored"] for process in processes]
    assert max(stored) == alone[method]["tokens_stored"]
    for process in processes:
        # What is counted per row, such as padding, is held by both.
        assert process[method]["bytes"] <= 0.5 * alone[method]["bytes"] + 1024


def test_what_cannot_be_shared_is_refused(processes: list[Results]) -> None:
    messages = processes[0]["refusals"]
    assert "1 KV heads" in messages["one KV head"] and "2 processes" in messages["one KV head"]
    assert "CompressedCache(model" in messages["config"]


class Mesh:
    """The sizes of a mesh of processes that does not exist."""

    def __init__(self, **sizes: int) -> None:
        self.mesh_dim_names = tuple(sizes) or None
        self.ndim, self._sizes = len(sizes), list(sizes.values())

    def size(self, dimension: int) -> int:
        return self._sizes[dimension]


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("llama", {"pp": 1, "fsdp": 4, "tp": 1}, None),
        # Every process computes all heads of these and divides the rest of the layer alone.
        ("phi3", {"pp": 1, "fsdp": 1, "tp": 2}, None),
        ("olmo2", {"tp": 2}, None),
        ("llama", {"pp": 2, "fsdp": 1, "tp": 1}, "2 processes .pp_size."),
        ("llama", {"tp": 4}, "2 KV heads of llama cannot be divided among 4 processes; use tp_size=2"),
        ("gpt2", {"tp": 3}, None),
    ],
)
def test_plans_of_families(family: str, sizes: dict[str, int], message: str | None) -> None:
    model = zoo.build(family)
    model._device_mesh = Mesh(**sizes)
    if message is None:
        assert parallel.head_share(model) is None
    else:
        with pytest.raises(ValueError, match=message):
            parallel.head_share(model)


def test_keys_that_all_processes_hold_with_divided_queries_are_refused() -> None:
    """Latent attention: one latent head for all query heads."""
    model = zoo.build("llama")
    model._device_mesh = Mesh(tp=2)
    model.tp_plan = {"model.layers.*.self_attn.q_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise"}
    with pytest.raises(ValueError, match="all KV heads of llama but a part of the query heads"):
        parallel.head_share(model)
