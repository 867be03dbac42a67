"""BalanceKV (arXiv 2502.07861)."""

from __future__ import annotations

from kvsketch_lab.report.kinds import BIG
from kvsketch_lab.report.papers.claims import CANNOT, FAILS, NO_NUMBER, OTHER, Ask, Claim, Paper, Part, answers, ask

SMOL, QWEN = "smollm2-135m (float32)", "qwen2.5-coder-0.5b (float32)"
LONG = "mean over layers 0,1,4, 8,192 tokens, protocol of balancekv"
RATES = ("1/2", "1/4", "1/8", "1/16")
LAYERS = (0, 1, 4)
PLACE = "2,048 tokens, protocol of balancekv"
ALL = f"mean over layers 0,1,4, {PLACE}"
FOUR = "mean over layers 1,4,12,20, 4,096 tokens, protocol of balancekv"
THEORY_STREAM = "balancekv:form=stream:c=theory"
TESTS = "tests/methods/test_merge_reduce.py"
NOT_HERE = "LongBench and the weights are not to be had here"


def _error(method: str, budget: str, setting: str = ALL, model: str = SMOL) -> Ask:
    return answers("attention_error", method, budget, setting, form=".3f", model=model)


def _form(at: str, says: str, method: str, why: str = "", place: tuple[str, str] = (LONG, BIG)) -> Claim:
    """A form of the method beside uniform samples at every rate."""
    uniform = {f"uniform {rate}": _error("uniform", rate, *place) for rate in RATES}
    return Claim(at, says, "as Fig. 2", {rate: _error(method, rate, *place) for rate in RATES}, beside=uniform,
                 rule=" and ".join(f"{rate} < uniform {rate}" for rate in RATES), why=why,
                 on="1.5B" if place[1] == BIG else "135M")  # fmt: skip


def _rate(number: int, rate: str, size: str, *place: str) -> Claim:
    own = {name: _error(method, rate, *place) for name, method in (("ours", "balancekv"), ("uniform", "uniform"))}
    return Claim(
        f"T = {number}", "error much below uniform's", f"{rate} of the middle", own, rule="ours < uniform", on=size
    )


def _each_layer() -> Claim:
    methods = {"ours": "balancekv", "uniform": "uniform"}
    asks = {
        f"{name} {rate} {layer}": _error(method, rate, f"layer {layer}, {PLACE}")
        for name, method in methods.items()
        for rate in RATES
        for layer in LAYERS
    }
    rule = " and ".join(f"ours {rate} {layer} < uniform {rate} {layer}" for rate in RATES for layer in LAYERS)
    return Claim("each layer and rate", "error below uniform's", "3 layers, 4 rates", asks, rule=rule, brief=True,
                 on="errors of single layers: [report](../report/report.md#attention-error)")  # fmt: skip


def _lines(method: str) -> Ask:
    return answers("lines", method, "1/4", "lines 200")


THEORY = [
    Claim(
        "Theorem 3.2",
        "the sums of the two halves of a set differ by an amount that does not grow with the set",
        "any set",
        test=f"{TESTS}::test_discrepancy_does_not_grow_with_the_stream",
    ),
    Claim(
        "Theorem 3.3",
        "MergeAndReduce: the error falls as 1 / t for batches of t tokens",
        "log2(n / t) levels",
        test=f"{TESTS}::test_errors_fall_with_one_over_t_and_beat_samples_of_the_same_size",
        why="with c = 1",
    ),
    Claim(
        "Theorem 3.1, Eq. (2)",
        "|z - exact| at most eps |softmax| |V| with e^(2 r² / sqrt(d)) / eps tokens; independent samples need 1 / eps²",
        "norms of queries and keys up to r",
        test="tests/methods/test_guarantees.py::test_the_error_of_balancekv_falls_faster_than_that_of_a_sample",
        why="with c = 1; with the theorem's c = 30 ln(n / delta) it is worse than a sample",
    ),
    _form(
        "Eq. (2), real keys",
        "error below uniform's with the theorem's c",
        THEORY_STREAM,
        "30 ln(n / delta) is so large that the walk hardly balances",
    ),
    Claim(
        "Theorem 3.1, memory",
        "O*(e^(2 r² / sqrt(d)) / eps) in all, its square as time of a step",
        "no constant is given",
        test=f"{TESTS}::test_peak_storage_is_the_known_one",
        why="what is stored is at most t (T + 1)",
    ),
    Claim(
        "Theorem 3.4",
        "the walk of Alweiss, Liu and Sawhney",
        "cited",
        test=f"{TESTS}::test_discrepancies_are_the_known_ones",
    ),
    Claim("Fig. 1", "the tree of MergeAndReduce", "-", verdict=NO_NUMBER, why="a drawing"),
]

FIGURE_2 = [
    *(
        _rate(number, rate, *place)
        for number, rate in enumerate(RATES, 1)
        for place in (("1.5B", LONG, BIG), ("0.5B", FOUR, QWEN), ("135M", ALL, SMOL))
    ),
    _each_layer(),
    _form("Algorithm 1 as a stream", "covered by Theorem 3.1", "balancekv:form=stream", "with c = 1"),
    Claim(
        "Algorithm 1 as published",
        "covered by Theorem 3.1",
        "batches of 256, no budget",
        {"ours": _error("balancekv:form=paper", "1/4", LONG, BIG), "uniform": _error("uniform", "1/4", LONG, BIG)},
        rule="ours < uniform",
        why="its size follows from the batches; beside a sample of a quarter",
        on="1.5B",
    ),
    _form("§4, exactly half", "each halving keeps exactly half of a block", "balancekv:select=strict"),
    _form("authors' code, temp = 0.1", "not in the paper", "balancekv:temp=0.1", place=(ALL, SMOL)),
    _form("authors' code, other weights", "not in the paper", "balancekv:den_weight=pow2", place=(ALL, SMOL)),
]

TABLE_1 = [
    Claim(name, says, "see above", verdict=CANNOT, why=NOT_HERE)
    for name, says in (
        ("average", "BalanceKV 44.99, uniform 44.82, SnapKV 44.57, PyramidKV 44.03, StreamingLLM 42.51, full 48.63"),
        ("single-document QA", "36.97, 37.17, 38.23, 36.80, 27.86, 45.71"),
        ("multi-document QA", "42.37, 42.66, 42.61, 41.54, 39.05, 45.32"),
        ("summaries", "23.82, 24.31, 19.07, 18.91, 20.70, 26.69"),
        ("few-shot", "65.49, 65.09, 64.65, 64.88, 66.16, 68.62"),
        ("synthetic", "58.46, 58.30, 59.60, 59.68, 58.37, 59.25"),
        ("code", "42.82, 41.40, 43.28, 42.38, 42.91, 46.17"),
    )
]

AROUND_TABLE_1 = [
    Claim(
        "§4.2, text",
        "the best of the five at a quarter",
        "the mean of Table 1",
        {
            "BalanceKV": _lines("balancekv"),
            "uniform": _lines("uniform"),
            "SnapKV": _lines("snapkv"),
            "PyramidKV": _lines("pyramidkv"),
            "StreamingLLM": _lines("streamingllm"),
        },
        rule="BalanceKV > SnapKV and BalanceKV > PyramidKV and BalanceKV > StreamingLLM and BalanceKV > uniform",
        on="Qwen2.5-Coder-1.5B, one line of 200, the hardest task for a method that asks no query",
    ),
    Claim(
        "§4.2, text",
        "best on summaries by a large margin, 23.82",
        "Table 1",
        verdict=FAILS,
        why="uniform has 24.31 there; the lead over uniform in the mean is 0.17",
    ),
    Claim(
        "§4",
        "all blocks are walked in parallel",
        "blocks of 256, T = 2; no time is given",
        {"added to a prefill": ask("prefill", "overhead", form=".1%", method="balancekv:budget=8192", beside=None)},
        verdict=OTHER,
        on="Llama-3.1-8B shape, 32,768 tokens, a quarter kept, H200",
    ),
]

PAPER = Paper(
    "balancekv",
    "BalanceKV",
    ("balancekv:budget=25%", "balancekv:form=stream", "balancekv:form=paper:c=theory"),
    [
        Part("Theory", THEORY),
        Part(
            "Error of one layer (Fig. 2)",
            FIGURE_2,
            "The paper's: layers 1, 2 and 5 of Llama-3.1-8B and Ministral-8B, 300 TriviaQA prompts, first and last 256 "
            "tokens kept, the last 256 queries, 10 seeds, A100. Ours, with the same protocol and number of seeds, on "
            "one speech: layers 1, 2 and 5 of Qwen2.5-Coder-1.5B (8,192 tokens) and of SmolLM2-135M (2,048), layers 2, "
            "5, 13 and 21 of Qwen2.5-Coder-0.5B (4,096). Values are relative errors of the output; the paper has its "
            "own only as a picture.",
        ),
        Part(
            "LongBench (Table 1)",
            [*TABLE_1, *AROUND_TABLE_1],
            "Llama-3.1-8B, LongBench-E, a quarter of the prompt, blocks of 256, A6000. Columns as in the first line.",
        ),
    ],
)
