"""Turns that go on where another request ended, inside stock vLLM (its CPU build). `make test-vllm` runs it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvsketch
from tests.integrations.test_vllm import (
    LLM,
    SamplingParams,
    answers,
    engine,
    folder,
    prompts,
    require_same,
)  # skips without vLLM

__all__ = ["folder"]
EXACT = "rehearse:budget=400:wait=64:bits=16"  # drops nothing of texts this long: continued is the same as read again
SMALL = "rehearse:budget=60:wait=64:recent=16"
TIE = 0.002  # in 16 bits: vLLM adds in another order


@pytest.fixture(autouse=True)
def _one_connector() -> Iterator[None]:
    yield
    end_connector()


def end_connector() -> None:
    """A process has one connector, that of its first engine, until it is told that there is none."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    gc.collect()


def told(llm: LLM, texts: list[list[int]], new: int = 20, **given: Any) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, **given)
    result: list[Any] = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    return result


def tokens(result: list[Any]) -> list[list[int]]:
    return [[*each.outputs[0].token_ids] for each in result]


def conversation(
    llm: LLM, first: list[int], turns: list[list[int]], new: int = 20
) -> tuple[list[list[int]], list[int]]:
    """The answers of a chat, and how many tokens of each prompt were there already."""
    text, made, cached = [], [], []
    for turn in [first, *turns]:
        text = text + turn
        (result,) = told(llm, [text], new)
        made.append([*result.outputs[0].token_ids])
        cached.append(result.num_cached_tokens)
        text = text + made[-1]
    return made, cached


def continued(
    folder: Path,
    method: str,
    first: list[int],
    turns: list[list[int]],
    new: int = 20,
    said: list[list[int]] | None = None,
) -> list[tuple[list[int], Any]]:
    """The same chat in one cache on transformers: answers, and the logits behind them.

    `said`: answers of one token, which the chat goes on from instead of its own.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    cache, text, result = kvsketch.CompressedCache(model, method), [], []
    for number, turn in enumerate([first, *turns]):
        text = text + turn
        ids = torch.tensor([text])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        text = out.sequences[0].tolist()
        result.append((text[-new:], torch.cat(out.logits)))
        if said is not None:
            text = text[:-1] + said[number]  # the last token of an answer was not read yet
    return result


def test_a_turn_goes_on_where_the_last_one_ended(folder: Path) -> None:
    first, *turns = prompts(150, 30, 1, 90)
    result, cached = conversation(engine(folder, EXACT), first, turns)
    require_same(result, continued(folder, EXACT, first, turns), tie=TIE)
    # All but the last token of the answer before it, which nobody had read.
    assert cached == [0, 169, 219, 240]


def test_a_compressed_chat_gives_the_answers_of_a_cache_on_transformers(folder: Path) -> None:
    """Turns that wait, one that is rehearsed with what waited, and one of a single token."""
    first, *turns = prompts(150, 10, 30, 1, 30)
    result, cached = conversation(engine(folder, f"{SMALL}:bits=16"), first, turns)
    assert cached == [0, 169, 199, 249, 270]
    require_same(result, continued(folder, f"{SMALL}:bits=16", first, turns), tie=0.01)


@pytest.mark.parametrize(("bits", "tie"), [(4, 0.5), (2, 0.01)])
def test_a_quantised_chat_gives_the_answers_of_a_cache_on_transformers(folder: Path, bits: int, tie: float) -> None:
    """Answers of one token, and both chats go on from vLLM's: a tie makes no other chat.

    Weights that differ by a ten-millionth move a log probability on transformers by up to 0.4 in 4 bits, whose codes
    have many borders, and by less than 0.0001 in 2.
    """
    first, *turns = prompts(150, 10, 30, 20, 5, 12, 40, 64)
    method = f"{SMALL}:bits={bits}"
    result, cached = conversation(engine(folder, method), first, turns, new=1)
    assert cached == [0, 150, 161, 192, 213, 219, 232, 273]
    require_same(result, continued(folder, method, first, turns, new=1, said=result), tie)


def test_answers_asked_for_again_and_edited_turns_go_on_in_copies(folder: Path) -> None:
    first, turn, other, one, two = prompts(150, 10, 12, 9, 8)
    llm = engine(folder, EXACT)
    fresh = {}
    for name, text in {"first": first, "one": first + one, "two": first + two}.items():
        fresh[name] = tokens(told(llm, [text], 20, prompt_logprobs=0))[0]  # vLLM then reads a prompt whole
        require_same([fresh[name]], answers(folder, EXACT, [text], 20), tie=TIE)
    llm.reset_prefix_cache(reset_connector=True)
    (begun,) = told(llm, [first])
    answer = [*begun.outputs[0].token_ids]
    assert answer == fresh["first"] and begun.num_cached_tokens == 0
    # The same prompt again: all but its last token is there, and what the first answer left stays too.
    (again,) = told(llm, [first])
    assert again.num_cached_tokens == 149 and [*again.outputs[0].token_ids] == answer
    (went_on,) = told(llm, [first + answer + turn])
    assert went_on.num_cached_tokens == 169
    (edited,) = told(llm, [first + answer[:12] + other])
    assert edited.num_cached_tokens == 162
    texts = [first + answer + turn, first + answer[:12] + other]
    require_same(tokens([went_on, edited]), answers(folder, EXACT, texts, 20), tie=TIE)
    # Two at once behind one prompt.
    both = told(llm, [first + one, first + two])
    assert [each.num_cached_tokens for each in both] == [150, 150]
    assert tokens(both) == [fresh["one"], fresh["two"]]
    assert told(llm, [first], prompt_logprobs=0)[0].num_cached_tokens == 0


def test_one_prompt_is_read_once_however_many_answers_it_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsketch.integrations.vllm.connector import KVSketchDocuments

    found: list[int] = []
    begin = KVSketchDocuments.update_state_after_alloc

    def noted(self: Any, request: Any, blocks: Any, tokens: int) -> None:
        found.append(tokens)
        begin(self, request, blocks, tokens)

    monkeypatch.setattr(KVSketchDocuments, "update_state_after_alloc", noted)
    llm = engine(folder, EXACT, num_gpu_blocks_override=12)
    text, other, edit = prompts(150, 140, 5)
    # As good as greedy, which vLLM answers once.
    params = SamplingParams(temperature=1e-3, n=3, max_tokens=20, ignore_eos=True, detokenize=False)
    (many,) = llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)
    assert found == [0, 149, 149]
    one, two, three = ([*each.token_ids] for each in many.outputs)
    assert one == two == three == tokens(told(llm, [text]))[0]
    # Requests of others, at once.
    assert [each.num_cached_tokens for each in told(llm, [other, other])] == [0, 139]
    # An answer so long that it was decided about, and then asked for again, or with another question.
    whole = tokens(told(llm, [text], 90, prompt_logprobs=0))[0]
    llm.reset_prefix_cache(reset_connector=True)
    (first,) = told(llm, [text], 90)
    (again,) = told(llm, [text], 90)
    assert [first.num_cached_tokens, again.num_cached_tokens] == [0, 149]
    assert tokens([first, again]) == [whole, whole]
    assert told(llm, [text + whole[:20] + edit])[0].num_cached_tokens == 170


def test_the_next_request_in_a_page_may_be_as_long(folder: Path) -> None:
    """What is known of a page is that of its own request."""
    llm = engine(folder, EXACT, num_gpu_blocks_override=2)
    one, two, turn = prompts(100, 100, 9)
    told(llm, [one])
    (begun,) = told(llm, [two])
    assert told(llm, [[*two, *begun.outputs[0].token_ids, *turn]])[0].num_cached_tokens == 119


def test_pages_that_are_needed_are_forgotten(folder: Path) -> None:
    """A page for each of three requests: the chat that was used longest ago is read again, and nobody waits."""
    llm = engine(folder, EXACT, num_gpu_blocks_override=4)
    chats = prompts(100, 90, 80, 70)
    asked = tokens(told(llm, [chats[0]])) + tokens(told(llm, [chats[1]])) + tokens(told(llm, [chats[2]]))
    texts = [chat + answer + [5, 6] for chat, answer in zip(chats, asked, strict=False)]
    assert told(llm, [texts[0]])[0].num_cached_tokens == 119  # the page itself: the others stay
    assert [each.num_cached_tokens for each in told(llm, texts[1:])] == [109, 99]
    assert told(llm, [chats[3]])[0].num_cached_tokens == 0
    assert told(llm, [texts[2]])[0].num_cached_tokens == len(texts[2]) - 1
    assert told(llm, [texts[0]])[0].num_cached_tokens == 0
    assert len(told(llm, chats * 2)) == 8


def test_pages_that_are_needed_come_back_from_the_host(folder: Path) -> None:
    """Two pages for four chats: each is given away before its chat goes on, compressed, exact, and cut back."""
    method, said = f"{SMALL}:bits=16", prompts(100, 130, 90, 150, 7, 40, 30, 9)
    chats, turns, end = said[:4], said[4:7], said[7]
    on_host = {"additional_config": {"kvsketch": method, "kvsketch_host_gb": 0.01}, "num_gpu_blocks_override": 3}
    results = []
    for options in (on_host, {}):
        llm = engine(folder, method, **options)
        texts, made = [*chats], []
        for turn in ([], *turns):
            for number, text in enumerate(texts):
                (result,) = told(llm, [text + turn])
                made.append((number, result.num_cached_tokens, *result.outputs[0].token_ids))
                texts[number] = text + turn + [*result.outputs[0].token_ids]
        # Many at once, in the pages of each other, each with an edited end.
        again = told(llm, [text[:-5] + end for text in texts])
        assert [each.num_cached_tokens for each in again] == [len(text) - 5 for text in texts]
        results.append((made, tokens(again)))
        end_connector()
    # As many tokens are found as where all pages stay, all but the last one of an answer, and answers are the same.
    assert results[0] == results[1]
    assert [found for number, found, *_ in results[0][0] if number == 0] == [0, 119, 146, 206]


def test_turns_of_two_processes_go_on_in_their_pages_and_on_the_host(folder: Path) -> None:
    """Each holds one of two heads; the connector is named, and all heads of a process share a budget."""
    llm = engine(
        folder, EXACT, tensor_parallel_size=2, num_gpu_blocks_override=3,
        additional_config={"kvsketch": EXACT, "kvsketch_host_gb": 0.01},
        kv_transfer_config={"kv_connector": "KVSketchDocuments", "kv_role": "kv_both"},
    )  # fmt: skip
    *chats, turn = prompts(100, 130, 90, 7)
    begun = tokens([told(llm, [chat])[0] for chat in chats])
    texts = [chat + answer + turn for chat, answer in zip(chats, begun, strict=True)]
    went_on = [told(llm, [text])[0] for text in texts]
    assert [each.num_cached_tokens for each in went_on] == [119, 149, 109]
    require_same(begun + tokens(went_on), answers(folder, EXACT, chats + texts, 20), tie=TIE)


def test_the_caches_are_reset_for_the_host_too(folder: Path) -> None:
    """vLLM hands out a page after it has reset its own caches alone: what lies there is not kept."""
    llm = engine(
        folder, EXACT, num_gpu_blocks_override=3, additional_config={"kvsketch": EXACT, "kvsketch_host_gb": 0.01}
    )
    chats = prompts(100, 110, 120)
    told(llm, chats[:2])
    llm.reset_prefix_cache()
    told(llm, [chats[2], chats[2][:-1]])
    assert [each.num_cached_tokens for each in told(llm, [chats[0] + [5], chats[1] + [5]])] == [0, 0]
    # With the connector's own, nothing is left on the host either.
    assert told(llm, [chats[2] + [5]])[0].num_cached_tokens > 0
    llm.reset_prefix_cache(reset_connector=True)
    assert [each.num_cached_tokens for each in told(llm, [[*chat, 5, 6] for chat in chats])] == [0, 0, 0]


def test_an_aborted_request_leaves_a_page_that_is_right(folder: Path) -> None:
    llm = engine(folder, EXACT)
    (text,) = prompts(120)
    whole = tokens(told(llm, [text], 30))[0]
    require_same([whole], answers(folder, EXACT, [text], 30), tie=TIE)
    llm.reset_prefix_cache(reset_connector=True)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request("left", {"prompt_token_ids": text}, params)
    for _ in range(9):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["left"])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    (again,) = told(llm, [text + whole[:5]], 25)
    assert again.num_cached_tokens in range(120, 125) and [*again.outputs[0].token_ids] == whole[5:]


def test_chunks_of_a_prompt_behind_a_kept_page(folder: Path) -> None:
    first, turn = prompts(100, 150)
    llm = engine(folder, EXACT, max_num_batched_tokens=64, long_prefill_token_threshold=64)
    result, cached = conversation(llm, first, [turn])
    require_same(result, continued(folder, EXACT, first, [turn]), tie=TIE)
    assert cached == [0, 119]


def test_other_methods_keep_no_pages(folder: Path) -> None:
    first, turn = prompts(100, 10)
    _, cached = conversation(engine(folder, "snapkv:budget=60:window=8"), first, [turn])
    assert cached == [0, 0]
