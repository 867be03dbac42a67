"""What a request may ask for beside an answer, inside stock vLLM (its CPU build). `make test-vllm` runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_vllm import (
    LLM,
    SamplingParams,
    answers,
    engine,
    folder,
    prompts,
    require_same,
)  # skips without vLLM
from tests.integrations.test_vllm_turns import EXACT, _one_connector, tokens, told

__all__ = ["_one_connector", "folder"]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    """The answer to a text of an engine that reads all of it."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    llm = engine(folder, EXACT, enable_prefix_caching=False, enable_chunked_prefill=False)

    def answer(text: list[int], new: int = 20) -> list[int]:
        return tokens(told(llm, [text], new))[0]

    yield answer
    ensure_kv_transfer_shutdown()


@contextmanager
def with_documents(folder: Path, **options: Any) -> Iterator[LLM]:
    extra = {"budget": 400, "count": 2}
    transfer = {"kv_connector": "KVSketchDocuments", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    yield engine(folder, "rehearse:budget=300:wait=64:bits=16", kv_transfer_config=transfer, **options)


def asked(llm: LLM, text: list[int], new: int = 20, logprobs: int | None = None, **given: str) -> Any:
    params = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, prompt_logprobs=logprobs,
        extra_args={"kv_transfer_params": {f"kvsketch_{name}": value for name, value in given.items()}},
    )  # fmt: skip
    return llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)[0]


def test_likelihoods_of_a_prompt_behind_documents_and_kept_pages(folder: Path, whole: Any) -> None:
    """vLLM then reads a prompt whole, and discards what the connector has found."""
    document, question, more = prompts(150, 20, 6)
    text = document + question
    wanted = whole(text)
    with with_documents(folder, max_num_batched_tokens=64, disable_log_stats=False) as llm:
        # Read in three parts, and stored nevertheless.
        stored = asked(llm, document, store="book")
        assert stored.kv_transfer_params == {"kvsketch_document": "book", "kvsketch_tokens": 150}
        first = asked(llm, text)
        assert first.num_cached_tokens == 150 and [*first.outputs[0].token_ids] == wanted
        again = asked(llm, text, logprobs=0)
        assert again.num_cached_tokens == 0 and len(again.prompt_logprobs) == 170
        assert [*again.outputs[0].token_ids] == wanted
        # Its page is that of a request without a document: 64 tokens and more are rehearsed where they lie.
        later = asked(llm, text + wanted + more, 80)
        assert later.num_cached_tokens in (189, 150)
        assert [*later.outputs[0].token_ids] == whole(text + wanted + more, 80)
        counts = metrics()
        assert counts["vllm:kvsketch_tokens_reused_total"] == 150 + later.num_cached_tokens
        assert counts["vllm:kvsketch_tokens_rehearsed_total"] >= 150 + 170
        assert counts["vllm:kvsketch_tokens_kept_total"] > 0
        assert counts["vllm:kvsketch_longest_pause_seconds_sum"] > 0
        # A document that is not there ends the request here too.
        assert asked(llm, text, logprobs=0, document="bok").outputs[0].finish_reason == "error"


def test_input_that_streams_goes_on_in_its_page(folder: Path, whole: Any) -> None:
    llm = engine(folder, EXACT)
    first, more, last = prompts(100, 12, 9)
    core, inputs = llm.llm_engine.engine_core, llm.llm_engine.input_processor
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)

    def send(part: list[int]) -> None:
        request = inputs.process_inputs(
            "stream", {"prompt_token_ids": part}, params, supported_tasks=("generate",), resumable=True
        )
        core.add_request(request)

    made: list[list[int]] = []
    text: list[int] = []
    for part in (first, more, last):
        send(part)
        text += part
        new: list[int] = []
        while len(new) < 6:
            new += [token for output in core.get_output().outputs for token in output.new_token_ids]
        made.append(new)
        assert new == whole(text, 6), f"part {len(made)}"
        text += new[:-1]  # vLLM forgets the last one, which nobody has read
    core.abort_requests(["stream"])
    for _ in range(3):
        core.get_output()
    # Its page was kept: the same text goes on there.
    (again,) = told(llm, [[*text, 5, 6]], 6)
    assert again.num_cached_tokens == len(text) and tokens([again])[0] == whole([*text, 5, 6], 6)


def test_what_sleep_takes_is_forgotten_with_a_word(folder: Path, whole: Any, caplog: Any) -> None:
    """Requests under way are aborted, or begin again; pages that ended ones have left, and documents, are gone."""
    document, question = prompts(150, 20)
    text = document + question
    with with_documents(folder) as llm:
        core = llm.llm_engine.engine_core.engine_core
        asked(llm, document, store="book")
        assert asked(llm, text).num_cached_tokens == 150
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
        llm.llm_engine.add_request("left", {"prompt_token_ids": text}, params)
        for _ in range(4):
            llm.llm_engine.step()
        spoil(llm)
        core.pause_scheduler(mode="abort")  # what sleep begins with; the CPU build has no memory that sleeps
        core.resume_scheduler()
        llm.llm_engine.abort_request(["left"])  # who waits for it learns nothing otherwise
        assert asked(llm, question, document="book").outputs[0].finish_reason == "error"
        after = asked(llm, text)
        assert after.num_cached_tokens == 0 and [*after.outputs[0].token_ids] == whole(text)
        # One that is under way begins again.
        asked(llm, document, store="book")
        llm.llm_engine.add_request("stays", {"prompt_token_ids": text}, params)
        for _ in range(5):
            llm.llm_engine.step()
        core.pause_scheduler(mode="keep")
        core.resume_scheduler()
        made: list[int] = []
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                made = [*output.outputs[0].token_ids]
        assert made == whole(text, 30)


def test_drafts_that_are_rejected_leave_no_trace(folder: Path, whole: Any) -> None:
    """The prompt repeats itself, so that some drafts are right; tokens are rehearsed while others are drafts."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = engine(folder, EXACT, speculative_config=drafts, disable_log_stats=False)
    texts = [part * 3 for part in prompts(30, 41)]
    result = told(llm, texts, 140)
    assert tokens(result) == [whole(text, 140) for text in texts]
    counts = metrics()
    drafted, accepted = (counts[f"vllm:spec_decode_num_{name}_tokens_total"] for name in ("draft", "accepted"))
    assert 0 < accepted < drafted
    (turn,) = told(llm, [texts[0] + tokens(result)[0] + [5, 6, 7]], 30)
    assert turn.num_cached_tokens in (90 + 139, 90 + 140)
    assert tokens([turn])[0] == whole(texts[0] + tokens(result)[0] + [5, 6, 7], 30)


def metrics() -> dict[str, float]:
    from prometheus_client import generate_latest

    lines = [line for line in generate_latest().decode().splitlines() if not line.startswith("#")]
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines}


def spoil(llm: LLM) -> None:
    """What a sleep of level 2 leaves: nothing but weights and buffers of the model, which vLLM brings back."""
    import torch

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    model, kept = runner.model, {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        kept[name] = tensor.data.clone()
    layers = [*llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()]
    joint = layers[0].impl.joint
    for lost in [layer.kv_cache for layer in layers] + [joint.document_pool.pages.planes]:
        parts = lost.values() if isinstance(lost, dict) else lost if isinstance(lost, list) else [lost]
        for part in parts:
            part.view(torch.uint8).fill_(255) if part.is_contiguous() else part.fill_(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.data.copy_(kept[name])


def test_adapters_and_salts_have_pages_of_their_own(folder: Path, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    adapter, merged = adapted(folder, tmp_path)
    llm = engine(folder, EXACT, enable_lora=True, max_lora_rank=8)
    (text,) = prompts(150)
    wanted = answers(merged, "full", [text], 20)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)

    def asked_of(adapter_path: Path | None, **more: str) -> Any:
        lora = None if adapter_path is None else LoRARequest("one", 1, str(adapter_path))
        return llm.generate([{"prompt_token_ids": text, **more}], params, use_tqdm=False, lora_request=lora)[0]

    plain, own, again = asked_of(None), asked_of(adapter), asked_of(adapter)
    assert [each.num_cached_tokens for each in (plain, own, again)] == [0, 0, 149]
    require_same(tokens([own, again]), wanted * 2, tie=0.002)
    assert tokens([plain]) != tokens([own])
    assert [asked_of(None, cache_salt=salt).num_cached_tokens for salt in ("a", "a", "b")] == [0, 149, 0]


def adapted(folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A LoRA adapter of rank 4 for queries and values, and the model with it."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model, parts = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), {}
    for number, layer in enumerate(model.model.layers):
        for name in ("q_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight
            down, up = 0.3 * torch.randn(4, weight.shape[1]), 0.3 * torch.randn(weight.shape[0], 4)
            where = f"base_model.model.model.layers.{number}.self_attn.{name}"
            parts |= {f"{where}.lora_A.weight": down, f"{where}.lora_B.weight": up}
            weight.data += up @ down
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    adapter.mkdir()
    save_file(parts, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    model.save_pretrained(merged)
    return adapter, merged
