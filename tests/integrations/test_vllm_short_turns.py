"""What the host does for a later turn of a chat and for a question: how much it launches, by layer and by forward.

A short turn is little work for a GPU, which waits for the host then. Every operation goes to its kernel here, whose
launch is counted, as is what torch is asked for meanwhile. Ceilings are what is reached: whoever launches less lowers
them.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvsketch.integrations.vllm.behind import Prompt
from kvsketch.integrations.vllm.document_index import Stored, Use
from kvsketch.integrations.vllm.settings import servable
from kvsketch.methods import parse_method
from kvsketch.ops.common import dispatch
from tests.integrations import test_vllm_joint_layers as joint_layers
from tests.integrations.test_vllm_joint_layers import GROUP, HEADS, SIZE, Served
from tests.ops.formula import needs_triton

LAYERS = 4
TEXT = "rehearse:budget=40:wait=64:recent=8"
ON_THE_HOST = {"empty", "empty_like", "new_empty", "lift_fresh", "_unsafe_view"}  # they launch nothing, as views


class Count(TorchDispatchMode):
    """Counts what is launched, and what else torch is asked for, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.launched = self.others = 0
        self.pauses = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.pauses:
            launches = not func.is_view and func.overloadpacket.__name__ not in ON_THE_HOST
            self.launched, self.others = self.launched + launches, self.others + (not launches)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _four_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_layers, "LAYERS", LAYERS)


class Counted(NamedTuple):
    """What is launched, and what else torch is asked for."""

    first: tuple[int, int]  # by the first layer, which finds out where all of them read and write
    layer: tuple[int, int]  # by each other one
    end: tuple[int, int]  # behind the last


def counted(served: Served, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> Counted:
    """What the new tokens of a forward take. What layers compute is tested elsewhere: their kernels are not run."""
    from triton.runtime.interpreter import GridExecutor

    count = Count()

    def launched(*_: Any, **__: Any) -> None:
        count.launched += 1

    def kernel_for(operation: str, device: torch.device) -> ModuleType:
        return importlib.import_module(f"kvsketch.ops.{operation}.kernel")

    class InTorch:
        """An operation whose result decides what comes next: its definition, as one launch."""

        def __init__(self, operation: str, device: torch.device) -> None:
            self.definition = dispatch.reference_of(operation)

        def __getattr__(self, name: str) -> Any:
            def run(*args: Any) -> Any:
                launched()
                count.pauses += 1
                result = getattr(self.definition, name)(*args)
                count.pauses -= 1
                return result

            return run if name != "supported" else lambda *_: True

    result = []
    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launched)
        patch.setattr(dispatch, "kernel_for", kernel_for)
        served.joint.begin(served.pool)
        for layer, (q, k, v) in enumerate(served.tokens(prompts[-1].end)):
            with (count := Count()):
                served.joint.read_prompts(layer, prompts, q, k, v, torch.empty_like(q))
            result.append((count.launched, count.others))
        patch.setattr(dispatch, "kernel_for", InTorch)
        with (count := Count()):
            served.joint.finish()
    assert result[1:] == [result[1]] * (LAYERS - 1)
    return Counted(result[0], result[1], (count.launched, count.others))


def turns(bits: int, requests: int, tokens: int) -> tuple[Served, list[Prompt]]:
    """Requests that have read a prompt and answered, and the tokens of their next turn."""
    served = Served(f"{TEXT}:bits={bits}")
    served.joint.most_held = 400
    pages = [*range(1, requests + 1)]
    served.forward([], {page: 80 + 10 * page for page in pages})
    served.forward(pages, {})
    return served, [Prompt(p, (p - 1) * tokens, p * tokens, served.seen[p]) for p in pages]


def questions(bits: int, requests: int, tokens: int) -> tuple[Served, list[Prompt]]:
    """Requests behind one document."""
    served, document = Served(f"{TEXT}:bits={bits}"), 120
    joint, method = served.joint, servable(parse_method(f"rehearse:budget=60:bits={bits}"))
    joint.shares = True
    shape = joint.shape(LAYERS, HEADS, HEADS * GROUP, SIZE, SIZE, torch.float32, longest=400)
    served.pool = torch.full((5, shape.nbytes), 255, dtype=torch.uint8)
    joint.open_documents(method, 2, None)  # type: ignore[arg-type]
    joint.begin_requests(served.pool, {}, {1: Stored(1)})
    joint.begin(served.pool)
    for layer, new in enumerate(served.tokens(document)):
        joint.prefill(layer, 1, 0, *new)
    joint.finish()
    pages = [*range(1, requests + 1)]
    joint.begin_requests(served.pool, dict.fromkeys(pages, Use(1, document, 0)), {})
    return served, [Prompt(page, (page - 1) * tokens, page * tokens, document) for page in pages]


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the pool is on the CPU, where kernels need the interpreter")
@pytest.mark.parametrize(
    ("make", "bits", "requests", "tokens", "most"),
    [
        (turns, 4, 1, 20, Counted((41, 55), (12, 28), (0, 0))),
        (turns, 4, 4, 20, Counted((52, 56), (11, 26), (0, 0))),
        (turns, 4, 1, 64, Counted((27, 53), (8, 29), (458, 254))),
        (turns, 16, 4, 20, Counted((48, 50), (13, 26), (0, 0))),
        # Turns that are decided about after the last layer.
        (turns, 4, 1, 63, Counted((39, 50), (12, 25), (458, 254))),
        (turns, 16, 1, 63, Counted((33, 44), (12, 25), (353, 208))),
        (questions, 4, 1, 20, Counted((76, 137), (22, 55), (0, 0))),
        (questions, 4, 4, 20, Counted((89, 140), (22, 55), (0, 0))),
        (questions, 16, 4, 20, Counted((73, 91), (18, 36), (0, 0))),
    ],
)
def test_a_turn_launches_no_more_than_it_did(
    make: Any, bits: int, requests: int, tokens: int, most: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few operations more than reached are let through: other versions of torch may divide them otherwise."""
    found = counted(*make(bits, requests, tokens), monkeypatch)
    for (launched, others), (most_launched, most_others) in zip(found, most, strict=True):
        assert launched <= most_launched * 1.05 + 1 and others <= most_others * 1.1 + 2, found
