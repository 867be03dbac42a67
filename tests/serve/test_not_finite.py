"""A model that overflows for one request: it ends with an error that names it, and the others notice nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import kvsketch
from kvsketch import CompressedCache
from kvsketch.decode import shared as shared_rows
from kvsketch.decode.sampling import NO_TOKEN, Draw
from kvsketch.methods import Rehearse
from kvsketch.serve.engine import BatchedEngine
from kvsketch.serve.requests import Request
from kvsketch.slots.codes import NotFinite
from tests.helpers import zoo
from tests.helpers.common import also, thinned, with_budget
from tests.helpers.engines import starting

METHODS = [
    *(with_budget(name, 16) for name, method in kvsketch.METHODS.items() if not method.budget_is_mean),
    "full:bits=4",
    "snapkv:budget=16:window=4:bits=4",
    "keyformer:budget=40%:sinks=2:recent=4",
    "subgen:budget=20:sinks=2:recent=4:normalizer=clipped",
    "snapkv:budget=16:window=4:share=model",
    "snapkv:budget=16:window=4:share=layer:bits=4",
    "rehearse:budget=50%:sinks=2:recent=4",
    "rehearse:budget=50%:sinks=2:recent=4:bits=16",
    "kvzip:budget=50%:sinks=2",
    "expected:budget=16:sinks=2:recent=4",
]
OVERFLOWS, TRIGGER = 95, 96  # a token whose keys and values overflow, and one that is answered by it
BY_OVERFLOW, BY_TRIGGER, BY_OTHERS = 0, 1, 2  # channels of the embeddings that only these tokens have
LONGEST, CHUNK = 200, 40


@functools.cache
def model(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    made = zoo.build("llama", num_hidden_layers=2)
    embedding, head = made.model.embed_tokens.weight.data, made.lm_head.weight.data
    own, special = [BY_OVERFLOW, BY_TRIGGER, BY_OTHERS], [OVERFLOWS, TRIGGER]
    embedding[:, own] = torch.tensor([0.0, 0.0, 0.06])
    embedding[special] = 0.0
    embedding[OVERFLOWS, BY_OVERFLOW] = 1.0
    embedding[TRIGGER, BY_TRIGGER] = 100.0
    head[:, own] = 0.0
    head[special] = 0.0
    head[special, BY_OTHERS] = -1000.0  # no other token is answered by them
    head[OVERFLOWS, BY_TRIGGER] = 100.0
    for layer in made.model.layers:
        layer.self_attn.o_proj.weight.data[own] = 0.0
        layer.mlp.down_proj.weight.data[own] = 0.0
    made = made.to(device, dtype)
    attention = made.model.layers[0].self_attn
    for projection in (attention.k_proj, attention.v_proj):
        projection.weight.data[:, BY_OVERFLOW] = torch.finfo(dtype).max / 4  # of a normed vector of 8
    return made


def prompt(number: int, length: int, *last: int) -> tuple[int, ...]:
    """Tokens of no special kind, and others behind them."""
    made = torch.randint(3, OVERFLOWS, (length,), generator=torch.Generator().manual_seed(number))
    return (*made.tolist(), *last)


def poisoned(when: str) -> Request:
    """In the prompt, at its end, or in the answer, where others take the same step."""
    last = {"early": (OVERFLOWS, *prompt(8, 30)), "prompt": (OVERFLOWS,), "answer": (TRIGGER,)}[when]
    return Request(prompt(9, 70, *last), 12)


start = starting(model, rows=3, longest=LONGEST, chunk=CHUNK)


def require_refused(ticket: Any) -> None:
    with pytest.raises(NotFinite, match=f"request {ticket.request.id}.*not finite.*bfloat16"):
        list(ticket)
    assert ticket.finish_reason == "error"


def test_the_model_overflows_for_one_token_alone() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        # One by one: a product of a CPU may spread what is not finite over a batch.
        ids = (prompt(0, 20, TRIGGER), prompt(1, 20, OVERFLOWS), prompt(1, 21))
        logits = torch.cat([model(dtype)(torch.tensor([each])).logits[:, -1] for each in ids])
        assert logits.isfinite().all(-1).tolist() == [True, False, True]
        assert logits[[0, 2]].argmax(-1).eq(OVERFLOWS).tolist() == [True, False]


@pytest.mark.parametrize("method", thinned(METHODS))
def test_a_request_whose_activations_are_not_finite_harms_no_other(method: str, start: Any) -> None:
    """Others are served before, beside and after it, in its row and in those next to it."""
    asked = [Request(prompt(i, n), count) for i, (n, count) in enumerate([(66, 16), (75, 6), (65, 5), (80, 8)])]
    clean = start(method)
    wanted = [list(clean.submit(request)) for request in asked]
    engine = start(method)
    beside = engine.submit(asked[0])
    next(iter(beside))
    for when, request in zip(("early", "prompt", "answer"), asked[1:], strict=True):
        bad = engine.submit(poisoned(when))
        near = engine.submit(request)
        require_refused(bad)
        assert list(near) == wanted[asked.index(request)], when
        assert bad.tokens == ([OVERFLOWS] if when == "answer" else []), when
    assert list(beside) == wanted[0]
    for request, answer in zip(asked, wanted, strict=True):
        assert list(engine.submit(request)) == answer
    assert engine.state().finished == {"error": 3, "length": 8}


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("full", torch.bfloat16),
        ("h2o:budget=16", torch.float16),
        ("kvzip:sinks=2", torch.bfloat16),
        ("rehearse:bits=16", torch.float16),
        ("rehearse", torch.bfloat16),
        *also(
            ("full", torch.float16),
            ("h2o:budget=16", torch.bfloat16),
            ("kvzip:sinks=2", torch.float16),
            ("rehearse:bits=16", torch.bfloat16),
            ("rehearse", torch.float16),
        ),
    ],
)
def test_the_next_request_in_half_precision_too(method: str, dtype: torch.dtype, start: Any) -> None:
    request = Request(prompt(0, 66), 10)
    wanted = list(start(method, model=model(dtype)).submit(request))
    engine = start(method, model=model(dtype))
    for when in ("prompt", "answer"):
        require_refused(engine.submit(poisoned(when)))
        assert list(engine.submit(request)) == wanted
    assert len(set(wanted)) > 1


@pytest.mark.parametrize("method", thinned(METHODS))
def test_what_a_row_leaves_is_not_read(method: str) -> None:
    """Whatever lies in the tables, infinity included, a row that joins finds nothing of it in its slots."""
    if not shared_rows.batched(model(), method):
        pytest.skip("requests share no tables")
    said = []
    for spoilt in (None, float("inf"), float("nan")):
        shared = shared_rows.SharedRows(model(), method, rows=2, longest=LONGEST)
        for tensor in {t.data_ptr(): t for table in shared.tables for t in table.tensors()}.values():
            if spoilt is not None and tensor.is_floating_point():
                tensor.fill_(spoilt)
        cache, draw = CompressedCache(model(), method), Draw(1, shared.device, shared.logits.shape[1])
        logits = kvsketch.prefill(model(), torch.tensor([prompt(3, 70)]), cache)
        assert shared.join(1, cache, draw.choose(logits, Draw.GREEDY), draw) == ""
        said.append([int(shared.step(2, Draw.GREEDY)[1]) for _ in range(8)])
        shared.move(1, 0)
        said[-1] += [int(shared.step(1, Draw.GREEDY)[0]) for _ in range(8)]
    assert said[0] == said[1] == said[2] and NO_TOKEN not in said[0]


def test_a_row_whose_rehearsal_fails_ends_alone(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method = "rehearse:budget=50%:sinks=2:recent=4:chunk=64"
    asked = [Request(prompt(0, 70), 40), Request(prompt(1, 80), 20)]
    quiet = start(method, longest=300)
    wanted = [list(quiet.submit(request)) for request in asked]
    catch_up = Rehearse.catch_up

    def failing(self: Rehearse, tables: Any) -> None:
        if tables[0].prompt_tokens == 90:
            raise NotFinite("the keys of slot 3 are not finite; bfloat16")
        catch_up(self, tables)

    monkeypatch.setattr(Rehearse, "catch_up", failing)
    engine = start(method, longest=300)
    others = [engine.submit(request) for request in asked]
    bad = engine.submit(Request(prompt(2, 90), 90))
    require_refused(bad)
    assert len(bad.tokens) > 50
    assert [list(ticket) for ticket in others] == wanted
    assert [list(engine.submit(request)) for request in asked] == wanted
    assert not engine._shared.store.rows


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["full", "h2o:budget=16", "rehearse"])
def test_an_engine_of_one_row_refuses_it_too(method: str, temperature: float) -> None:
    engine = BatchedEngine(model(), method, rows=1)
    request = Request(prompt(0, 66), 9, temperature=temperature, seed=3)
    wanted = list(engine.submit(request))
    for when in ("early", "prompt", "answer"):
        bad = poisoned(when)
        require_refused(engine.submit(Request(bad.ids, 12, temperature=temperature, top_k=40, seed=1)))
    assert list(engine.submit(request)) == wanted
    engine.close()


def test_rows_without_finite_logits_draw_no_token() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    logits[1, 7], logits[2, 39], logits[3] = float("nan"), float("inf"), float("-inf")
    logits[4, :39] = float("-inf")  # a vocabulary may be masked
    for mode in (Draw.GREEDY, Draw.SAMPLE, Draw.ALL):
        draw = Draw(5, logits.device, 40)
        draw.set(slice(None), 0.7 if mode else 0.0, 0.9, seed=1, penalty=1.3 if mode == Draw.ALL else 1.0)
        tokens = draw.choose(logits, mode).flatten().tolist()
        assert tokens[1:] == [NO_TOKEN] * 3 + [39] and tokens[0] >= 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("method", thinned(METHODS))
def test_recorded_steps_serve_the_others_as_before(method: str, dtype: torch.dtype, start: Any) -> None:
    """On a GPU, from graphs that were recorded before the first request came; rows in half precision one at a time."""
    asked = [Request(prompt(i, n), count) for i, (n, count) in enumerate([(66, 30), (75, 14), (65, 9)])]
    engine = start(method, model=model(dtype, "cuda"))
    wanted = [list(engine.submit(request)) for request in asked]
    for when, request, answer in zip(("early", "prompt", "answer"), asked, wanted, strict=True):
        bad = engine.submit(poisoned(when))
        near = engine.submit(request)
        require_refused(bad)
        assert bad.tokens == ([OVERFLOWS] if when == "answer" else [])
        assert dtype != torch.float32 or list(near) == answer, when
        near.wait()
        assert near.finish_reason == "length" and len(set(near.tokens)) > 1
        assert [list(engine.submit(each)) for each in asked] == wanted
    alone = BatchedEngine(model(dtype, "cuda"), method, rows=1)
    wanted = [list(alone.submit(request)) for request in asked]
    for when in ("early", "prompt", "answer"):
        require_refused(alone.submit(poisoned(when)))
    assert [list(alone.submit(request)) for request in asked] == wanted
    alone.close()
