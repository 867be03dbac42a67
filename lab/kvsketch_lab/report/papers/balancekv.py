"""BalanceKV (arXiv 2502.07861)."""

from __future__ import annotations

from kvsketch_lab.report.papers.claims import CANNOT, FAILS, NO_NUMBER, OTHER, Ask, Claim, Paper, answers, ask

SMOL, QWEN = "smollm2-135m (float32)", "qwen2.5-coder-0.5b (float32)"
RATES = ("1/2", "1/4", "1/8", "1/16")
PLACE = "2,048 tokens, protocol of balancekv"
ALL = f"mean over layers 0,1,4, {PLACE}"
FIGURE = "Llama-3.1-8B and Ministral-8B, TriviaQA, first and last 256 tokens kept, last 256 queries, 10 seeds; A100"
ON = "SmolLM2-135M, layers 1, 2 and 5, one text of 2,048 tokens, 10 seeds, relative error of the output"
THEORY = "balancekv:form=paper:c=theory"


def _error(method: str, budget: str, setting: str = ALL, model: str = SMOL) -> Ask:
    return answers("attention_error", method, budget, setting, form=".3f", model=model)


def _beside_uniform(method: str, rates: tuple[str, ...] = RATES) -> dict[str, Ask]:
    """Ours and uniform's errors, by rate."""
    own = {f"ours {rate}": _error(method, rate) for rate in rates}
    return own | {f"uniform {rate}": _error("uniform", rate) for rate in rates}


def _below(rates: tuple[str, ...] = RATES) -> str:
    return " and ".join(f"ours {rate} < uniform {rate}" for rate in rates)


def _form(name: str, method: str, why: str) -> Claim:
    return Claim(name, "its error is below uniform's", FIGURE, _beside_uniform(method), rule=_below(), why=why, on=ON)


def _layers() -> dict[str, Ask]:
    names = {"ours": "balancekv", "uniform": "uniform"}
    return {
        f"{name} {rate} {layer}": _error(method, rate, f"layer {layer}, {PLACE}")
        for name, method in names.items()
        for rate in RATES
        for layer in (0, 1, 4)
    }


def _longbench(at: str, says: str) -> Claim:
    setting = "Llama-3.1-8B, LongBench-E, a quarter of the prompt, b = 256; A6000"
    return Claim(at, says, setting, verdict=CANNOT, why="LongBench and the weights are not to be had here")


def _lines(method: str) -> Ask:
    return answers("lines", method, "1/4", "lines 200")


PAPER = Paper(
    "balancekv",
    "BalanceKV",
    ("balancekv:budget=25%", "balancekv:form=stream", THEORY),
    {
        "Theory": [
            Claim(
                "Theorem 3.2",
                "the two halves of a set differ by an amount that does not grow with its size",
                "any set, c = 30 log(n / delta)",
                test="tests/methods/test_merge_reduce.py::test_discrepancy_does_not_grow_with_the_stream",
            ),
            Claim(
                "Theorem 3.3",
                "MergeAndReduce: error / n falls as 1 / t",
                "batches of t tokens, log2(n / t) levels",
                test="tests/methods/test_merge_reduce.py"
                "::test_errors_fall_with_one_over_t_and_beat_samples_of_the_same_size",
                why="with c = 1",
            ),
            Claim(
                "Theorem 3.1, Eq. (2)",
                "|z - exact| at most eps |softmax| |V| with e^(2 r² / sqrt(d)) / eps tokens, where independent samples "
                "need 1 / eps²",
                "norms of queries and keys up to r; c = 30 log(n / delta)",
                _beside_uniform(THEORY),
                rule=_below(),
                why="with the constant of the theorem the walk is a coin flip at these sizes, and only the loss of two "
                "samples instead of one is left",
                on=ON,
            ),
            Claim(
                "Theorem 3.4",
                "self-balancing walk of Alweiss, Liu and Sawhney",
                "cited",
                test="tests/methods/test_merge_reduce.py::test_discrepancies_are_the_known_ones",
            ),
            Claim(
                "Theorem 3.1, cost",
                "O*(e^(2 r² / sqrt(d)) / eps) memory, its square as time of a step",
                "any stream",
                test="tests/methods/test_merge_reduce.py::test_peak_storage_is_the_known_one",
                why="no constant is given; what is stored is at most t (T + 1)",
            ),
            Claim("Fig. 1", "the tree of MergeAndReduce", "-", verdict=NO_NUMBER, why="a drawing"),
        ],
        "Error of one layer (Fig. 2)": [
            *(
                Claim(
                    f"T = {number}",
                    "error much below uniform's",
                    f"{FIGURE}; {rate} of the middle",
                    {
                        "ours": _error("balancekv", rate),
                        "uniform": _error("uniform", rate),
                        "ours, 0.5B": _error("balancekv", rate, "mean over layers 1,4,12,20, 4,096 tokens, protocol of "
                                             "balancekv", QWEN),
                        "uniform, 0.5B": _error("uniform", rate, "mean over layers 1,4,12,20, 4,096 tokens, protocol "
                                                "of balancekv", QWEN),
                    },
                    rule="ours < uniform and ours, 0.5B < uniform, 0.5B",
                    on=ON.replace(", relative", "; 0.5B: layers 2, 5, 13 and 21 of 4,096 tokens; relative"),
                )
                for number, rate in enumerate(RATES, 1)
            ),  # fmt: skip
            Claim(
                "each layer and rate",
                "error below uniform's in each",
                FIGURE,
                _layers(),
                rule=" and ".join(
                    f"ours {rate} {layer} < uniform {rate} {layer}" for rate in RATES for layer in (0, 1, 4)
                ),
                brief=True,
                on=ON,
            ),
            _form("Algorithm 1 as a stream", "balancekv:form=stream", "the algorithm of the theorem within the budget"),
            _form("Algorithm 1 as published", "balancekv:form=paper", "sets grow with the logarithm of the length"),
            _form("exactly half, §4", "balancekv:select=strict", "the published code keeps exactly half of each block"),
            _form("temperature of the notebook", "balancekv:temp=0.1", "not in the paper; 0.1 in the authors' code"),
            _form("weights of the LongBench code", "balancekv:den_weight=pow2", "not in the paper"),
        ],
        "LongBench (Table 1)": [
            _longbench("average", "BalanceKV 44.99, uniform 44.82, SnapKV 44.57, PyramidKV 44.03, StreamingLLM 42.51, "
                       "all 48.63"),
            _longbench("single-document QA", "BalanceKV 36.97, uniform 37.17, SnapKV 38.23, PyramidKV 36.80, "
                       "StreamingLLM 27.86, all 45.71"),
            _longbench("multi-document QA", "42.37, 42.66, 42.61, 41.54, 39.05, all 45.32"),
            _longbench("summaries", "23.82, 24.31, 19.07, 18.91, 20.70, all 26.69"),
            _longbench("few-shot", "65.49, 65.09, 64.65, 64.88, 66.16, all 68.62"),
            _longbench("synthetic", "58.46, 58.30, 59.60, 59.68, 58.37, all 59.25"),
            _longbench("code", "42.82, 41.40, 43.28, 42.38, 42.91, all 46.17"),
            Claim(
                "best on average",
                "BalanceKV over SnapKV, PyramidKV, StreamingLLM and uniform at a quarter",
                "as above",
                {
                    "ours": _lines("balancekv"),
                    "SnapKV": _lines("snapkv"),
                    "PyramidKV": _lines("pyramidkv"),
                    "StreamingLLM": _lines("streamingllm"),
                    "uniform": _lines("uniform"),
                },
                rule="ours > SnapKV and ours > StreamingLLM and ours > uniform",
                why="retrieval of one line is the hardest case for a method that asks no query",
                on="Qwen2.5-Coder-1.5B, 200 lines, a quarter",
            ),
            Claim(
                "§4.2, text",
                "best on summaries by a large margin, 23.82",
                "as above",
                verdict=FAILS,
                why="uniform has 24.31 in the same table; the lead over uniform in the mean is 0.17",
            ),
        ],
        "Cost": [
            Claim(
                "§4, blocks",
                "all blocks of 256 are walked in parallel",
                "b = 256, T = 2",
                {"walks, share of a prefill": ask("prefill", "overhead", form=".1%", method="balancekv:budget=8192")},
                verdict=OTHER,
                why="the paper gives no time",
                on="Llama-3.1-8B shape, 32,768 tokens, a quarter kept, H200",
            ),
        ],
    },
)  # fmt: skip
