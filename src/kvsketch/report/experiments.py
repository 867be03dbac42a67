"""The experiments a report knows, in the order in which it shows them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from kvsketch.evaluation import longbench_scores
from kvsketch.evaluation.statistics import CONFIDENCE, RESAMPLES
from kvsketch.report.kinds import Data, Kind, observation, setting_text, variants
from kvsketch.report.observations import Estimate, Observation, mean_and_interval
from kvsketch.report.reading import Record

ALL_GROUPS = "average of the groups"
GROUP = "group "
ROUGE = {"ROUGE-2": "rouge2", "ROUGE-1": "rouge1", "ROUGE-L": "rougeL"}
COMMON_PROTOCOL = "prefix"


def _error_places(kind: Kind, data: Data) -> list[str]:
    """Other layers, lengths and protocols are other measurements."""
    parts = [_layers(data), f"{data['tokens']:,} tokens"]
    if data.get("protocol", COMMON_PROTOCOL) != COMMON_PROTOCOL:
        parts.append(f"protocol of {data['protocol']}")
    return [", ".join(parts)]


def _layers(data: Data) -> str:
    return f"mean over layers {data.get('layers') or ','.join(data.get('outcomes', ()))}"


def _attention_error(kind: Kind, record: Record) -> list[Observation]:
    """The mean over layers, and each layer on its own."""
    data = record["data"]
    (overall,) = kind.settings(data)
    found = [observation(kind, record, data["mean"], overall, device_bytes=data["bytes"])]
    for layer, each in data["outcomes"].items():
        place = overall.replace(_layers(data), f"layer {layer}", 1)
        memory = {"tokens_read": each["tokens_read"], "device_bytes": each["bytes"], "full_bytes": None}
        found.append(observation(kind, record, each["error"], place, **memory))
    return found


def _perplexity_places(kind: Kind, data: Data) -> list[str]:
    """Streams of other lengths, and other numbers of steps behind a prefill, are other measurements."""
    extent = (
        f" of {data['tokens']:,} tokens" if "tokens" in data else f", {data['steps']} steps" if "steps" in data else ""
    )
    return [", ".join([f"{data['protocol']}{extent}", *variants(data)])]


def _longbench_places(kind: Kind, data: Data) -> list[str]:
    """A row counts in the average, in the group of its task and in its task."""
    group = [f"{GROUP}{data['group']}"] if data.get("group") else []
    return [ALL_GROUPS, *group, setting_text(kind, data)]


def _summaries(kind: Kind, record: Record) -> list[Observation]:
    """Three forms of ROUGE."""
    data = record["data"]
    suffix = variants(data)
    return [observation(kind, record, data[field], ", ".join([name, *suffix])) for name, field in ROUGE.items()]


def _summary_places(kind: Kind, data: Data) -> list[str]:
    return [", ".join([name, *variants(data)]) for name in ROUGE]


def _longbench_estimate(members: Sequence[Observation]) -> Estimate:
    """A task is the mean of its rows, a group the mean of its tasks, the average that of the groups."""
    setting = members[0].setting
    if setting != ALL_GROUPS and not setting.startswith(GROUP):
        return mean_and_interval(members)
    found = longbench_scores.scores([each.data for each in members])
    estimate = found.average if setting == ALL_GROUPS else found.groups.get(setting.removeprefix(GROUP))
    if estimate is None:
        return mean_and_interval(members)
    low, high = estimate.interval
    return estimate.value / 100, low / 100, high / 100


def _recall(kind: Kind, record: Record) -> list[Observation]:
    """One value for each query head of each layer."""
    by_layer = record["data"]["recall_by_head"]
    return [
        observation(kind, record, float(value), place)
        for place in kind.settings(record["data"])
        for values in by_layer.values()
        for value in values
    ]


def deviation(members: Sequence[Observation]) -> Estimate:
    """exp(mean nll) - exp(mean nll of the full cache) over all tokens, its interval from resampled runs of tokens."""
    tokens, nll, full = (_runs([each.data for each in members], name) for name in RUNS)
    drawn = numpy.random.default_rng(0).integers(0, len(tokens), (RESAMPLES, len(tokens)))
    drawn = numpy.vstack([numpy.arange(len(tokens)), drawn])
    weight = tokens[drawn]
    perplexity, exact = (numpy.exp((values[drawn] * weight).sum(1) / weight.sum(1)) for values in (nll, full))
    found = perplexity - exact
    tail = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(found[1:], [tail, 1 - tail])
    return float(found[0]), float(low), float(high)


RUNS = ("chunk_tokens", "chunk_nll", "full_chunk_nll")


def _runs(data: Sequence[Data], name: str) -> numpy.ndarray:
    return numpy.array([value for each in data for value in each[name]], dtype=numpy.float64)


KINDS = (
    Kind(
        name="lines",
        title="Line retrieval",
        text="The model reads numbered lines and is asked for the number of one of them.",
        measure="right answers",
        metric="score",
        setting=("lines",),
        overall="all numbers of lines",
        share=True,
    ),
    Kind(
        name="needle",
        title="Needle",
        text="A sentence hidden in real text, asked for at the end; means over all depths.",
        measure="needles found",
        metric="score",
        setting=("length",),
        overall="all lengths",
        share=True,
    ),
    Kind(
        name="longbench",
        title="LongBench",
        text="Scores of the tasks' own metrics; a group is the mean of its tasks, the average that of the groups.",
        measure="score",
        metric="score",
        setting=("task",),
        share=True,
        places=_longbench_places,
        estimate=_longbench_estimate,
    ),
    Kind(
        name="summaries",
        title="Summaries",
        text="ROUGE of generated summaries against the reference, F measure with stemming.",
        measure="ROUGE",
        metric="rouge2",
        share=True,
        places=_summary_places,
        observe=_summaries,
    ),
    Kind(
        name="attention_error",
        title="Attention error",
        text="Relative distance of the attention output from the exact one, mean over queries and heads; "
        "intervals over texts and seeds.",
        measure="relative error",
        metric="error",
        higher_is_better=False,
        logarithmic=True,
        places=_error_places,
        observe=_attention_error,
    ),
    Kind(
        name="perplexity",
        title="Perplexity",
        text="Perplexity of real text through the compressed cache, minus that of the full cache on the same tokens; "
        "intervals from resampled runs of tokens.",
        measure="deviation of perplexity",
        metric="deviation",
        identified_by=("position",),
        higher_is_better=False,
        places=_perplexity_places,
        estimate=deviation,
    ),
    Kind(
        name="recall",
        title="Recall of the tokens a query needs most",
        text="Share of the true top tokens, by inner product, that a query reads; the true top has as many tokens as "
        "the budget. Intervals over query heads.",
        measure="recall",
        metric="recall",
        setting=("tokens",),
        share=True,
        observe=_recall,
    ),
)
