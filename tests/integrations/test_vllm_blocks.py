"""All tokens quantised, in vLLM's own blocks (its CPU build). `make test-vllm` runs it.

Answers are those of a model of transformers that attends through the same blocks without vLLM, read in the same chunks.
vLLM adds in another order: a code may fall to the other side, and a token that is close to a tie with it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvsketch.integrations.vllm.blocks import ENOUGH
from kvsketch.ops.token_blocks import TOKENS
from tests.helpers.block_model import BlockModel

if find_spec("vllm") is None:
    pytest.skip(
        "vLLM is not installed; make test-vllm runs these in an environment of their own", allow_module_level=True
    )

from tests.integrations.test_vllm import NEW, engine, prompts, require_same, served

# What one code on the other side moves a logit by, which are 0.8 apart on average; and what coding moves it by.
FLIPS, ERRORS = {8: 0.01, 4: 0.1}, {8: 0.05, 4: 0.5}
LONG = ENOUGH + 8  # tokens of a prompt after which the centers stay


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in which small errors stay small."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, initializer_range=0.1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("calm")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _free() -> Iterator[None]:
    yield
    gc.collect()


def started(calm: Path, bits: int, **options: Any) -> Any:
    """An engine with room for 40 blocks of vLLM's, which are two of ours on a CPU."""
    settings = {"max_model_len": 1024, "num_gpu_blocks_override": 40} | options
    return engine(calm, f"full:bits={bits}", **settings)


def blocks_alone(calm: Path, bits: int) -> BlockModel:
    model = AutoModelForCausalLM.from_pretrained(calm, dtype=torch.float32).eval()
    return BlockModel(model, f"full:bits={bits}")


@torch.no_grad()
def require_likely(calm: Path, texts: list[list[int]], result: list[list[int]], error: float) -> None:
    """Each token of an answer is the most likely one to the model with all tokens as they are, up to this error."""
    model = AutoModelForCausalLM.from_pretrained(calm, dtype=torch.float32).eval()
    for text, tokens in zip(texts, result, strict=True):
        logits = model(torch.tensor([text + tokens])).logits[0, len(text) - 1 : -1]
        apart = logits.amax(1) - logits.gather(1, torch.tensor(tokens).unsqueeze(1))[:, 0]
        assert apart.max() < error, f"token {int(apart.argmax())} of {tokens} behind {len(text)}"


@pytest.mark.parametrize("bits", [8, 4])
def test_answers_are_those_of_blocks_without_vllm(calm: Path, bits: int) -> None:
    llm, alone = started(calm, bits), blocks_alone(calm, bits)
    # The first prompt alone says where the centers are; the others come together, and decode while they are read.
    first, *texts = prompts(LONG, 70, 41, 1, 100, 300)
    wanted = [alone.answer(number, tokens, NEW) for number, tokens in enumerate((first, *texts))]
    require_same([*served(llm, [first]), *served(llm, texts)], wanted, FLIPS[bits])
    require_likely(calm, [first, *texts], [tokens for tokens, _ in wanted], ERRORS[bits])


def test_prefix_caching_finds_the_blocks_of_others(calm: Path) -> None:
    llm, alone = started(calm, 4), blocks_alone(calm, 4)
    first, tail = prompts(LONG, 40)
    served(llm, [first])
    alone.read(0, first)
    # A text with the same beginning: what vLLM has of it is whole blocks of its own.
    second = first[:500] + tail
    result = llm.generate([{"prompt_token_ids": second}], _greedy(), use_tqdm=False)[0]
    assert result.num_cached_tokens is not None and result.num_cached_tokens >= 384
    shared = result.num_cached_tokens
    alone.tables[1], alone.seen[1] = alone.tables[0][: shared // TOKENS], shared
    require_same([[*result.outputs[0].token_ids]], [alone.answer(1, second[shared:], NEW)], FLIPS[4])


def test_a_chunk_reads_what_is_before_it_from_blocks(calm: Path) -> None:
    chunk = 96
    llm, alone = started(calm, 4, max_num_seqs=1, max_num_batched_tokens=chunk), blocks_alone(calm, 4)
    texts = prompts(250, 97, 300)
    wanted = []
    for number, text in enumerate(texts):
        last = (len(text) - 1) // chunk * chunk
        for start in range(0, last, chunk):
            alone.read(number, text[start : start + chunk])
        wanted.append(alone.answer(number, text[last:], NEW))
    require_same(served(llm, texts), wanted, FLIPS[4])


def test_a_preempted_request_ends_as_if_it_had_not_been(calm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, preempt = [], Scheduler._preempt_request

    def counted(self: Any, request: Any, *rest: Any, **named: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(self, request, *rest, **named)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    # Four prompts of one block of vLLM's each, whose answers need a second one; six are there, and one is nobody's.
    llm = started(calm, 8, num_gpu_blocks_override=7, max_model_len=512)
    texts, new = prompts(120, 121, 122, 123), 40
    result = served(llm, texts, new)
    assert preempted
    require_likely(calm, texts, result, ERRORS[8])


def test_two_processes_share_the_heads(calm: Path) -> None:
    texts = prompts(70, 41, 100)
    llm = started(calm, 8, tensor_parallel_size=2)
    require_likely(calm, texts, served(llm, texts), ERRORS[8])


def test_a_token_takes_the_bytes_that_were_promised(calm: Path) -> None:
    """Of the same memory, beside vLLM's own cache in float32."""
    tokens = {}
    for bits in (4, 8, 32):
        options: dict[str, Any] = {} if bits < 32 else {"attention_backend": None}
        cache = engine(calm, f"full:bits={bits}", **options).llm_engine.vllm_config.cache_config
        tokens[bits] = cache.num_gpu_blocks * cache.block_size
        gc.collect()
    for bits in (4, 8):
        taken = sum(layer.shape.nbytes / TOKENS for layer in blocks_alone(calm, bits).layers)
        plain = 3 * 2 * 2 * 32 * 4  # layers, heads, a key and a value of 32 numbers
        assert tokens[bits] / tokens[32] == pytest.approx(plain / taken, rel=0.01)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("full", {}, r"full cannot be served by vLLM: keys or values in 16 bits are what vLLM keeps.*use bits=4"),
        ("full:bits=4", {"block_size": 32}, r"--block-size 32; leave it out, or use a multiple of 64"),
        ("full:bits=4", {"kv_cache_dtype": "fp8"}, "leave out --kv-cache-dtype"),
    ],
)
def test_what_cannot_be_served_ends_the_start(calm: Path, method: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine(calm, method, **options)


def _greedy() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
