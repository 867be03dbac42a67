"""How far the attention output of a compressed cache is from the exact one, on a real model and text.

    kvsketch eval attention-error --model qwen2.5-coder-0.5b --tokens 8192
    kvsketch eval attention-error --protocol balancekv --layers 0,1,4 --seeds 0-9 --methods balancekv,uniform

The model reads a text once; queries, keys and values of some layers are kept. In each of them the last queries read the
full cache, and then the cache of a method (attention_protocol.py has the details). All methods keep the same sinks and
recent tokens; a budget of 1/8, or `--rates 8`, means that one in 8 of the tokens between them is read. Methods without
random draws are measured with the first seed only. Runs on any device.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from kvsketch.compare import budgets
from kvsketch.methods import parse_method
from kvsketch.methods.budget import Size
from kvsketch.models import texts
from kvsketch_lab.evaluation import passages
from kvsketch_lab.evaluation.attention_protocol import (
    ORACLE,
    PREFIX,
    PROTOCOLS,
    measure,
)
from kvsketch_lab.evaluation.captures import LayerExperiment, LayerOptions
from kvsketch_lab.evaluation.experiment import (
    Cell,
    budgets_option,
    methods_option,
    model_option,
)
from kvsketch_lab.options import option

RATES = (4, 8, 16)
LAYERS = (0, 1, 2, 4, 8, 12, 16, 20, 23)
PAPER_CLUSTERKV = "clusterkv:tokens_per_cluster=80:recluster_into=4:rounds=20:completion=false"
CONTENDERS = (
    ORACLE,
    "clusterkv",
    "clusterkv:rounds=20",
    "clusterkv:completion=false",
    "clusterkv:tokens_per_cluster=10:completion=false",  # its index is as large as that of the default
    "clusterkv:tokens_per_cluster=40",
    "clusterkv:tokens_per_cluster=80",
    PAPER_CLUSTERKV,
    "infinigen:alpha=100",  # no score is that far below the largest, so it reads its whole budget
    *(text for text in budgets.ALL if text not in ("full", "clusterkv")),
)


@dataclass
class AttentionErrorOptions(LayerOptions):
    model: str = model_option("qwen2.5-coder-0.5b")
    methods: str = methods_option(",".join(CONTENDERS))
    budgets: str = budgets_option(",".join(f"1/{rate}" for rate in RATES))
    protocol: str = option(PREFIX.name, "what all methods keep, and which tokens are queries", choices=tuple(PROTOCOLS))
    tokens: int = option(8192, "tokens of the text, the queries' own included", least=1)
    queries: int | None = option(None, "how many of the last tokens are queries; by the protocol unless given", least=1)
    layers: str = option(",".join(map(str, LAYERS)), "such as 0,7,14 or 2- or all")
    rates: tuple[int, ...] = option(
        "", "one in N middle tokens is read, separated by commas; instead of --budgets", least=1, none=True
    )
    texts: str = passages.texts_option(texts.LONGEST_SPEECH)


class AttentionError(LayerExperiment):
    name, metric, form = "attention-error", "mean", ".4f"
    columns = "tokens read=tokens_read:,.0f"
    options: AttentionErrorOptions

    def __init__(self, options: AttentionErrorOptions) -> None:
        super().__init__(options)
        self.protocol = PROTOCOLS[options.protocol]
        self.queries = options.queries or (self.protocol.recent if self.protocol.causal else 2 * self.protocol.recent)

    @property
    def contenders(self) -> list[tuple[str, str]]:
        options = self.options
        shares = [f"1/{rate}" for rate in options.rates]
        sizes = shares or [size.strip() for size in options.budgets.split(",") if size.strip()]
        for size in sizes:
            rate_of(size)
        result = []
        for text in options.methods.split(",") if options.methods != "all" else budgets.ALL:
            known = [text] if text == ORACLE else dict.fromkeys(m for m, _ in budgets.contenders(text, "1/2"))
            result += [(method, size) for method in known for size in sizes if method != "full"]
        return list(dict.fromkeys(result))

    def cells(self) -> list[Cell]:
        tokens, kept = self.options.tokens, self.protocol.sinks + self.protocol.recent
        if tokens - (0 if self.protocol.causal else self.queries) < 2 * kept:
            raise ValueError(
                f"--tokens {tokens} leaves too few beside {kept} kept and {self.queries} queries; use more"
            )
        layers = ",".join(map(str, self.layers))
        added = (("protocol", self.protocol.name), ("tokens", tokens), ("queries", self.queries))
        return [
            Cell(method, budget, name, seed, (*self.setting, *added, ("layers", layers)))
            for name in self.texts
            for method, budget in self.contenders
            for seed in (self.seeds if _has_chance(method) else self.seeds[:1])
        ]

    def alike(self, cell: Cell) -> Hashable:
        """The cells of one text and method; successive groups of one text share its forward."""
        return cell.sample, cell.method

    def outcome(self, cell: Cell) -> dict[str, Any]:
        layers, rate = self.captured(cell.sample), rate_of(cell.budget)
        outcomes = {
            str(index): measure(cell.method, rate, layer, self.queries, self.protocol, cell.cache_seed)._asdict()
            for index, layer in layers.items()
        }
        full = sum(t.nbytes for layer in layers.values() for t in (layer.keys, layer.values))
        result = summary(cell.method, rate, outcomes)
        result |= {"device_bytes": result["bytes"], "host_bytes": 0, "full_bytes": full}
        return result | ({"cache_seed": cell.cache_seed} if _has_chance(cell.method) else {})


def rate_of(budget: str) -> int:
    """8 of 1/8."""
    share = Size.parse(budget, "--budgets").share
    if share is None or share.numerator != 1:
        raise ValueError(f"--budgets {budget} is not possible here; use a share such as 1/8")
    return share.denominator


def summary(text: str, rate: int, outcomes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The fields of a record for the outcomes of all layers."""
    masses = [o["mass"] for o in outcomes.values() if o.get("mass") is not None]
    return {
        "family": "recall" if text == ORACLE else parse_method(text).family,
        "rate": rate,
        "mean": sum(o["error"] for o in outcomes.values()) / len(outcomes),
        "tokens_read": round(sum(o["tokens_read"] for o in outcomes.values()) / len(outcomes)),
        "bytes": sum(o["bytes"] for o in outcomes.values()),
        "outcomes": outcomes,
        **({"mass": sum(masses) / len(masses)} if masses else {}),
    }


def _has_chance(text: str) -> bool:
    return text != ORACLE and parse_method(text).random
