"""Keyformer (arXiv 2403.09054), by the page of its authors."""

from __future__ import annotations

from typing import Any

from kvsketch_lab.report.kinds import REFERENCE, UNSEEN
from kvsketch_lab.report.papers.claims import (
    CANNOT,
    FAILS,
    NO_NUMBER,
    OTHER,
    Ask,
    Claim,
    Paper,
    Part,
    answers,
    ask,
    attended,
)

NOT_HERE = "weights and data are not to be had here"
METHODS = {"Keyformer": "keyformer", "H2O": "h2o", "window": "streamingllm"}
HALF_B = "Qwen2.5-Coder-0.5B, a speech of 4,096 tokens, mean over layers"
SHORT_TEXT = "Qwen2.5-Coder-0.5B, a speech of 1,024 tokens, mean over layers"
CNN = "CNN/DailyMail, 20 to 90% of the prompt"
# Of the figure's context and generated tokens the mean length while the second are generated, and half of it.
LENGTHS = {1024: (1536, 512), 2048: (3072, 1024), 4096: (6144, 2048)}


def _decode(formula: str, method: str, context: int, batch: int = 1, over: Ask | None = None, **how: str) -> Ask:
    where: dict[str, Any] = {"method": method, "prompt": LENGTHS[context][0], "batch": batch, "shape": "llama-2-7b"}
    return ask("decode_all", f"{formula} if step_ms else none", over=over, **how, **where)


def _faster(method: str, context: int, batch: int = 1) -> Ask:
    # Records name no parameter that has its default: a budget of 1,024 of h2o.
    text = f"{method}:budget={LENGTHS[context][1]}".replace("h2o:budget=1024", "h2o")
    ours = _decode("step_ms", text, context, batch)
    return _decode("step_ms", "full", context, batch, over=ours, unit="x")


def _speed(context: int, keyformer: float, h2o: float) -> Claim:
    return Claim(
        f"Fig. 8 right, {context:,} + {context:,}",
        f"{keyformer} times as fast as the full cache, H2O {h2o}",
        f"{context:,} tokens read, {context:,} generated",
        {"Keyformer": _faster("keyformer", context), "H2O": _faster("h2o", context)},
        rule=f"Keyformer >= {keyformer}",
        on=f"a step after {LENGTHS[context][0]:,} tokens, budget {LENGTHS[context][1]:,}",
    )


def _lines(budget: str) -> Claim:
    own = {name: answers("lines", method, budget, "lines 200") for name, method in METHODS.items()}
    return Claim(f"as Fig. 7: lines, {budget}", "above H2O, which is above a window", "our task: one line of 200", own,
                 rule="Keyformer > H2O and H2O > window")  # fmt: skip


def _mass(field: str, method: str, budget: str) -> Ask:
    """Attention over the text of the tokens that a method keeps, or of as many with most."""
    where: dict[str, Any] = {"kind": "recall", "model": "qwen2.5-coder-0.5b", "tokens": 1024}
    return ask("eval/", field, form=".0%", method=method, budget=budget, **where)


def _summaries(budget: str) -> Claim:
    """Beside the summaries that the full cache writes of the same texts."""
    own = {
        name: answers("summaries", method, budget, "4,000 tokens", form=".3f", variant=UNSEEN)
        for name, method in METHODS.items()
    }
    return Claim(f"as Fig. 7: {budget}", "above H2O, which is above a window", "our stand-in: speeches", own,
                 rule="Keyformer > H2O and H2O > window", on="beside the full cache's own summary")  # fmt: skip


def _reports(budget: str) -> Claim:
    """Beside references that people wrote."""
    file = "from gov_report_summ.jsonl"
    place = f"8,000 tokens, {file}, {REFERENCE}"
    budgets = dict.fromkeys(METHODS, budget) | {"full": ""}
    own = {name: answers("summaries", METHODS.get(name, name), each, place, form=".3f", variant=f"{UNSEEN}, {file}")
           for name, each in budgets.items()}  # fmt: skip
    return Claim(f"as Fig. 8 left: {budget}", "99% of the full cache's from 50% on", "our stand-in: L-Eval's GovReport",
                 own, rule="Keyformer >= 0.99 * full", on="beside a reference, up to 8,000 tokens")  # fmt: skip


OBSERVATIONS = [
    Claim(
        "Fig. 1 left",
        "moving the cache is nearly 40% of the time",
        "MPT-7B, A100; half read, half generated",
        {f"{2 * context:,}": _decode("cache_bytes / (floor_ms / 1e3 * copy_bytes_per_s)", "full", context, form=".0%")
         for context in LENGTHS},
        verdict=OTHER,
        why="share of the bytes that a step reads, by the length of the sequence; the others are weights",
    ),
    Claim("Fig. 1 right", "the cache outgrows the model", "MPT-7B", verdict=NO_NUMBER, why="0.5 MiB for each token"),
    Claim("Fig. 2, 5, 6", "windows and key tokens; the phases; one layer", "-", verdict=NO_NUMBER, why="drawings"),
    Claim("Fig. 3 left", "attention is sparse in all layers", "GPT-J, Cerebras-GPT, MPT; CNN/DailyMail",
          {"tokens with less than 1% of the largest": attended("sparse")}, verdict=OTHER, on=HALF_B,
          why="the paper gives a picture and no threshold"),
    Claim("Fig. 3 right", "90% of the attention goes to 40% of the tokens", "as Fig. 3 left",
          {"tokens that hold 90%": attended("tokens_90", form=".1%")}, rule="tokens that hold 90% <= 0.4", on=HALF_B),
    Claim("Fig. 3 right", "the same", "as Fig. 3 left", {"attention of the 40%": _mass("top_mass", "keyformer", "40%")},
          rule="attention of the 40% >= 0.9", on=SHORT_TEXT),
    Claim("Fig. 4", "without half of the tokens the scores of the others grow unevenly", "MPT-7B, 50%",
          {"attention that stays, Keyformer": _mass("mass", "keyformer", "50%"), "H2O": _mass("mass", "h2o", "50%"),
           "the most that half can hold": _mass("top_mass", "h2o", "50%")}, verdict=FAILS, on=SHORT_TEXT,
          why="for one query the softmax multiplies all that stay by one factor; it differs between queries"),
    Claim("text", "noise that is skewed towards initial tokens", "Gumbel noise", verdict=FAILS,
          why="independent draws favour no position; the sums over causal rows do"),
    Claim("text", "temperature 1 is about a softmax", "Gumbel noise", verdict=FAILS,
          why="only the largest has that law; the mean is flatter"),
    Claim("text", "temperature 1 rising to 2 is best", "not shown", verdict=CANNOT, why="no number to compare with"),
]  # fmt: skip

SUMMARIES = [
    *(
        Claim(at, says, setting, verdict=CANNOT, why=NOT_HERE)
        for at, says, setting in (
            ("Fig. 7, GPT-J", "full 19.8, Keyformer 19.9, H2O 19.1, window 11.8 at 70%", CNN),
            ("Fig. 7, Cerebras-GPT", "full 15.4, Keyformer 15.8, H2O 14.0, window about 0 at 70%", CNN),
            ("Fig. 7, MPT", "full 17.5, Keyformer 17.6, H2O 16.4, window 4.3 at 60%", CNN),
            ("Fig. 7, MPT-chat", "full 12.3, Keyformer 12.3, H2O 9.6 at 90%", "SODA dialogues"),
            ("Fig. 7, Cerebras-GPT", "full 3.7, Keyformer 3.7 at 80%, H2O 2.3", "SODA dialogues"),
            ("Fig. 7, MPT", "full 7.3, Keyformer 7.3, H2O 6.4 at 90%", "SODA dialogues"),
            ("Fig. 8 left, Keyformer", "full 10.53; 7.03, 8.29, 9.94, 9.64, 10.46 at 10 to 50%",
             "MPT-7B-storywriter, GovReport, 8k tokens"),
            ("Fig. 8 left, H2O", "6.90, 6.95, 9.62, 8.69, 9.27 at 10 to 50%", "as above"),
        )
    ),
    *map(_summaries, ("90%", "70%", "50%", "30%")),
    *map(_reports, ("70%", "50%")),
    _lines("1/2"),
    _lines("1/4"),
]  # fmt: skip

SPEED = [
    _speed(1024, 1.28, 1.12),
    _speed(2048, 1.62, 1.37),
    _speed(4096, 2.05, 1.71),
    Claim(
        "text, latency",
        "2.1 times as fast",
        "the longest of Fig. 8; their own bar is 2.05",
        {"Keyformer": _faster("keyformer", 4096)},
        rule="Keyformer >= 2.1",
    ),
    Claim(
        "text, throughput",
        "up to 2.4 times the tokens per second",
        "as above, the largest batch that fits",
        {"batch 16": _faster("keyformer", 4096, 16), "batch 4": _faster("keyformer", 4096, 4)},
        rule="batch 16 >= 2.4",
        on="the same batch for both",
    ),
]

PAPER = Paper(
    "keyformer",
    "Keyformer",
    ("keyformer:budget=70%", "keyformer:budget=50%"),
    [
        Part("Observations", OBSERVATIONS),
        Part("Summaries (ROUGE-2)", SUMMARIES, "Ours: Qwen2.5-Coder-1.5B, summaries of at most 128 tokens."),
        Part(
            "Speed at half of the cache",
            SPEED,
            "The paper's: MPT-7B, A100. Ours: the shape of Llama-2-7B, which has as many KV heads as query heads too, "
            "with random weights, captured steps at batch 1, H200, whose memory is 2.4 times as fast; the step after "
            "the mean number of tokens.",
        ),
    ],
)
