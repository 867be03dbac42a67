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
| divide | who shares a budget               | `divide.py`: a head, a layer, the model, a floor                        |
| keep   | what happens to the tokens        | `keep.py` evicts, `waiting.py` keeps them until enough wait, `rehearse` |

    snapkv, pyramidkv    votes of the last queries + evict       kvzip       replay of the model + keep when enough wait
    h2o, keyformer       heavy hitters + evict                   expected    normal distribution + keep when enough wait
                                                                 rehearse    virtual replay + refit

`base.py` is the contract, `parameters.py` fields and their text form, `text.py` reads it, `budget.py` sizes as tokens
or shares, `recall.py` what recall methods share, `replay_map.py` what stands for a repetition. A method that needs
several files has a folder; the method itself is its `__init__.py`.
"""

from __future__ import annotations

from kvsketch.methods.balancekv import BalanceKV
from kvsketch.methods.base import Method
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
    """The method that a text such as `streamingllm:budget=1024:sinks=4` describes; a Method is returned as it is.

    Methods from outside: `package.module:Class:budget=1024`, or the name of an entry point (`text.py`). Without
    `importing` no module is imported for them.
    """
    return text if isinstance(text, Method) else parse(text, METHODS, importing)


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
]
