"""Documents that requests share, inside stock vLLM (its CPU build). `make test-vllm` runs it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_vllm import LLM, SamplingParams, engine, folder, prompts  # skips without vLLM

__all__ = ["folder"]
NEW = 80  # tokens, of which the first 64 are rehearsed


@contextmanager
def sharing(folder: Path, method: str, count: int = 2, files: Path | None = None, processes: int = 1) -> Iterator[LLM]:
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    extra = {"budget": 400, "count": count} | ({"folder": str(files)} if files else {})
    transfer = {"kv_connector": "KVSketchDocuments", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    yield engine(
        folder, method, kv_transfer_config=transfer, enable_chunked_prefill=False, tensor_parallel_size=processes
    )
    # A process has one connector, that of its first engine, until it is told that there is none.
    ensure_kv_transfer_shutdown()
    gc.collect()


def asked(llm: LLM, texts: list[list[int]], **given: str) -> list[Any]:
    extra = {"kv_transfer_params": {f"kvsketch_{name}": value for name, value in given.items()}}
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra)
    result: list[Any] = llm.generate([{"prompt_token_ids": text} for text in texts], params)
    return result


def tokens(result: list[Any]) -> list[list[int]]:
    return [[*each.outputs[0].token_ids] for each in result]


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[list[int]]:
    """Answers behind the document, and behind the document and each question, of requests that share nothing."""
    llm = engine(folder, "rehearse:budget=500:wait=64:bits=16", enable_chunked_prefill=False)
    document, *questions = prompts(200, 7, 90, 1, 20)
    result = tokens(asked(llm, [document, *(document + question for question in questions)]))
    del llm
    gc.collect()
    return result


@pytest.mark.parametrize("processes", [1, 2])
def test_a_document_that_is_kept_whole_gives_the_answers_of_the_whole_prompt(
    folder: Path, whole: list[list[int]], processes: int
) -> None:
    with sharing(folder, "rehearse:budget=300:wait=64:bits=16", processes=processes) as llm:
        document, *questions = prompts(200, 7, 90, 1, 20)
        stored = asked(llm, [document], store="book")
        assert stored[0].kv_transfer_params == {"kvsketch_document": "book", "kvsketch_tokens": 200}
        assert tokens(stored) == whole[:1]
        begun = asked(llm, [document + question for question in questions])
        assert [each.num_cached_tokens for each in begun] == [200] * 4 and tokens(begun) == whole[1:]
        assert tokens(asked(llm, questions, document="book")) == whole[1:]
        # Others beside them, and one that is told what is wrong.
        wrong = asked(llm, questions[:1], document="bok")
        assert wrong[0].outputs[0].finish_reason == "error"
        assert tokens(asked(llm, [document[:150]])) == tokens(asked(llm, [document[:150]]))


def test_a_document_makes_room_for_another(folder: Path) -> None:
    with sharing(folder, "rehearse:budget=100:wait=64", count=1) as llm:
        first, second, question = prompts(200, 180, 30)
        asked(llm, [first], store="first")
        answer = tokens(asked(llm, [question], document="first"))
        asked(llm, [second], store="second")
        assert tokens(asked(llm, [question], document="second")) != answer
        assert asked(llm, [question], document="first")[0].outputs[0].finish_reason == "error"
        asked(llm, [first], store="first")
        assert tokens(asked(llm, [question], document="first")) == answer


def test_documents_are_kept_over_a_restart(folder: Path, tmp_path: Path) -> None:
    method, (document, question) = "rehearse:budget=100:wait=64", prompts(200, 30)
    with sharing(folder, method, files=tmp_path) as llm:
        asked(llm, [document], store="book")
        answer = tokens(asked(llm, [question], document="book"))
    with sharing(folder, method, files=tmp_path) as again:
        assert tokens(asked(again, [question], document="book")) == answer
        begun = asked(again, [document + question])
        assert begun[0].num_cached_tokens == 200
