"""The index of methods. Read this first, then the shortest of them, `streamingllm.py`.

| family    | keeps                                                    | verb                         |
|-----------|----------------------------------------------------------|------------------------------|
| full      | everything                                               | none                         |
| evict     | a subset of the tokens, each with weight 1               | compress                     |
| summarise | a weighted set; numerator and denominator may differ     | compress                     |
| recall    | everything; a query reads a part of it                   | compress indexes, attend     |

A method that drops tokens has three parts:

| part   | what it says                      | files                                                                   |
|--------|-----------------------------------|-------------------------------------------------------------------------|
| score  | how much a token is worth         | `received.py` votes and heavy hitters, `replay.py`, `expected.py`       |
| divide | who shares a budget               | `allocation.py`: a head, a layer, the model, a floor                    |
| keep   | what happens to the tokens        | `evict.py`, `waiting.py` keeps them until enough wait, `rehearse`       |

    snapkv, pyramidkv    votes of the last queries + evict       kvzip       replay of the model + keep when enough wait
    h2o, keyformer       heavy hitters + evict                   expected    normal distribution + keep when enough wait
                                                                 rehearse    virtual replay + refit

    streamingllm         no scores: the first and the last         kcenter     far keys
    uniform, balancekv, subgen   samples with weights                full        everything
    quest, clusterkv, infinigen  recall

`base.py` is the contract, `capabilities.py` what a method can do and why not the rest, `parameters.py` fields and their
text form, `text.py` reads it, `budget.py` sizes as tokens or shares, `bits.py` bits that a prompt chooses, `recall.py`
what recall methods share, `replay_map.py` what stands for a repetition. A method that needs several files has a folder;
the method itself is its `__init__.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvsketch.methods.balancekv import BalanceKV
from kvsketch.methods.base import BudgetedMethod, Method
from kvsketch.methods.clusterkv import ClusterKV
from kvsketch.methods.expected import Expected
from kvsketch.methods.full import Full
from kvsketch.methods.h2o import H2O
from kvsketch.methods.infinigen import InfiniGen
from kvsketch.methods.kcenter import KCenter
from kvsketch.methods.keyformer import Keyformer
from kvsketch.methods.kvzip import KVzip
from kvsketch.methods.pyramidkv import PyramidKV
from kvsketch.methods.quest import Quest
from kvsketch.methods.rehearse import Rehearse
from kvsketch.methods.snapkv import SnapKV
from kvsketch.methods.streamingllm import StreamingLLM
from kvsketch.methods.subgen import SubGen
from kvsketch.methods.text import parse
from kvsketch.methods.uniform import Uniform

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Full,
        StreamingLLM,
        Uniform,
        H2O,
        Keyformer,
        SnapKV,
        PyramidKV,
        KCenter,
        SubGen,
        BalanceKV,
        Expected,
        KVzip,
        Rehearse,
        Quest,
        ClusterKV,
        InfiniGen,
    )
}


def parse_method(text: str | Method, importing: bool = True) -> Method:
    """The method of a string such as `streamingllm:budget=1024:sinks=4`; a Method is returned unchanged.

    Methods from outside: `package.module:Class:budget=1024`, or the name of an entry point (`text.py`). Without
    `importing` no module is imported for them.
    """
    return text if isinstance(text, Method) else parse(text, METHODS, importing)


def usual(kind: type[Method]) -> Method:
    """The method at its defaults, with a budget in tokens if it has one."""
    method: Any = kind()
    return replace(method, budget=1024) if isinstance(method, BudgetedMethod) else kind()


def supporting(capability: str) -> list[str]:
    """The methods that have a capability (`Capabilities`) as `usual` makes them."""
    return [name for name, kind in METHODS.items() if usual(kind).capabilities.named()[capability]]


__all__ = [
    "H2O",
    "METHODS",
    "BalanceKV",
    "ClusterKV",
    "Expected",
    "Full",
    "InfiniGen",
    "KCenter",
    "KVzip",
    "Keyformer",
    "Method",
    "PyramidKV",
    "Quest",
    "Rehearse",
    "SnapKV",
    "StreamingLLM",
    "SubGen",
    "Uniform",
    "parse_method",
    "supporting",
    "usual",
]
