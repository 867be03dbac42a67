"""Keyformer (arXiv 2403.09054), by the page of its authors: its figures are read off within 0.2."""

from __future__ import annotations

from kvsketch_lab.report.papers.claims import CANNOT, FAILS, NO_NUMBER, OTHER, Ask, Claim, Paper, answers, ask

MPT = "MPT-7B, 50% of the cache; A100"
LLAMA = "Llama-2-7B shape (as many KV heads as query heads), random weights, captured steps, H200"
CNN = "CNN/DailyMail, 20 to 90% of the prompt"
QWEN = "Qwen2.5-Coder-1.5B"
# Context and generated tokens of the figure, and the mean length while the second are generated.
LENGTHS = {1024: (1536, 512), 2048: (3072, 1024), 4096: (6144, 2048)}


def _faster(method: str, context: int) -> Ask:
    prompt, budget = LENGTHS[context]
    where = {"prompt": prompt, "batch": 1, "shape": "llama-2-7b"}
    ours = ask("decode_all", "step_ms or none", method=f"{method}:budget={budget}", **where)
    return ask("decode_all", "step_ms or none", unit="x", over=ours, method="full", **where)


def _speed(context: int, keyformer: float, h2o: float) -> Claim:
    prompt, budget = LENGTHS[context]
    return Claim(
        f"Fig. 8 right, {context:,} + {context:,} tokens",
        f"{keyformer} times as fast as the full cache, H2O {h2o}",
        MPT,
        {"Keyformer": _faster("keyformer", context), "H2O": _faster("h2o", context)},
        rule=f"Keyformer >= {keyformer}",
        on=f"{LLAMA}; a step after {prompt:,} tokens, budget {budget:,}",
    )


def _lines(method: str, lines: int, budget: str) -> Ask:
    return answers("lines", method, budget, f"lines {lines}")


PAPER = Paper(
    "keyformer",
    "Keyformer",
    ("keyformer:budget=70%", "keyformer:budget=50%"),
    {
        "Observations": [
            Claim(
                "Fig. 1 left",
                "moving the cache takes nearly 40% of the inference time",
                "MPT-7B, half context and half generated; A100",
                {
                    f"{context * 2:,} tokens": ask(
                        "decode_all", "cache_bytes / (floor_ms / 1e3 * copy_bytes_per_s) if floor_ms else none",
                        form=".0%", method="full", batch=1, shape="llama-2-7b", prompt=LENGTHS[context][0],
                    )
                    for context in LENGTHS
                },
                verdict=OTHER,
                why="at batch 1 the weights are most of what a step reads",
                on=f"share of the bytes of a step; {LLAMA}",
            ),
            Claim("Fig. 1 right", "the cache outgrows the model", "MPT-7B, batch not given", verdict=NO_NUMBER,
                  why="arithmetic: 0.5 MiB for a token"),
            Claim("Fig. 2", "window and key tokens", "-", verdict=NO_NUMBER, why="a drawing"),
            Claim("Fig. 3 left", "attention is sparse in every layer", "GPT-J, Cerebras-GPT, MPT; CNN/DailyMail"),
            Claim("Fig. 3 right", "90% of the attention goes to 40% of the tokens",
                  "GPT-J, Cerebras-GPT, MPT; CNN/DailyMail"),
            Claim("Fig. 4", "with half of the tokens gone the others' scores grow unevenly", "MPT-7B, 50%"),
            Claim("Fig. 5, 6", "the two phases; one layer", "-", verdict=NO_NUMBER, why="drawings"),
        ],
        "Score": [
            Claim(
                "noise",
                "Gumbel noise is skewed towards initial tokens",
                "any",
                verdict=FAILS,
                why="independent draws favour no position; the sums over causal rows do",
            ),
            Claim(
                "temperature 1",
                "is about a standard softmax",
                "any",
                verdict=FAILS,
                why="only the argmax has that law; the mean is flatter",
            ),
            Claim(
                "temperature",
                "1 rising to 2 is best",
                "not shown",
                verdict=CANNOT,
                why="no number to compare with",
            ),
        ],
        "Summaries": [
            Claim(
                "Fig. 7, CNN/DailyMail, GPT-J",
                "ROUGE-2 of the full cache, 19.8, from 70% on (19.9); H2O 19.0, window 11.8",
                f"GPT-J-6B fine-tuned, {CNN}",
                verdict=CANNOT,
                why="weights and data are not to be had here",
            ),
            Claim("Fig. 7, CNN/DailyMail, Cerebras", "full 15.4, Keyformer 15.8 at 70%, H2O 14.0, window about 0",
                  f"Cerebras-GPT-6.7B, {CNN}", verdict=CANNOT, why="weights and data are not to be had here"),
            Claim("Fig. 7, CNN/DailyMail, MPT", "full 17.5, Keyformer 17.6 at 60%, H2O 16.4, window 4.3",
                  f"MPT-7B, {CNN}", verdict=CANNOT, why="weights and data are not to be had here"),
            Claim("Fig. 7, SODA", "full 12.3, 3.7, 7.3 (MPT-chat, Cerebras, MPT), reached at 90, 80, 90%; H2O 9.6, 2.7, 6.4",
                  "dialogues, 20 to 90%", verdict=CANNOT, why="weights and data are not to be had here"),
            Claim(
                "Fig. 8 left",
                "full 10.53, Keyformer 7.03, 8.29, 9.94, 9.64, 10.46 at 10 to 50%; H2O 6.90, 6.95, 9.62, 8.69, 9.27",
                "MPT-7B-storywriter, GovReport, 8k tokens",
                verdict=CANNOT,
                why="weights and data are not to be had here",
            ),
            Claim(
                "the same question, lines",
                "Keyformer over H2O",
                "our own task: one line of 200, half and a quarter of the cache",
                {
                    "Keyformer, 1/2": _lines("keyformer", 200, "1/2"),
                    "H2O, 1/2": _lines("h2o", 200, "1/2"),
                    "Keyformer, 1/4": _lines("keyformer", 200, "1/4"),
                    "H2O, 1/4": _lines("h2o", 200, "1/4"),
                    "window, 1/4": _lines("streamingllm", 200, "1/4"),
                },
                rule="Keyformer, 1/2 > H2O, 1/2 and Keyformer, 1/4 > H2O, 1/4",
                on=QWEN,
            ),
        ],
        "Speed": [
            _speed(1024, 1.28, 1.12),
            _speed(2048, 1.62, 1.37),
            _speed(4096, 2.05, 1.71),
            Claim(
                "text, latency",
                "2.1 times as fast",
                MPT,
                {"4,096 + 4,096": _faster("keyformer", 4096)},
                rule="4,096 + 4,096 >= 2.1",
                why="their own bar is 2.05",
                on=LLAMA,
            ),
            Claim(
                "text, throughput",
                "up to 2.4 times the tokens per second",
                f"{MPT}; a larger batch fits",
            ),
        ],
    },
)  # fmt: skip
