"""The experiments a report knows, in the order in which it shows them, and what their records say."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from kvsketch_lab.records import Estimate, Record, Result, nested_mean, paired_difference, perplexity_deviation, text_of
from kvsketch_lab.report.rows import MEMORY, Estimator, Observation, mean_of, values_of

BIG = "qwen2.5-coder-1.5b (bfloat16)"  # the model that most was measured on
NOTHING = "not measured"
UNSEEN = "question unseen"
Data = dict[str, Any]
Observe = Callable[["Kind", Record], list[Observation]]
Places = Callable[[Data], list[str]]
Results = Callable[[Data, Hashable, float], list[Result]]


def question_of(data: Data, text: Hashable) -> Hashable:
    """What methods were asked the same of: the text, which of its questions, and where in a text losses begin."""
    return text, data.get("sample"), data.get("text_sha256"), data.get("position") if data.get("protocol") else None


def one_result(data: Data, text: Hashable, value: float) -> list[Result]:
    """One answer; of tasks, which count alike, with its own."""
    return [Result(question_of(data, text), text, value, place=str(data.get("task", "")))]


@dataclass(frozen=True)
class Kind:
    """How the records of one experiment are read and shown."""

    name: str
    title: str
    text: str
    measure: str  # name of the axis
    metric: str  # field of the value
    setting: tuple[str, ...] = ()  # fields whose values are compared only among themselves
    overall: str = ""  # name of the setting that takes all values of those fields together; empty: there is none
    higher_is_better: bool = True
    logarithmic: bool = False
    share: bool = False  # whether values are shares of 1
    places: Places | None = None  # the settings that a record counts in; None: the overall one and its own
    observe: Observe | None = None  # the observations of a record that did not fail; None: `metric` at every place
    form: str = ".2f"  # how its values are written
    estimate: Estimator = mean_of
    results: Results = one_result
    perplexity: bool = False  # whether what methods differ by is that of the exponentials of mean losses

    def observations(self, record: Record) -> list[Observation]:
        """What the record measured: one value, several, or a failure."""
        data = record["data"]
        failed, value = data.get("failed"), data.get(self.metric)
        if self.observe and not failed:
            return self.observe(self, record)
        if not failed and value is None:
            return []
        measured = None if failed else float(value)
        common = observation(self, record, measured, "")
        return [common._replace(setting=place) for place in self.settings(data)]

    def settings(self, data: Data) -> list[str]:
        """The settings that a record counts in."""
        if self.places:
            return self.places(data)
        if self.overall and self.setting[0] not in data:
            raise KeyError(self.setting[0])
        overall = [", ".join([self.overall, *variants(data)])] if self.overall else []
        # In words, such as `lines 400`, with what differs from the common way to measure.
        parts = [_words(key, data[key]) for key in self.setting if data.get(key) not in (None, "")]
        return [*overall, ", ".join([*parts, *variants(data)])]

    def owns(self, record: Record) -> bool:
        """Whether a record is of this experiment; benchmarks may use the same word for another thing."""
        same = record["kind"].replace("-", "_") == self.name
        return same and "method" in record["data"] and "operation" not in record["data"]


def observation(
    kind: Kind, record: Record, value: float | None, setting: str, part: Hashable = None, **memory: Any
) -> Observation:
    """An observation of the method, budget and memory that the record names, or of a `part` of it, such as a head."""
    data, text = record["data"], (*text_of(record["data"], record["seed"]), part)
    return Observation(
        kind=kind.name,
        model=model_name(data),
        setting=setting,
        variant=", ".join(variants(data)),
        method=str(data["method"]),
        budget=str(data.get("budget", "")),
        value=value,
        text=text,
        results=() if value is None else tuple(kind.results(data, text, value)),
        failed=str(data.get("failed") or ""),
        data=data,
        run=(str(record.get("time", "")), str(record.get("command") or "")),
        **{name: memory.get(name, data.get(name)) for name in MEMORY},
    )


def model_name(data: Data) -> str:
    """The model, with its weights where its name does not say them and the dtype it ran in."""
    name = str(data.get("model") or "unknown model")
    name += f" {data['weights'][:8]}" if data.get("weights") else ""
    return f"{name} ({data['dtype']})" if data.get("dtype") else name


def variants(data: Data) -> list[str]:
    """What makes a measurement another one than the common one of its experiment."""
    result = [f"kvpress {data['kvpress']}"] if "kvpress" in data else []
    if data.get("budgets_in") == "bytes":
        result.append("budgets of equal bytes")
    if data.get("question") == "unseen":
        result.append(UNSEEN)
    if data.get("primed"):
        result.append("answer begun")
    if data.get("chunk"):
        result.append(f"read in chunks of {data['chunk']:,}")
    if data.get("file"):
        result.append(f"from {data['file']}")
    if data.get("needles", 1) != 1:
        result.append(f"{data['needles']} needles")
    return result


def _words(key: str, value: Any) -> str:
    return value if isinstance(value, str) else f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}"


ALL_TASKS = "average of the tasks"
REFERENCE = "beside a reference"
COMMON_PROTOCOL = "prefix"


def _error_places(data: Data) -> list[str]:
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
    result = [observation(kind, record, data["mean"], overall, device_bytes=data["bytes"])]
    for layer, each in data["outcomes"].items():
        place = overall.replace(_layers(data), f"layer {layer}", 1)
        memory = {"tokens_read": each["tokens_read"], "device_bytes": each["bytes"], "full_bytes": None}
        result.append(observation(kind, record, each["error"], place, **memory))
    return result


def _perplexity_places(data: Data) -> list[str]:
    """Streams of other lengths, and other numbers of steps behind a prefill, are other measurements."""
    extent = (
        f" of {data['tokens']:,} tokens" if "tokens" in data else f", {data['steps']} steps" if "steps" in data else ""
    )
    return [", ".join([f"{data['protocol']}{extent}", *variants(data)])]


def _task_places(data: Data) -> list[str]:
    """A question counts in the average, of its length where it has one, and in its task."""
    length = [f"{data['length']:,} tokens"] if "length" in data else []
    return [", ".join([place, *length, *variants(data)]) for place in (ALL_TASKS, data["task"])]


def _summary_places(data: Data) -> list[str]:
    """The request is a part of the prompt: it makes no difference whether a question is known."""
    return [", ".join([f"{data['tokens']:,} tokens", *variants(data | {"question": ""})])]


def _task_estimate(members: Sequence[Observation]) -> Estimate:
    """A task is the mean of its questions, the average the mean of the tasks."""
    places = [str(each.data.get("task")) for each in members]
    return nested_mean(values_of(members), [each.text for each in members], places)


def estimate_of(records: Sequence[Record]) -> Estimate:
    """What records of one experiment, method and setting say together, none of which failed."""
    kind = next(kind for kind in KINDS if kind.owns(records[0]))
    return kind.estimate([observation(kind, each, each["data"].get(kind.metric), "") for each in records])


def difference_of(ours: Sequence[Record], theirs: Sequence[Record]) -> Estimate | None:
    """What records of one experiment have more than others on the same questions, none of which failed; None where the
    questions are others.
    """
    kind = next(kind for kind in KINDS if kind.owns(ours[0]))
    one, other = ([result for record in own for result in _results(kind, record)] for own in (ours, theirs))
    found = paired_difference(one, other, perplexity=kind.perplexity)
    return found.estimate if found else None


def _results(kind: Kind, record: Record) -> list[Result]:
    data = record["data"]
    return kind.results(data, text_of(data, record["seed"]), data.get(kind.metric, 0.0))


def _recall(kind: Kind, record: Record) -> list[Observation]:
    """One value for each query head of each layer."""
    by_layer = record["data"]["recall_by_head"]
    return [
        observation(kind, record, float(value), place, part=(layer, head))
        for place in kind.settings(record["data"])
        for layer, values in by_layer.items()
        for head, value in enumerate(values)
    ]


def _summaries(kind: Kind, record: Record) -> list[Observation]:
    """ROUGE-2 beside the full cache's own summary and, where there is one, beside a reference."""
    data = record["data"]
    (place,) = kind.settings(data)
    result = [observation(kind, record, data["score"], place)]
    if "reference_rouge" in data:
        result.append(observation(kind, record, data["reference_rouge"]["rouge2"], f"{place}, {REFERENCE}"))
    return result


def _runs(data: Data, text: Hashable, _: float) -> list[Result]:
    """One result for each run of tokens."""
    runs = enumerate(zip(data["chunk_nll"], data["chunk_tokens"], strict=True))
    keys = [(question_of(data, text), number) for number in range(len(data["chunk_nll"]))]
    return [Result(keys[number], keys[number], nll * tokens, tokens) for number, (nll, tokens) in runs]


def deviation(members: Sequence[Observation]) -> Estimate:
    """exp(mean nll) - exp(mean nll of the full cache) over all tokens, its interval from resampled runs of tokens."""
    return perplexity_deviation(each.data for each in members)


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
        name="facts",
        title="Facts of texts of seven kinds",
        text="The model reads lines, JSON keys, code, logs, a table, prose or turns of a chat, and is then asked "
        "for one of its facts.",
        measure="right answers",
        metric="score",
        setting=("text_kind",),
        overall="all kinds of texts",
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
        name="ruler",
        title="RULER",
        text="Needles, variables and words in texts of a given length; a score is the share of the expected strings "
        "that the answer contains, the average that of the tasks.",
        measure="score",
        metric="score",
        share=True,
        places=_task_places,
        estimate=_task_estimate,
    ),
    Kind(
        name="leval",
        title="L-Eval",
        text="Questions by people about long documents, scored exactly; the average is that of the tasks.",
        measure="right answers",
        metric="score",
        share=True,
        places=_task_places,
        estimate=_task_estimate,
    ),
    Kind(
        name="summaries",
        title="Summaries",
        text="ROUGE-2 of a summary against the one that the full cache writes of the same prompt, or against a "
        "reference.",
        measure="ROUGE-2",
        metric="score",
        share=True,
        places=_summary_places,
        observe=_summaries,
    ),
    Kind(
        name="attention_error",
        form=".3f",
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
        form="+.2f",
        title="Perplexity",
        text="Perplexity of real text through the compressed cache, minus that of the full cache on the same tokens; "
        "intervals from resampled runs of tokens.",
        measure="deviation of perplexity",
        metric="deviation",
        higher_is_better=False,
        places=_perplexity_places,
        estimate=deviation,
        results=_runs,
        perplexity=True,
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
