"""The table of long answers: what the full cache's own answers cost under rules for generated tokens."""

from __future__ import annotations

from collections.abc import Sequence

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import (
    FAILED,
    Record,
    Result,
    budget_value,
    interval_text,
    latest,
    mean,
    mean_over_texts,
    paired_difference,
    text_of,
)
from kvsketch_lab.report.blocks import Code, table
from kvsketch_lab.report.kinds import Data, model_name

FULL, USUAL, SOON = "full", "rehearse, 64 tokens wait", "rehearse, 16 tokens wait"
LAB = "kvsketch_lab.evaluation.protected:"
RULES = {
    "full": "all tokens",
    "streamingllm": "the most recent tokens",
    "h2o": "window and heavy hitters",
    "rehearse:wait=64": USUAL,
    "rehearse:wait=16": SOON,
    f"{LAB}Prompt": "the same, and the prompt stays",
    f"{LAB}Even": "the same, scores scaled by the tokens of a chunk",
    f"{LAB}Values": "the same, and the largest values stay",
    f"{LAB}Random": "the same, random scores",
    f"{LAB}Window": "the prompt and the most recent tokens",
}
HEADS = (
    "rule", "method", "bytes at the end", "bytes, mean", "nats per token", "in the second half", "same token",
)  # fmt: skip


def measured(records: Sequence[Record]) -> dict[tuple[str, str], list[Data]]:
    """Measurements by model and share of the bytes, of the answers that every method was fed, the largest share first.

    A method that has failed at a share is not among them; one without a budget is at every share.
    """
    known = [
        record["data"] | {"seed": record["seed"]}
        for record in latest(records)
        if record["kind"] == "long_answers" and FAILED not in record["data"] and record["data"]["method"] != FULL
    ]
    result = {}
    for model, own in grouped(known, model_name).items():
        shares = sorted({each["budget"] for each in own if each["budget"]}, key=budget_value, reverse=True)
        for share in shares:
            here = [each for each in own if each["budget"] in ("", share)]
            asked = [set(map(_answer, runs)) for runs in grouped(here, lambda each: each["method"]).values()]
            result[model, share] = [each for each in here if all(_answer(each) in other for other in asked)]
    return {key: own for key, own in result.items() if own}


def _answer(data: Data) -> tuple[int, str]:
    return data["seed"], data["sample"]


def tables(records: Sequence[Record]) -> str:
    """A table with its introduction for each model and share, the cheapest rule first; empty without records."""
    return "\n\n".join(
        f"{_introduction(model, share, data)}\n\n{table([*HEADS, f'against {_usual(data)}'], _rows(data))}"
        for (model, share), data in measured(records).items()
    )


def _introduction(model: str, share: str, data: Sequence[Data]) -> str:
    answers = {_answer(each): each for each in data}
    tokens = sum(each["tokens_scored"] for each in answers.values())
    prompts = mean([each["prompt_tokens"] for each in answers.values()])
    return (
        f"{model}, {share} of the bytes of prompt and answer: {len(answers)} answers of {tokens / len(answers):,.0f} "
        f"tokens behind prompts of {prompts:,.0f}, with {data[0]['problems']} problems each."
    )


def _usual(data: Sequence[Data]) -> str:
    """The rule that others are compared with."""
    known = {rule(each["method"]) for each in data}
    return SOON if SOON in known else USUAL


def _rows(data: Sequence[Data]) -> list[list[str]]:
    by = grouped(data, lambda each: str(each["method"]))
    usual = next((_results(own) for method, own in by.items() if rule(method) == _usual(data)), [])
    rows = []
    for method, own in sorted(by.items(), key=lambda item: mean([each["cost"] for each in item[1]])):
        texts = [text_of(each, each["seed"]) for each in own]
        late = mean_over_texts([each["late_cost"] for each in own], texts)
        less = paired_difference(_results(own), usual) if rule(method) != _usual(data) else None
        rows.append([
            rule(method), Code(method.removeprefix(LAB)),
            *(f"{mean([each[name] for each in own]):.1%}" for name in ("share_after", "share_during")),
            interval_text(mean_over_texts([each["cost"] for each in own], texts), ".3f"), interval_text(late, ".3f"),
            f"{mean([each['same'] for each in own]):.1%}",
            "" if less is None else interval_text(less.estimate, "+.3f"),
        ])  # fmt: skip
    return rows


def rule(method: str) -> str:
    """What a method is, in words."""
    known = [name for name in RULES if method == name or method.startswith(f"{name}:")]
    return RULES[max(known, key=len)] if known else method.partition(":")[0]


def _results(data: Sequence[Data]) -> list[Result]:
    return [Result(_answer(each), text_of(each, each["seed"]), each["cost"]) for each in data]
