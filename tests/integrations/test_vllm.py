"""kvsketch inside stock vLLM (its CPU build) gives the tokens of kvsketch on transformers. `make test-vllm` runs it."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kvsketch

if find_spec("vllm") is None:
    pytest.skip(
        "vLLM is not installed; make test-vllm runs these in an environment of their own", allow_module_level=True
    )
os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

from vllm import LLM, SamplingParams

NEW = 16
METHODS = [
    "streamingllm:budget=24",
    "uniform:budget=24:recent=8",
    "kcenter:budget=24",
    "h2o:budget=24",
    "keyformer:budget=24:horizon=8",
    "snapkv:budget=24:window=8",
    "pyramidkv:budget=24:window=8",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose next tokens are far from ties."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (length,), generator=generator).tolist() for length in lengths]


def alone(folder: Path, method: str, texts: list[list[int]], **options: Any) -> list[list[int]]:
    """What kvsketch on transformers says after each text by itself."""
    return [tokens for tokens, _ in answers(folder, method, texts, NEW, **options)]


def answers(
    folder: Path, method: str, texts: list[list[int]], new: int, **options: Any
) -> list[tuple[list[int], torch.Tensor]]:
    """The same, and the logits [new, vocabulary] behind it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    result = []
    for text in texts:
        ids = torch.tensor([text])
        cache = kvsketch.CompressedCache(model, method, **options)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        result.append((out.sequences[0, len(text) :].tolist(), torch.cat(out.logits)))
    return result


def require_same(result: list[list[int]], wanted: list[tuple[list[int], torch.Tensor]], tie: float) -> None:
    """The tokens are those wanted, up to a tie: vLLM adds in another order, and codes and choices round."""
    compared = 0
    for tokens, (best, logits) in zip(result, wanted, strict=True):
        first = next((i for i, pair in enumerate(zip(tokens, best, strict=True)) if pair[0] != pair[1]), len(best))
        compared += first
        if first < len(best):
            apart = float(logits[first, best[first]] - logits[first, tokens[first]])
            assert apart < tie, f"token {first} is {tokens[first]}, {apart} below {best[first]}"
    assert compared > 0.6 * sum(map(len, result))


def engine(folder: Path, method: str, **options: Any) -> LLM:
    settings = {
        "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 1024, "attention_backend": "CUSTOM",
        "dtype": "float32", "disable_log_stats": True, "additional_config": {"kvsketch": method},
    } | options  # fmt: skip
    # N-gram drafts import numba. vLLM 0.32 on a CPU looks at every module for kernels and stumbles over this one.
    sys.modules.pop("llvmlite.binding.ffi", None)
    return LLM(str(folder), skip_tokenizer_init=True, enforce_eager=True, **settings)


def served(llm: LLM, texts: list[list[int]], new: int = NEW) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": text} for text in texts], greedy, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


@pytest.fixture(autouse=True)
def _free() -> Any:
    yield
    gc.collect()


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_transformers(folder: Path, method: str) -> None:
    # Three blocks are two pages beside vLLM's null block: four rows, two requests at a time, pages change hands.
    llm = engine(folder, method, num_gpu_blocks_override=3)
    # A page of pyramidkv has the shape of a long prompt.
    texts = prompts(70, 41, 90 if method.startswith("pyramidkv") else 1, 100)
    # The first again: prefix caching is on, as it is by default, and must find nothing.
    texts.append(texts[0])
    assert served(llm, texts) == alone(folder, method, texts)


QUANTISED = [f"{method}:bits=4" for method in METHODS] + ["h2o:budget=24:key_bits=8", "snapkv:budget=80:value_bits=4"]


# A code of 4 bits that rounding flips moves a logit of this model by up to 0.3.
@pytest.mark.parametrize("method", QUANTISED)
def test_quantised(folder: Path, method: str) -> None:
    llm = engine(folder, method, num_gpu_blocks_override=3)
    # A cache on transformers codes nothing before it has 64 tokens.
    texts = prompts(70, 64, 90, 100)
    require_same(served(llm, texts), answers(folder, method, texts, NEW), tie=0.5)


@pytest.mark.parametrize("method", ["h2o:budget=24", "snapkv:budget=24:window=8", "pyramidkv:budget=24:window=8"])
def test_chunked_prefill_is_a_streamed_prompt(folder: Path, method: str) -> None:
    llm = engine(folder, method, max_num_batched_tokens=68, long_prefill_token_threshold=16)
    texts = prompts(70, 90, 43, 100, 64)
    assert served(llm, texts) == alone(folder, method, texts, prefill="stream", chunk=16)


# A code of 4 bits that rounding flips moves a logit of this model by up to 0.3.
@pytest.mark.parametrize(("options", "tie"), [("bits=4", 0.5), ("bits=16:share=layer", 0.002)])
def test_layers_that_decide_together(folder: Path, options: str, tie: float) -> None:
    # New tokens are rehearsed when they are 64; the answers are longer than that.
    method, new = f"rehearse:budget=40:wait=64:recent=8:{options}", 70
    llm = engine(folder, method, num_gpu_blocks_override=3)
    # A quantised prompt of one token is stored in other codes than on transformers.
    texts = prompts(70, *((41, 130, 1) if "bits=16" in method else (64, 130, 100)))
    texts.append(texts[0])
    wanted = answers(folder, method, texts, new)
    require_same(served(llm, texts, new), wanted, tie)
    later, _ = answers(folder, method.replace("wait=64", "wait=128"), texts[:1], new)[0]
    assert later[:63] == wanted[0][0][:63] and later != wanted[0][0], "nothing was rehearsed behind the prompt"


def test_a_divided_prompt_is_a_whole_one(folder: Path) -> None:
    """Read 32 tokens at a time, beside others; rehearsed 64 at a time."""
    method = "rehearse:budget=40:wait=64:chunk=64:recent=8:bits=16"
    llm = engine(folder, method, max_num_batched_tokens=132, long_prefill_token_threshold=32)
    texts = prompts(70, 200, 99, 130, 64, 163)
    require_same(served(llm, texts), answers(folder, method, texts, NEW), tie=0.002)


@pytest.mark.parametrize(("options", "tie"), [("bytes=1/4:bits=16", 0.002), ("bytes=1/8", 0.5)])
def test_a_share_is_of_each_prompt(folder: Path, options: str, tie: float) -> None:
    """What a user writes, and no more: prompts are divided, and new tokens are rehearsed behind them."""
    method, new = f"rehearse:{options}:wait=64:recent=8", 70
    llm = engine(folder, method, max_num_batched_tokens=128)
    texts = prompts(400, 150, 300)
    require_same(served(llm, texts, new), answers(folder, method, texts, new), tie)


# Noise and scores by head: a process that took its heads for the first ones would keep other tokens.
@pytest.mark.parametrize("method", ["keyformer:budget=24:horizon=8", "rehearse:budget=40:share=head:bits=16"])
def test_two_processes_share_the_heads(folder: Path, method: str) -> None:
    texts = prompts(70, 41, 100)
    llm = engine(folder, method, tensor_parallel_size=2)
    require_same(served(llm, texts), answers(folder, method, texts, NEW), tie=0.002)


def test_a_wrong_method_ends_the_start(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"h2o cannot be served by vLLM: budget=25% is a share of the prompt.*use a number"
    ):
        engine(folder, "h2o:budget=25%")


def test_the_server_answers(folder: Path) -> None:
    # What `vllm serve` starts; the command itself asks for a package "vllm", and the CPU build has another name.
    method, text = "h2o:budget=24", prompts(70)[0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port),
        "--skip-tokenizer-init",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--attention-backend", "CUSTOM",
        "--additional-config", json.dumps({"kvsketch": method}),
    ]  # fmt: skip
    asked = {
        "model": str(folder), "prompt": text, "max_tokens": NEW, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "detokenize": False,
    }  # fmt: skip
    server = subprocess.Popen(command, env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server)
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            result = json.load(answer)["choices"][0]["token_ids"]
    finally:
        server.terminate()
        server.wait(60)
    assert result == alone(folder, method, [text])[0]


def test_without_custom_vllm_is_as_it_was(folder: Path) -> None:
    texts = prompts(70, 41)
    llm = engine(folder, "h2o:budget=24", attention_backend=None)
    assert served(llm, texts) == alone(folder, "full", texts)


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert server.poll() is None, "vllm serve has ended"
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise TimeoutError(url)
