"""ClusterKV (arXiv 2412.03213)."""

from __future__ import annotations

from kvsketch_lab.report.papers.claims import CANNOT, NO_NUMBER, OTHER, Ask, Claim, Paper, answers, ask

OURS = "clusterkv:tokens_per_cluster=80:recluster_into=4:rounds=20:completion=false"
PAPERS = "clusterkv:budget=1024:tokens_per_cluster=80:rounds=20:recluster_into=4:completion=false"
QWEN = "Qwen2.5-Coder-1.5B"
LLAMA = "Llama-3.1-8B shape, random weights, captured steps, H200"
LONGBENCH = "GLM4-9B, eight LongBench tasks up to 32k tokens, budgets 256 to 2,048; RTX 6000 Ada"
BUDGETS = ("256", "512", "1024", "2048")


def _recall(method: str, budget: str, tokens: int = 8192) -> Ask:
    return answers("recall", method, budget, f"tokens {tokens:,}")


def _lines(method: str, lines: int) -> Ask:
    return answers("lines", method, "1/16" if method != "full" else "", f"lines {lines}")


def _perplexity(method: str) -> Ask:
    budget = "1024" if method != "full" else ""
    return answers("perplexity", method, budget, "prefill, 64 steps", form="+.2f")


def _step(method: str, prompt: int, batch: int, shape: str = "llama-3.1-8b") -> Ask:
    return ask("decode_all", "step_ms or none", method=method, prompt=prompt, batch=batch, shape=shape)


def _faster(prompt: int, batch: int, rival: str = "full") -> Ask:
    """How many times as long a step of the rival takes."""
    wanted = _step(rival, prompt, batch)
    return Ask(wanted.kind, wanted.formula, ".2f", "x", _step(PAPERS, prompt, batch), wanted.where)


def _whole(prompt: int, batch: int, steps: int = 1024) -> Ask:
    """Prefill and 1,024 steps of the full cache over those of the method."""
    formula = f"prefill_ms + {steps} * step_ms if step_ms else none"
    method, full = (
        ask("decode_all", formula, method=each, prompt=prompt, batch=batch, shape="llama-3.1-8b")
        for each in (PAPERS, "full")
    )
    return Ask(full.kind, full.formula, ".2f", "x", method, full.where)


def _hits(steps: int) -> Ask:
    return ask("eval/", f"cluster_hits['{steps}']", form=".0%", kind="recall", method=OURS, budget="1024",
               model="qwen2.5-coder-1.5b")  # fmt: skip


PAPER = Paper(
    "clusterkv",
    "ClusterKV",
    (f"{OURS}:budget=1024",),
    {
        "Observations": [
            Claim("Fig. 1, 2, 4 to 8", "the idea, the system, the kernels", "-", verdict=NO_NUMBER, why="drawings"),
            Claim(
                "Fig. 3a",
                "the rank of a token changes over 64 steps: token 3,200 becomes important after 20 steps",
                "Llama-3-8B, 8,192 tokens",
            ),
            Claim(
                "Fig. 3b",
                "a page of 16 tokens holds one or two important ones",
                "Llama-3-8B, 8k tokens",
            ),
        ],
        "Answers": [
            Claim(
                "Fig. 9",
                "above Quest and InfiniGen at most budgets; close to the full cache from 1k to 2k tokens on",
                LONGBENCH,
                verdict=CANNOT,
                why="LongBench and the weights are not to be had here",
            ),
            Claim("Table I", "the averages of Fig. 9", LONGBENCH, verdict=CANNOT,
                  why="the numbers are not in the text"),
            *(
                Claim(
                    f"the same question, {lines} lines",
                    "above Quest, close to the full cache",
                    "our own task: one line of many, one token in 16 read",
                    {
                        "paper's setting": _lines(OURS, lines),
                        "our default": _lines("clusterkv", lines),
                        "Quest": _lines("quest", lines),
                        "full": _lines("full", lines),
                    },
                    rule="paper's setting > Quest",
                    on=QWEN,
                )
                for lines in (200, 400)
            ),
            Claim(
                "Fig. 10",
                "perplexity at most 0.5 above the full cache's, Quest about 4, InfiniGen about 2",
                "GLM4-9B, PG19, 1 to 32,000 tokens, budget 1,024",
                {
                    "paper's setting": _perplexity(OURS),
                    "our default": _perplexity("clusterkv"),
                    "Quest": _perplexity("quest"),
                    "InfiniGen": _perplexity("infinigen"),
                },
                rule="paper's setting <= 0.5",
                on=f"{QWEN}, speeches, a prefill and 64 compressed steps",
            ),
            Claim(
                "Fig. 10, order",
                "below Quest's and InfiniGen's",
                "as above",
                {
                    "paper's setting": _perplexity(OURS),
                    "Quest": _perplexity("quest"),
                    "InfiniGen": _perplexity("infinigen"),
                },
                rule="paper's setting < Quest and paper's setting < InfiniGen",
                on="as above",
            ),
        ],
        "Recall of the important tokens": [
            *(
                Claim(
                    f"Fig. 11a, budget {int(budget):,}",
                    "recall above Quest's and InfiniGen's",
                    "GLM4-9B, one NarrativeQA text of 32k tokens",
                    {
                        "paper's setting": _recall(OURS, budget),
                        "our default": _recall("clusterkv", budget),
                        "Quest": _recall("quest", budget),
                        "InfiniGen": _recall("infinigen", budget),
                        "InfiniGen, whole budget": _recall("infinigen:alpha=100", budget),
                    },
                    rule="paper's setting > Quest and paper's setting > InfiniGen",
                    on=f"{QWEN}, a speech of 8,192 tokens",
                    why="InfiniGen with `alpha=100` reads its whole budget and finds more",
                )
                for budget in BUDGETS
            ),
            Claim(
                "Fig. 11b, distance",
                "cosine above L2 and inner product",
                "as above, C0 = 400",
            ),
            Claim(
                "Fig. 11b, C0",
                "more clusters find more; little gain beyond 400, one for 80 tokens",
                "as above, C0 = 100 to 800",
            ),
        ],
        "Speed": [
            Claim(
                "Fig. 12, latency",
                "2 times as fast: prefill and 1,024 steps after 32k tokens, budget 1,024",
                "Llama-3.1-8B, batch 1; RTX 6000 Ada",
                {"faster": _whole(32768, 1), "steps alone": _faster(32768, 1)},
                rule="faster >= 2",
                why="an H200 reads its memory five times as fast, so a full cache costs less",
                on=LLAMA,
            ),
            Claim(
                "Fig. 12, throughput",
                "up to 2.5 times the tokens per second while decoding",
                "Llama-3.1-8B, 8k to 32k tokens",
                {"32k, batch 1": _faster(32768, 1), "32k, batch 8": _faster(32768, 8), "8k, batch 8": _faster(8192, 8)},
                rule="32k, batch 8 >= 2.5",
                on=LLAMA,
            ),
            Claim(
                "Fig. 12, clustering",
                "6 to 8% of the prefill",
                "Llama-3.1-8B, 8k to 32k tokens",
                {
                    "clustering": ask("recall_all", "share", form=".1%", part="kmeans", clusters=409, rounds=20,
                                      contender="ours")
                },
                rule="clustering <= 0.08",
                why="in line; the paper's runs beside the next layer",
                on=LLAMA,
            ),
            Claim(
                "Fig. 13a",
                "2.3 times as fast as InfiniGen",
                "OPT-6.7B, 2k tokens, budget 256, FlexGen",
                {"32k": _faster(32768, 1, "infinigen:budget=1024"), "8k": _faster(8192, 1, "infinigen:budget=1024")},
                rule="32k >= 2.3",
                why="both in our own captured steps, without FlexGen",
                on=f"{LLAMA}, budget 1,024",
            ),
            Claim(
                "Fig. 13a, selection",
                "about 5% of the decode latency",
                "OPT-6.7B",
                {
                    "selection": ask("recall_all", "share", form=".1%", part="selection", clusters=409, budget=1024,
                                     batch=1, contender="ours")
                },
                rule="selection <= 0.06",
                on=LLAMA,
            ),
            Claim(
                "Fig. 13b",
                "within 5% of Quest's latency",
                "Llama-3.1-8B, budget 1k",
                {
                    "ours, ms": _step(PAPERS, 32768, 1),
                    "Quest, ms": _step("quest:budget=1024", 32768, 1),
                    "ours, 8k, ms": _step(PAPERS, 8192, 1),
                    "Quest, 8k, ms": _step("quest:budget=1024", 8192, 1),
                },
                rule="ours, ms <= 1.05 * Quest, ms and ours, 8k, ms <= 1.05 * Quest, 8k, ms",
                on=f"{LLAMA}, batch 1",
            ),
        ],
        "The cluster cache": [
            Claim(
                "§V-C, hits",
                "63% of the clusters were read one step before (R = 1), 74% two (R = 2)",
                "one NarrativeQA text of 32k tokens, budget 1,024",
                {"R = 1": _hits(1), "R = 2": _hits(2)},
                rule="R = 1 >= 0.63 and R = 2 >= 0.74",
                on=f"{QWEN}, a speech of 8,192 tokens",
            ),
            Claim(
                "§V-C, throughput",
                "2.3 and 3 times that of loading every cluster from the host",
                "RTX 6000 Ada, R = 1 and 2",
            ),
        ],
        "The system": [
            Claim(
                "§III-B",
                "16 sinks, C0 = L / 80, 4 more clusters for every 320 generated tokens",
                "settings",
                verdict=OTHER,
                why=f"the paper's setting is `{OURS}`; our default has a cluster for 20 tokens and completion",
            ),
            Claim(
                "§IV-B, overlap",
                "clustering runs beside attention and the next layer",
                "-",
            ),
            Claim(
                "§IV-B, kernel",
                "512 threads in 16 or 32 parts of 128 channels are the fastest",
                "their CUDA kernel",
                verdict=CANNOT,
                why="our kernel is another, in Triton, with no such choice",
            ),
            Claim(
                "§IV-D",
                "R = 1 is a good balance",
                "-",
                {"R = 1": _hits(1), "R = 2": _hits(2)},
                verdict=OTHER,
                why="R = 2 doubles the device memory of the hot set for these hits",
                on="as above",
            ),
        ],
    },
)  # fmt: skip
