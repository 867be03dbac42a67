"""ClusterKV (arXiv 2412.03213)."""

from __future__ import annotations

from typing import Any

from kvsketch_lab.report.kinds import UNSEEN
from kvsketch_lab.report.papers.claims import CANNOT, NO_NUMBER, OTHER, Ask, Claim, Paper, Part, answers, ask, attended

# Records name no parameter that has its default: a budget of 1,024 here.
PAPERS = "clusterkv:tokens_per_cluster=80:rounds=20:recluster_into=4:completion=false"
SETTING, DEFAULT = "paper's setting", "our default"
METHODS = {SETTING: PAPERS, DEFAULT: "clusterkv", "Quest": "quest", "InfiniGen": "infinigen"}
SHORT, LONG = 8192, 32000  # tokens of a text
LEVAL = ("tpo", "quality", "coursera", "sci_fi", "topic_retrieval_longchat")
HALF_B = "Qwen2.5-Coder-0.5B, a speech of 4,096 tokens, mean over layers"
NOT_HERE = "LongBench and the weights are not to be had here"


def _recall(method: str, budget: str, tokens: int = 8192) -> Ask:
    return answers("recall", method, budget, f"tokens {tokens:,}")


def _lines(lines: int) -> Claim:
    at = f"lines {lines}"
    own = {
        "paper's setting": answers("lines", PAPERS, "1/16", at, variant=UNSEEN),
        "our default": answers("lines", "clusterkv", "1/16", at, variant=UNSEEN),
        "full": answers("lines", "full", "", at, variant=UNSEEN),
        "Quest": answers("lines", "quest", "1/16", at),
    }
    return Claim(f"as Fig. 9: {lines} lines", "above Quest", "our own task: one token in 16 is read", own,
                 rule="paper's setting > Quest",
                 on="asked after compression; Quest's prompt ended with the question")  # fmt: skip


def _leval(setting: str, budget: str) -> dict[str, Ask]:
    own = {
        name: answers("leval", method, budget, setting, variant=UNSEEN)
        for name, method in METHODS.items()
        if name != DEFAULT
    }
    return own | {"full": answers("leval", "full", "", setting, variant=UNSEEN)}


def _perplexity(*names: str, steps: int) -> dict[str, Ask]:
    place = f"prefill, {steps} steps"
    return {name: answers("perplexity", METHODS[name], "1024", place, form="+.2f") for name in names}


def _figure_11a(budget: int, tokens: int) -> Claim:
    names = METHODS if tokens == SHORT else {name: METHODS[name] for name in (SETTING, "Quest")}
    own = {name: _recall(method, str(budget), tokens) for name, method in names.items()}
    rule = f"{SETTING} > Quest" + (f" and {SETTING} > InfiniGen" if tokens == SHORT else "")
    return Claim(f"Fig. 11a, budget {budget:,}", "recall above Quest's and InfiniGen's", "32k tokens",
                 own | {"InfiniGen, whole budget": _recall("infinigen:alpha=100", str(budget), tokens)},
                 rule=rule, on=f"{tokens:,} tokens")  # fmt: skip


def _metric(budget: str) -> Claim:
    names = {"cosine": "", "L2": ":metric=l2", "inner product": ":metric=inner"}
    own = {name: _recall(PAPERS + option, budget, LONG) for name, option in names.items()}
    return Claim(f"Fig. 11b, distance, budget {int(budget):,}", "cosine above L2 and inner product", "C0 = 400", own,
                 rule="cosine > L2 and cosine > inner product", on=f"{LONG:,} tokens")  # fmt: skip


def _clusters() -> Claim:
    """Recall by the number of clusters of the prompt."""
    sizes = {100: 320, 200: 160, 400: 80, 600: 53, 800: 40}
    own = {
        f"C0 = {count}": _recall(PAPERS.replace("cluster=80", f"cluster={size}"), "1024", LONG)
        for count, size in sizes.items()
    }
    return Claim("Fig. 11b, C0", "more clusters find more; little gain beyond 400", "C0 = 100 to 800", own,
                 rule="C0 = 200 > C0 = 100 and C0 = 400 > C0 = 200 and C0 = 800 < 1.1 * C0 = 400",
                 on=f"{LONG:,} tokens, budget 1,024")  # fmt: skip


def _host_step(keep_steps: int) -> Ask:
    """Milliseconds of a step with queries that resemble each other as in real text."""
    kept = f":keep_steps={keep_steps}" if keep_steps != 1 else ""
    return ask("offload", "host_ms", method=f"{PAPERS}{kept}:locality=0.96")


def _cached(keep_steps: int) -> Ask:
    without = _host_step(0)
    return ask("offload", without.formula, unit="x", over=_host_step(keep_steps), **without.where)


def _decode(formula: str, method: str, prompt: int, batch: int, over: Ask | None = None) -> Ask:
    where: dict[str, Any] = {"method": method, "prompt": prompt, "batch": batch, "shape": "llama-3.1-8b"}
    return ask("decode_all", f"{formula} if step_ms else none", unit="x" if over else "", over=over, **where)


def _faster(prompt: int, batch: int, rival: str = "full", formula: str = "step_ms") -> Ask:
    """How many times as long the rival takes."""
    return _decode(formula, rival, prompt, batch, over=_decode(formula, PAPERS, prompt, batch))


def _hits(steps: int, tokens: int) -> Ask:
    where: dict[str, Any] = {"kind": "recall", "method": PAPERS, "budget": "1024", "model": "qwen2.5-coder-1.5b"}
    where |= {"tokens": tokens}
    return ask("eval/", f"cluster_hits['{steps}']", form=".0%", **where)


OBSERVATIONS = [
    Claim("Fig. 1, 2, 4 to 8", "the idea, the system, the kernels", "-", verdict=NO_NUMBER, why="drawings"),
    Claim(
        "Fig. 3a",
        "which tokens are important changes over 64 steps: token 3,200 becomes so after 20",
        "Llama-3-8B, 8,192 tokens",
        {f"still after {steps}": attended(f"still['{steps}']") for steps in (1, 20)},
        rule="still after 20 < 0.9",
        on=f"of the 128 tokens with most attention; {HALF_B}",
    ),
    Claim(
        "Fig. 3b",
        "a page of 16 tokens holds one or two important ones",
        "Llama-3-8B, 8k tokens",
        {"in a page that has any": attended("in_page", form=".1f")},
        rule="in a page that has any <= 2",
        on=f"of the 128 tokens with most attention; {HALF_B}",
    ),
]

ANSWERS = [
    Claim(
        "Fig. 9",
        "above Quest and InfiniGen at most budgets, close to the full cache from 1k to 2k tokens on",
        "GLM4-9B, eight LongBench tasks, up to 32k tokens, budgets 256 to 2,048",
        verdict=CANNOT,
        why=f"{NOT_HERE}; L-Eval below",
    ),
    Claim("Table I", "the averages of Fig. 9", "as Fig. 9", verdict=CANNOT, why="the numbers are not in the text"),
    *(
        Claim(f"as Table I: L-Eval, budget {int(budget):,}", "above Quest and InfiniGen",
              "our stand-in: mean over five closed tasks", _leval("average of the tasks", budget),
              rule="paper's setting > Quest and paper's setting > InfiniGen")
        for budget in ("256", "1024")
    ),
    *(
        Claim(f"as Fig. 9: {task}", "close to the full cache at 1k", "our stand-in: L-Eval", _leval(task, "1024"),
              rule="paper's setting >= 0.9 * full")
        for task in LEVAL
    ),
    _lines(200),
    _lines(400),
    Claim(
        "Fig. 10",
        "perplexity at most 0.5 above the full cache's, Quest about 4, InfiniGen about 2",
        "GLM4-9B, PG19, 1 to 32,000 tokens, budget 1,024",
        _perplexity(SETTING, "Quest", "InfiniGen", steps=16),
        rule="paper's setting <= 0.5",
        on="a speech: 16 compressed steps after every 1,000 of 32,000 tokens",
    ),
    Claim(
        "Fig. 10, order",
        "below Quest and InfiniGen",
        "as Fig. 10",
        _perplexity(SETTING, "Quest", "InfiniGen", steps=16),
        rule="paper's setting < Quest and paper's setting < InfiniGen",
    ),
    Claim(
        "Fig. 10, our default",
        "as Fig. 10",
        "as Fig. 10",
        _perplexity(DEFAULT, "Quest", "InfiniGen", steps=64),
        rule="our default <= 0.5",
        on="four speeches: 64 steps after 8,000, 16,000 and 24,000 tokens",
    ),
]  # fmt: skip

RECALL = [
    *(_figure_11a(budget, LONG) for budget in range(256, 2049, 256)),
    *(_figure_11a(budget, SHORT) for budget in (256, 512, 1024, 2048)),
    *(_metric(budget) for budget in ("256", "512", "1024", "2048")),
    _clusters(),
]

SPEED = [
    Claim(
        "Fig. 12, latency",
        "2 times as fast: 32k tokens and 1,024 steps, budget 1,024",
        "batch 1",
        {"in all": _faster(32768, 1, formula="prefill_ms + 1024 * step_ms"), "steps": _faster(32768, 1)},
        rule="in all >= 2",
    ),
    Claim(
        "Fig. 12, throughput",
        "up to 2.5 times the tokens per second",
        "8k to 32k tokens",
        {
            "32k, batch 1": _faster(32768, 1),
            "32k, batch 8": _faster(32768, 8),
            "8k, batch 1": _faster(8192, 1),
            "8k, batch 8": _faster(8192, 8),
        },
        rule="32k, batch 8 >= 2.5",
    ),
    Claim(
        "Fig. 12, clustering",
        "6 to 8% of the prefill",
        "8k to 32k tokens",
        {"k-means": ask("recall_all", "share", form=".1%", part="kmeans", clusters=409, rounds=20,
                        contender="ours")},
        rule="k-means <= 0.08",
        on="32k tokens, 20 rounds, in line",
    ),
    Claim(
        "Fig. 13a",
        "2.3 times as fast as InfiniGen",
        "OPT-6.7B, 2k tokens, budget 256, FlexGen",
        {"32k": _faster(32768, 1, "infinigen"), "8k": _faster(8192, 1, "infinigen")},
        rule="32k >= 2.3",
        on="budget 1,024; both in our own captured steps",
    ),
    Claim(
        "Fig. 13a, selection",
        "about 5% of the latency of a step",
        "as Fig. 13a",
        {"selection": ask("recall_all", "share", form=".1%", part="selection", clusters=409, budget=1024, batch=1,
                          contender="ours")},
        rule="selection <= 0.06",
        on="32k tokens",
    ),
    Claim(
        "Fig. 13b",
        "within 5% of Quest",
        "budget 1k",
        {
            "ours, 32k, ms": _decode("step_ms", PAPERS, 32768, 1),
            "Quest, 32k, ms": _decode("step_ms", "quest", 32768, 1),
            "ours, 8k, ms": _decode("step_ms", PAPERS, 8192, 1),
            "Quest, 8k, ms": _decode("step_ms", "quest", 8192, 1),
        },
        rule="ours, 32k, ms <= 1.05 * Quest, 32k, ms",
    ),
]  # fmt: skip

CACHE = [
    *(
        Claim(
            "§V-C, hits",
            "63% of the clusters were read in the step before (R = 1), 74% in the two before (R = 2)",
            "one NarrativeQA text of 32k tokens",
            {"R = 1": _hits(1, tokens), "R = 2": _hits(2, tokens)},
            rule="R = 1 >= 0.63 and R = 2 >= 0.74",
            on=f"Qwen2.5-Coder-1.5B, a speech of {tokens:,} tokens, budget 1,024",
        )
        for tokens in (LONG, SHORT)
    ),
    *(
        Claim(
            f"§V-C, throughput, R = {steps}",
            "2.3 and 3 times that without a cache, for R = 1 and 2",
            "as above",
            {"times": _cached(steps)},
            rule=f"times >= {least}",
            on="Llama-3.1-8B shape, 32,768 tokens, H200; queries as alike as in real text",
        )
        for steps, least in ((1, 2.185), (2, 2.85))
    ),
    Claim(
        "§IV-B",
        "clustering beside attention and the next layer costs less than in line",
        "no number",
        {
            "in line": ask("prefill", "overhead", form="+.1%", method=PAPERS, length=32768, beside=None),
            "beside": ask("prefill", "overhead", form="+.1%", method=PAPERS, length=32768, beside=True),
        },
        rule="beside < 0.9 * in line",
        why="k-means fills the GPU: nothing is left beside it",
        on="added to a prefill; Llama-3.1-8B shape, 32,768 tokens, H200",
    ),
    Claim(
        "§IV-B, kernel",
        "512 threads, 16 or 32 parts of 128 channels",
        "their CUDA kernel",
        verdict=CANNOT,
        why="ours is another kernel, in Triton, without that choice",
    ),
    Claim(
        "§III-B",
        "16 sinks, C0 = L / 80, 4 more clusters for every 320 tokens",
        "a setting",
        verdict=OTHER,
        why="our default has a cluster for 20 tokens",
    ),
]


def _on_host(method: str, share: str) -> Ask:
    where: dict[str, Any] = {"kind": "lines", "lines": 400, "question": "unseen", "budget": share}
    return ask("recall_bytes/", "score", method=method, **where)


TODAY = [
    Claim(
        f"400 lines, {share} of the bytes",
        "",
        "keys and values in host memory",
        {name: _on_host(method, share) for name, method in methods.items()},
        verdict=OTHER,
        why=f"the share is of the device's bytes; not in the paper{why}",
    )
    for share, methods, why in (
        ("1/4", {"16 bits": "clusterkv", "4 bits": "clusterkv:bits=4"}, ""),
        ("1/8", {"4 bits": "clusterkv:bits=4"}, "; in 16 bits the index alone is larger"),
    )
]

PAPER = Paper(
    "clusterkv",
    "ClusterKV",
    (f"{PAPERS}:budget=1024",),
    [
        Part("Observations", OBSERVATIONS),
        Part("Answers", ANSWERS, "Ours: Qwen2.5-Coder-1.5B."),
        Part(
            "Recall of the important tokens",
            RECALL,
            "The share of the tokens with the largest attention that a query reads. The paper's: GLM4-9B, one "
            "NarrativeQA text of 32k tokens. Ours: Qwen2.5-Coder-1.5B, one speech. InfiniGen with "
            "`alpha=100` reads its whole budget, which its published threshold does not.",
        ),
        Part(
            "Speed",
            SPEED,
            "The paper's: Llama-3.1-8B unless another model is named, RTX 6000 Ada. Ours: the shape of Llama-3.1-8B "
            "with random weights, captured steps, H200, whose memory is five times as fast.",
        ),
        Part("The system", CACHE),
        Part(
            "The same idea over rows of 4 bits",
            TODAY,
            "Ours: Qwen2.5-Coder-1.5B, our default in [few bits](../few_bits.md), asked after compression.",
        ),
    ],
)
