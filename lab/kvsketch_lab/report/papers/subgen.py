"""SubGen (arXiv 2402.06082) and ClusterGen, its later version: one algorithm, one set of experiments."""

from __future__ import annotations

from kvsketch_lab.report.kinds import UNSEEN
from kvsketch_lab.report.papers.claims import CANNOT, FAILS, NO_NUMBER, OTHER, Ask, Claim, Paper, Part, answers, ask

SMALL, BIG = "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
# 64 centers cover keys better than values, each beside one center.
KEYS_CLUSTER = "keys.radius['64'] | sum / keys.radius['1'] | sum < values.radius['64'] | sum / values.radius['1'] | sum"
RADIUS = "(keys.radius['512'] | sum) / (keys.radius['512'] | length)"
K_CENTER = "k-center over H2O and sinks"
BETTER = "k-center > H2O and k-center > sinks"


def _table(lines: int, budget: str, recent: str = "") -> dict[str, Ask]:
    """The rows of the table at one length."""
    center = f"kcenter:recent={recent}" if recent else "kcenter"
    methods = {"k-center": center, "H2O": "h2o", "sinks": "streamingllm", "full": "full"}
    return {name: _lines(method, budget, lines, unseen=bool(recent)) for name, method in methods.items()}


def _lines(method: str, budget: str, lines: int, unseen: bool = False) -> Ask:
    """`unseen`: the question comes after compression."""
    own = budget if method != "full" else ""
    return answers("lines", method, own, f"lines {lines}", variant=UNSEEN if unseen else "")


def _length(at: str, says: str, lines: tuple[int, int], budget: str, recents: dict[int, str]) -> list[Claim]:
    """`recents`: the recent tokens, and the share of the budget that they are here."""
    theirs, ours = lines
    return [
        Claim(f"{at}, {recent:,} recent", says, f"{theirs} lines, {budget} of the cache", _table(ours, budget, share),
              rule=BETTER, on=f"{ours} lines, as many tokens; asked after compression")
        for recent, share in recents.items()
    ]  # fmt: skip


def _layers(formula: str, form: str) -> dict[str, Ask]:
    """The mean over the layers of both models."""
    models = {"0.5B": SMALL, "1.5B": BIG}
    return {name: ask("eval/", formula, form=form, kind="clusterability", model=of) for name, of in models.items()}


def _error(budget: str) -> Ask:
    place = "mean over layers 0,1,4,14,27, 2,048 tokens"
    return answers("attention_error", "subgen:normalizer=paper", budget, place)


THEORY = [
    Claim(
        "Lemma 1 (2.2)",
        "samples are drawn in proportion to the squared norms of the values",
        "the text before it says norms of keys; the proof has values",
        test="tests/methods/test_subgen.py::test_samples_follow_the_squared_norms",
    ),
    Claim(
        "Lemma 2 (2.3)",
        "representatives lie more than delta apart, members within delta of one; counts are exact",
        "any stream",
        test="tests/methods/test_subgen.py::test_lemma_of_the_clusters_after_every_token",
    ),
    Claim(
        "Theorem 1 (2.4), Eq. (3)",
        "error at most eps |softmax| |V| with probability .99 for s of order d / eps²",
        "t of order e^(2 delta r) log n / eps²",
        test="tests/methods/test_guarantees.py::test_the_error_of_subgen_is_at_most_sqrt_d_over_s",
        why="on keys that cluster",
    ),
    Claim(
        "Eq. (3), real keys",
        "an error of eps, and half of it with four times the samples",
        "as above",
        {"1/4": _error("1/4"), "1/16": _error("1/16")},
        rule="1/4 < 1 and 1/16 >= 2 * 1/4",
        why="real keys lie too far apart for so few clusters",
        on="Qwen2.5-Coder-1.5B, 2,048 tokens: relative error of the output with 1/4 and 1/16 of the middle kept",
    ),
    Claim(
        "Theorem 1 (2.4), t; Corollary 1 (2.5)",
        "sublinear memory and time if delta r = o(log n)",
        "delta: radius of a cluster, r: norm of a query",
        {"delta r / sqrt(d)": ask("eval/", f"{RADIUS} * query_norm.mean / 128 ** 0.5", form=".0f",
                                  kind="clusterability", model=BIG)},
        rule="delta r / sqrt(d) < 7.6",
        why="log n is 7.6; e^(2 delta r) keys for a cluster are more than any cache holds",
        on="Qwen2.5-Coder-1.5B, 512 centers of 2,048 tokens, mean over layers",
    ),
]  # fmt: skip

CLUSTERS = [
    Claim(
        "SubGen Fig. 1",
        "t-SNE: keys cluster better than values",
        "Llama-2-7B, MT-Bench, 1,024 generated tokens, 5 layers, 16 centers",
        _layers(f"1.0 if {KEYS_CLUSTER} else 0.0", ".0%"),
        rule="0.5B > 0.5 and 1.5B > 0.5",
        on="share of the layers in which 64 centers cover keys better than values",
    ),
    Claim(
        "ClusterGen Fig. 1",
        "the same; clearer with rotary positions (Llama-3.1, Gemma-2) than without (OPT, MPT)",
        "OPT-6.7B, MPT-7B, Llama-3.1-8B, Gemma-2-9B; TriviaQA, 5,600 tokens",
        verdict=CANNOT,
        why="no weights of these models here",
    ),
    Claim("ClusterGen B.1", "the same on more layers and heads", "as Fig. 1", verdict=NO_NUMBER, why="pictures"),
    Claim(
        "ClusterGen Table 1",
        "mean norm of a query: OPT 15.753, MPT 13.576, Llama-3.1 15.381, Gemma-2 23.800; "
        "leaderboard -, 5.98, 13.78, 20.98",
        "first 20 TriviaQA prompts",
        _layers("query_norm.mean", ".1f"),
        verdict=OTHER,
        why="other models; norms of the same size",
    ),
]

LINES = [
    *_length("5k tokens", "k-center .86, H2O .66, sinks .56, full .98; 1.51 GB of 2.35", (200, 300), "65%",
             {2048: "67%"}),
    *_length("7k tokens", "k-center .66, H2O .58, sinks .56, full 1.0; 2.01 GB of 3.49", (300, 450), "58%",
             {2048: "50%", 3072: "75%"}),
    *_length("9k tokens", "k-center .44, H2O .38, sinks .38, full .68; 2.26 GB of 4.61", (400, 600), "49%",
             {2048: "44%", 3072: "67%"}),
    *(
        Claim(f"half, {lines} lines", K_CENTER, "the table's order at half of the cache",
              _table(lines, "1/2") | {"SnapKV": _lines("snapkv", "1/2", lines)}, rule=BETTER)
        for lines in (200, 300, 400)
    ),
    Claim(
        "§4.1, text",
        "at 9k tokens H2O and sinks are 10% lower than .44",
        "as above",
        verdict=FAILS,
        why="their own table has .38: 6 points",
    ),
    Claim(
        "§4.1, text",
        "compression ratio 0.35 for 5k tokens",
        "as above",
        verdict=FAILS,
        why="their own table says 35% less: 65% stay",
    ),
    *(
        Claim(
            f"Abstract, {lines} lines",
            "the streaming algorithm is evaluated",
            "the experiments run k-center alone, once after the prompt",
            {
                "far keys absorbed": _lines("subgen:normalizer=paper", "1/2", lines, unseen=True),
                "clusters grown": _lines("subgen:normalizer=paper:policy=grow", "1/2", lines, unseen=True),
                "our default, no clusters": _lines("subgen", "1/2", lines),
            },
            verdict=OTHER,
            why="Algorithm 1 has no number in the papers",
            on="half of the cache; the first two asked after compression",
        )
        for lines in (200, 300, 400, 600)
    ),
]  # fmt: skip

LONG = [
    Claim(
        "ClusterGen Table 3",
        "k-center over sinks on single-document QA and code",
        "longchat-7B, LongBench, at most 20,000 tokens, 1,024 recent and 1,024 centers",
        verdict=CANNOT,
        why="LongBench is not to be had here, and the numbers are not in the text",
    ),
    Claim(
        "§4.2, text",
        "H2O runs out of memory at 20,000 tokens",
        "the authors' code of H2O, A100 80 GB",
        {
            "prefill over that of the full cache": ask(
                "prefill", "1 + overhead", unit="x", method="h2o:budget=2048", beside=None
            )
        },
        verdict=OTHER,
        why="a limit of that code: our kernel forms no n x n matrix",
        on="Llama-3.1-8B shape, 32,768 tokens, H200",
    ),
]

PAPER = Paper(
    "subgen",
    "SubGen and ClusterGen",
    ("kcenter:budget=65%:recent=67%", "subgen:normalizer=paper:policy=grow"),
    [
        Part("Theory", THEORY, "Numbers of theorems are those of SubGen, in brackets those of ClusterGen."),
        Part("Do keys cluster?", CLUSTERS, "Ours: Qwen2.5-Coder-0.5B and 1.5B, all layers, a speech of 2,048 tokens."),
        Part(
            "Line retrieval (SubGen Table 1, ClusterGen Table 2)",
            LINES,
            "The papers': longchat-7B, LongEval, 50 questions, the better of 2,048 and 3,072 recent tokens; the "
            "numbers of both papers are the same, though one names an RTX 6000 and the other an A100. Ours: "
            "Qwen2.5-Coder-1.5B; lines that come to as many tokens.",
        ),
        Part("Long inputs", LONG),
    ],
)
