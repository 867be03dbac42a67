"""Captured decoding gives the tokens of `model.generate`. Without a GPU the recorded step is run instead of
replayed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache.doubt import Doubt
from kvsketch.decode import captured as decoding
from kvsketch.decode.sampling import Sampler, largest
from tests.helpers import zoo
from tests.helpers.common import FED, also, padded, thinned, with_budget
from tests.helpers.waiting import LONGEST_WAIT

METHODS = list(FED)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class RunInsteadOfReplay:
    """Stands in for a CUDA graph on a CPU: same bookkeeping, the step is run at each replay.

    A graph repeats the branches that the host took when it was recorded; a step in which a method would take others
    must not be replayed.
    """

    def __init__(self, step: decoding.Step) -> None:
        self.step = step
        self.branches = self._branches()

    def _branches(self) -> list[object]:
        return [
            (layer.table.exact, [name for state in (layer.table.state, layer.table.hot) for name, _ in state.named()])
            for layer in self.step.layers
        ]

    def replay(self) -> None:
        assert self.branches == self._branches(), "the tables changed, yet the old graph was replayed"
        counters = [(layer.table.seen, layer.table.new_tokens, layer.table.prompt_tokens) for layer in self.step.layers]
        with decoding.side_stream(self.step.layers):
            self.step._forward(bounded=True)
        for layer, values in zip(self.step.layers, counters, strict=True):
            layer.table.seen, layer.table.new_tokens, layer.table.prompt_tokens = values
        assert self.branches == self._branches(), "a replayed step did work that a graph cannot repeat"


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        possible = decoding.impossible

        def impossible(model: Any, cache: CompressedCache, options: dict[str, Any]) -> str | None:
            reason = possible(model, cache, options)
            return None if reason is not None and "only CUDA" in reason else reason

        def record(step: decoding.Step) -> RunInsteadOfReplay:
            step.addresses = step._addresses()
            return RunInsteadOfReplay(step)

        monkeypatch.setattr(decoding, "impossible", impossible)
        monkeypatch.setattr(decoding.Step, "_record", record)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 30, "top_p": 0.9},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "eos_and_min_length": {"do_sample": False, "eos_token_id": [5, 17, 30, 44, 60, 71, 80, 90], "min_new_tokens": 6},
}


# Rows and prompts are the method's business, the choice of a token is not.
CASES = [(name, "greedy", [0, 9], length) for name in METHODS for length in (12, 40)]
CASES += [(name, "greedy", [0, 0], 12) for name in ("full", "h2o", "subgen", "quest")]
CASES += [("h2o", mode, [0, 9], length) for mode, length in (("sampling", 40), ("penalty", 12))]
CASES += [("clusterkv", "eos_and_min_length", [0, 9], 40)]


@pytest.mark.parametrize(("name", "mode", "pads", "length"), CASES)
def test_same_tokens_as_generate(name: str, mode: str, pads: list[int], length: int) -> None:
    model = zoo.build("llama").to(DEVICE)
    ids, mask = (t.to(DEVICE) for t in padded(zoo.tokens(2, length), pads))
    caches = [CompressedCache(model, with_budget(name, 20)) for _ in range(2)]
    torch.manual_seed(1)
    expected = model.generate(ids, attention_mask=mask, past_key_values=caches[0], max_new_tokens=14, **OPTIONS[mode])
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        ours = kvsketch.generate(
            model, {"input_ids": ids, "attention_mask": mask}, caches[1], max_new_tokens=14, **OPTIONS[mode]
        )
    assert ours.tolist() == expected.tolist()
    assert caches[0].tokens_seen == caches[1].tokens_seen
    assert caches[0].tokens_stored == caches[1].tokens_stored


@pytest.mark.parametrize("mode", ["greedy", "sampling", "penalty"])
@pytest.mark.parametrize("captured", [True, False])
def test_doubt_is_the_mean_of_what_other_tokens_had(mode: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not captured:
        monkeypatch.setattr(decoding, "impossible", lambda *_: decoding.NO_GRAPHS)
    model, options = zoo.build("llama").to(DEVICE), {"max_new_tokens": 20, **OPTIONS[mode]}
    ids, mask = (t.to(DEVICE) for t in padded(zoo.tokens(2, 40), [0, 9]))
    inputs, method = {"input_ids": ids, "attention_mask": mask}, with_budget("rehearse", 20)
    if mode == "greedy":
        # One row ends before the other.
        said = model.generate(**inputs, past_key_values=CompressedCache(model, method), **options)[:, 40:].tolist()
        options["eos_token_id"] = next(token for token in said[0][4:] if token not in said[1])
        options["pad_token_id"] = 0
    torch.manual_seed(1)
    plain = model.generate(**inputs, past_key_values=CompressedCache(model, method), return_dict_in_generate=True,
                           output_logits=True, **options)  # fmt: skip
    torch.manual_seed(1)
    cache = CompressedCache(model, method)
    ours = kvsketch.generate(model, inputs, cache, doubt=True, **options)
    assert ours.tolist() == plain.sequences.tolist()
    answers = plain.sequences[:, 40:]
    other = 1 - torch.stack(plain.logits, 1).double().softmax(-1).gather(2, answers.unsqueeze(-1))[..., 0]
    ends = (answers == options.get("eos_token_id", -1)).int().cumsum(1) > 0
    expected = [float(row[~over].mean()) for row, over in zip(other, ends, strict=True)]
    assert bool(ends.any()) == ("eos_token_id" in options)
    assert cache.doubt() == pytest.approx(expected, abs=1e-4)
    assert min(expected) > 0.05 and len(set(expected)) == 2


def test_an_answer_that_nobody_watched_has_no_doubt() -> None:
    model, ids = zoo.build("llama").to(DEVICE), zoo.tokens(1, 12).to(DEVICE)
    cache = CompressedCache(model, with_budget("h2o", 20))
    kvsketch.generate(model, ids, cache, doubt=True, do_sample=False, max_new_tokens=3)
    assert len(cache.doubt()) == 1
    for options in ({"doubt": False}, {"doubt": True, "num_beams": 2}):
        cache = CompressedCache(model, with_budget("h2o", 20))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            kvsketch.generate(model, ids, cache, do_sample=False, max_new_tokens=3, **options)
        with pytest.raises(RuntimeError, match="doubt=True"):
            cache.doubt()


DOCUMENTS = [
    "rehearse:wait=64:chunk=64",
    "rehearse:wait=64:chunk=64:bits=16",
    "expected:wait=64",
    "full",
    "full:bits=4",
]


@pytest.mark.parametrize("method", DOCUMENTS)
@pytest.mark.parametrize("pads", [[0, 4, 7], *also([0])])
def test_same_tokens_beside_a_document(method: str, pads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The document lies where it lay when the step was recorded; the new tokens are rehearsed on the way."""
    model, recorded = zoo.build("llama").to(DEVICE), []
    record = decoding.Step._record
    monkeypatch.setattr(decoding.Step, "_record", lambda self: recorded.append(self) or record(self))
    document = CompressedCache(model, method)
    kvsketch.prefill(model, zoo.tokens(1, 150, seed=1).to(DEVICE), document)
    ids, mask = (t.to(DEVICE) for t in padded(zoo.tokens(len(pads), 9), pads))
    inputs = {"input_ids": ids, "attention_mask": torch.cat([mask.new_ones(len(ids), 150), mask], 1)}
    new = 70 if "wait=64" in method else 20
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    caches = [document.continued() for _ in range(2)]
    expected = model.generate(**inputs, past_key_values=caches[0], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        ours = kvsketch.generate(model, inputs, caches[1], **options)
    assert ours.tolist() == expected.tolist() and recorded
    assert caches[0].tokens_seen == caches[1].tokens_seen == 150 + 9 + new - 1
    assert caches[0].tokens_stored == caches[1].tokens_stored


@pytest.mark.parametrize("name", thinned(METHODS))
def test_a_second_turn_after_captured_decoding(name: str) -> None:
    model = zoo.build("llama").to(DEVICE)
    first, second = zoo.tokens(1, 40).to(DEVICE), zoo.tokens(1, 9, seed=2).to(DEVICE)
    transcripts = []
    for captured in (False, True):
        cache = CompressedCache(model, with_budget(name, 20))
        text = first
        for turn in range(3):
            options: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False}
            if captured and turn != 1:
                text = kvsketch.generate(model, text, cache, **options)
            else:
                text = model.generate(text, past_key_values=cache, **options)
            text = torch.cat([text, second], 1)
        transcripts.append(text.tolist())
    assert transcripts[0] == transcripts[1]


@pytest.mark.parametrize("name", thinned(METHODS))
def test_tokens_hidden_inside_a_row_are_read_eagerly_or_refused(name: str) -> None:
    """A captured step reads no mask."""
    model, ids = zoo.build("llama").to(DEVICE), zoo.tokens(2, 30).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, 25:28] = 0
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    inputs = {"input_ids": ids, "attention_mask": mask}
    ours, theirs = (CompressedCache(model, with_budget(name, 20)) for _ in range(2))
    warned = pytest.warns(RuntimeWarning, match="hides token 25 inside batch row 1 cannot be captured")
    if not kvsketch.METHODS[name].ignores_hidden_tokens:
        with warned, pytest.raises(ValueError, match=f"hides token 25 of batch row 1.*{name} would"):
            kvsketch.generate(model, inputs, ours, **options)
        return
    with warned:
        result = kvsketch.generate(model, inputs, ours, **options)[:, 30:].tolist()
    assert result == model.generate(**inputs, past_key_values=theirs, **options)[:, 30:].tolist()
    theirs.reset()
    inputs["input_ids"] = torch.where(mask == 0, 7, ids)
    assert result == model.generate(**inputs, past_key_values=theirs, **options)[:, 30:].tolist()


def test_a_streamer_hears_every_token() -> None:
    model, ids = zoo.build("llama").to(DEVICE), zoo.tokens(1, 20).to(DEVICE)
    heard: list[int] = []

    class Ear:
        def put(self, value: torch.Tensor) -> None:
            heard.extend(value.flatten().tolist())

        def end(self) -> None:
            heard.append(-1)

    out = kvsketch.generate(
        model, ids, CompressedCache(model, "streamingllm:budget=12"), max_new_tokens=9, do_sample=False, streamer=Ear()
    )
    assert heard == [*out[0].tolist(), -1]


@pytest.mark.parametrize(
    ("family", "options", "word"),
    [
        ("llama", {"num_beams": 2}, "num_beams=2"),
        ("llama", {"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
        ("gemma3", {}, "sliding"),
        ("mpt", {}, "position"),
    ],
)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(family: str, options: dict[str, Any], word: str) -> None:
    model, ids = zoo.build(family).to(DEVICE), zoo.tokens(1, 20).to(DEVICE)
    expected = model.generate(
        ids,
        past_key_values=CompressedCache(model, "streamingllm:budget=12"),
        max_new_tokens=6,
        do_sample=False,
        **options,
    )
    with pytest.warns(RuntimeWarning, match=word):
        ours = kvsketch.generate(
            model, ids, CompressedCache(model, "streamingllm:budget=12"), max_new_tokens=6, do_sample=False, **options
        )
    assert ours.tolist() == expected.tolist()


def test_beams_of_a_generation_config_are_not_overlooked() -> None:
    model, ids = zoo.build("llama").to(DEVICE), zoo.tokens(1, 20).to(DEVICE)
    config = GenerationConfig(num_beams=3, max_new_tokens=6, do_sample=False, pad_token_id=0)
    method = "streamingllm:budget=12"
    expected = model.generate(ids, past_key_values=CompressedCache(model, method), generation_config=config)
    with pytest.warns(RuntimeWarning, match="num_beams=3"):
        ours = kvsketch.generate(model, ids, CompressedCache(model, method), generation_config=config)
    assert ours.tolist() == expected.tolist()


def test_a_foreign_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="CompressedCache"):
        kvsketch.generate(zoo.build("llama"), zoo.tokens(1, 4), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ("a text", "not str; use tokenizer"),
        (zoo.tokens(1, 0), "one token or more"),
        ({"input_ids": [5, 6]}, "got list"),
    ],
)
def test_what_is_no_prompt_is_refused(inputs: Any, said: str) -> None:
    model = zoo.build("llama")
    with pytest.raises(ValueError, match=said):
        kvsketch.generate(model, inputs, CompressedCache(model, "h2o"), max_new_tokens=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", thinned(name for name in METHODS if name != "full"))
def test_the_models_own_modules_captured_give_the_tokens_of_generate_bit_by_bit(name: str) -> None:
    model, ids = zoo.build("llama").to(DEVICE).bfloat16(), zoo.tokens(2, 60).to(DEVICE)
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    method = with_budget(name, 20)
    expected = model.generate(ids, past_key_values=CompressedCache(model, method), **options)
    assert torch.equal(kvsketch.generate(model, ids, CompressedCache(model, method), fused=False, **options), expected)


OFFLOADED = [f"{with_budget(name, 20)}:offload=host" for name in ("quest", "clusterkv", "infinigen")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("method", [*thinned(with_budget(name, 20) for name in METHODS), *OFFLOADED])
def test_a_decode_step_never_waits_for_the_device(method: str) -> None:
    model, ids = zoo.build("llama").to(DEVICE), zoo.tokens(2, 60).to(DEVICE)
    cache = CompressedCache(model, method)
    with torch.no_grad():
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        sampler = Sampler([], ids, 90, None, None, do_sample=False, doubt=Doubt(2, ids.device))
        sampler.before_step()
        step = decoding.Step(model, cache, sampler, sampler.choose(logits), 90)
        for _ in range(3):
            step.run()
        sampler.before_step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step._forward(bounded=True)
            with pytest.raises(RuntimeError, match="synchroniz"):
                step.token.tolist()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("method", DOCUMENTS)
def test_a_step_beside_a_document_never_waits_for_the_device(method: str) -> None:
    model, ids = zoo.build("llama").to(DEVICE), zoo.tokens(2, 9).to(DEVICE)
    document = CompressedCache(model, method)
    kvsketch.prefill(model, zoo.tokens(1, 150, seed=1).to(DEVICE), document)
    cache = document.continued()
    with torch.no_grad():
        logits = kvsketch.prefill(model, ids, cache)
        sampler = Sampler([], ids, 90, None, None, do_sample=False)
        sampler.before_step()
        step = decoding.Step(model, cache, sampler, sampler.choose(logits), 240)
        for _ in range(3):
            step.run()
        sampler.before_step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step._forward(bounded=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tokens", [20, 70])
def test_steps_over_quantised_tables_are_recorded_once(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a text has its codes only when 64 tokens are there."""
    model, ids, recorded = zoo.build("llama").to(DEVICE), zoo.tokens(1, tokens).to(DEVICE), []
    record = decoding.Step._record
    monkeypatch.setattr(decoding.Step, "_record", lambda self: recorded.append(self) or record(self))
    cache = CompressedCache(model, "full:bits=4")
    kvsketch.generate(model, ids, cache, max_new_tokens=220, do_sample=False, eos_token_id=None)
    assert len(recorded) == 1


@pytest.mark.parametrize("method", ["rehearse", "full:bits=4"])
def test_what_is_recorded_has_run_before(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantised text is exact until it has 64 tokens. Steps of an exact table warm up nothing: a program that is
    first loaded in a capture may break it.
    """
    model, ids, said = zoo.build("llama").to(DEVICE), zoo.tokens(1, 60).to(DEVICE), []
    forward = decoding.Step._forward
    monkeypatch.setattr(decoding.Step, "_forward", lambda self, bounded: (said.append(bounded), forward(self, bounded)))
    monkeypatch.setattr(decoding.Step, "_record", lambda self: said.append("record") or RunInsteadOfReplay(self))
    cache = CompressedCache(model, method)
    with torch.no_grad():
        sampler = Sampler([], ids, 100, None, None, do_sample=False)
        first = sampler.choose(model(ids, past_key_values=cache).logits[:, -1])
        step = decoding.Step(model, cache, sampler, first, 100)
        while "record" not in said:
            step.run()
    assert said[: said.index("record")] == [False] * 4 + [True] * decoding.WARM_UP_STEPS


def test_nobody_else_is_at_work_while_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that meets another thread's prompt or step is lost."""
    model, started = zoo.build("llama").to(DEVICE), threading.Barrier(3, timeout=LONGEST_WAIT)
    record, forward = decoding.Step._record, type(model).forward
    recording: list[int] = []
    met: list[set[int]] = []

    def slow_record(step: decoding.Step) -> Any:
        recording.append(threading.get_ident())
        time.sleep(0.05)
        graph = record(step)
        recording.remove(threading.get_ident())
        return graph

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        met.append({*recording} - {threading.get_ident()})
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(decoding.Step, "_record", slow_record)
    monkeypatch.setattr(type(model), "forward", functools.wraps(forward)(watched))
    texts: dict[int, list[list[int]]] = {}

    def work(seed: int) -> None:
        cache = CompressedCache(model, "streamingllm:budget=12")
        started.wait()
        ids = zoo.tokens(1, 30, seed=seed).to(DEVICE)
        texts[seed] = kvsketch.generate(model, ids, cache, max_new_tokens=6, do_sample=False).tolist()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    # On a GPU a thread runs a prompt, two warm-up steps and the one that is recorded.
    assert len(met) >= 3 * 4 and not any(met)
    for seed, text in texts.items():
        cache, ids = CompressedCache(model, "streamingllm:budget=12"), zoo.tokens(1, 30, seed=seed).to(DEVICE)
        assert text == model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("fused", [False, True])
def test_threads_capture_beside_each_other_and_beside_plain_work(fused: bool) -> None:
    """Three threads capture again and again; a fourth allocates, launches and waits for its stream all the time."""
    model = zoo.build("llama").to(DEVICE)
    options: dict[str, Any] = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    methods = ["h2o:budget=16:recent=4", "clusterkv:budget=16:sinks=2:skip_layers=0", "streamingllm:budget=16"]
    prompts = [zoo.tokens(2, 50, seed=seed).to(DEVICE) for seed in range(len(methods))]

    def text(number: int) -> list[list[int]]:
        cache = CompressedCache(model, methods[number])
        return kvsketch.generate(model, prompts[number], cache, fused=fused, **options).tolist()

    alone = [text(number) for number in range(len(methods))]
    plain = model.generate(prompts[0], **options).tolist()
    result: dict[int, list[Any]] = {number: [] for number in range(len(methods))}
    beside: list[Any] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def captures(number: int) -> None:
        try:
            result[number] = [text(number) for _ in range(5)]
        except BaseException as error:
            errors.append(error)

    def works_beside() -> None:
        size = 0
        try:
            while not done.is_set():
                size = size % 64 + 1
                torch.ones(size << 20, device=DEVICE).sum().item()
                beside.append(model.generate(prompts[0], **options).tolist())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=captures, args=(number,)) for number in result]
    other = threading.Thread(target=works_beside)
    [thread.start() for thread in (*threads, other)]
    [thread.join() for thread in threads]
    done.set()
    other.join()
    assert not errors, errors
    assert result == {number: [alone[number]] * 5 for number in result}
    assert beside and all(text == plain for text in beside)


@pytest.mark.parametrize(
    "method",
    ["full:bits=4", "quest:budget=32:page=8:skip_layers=0", "clusterkv:budget=32:skip_layers=0:tokens_per_cluster=8"],
)
def test_all_layers_advance_in_one_launch(method: str) -> None:
    """A launch for each layer costs a tenth of a millisecond in a step of 32 layers."""

    class Additions(TorchDispatchMode):
        result = ends = 0

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.result += "add" in str(operation) and isinstance(args[0], list)
            self.ends += str(operation) == "aten.add.out"  # of the tails of clusters
            return operation(*args, **(kwargs or {}))

    model, ids = zoo.build("llama", num_hidden_layers=3), zoo.tokens(2, 80)
    cache = CompressedCache(model, method)
    with torch.no_grad():
        sampler = Sampler([], ids, 90, None, None, do_sample=False)
        step = decoding.Step(model, cache, sampler, sampler.choose(model(ids, past_key_values=cache).logits[:, -1]), 90)
        with Additions() as additions, decoding.side_stream(step.layers):
            step._forward(bounded=True)
    assert additions.result == 1 and additions.ends == ("clusterkv" in method)
    assert all((layer.table.next_slot == 81).all() for layer in step.layers)


def test_the_largest_score_is_found_in_parts() -> None:
    scores = torch.randn(3, 768)
    scores[0, [700, 300, 301]], scores[1, 5], scores[2] = 9.0, float("nan"), float("-inf")
    assert torch.equal(largest(scores), scores.argmax(-1, keepdim=True))
    assert torch.equal(largest(scores[:, :767]), scores[:, :767].argmax(-1, keepdim=True))


def test_nothing_is_collected_while_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread lets go while it records, such as graphs of an engine that has ended, may spoil the recording."""
    collects: list[bool] = []

    @contextlib.contextmanager
    def graph(*given: Any, **named: Any) -> Iterator[None]:
        collects.append(gc.isenabled())
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(decoding, "capture_stream", lambda device: None)
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            with pytest.raises(KeyError), decoding.recording(torch.device("cuda")):
                raise KeyError
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
    assert collects == [False, False]
