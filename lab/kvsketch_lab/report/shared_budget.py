"""Best tokens, balanced samples and refits in heads that share one budget: the tables of `kvsketch eval shared-budget`.

Only texts that are kept out of tuning count. Two contenders are compared text by text: the quotient of their errors, in
the mean over texts, with the interval of that mean. Seeds of one text are no further texts: their mean counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import stdev

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import FAILED, Estimate, budget_value, interval_text, mean, mean_over_texts
from kvsketch_lab.records.held_out import is_held_out_text
from kvsketch_lab.report import blocks
from kvsketch_lab.report.blocks import Code
from kvsketch_lab.report.kinds import NOTHING, Data, model_name

LATER, REPLAY = "later", "replay"
BETTER, WORSE, CLOSE = "better", "worse", "too close to tell"
BALANCED, SHARED = "balancekv", "mixture:top=0:floor=50%"
MOST_SHARED, BY_VOTES = "mixture:top=0", "mixture:top=0:score=votes"
BEST, EQUAL_BEST = "rehearse:bits=16:refit=none", "rehearse:bits=16:refit=none:share=head"
MIXED, EQUAL_MIXED = "mixture:top=1/2:floor=50%", "mixture:top=1/2:share=head"
REFITTED, EQUAL_REFITTED = "rehearse:bits=16", "rehearse:bits=16:share=head"
VOTED, EQUAL_BOTH = "snapkv:share=model", "mixture:top=1/2:share=head:refit=full"
# What contenders keep, in the order in which they are shown.
FORMS = {
    "uniform": "a uniform sample, equal heads",
    BALANCED: "a balanced sample, equal heads",
    SHARED: "the same, heads share half of a budget by replay",
    MOST_SHARED: "the same, heads share 80% by replay",
    BY_VOTES: "the same, heads share 80% by votes",
    EQUAL_BEST: "the best tokens by replay, equal heads",
    BEST: "the same, heads share a budget",
    VOTED: "the best tokens by votes, heads share 80%",
    EQUAL_MIXED: "half the best tokens by replay, half a balanced sample, equal heads",
    MIXED: "the same, heads share half of a budget",
    "mixture:top=1/2": "the same, heads share 80%",
    "mixture:top=1/2:rest=uniform": "the same with a uniform sample",
    "mixture:top=3/4": "three quarters the best tokens by replay, the rest balanced, heads share 80%",
    "mixture:top=3/4:rest=uniform": "the same with a uniform sample",
    "mixture:top=1/2:score=votes": "half the best tokens by votes, half balanced, heads share 80%",
    EQUAL_REFITTED: "the best tokens by replay, equal heads, refitted",
    REFITTED: "the same, heads share a budget",
    EQUAL_BOTH: "half the best tokens by replay, half balanced, equal heads, refitted",
    "mixture:top=1/2:refit=full": "the same, heads share 80%",
}
# Questions, and the two contenders whose errors answer them.
QUESTIONS = {
    "Does a shared budget help a balanced sample?": (SHARED, BALANCED),
    "Does one that votes divide?": (BY_VOTES, BALANCED),
    "Is a balanced sample better than the best tokens, heads share by replay?": (MOST_SHARED, BEST),
    "Is a balanced sample better than the best tokens, heads share by votes?": (BY_VOTES, VOTED),
    "Does a shared budget help the best tokens?": (BEST, EQUAL_BEST),
    "Is a balanced sample better than the best tokens, heads equal?": (BALANCED, EQUAL_BEST),
    "Are half and half better than the sample, heads equal?": (EQUAL_MIXED, BALANCED),
    "Are half and half better than the best tokens, heads equal?": (EQUAL_MIXED, EQUAL_BEST),
    "Does a shared budget help half and half?": (MIXED, EQUAL_MIXED),
    "Is a balanced half better than a uniform one?": ("mixture:top=1/2", "mixture:top=1/2:rest=uniform"),
    "Are half and half in a shared budget better than rehearse?": (MIXED, REFITTED),
    "Are half and half in equal heads better than rehearse?": (EQUAL_MIXED, REFITTED),
    "Are half and half in equal heads better than rehearse in equal heads?": (EQUAL_MIXED, EQUAL_REFITTED),
    "Does a shared budget help the refit?": (REFITTED, EQUAL_REFITTED),
    "Is it better to refit half and half than the best tokens, heads equal?": (EQUAL_BOTH, EQUAL_REFITTED),
}


def held_out(data: Iterable[Data]) -> list[Data]:
    """The measurements that count."""
    return [each for each in data if FAILED not in each and is_held_out_text(str(each["sample"]))]


def models(data: Iterable[Data]) -> list[str]:
    return sorted({model_name(each) for each in held_out(data)})


def texts(data: Iterable[Data]) -> int:
    """How many texts every model has read."""
    known = {(model_name(each), each["sample"]) for each in held_out(data)}
    return min((sum(own == model for own, _ in known) for model in {own for own, _ in known}), default=0)


def setting(data: Iterable[Data]) -> str:
    """Tokens that were compressed, and the layers of each model: `2,048 tokens, layers 0,5,10 of smollm2-135m`."""
    own = held_out(data)
    tokens = sorted({each["tokens"] for each in own})
    layers = {model_name(each): each["layers"] for each in own}
    of_models = ", ".join(f"layers {layers[model]} of {model}" for model in sorted(layers))
    return f"{' or '.join(f'{count:,}' for count in tokens)} tokens, {of_models}" if own else NOTHING


def steps(data: Iterable[Data]) -> str:
    """Tokens behind the compressed ones whose queries are asked."""
    return " or ".join(map(str, sorted({each["steps"] for each in held_out(data)}))) or NOTHING


def by_text(data: Iterable[Data], model: str, method: str, budget: str, field: str) -> dict[str, float]:
    """The error of a contender on each text, in the mean over seeds."""
    wanted = (model, method, budget)
    own = [each for each in held_out(data) if (model_name(each), each["method"], each["budget"]) == wanted]
    by_sample = grouped(own, lambda each: str(each["sample"]))
    return {text: mean([each[field] for each in seeds]) for text, seeds in by_sample.items()}


def quotient(data: Sequence[Data], model: str, pair: tuple[str, str], budget: str, field: str) -> Estimate | None:
    """The error of one contender over that of the other, in the mean over the texts that both have read."""
    one, other = (by_text(data, model, method, budget, field) for method in pair)
    both = sorted(one.keys() & other.keys())
    return mean_over_texts([one[text] / other[text] for text in both], both) if both else None


def verdict(of: Estimate) -> str:
    """Whether the first of two contenders is better, by the interval of the quotient."""
    if of.low is None or of.high is None or of.low <= 1 <= of.high:
        return CLOSE
    return BETTER if of.high < 1 else WORSE


def sizes(data: Iterable[Data]) -> list[str]:
    return sorted({each["budget"] for each in held_out(data)}, key=budget_value, reverse=True)


def errors(data: Sequence[Data], model: str) -> str:
    """Errors for later queries and for the replay, a row for each contender, a column for each budget."""
    known = {each["method"] for each in held_out(data) if model_name(each) == model}
    rows = [
        [told, Code(method), *(_pair(data, model, method, budget) for budget in sizes(data))]
        for method, told in FORMS.items()
        if method in known
    ]
    return blocks.table(["kept", "contender", *sizes(data)], rows) if rows else NOTHING


def _pair(data: Sequence[Data], model: str, method: str, budget: str) -> str:
    found = [by_text(data, model, method, budget, field) for field in (LATER, REPLAY)]
    return " / ".join(f"{mean(list(own.values())):.3f}" for own in found if own)


def answers(data: Sequence[Data], model: str) -> str:
    """Quotients of errors, a row for each question, a column for each budget."""
    rows = []
    for question, pair in QUESTIONS.items():
        found = [quotient(data, model, pair, budget, LATER) for budget in sizes(data)]
        if any(found):
            rows.append([question, *(f"{interval_text(each)}, {verdict(each)}" if each else "" for each in found)])
    return blocks.table(["error over error", *sizes(data)], rows) if rows else NOTHING


def tally(data: Sequence[Data], one: str, other: str, field: str = LATER) -> str:
    """`better in 5 of 6 comparisons, worse in 1`, over all models and budgets."""
    found = [quotient(data, model, (one, other), budget, field) for model in models(data) for budget in sizes(data)]
    said = [verdict(each) for each in found if each]
    if not said:
        return NOTHING
    parts = [f"{word} in {said.count(word)}" for word in (BETTER, WORSE, CLOSE) if word in said]
    return f"{', '.join(parts)} of {len(said)} comparisons"


def seed_spread(data: Iterable[Data]) -> str:
    """The largest standard deviation over seeds of a contender on one text, as a share of its error."""
    same = grouped(held_out(data), lambda each: (model_name(each), each["sample"], each["method"], each["budget"]))
    errors = [[each[LATER] for each in seeds] for seeds in same.values() if len(seeds) > 1]
    shares = [stdev(values) / mean(values) for values in errors]
    return f"{max(shares):.1%}" if shares else NOTHING


def commands(data: Iterable[Data]) -> list[str]:
    return list(dict.fromkeys(each["command"] for each in held_out(data) if each["command"]))
