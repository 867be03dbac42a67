"""Prints the commands behind docs/papers, one a line: what the papers' own tables and figures ask for, on our model.

    python -m scripts.paper_records DATA | xargs -P 6 -I{} sh -c {}
    python -m scripts.paper_records --alone        # speeds: one at a time, with nothing beside

DATA: a folder with L-Eval's files (tpo.jsonl, quality.jsonl, ..., gov_report_summ.jsonl). Each command takes some
minutes on an H200 and goes on where it was stopped. Then run `kvsketch report --docs`; claims without a record say
"not measured".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from scripts.equal_bytes import DEPTHS, MODEL, NEEDLES, OTHERS, OUT

PAPER = "clusterkv:tokens_per_cluster=80:recluster_into=4:rounds=20:completion=false"
SEEDS = "balancekv,subgen,kcenter,keyformer,keyformer:share=model"
SEEDS_IN_4_BITS = "balancekv:bits=4,subgen:bits=4,kcenter:bits=4,keyformer:bits=4,keyformer:bits=4:share=model"
RECALLED = f"full,{PAPER},quest,infinigen"
SUMMARISED = "full,keyformer,h2o,streamingllm"
# ClusterGen's table 2: lines, share of the tokens, recent windows of 2,048 and 3,072 as shares of the budget
RATES = ((300, "65%", ("67%",)), (450, "58%", ("50%", "75%")), (600, "49%", ("44%", "67%")))


def commands(data: str) -> Iterator[str]:
    common = f"--model {MODEL} --out {OUT}"
    asked = "lines --lines {} --texts 5 --questions 10 --batch 5 --answers 10 --eager --methods {} --budgets {}"
    held_out = "lines --lines {} --texts 10 --questions 12 --primed --max-new-tokens 8 --batch 5 --answers 16 --eager"
    unseen = f"--question unseen --seeds 100 {common}"
    for policy in ("", ":policy=grow"):
        yield f"kvsketch eval {asked.format('200,300,400,600', f'subgen:normalizer=paper{policy}', '1/4,1/2')} {common}"
    yield f"kvsketch eval {asked.format('200,300,400,600', f'full,{PAPER},clusterkv', '1/16,1/8,1/4')} {common}"
    for lines, share, recents in RATES:
        methods = ",".join(["full,streamingllm,h2o", *(f"kcenter:recent={recent}" for recent in recents)])
        yield f"kvsketch eval {asked.format(lines, methods, share)} {common}"
    steps = "perplexity --protocol prefill --texts 1 --tokens 32100 --bucket 1000 --steps 16 --budgets 1024"
    yield f"kvsketch eval {steps} --methods {RECALLED} {common}"
    recall = "recall --tokens 32000 --steps 32 --hot-budgets '' --budgets {} --methods {}"
    budgets = ",".join(str(256 * count) for count in range(1, 9))
    yield f"kvsketch eval {recall.format(budgets, f'{PAPER},quest,infinigen:alpha=100')} {common}"
    metrics = f"{PAPER}:metric=l2,{PAPER}:metric=inner"
    yield f"kvsketch eval {recall.format('256,512,1024,2048', metrics)} --clusters 100,200,400,600,800 {common}"
    streams = "balancekv:form=stream,balancekv:form=stream:c=theory,balancekv:form=paper"
    forms = f"balancekv,balancekv:select=strict,{streams},uniform"
    error = "attention-error --protocol balancekv --tokens 8192 --layers 0,1,4 --rates 2,4,8,16 --seeds 0-9"
    yield f"kvsketch eval {error} --methods {forms} {common}"
    error = "attention-error --protocol balancekv --tokens 2048 --layers 0,1,4 --rates 4 --seeds 0-2"
    small = "--model smollm2-135m --device cpu"
    forms = "balancekv,balancekv:form=paper,balancekv:form=stream"
    yield f"kvsketch eval {error} --methods {forms} {small} --out results/kept_mass"
    short = "summaries --texts 8 --tokens 250 --batch 8 --max-new-tokens 64 --budgets 50%"
    taus = ",".join(f"keyformer:horizon=64{tau}" for tau in ("", ":tau_end=1", ":tau_init=2"))
    yield f"kvsketch eval {short} --methods full,{taus} {small} --out results/keyformer_tau"
    for tasks, sizes in (
        ("tpo,quality", "--texts 10 --batch 5 --answers 8"),
        ("coursera,sci_fi,topic_retrieval_longchat", "--texts 7 --batch 2 --answers 4"),
    ):
        yield (
            f"kvsketch eval leval --data {data} --tasks {tasks} {sizes} --questions 4 --eager --methods {RECALLED} "
            f"--budgets 256,1024 {common}"
        )
    summaries = f"kvsketch eval summaries --methods {SUMMARISED} {common}"
    yield f"{summaries} --texts 8 --tokens 4000 --batch 8 --budgets 90%,70%,50%,30%"
    yield f"{summaries} --file {data}/gov_report_summ.jsonl --texts 14 --tokens 8000 --batch 7 --budgets 70%,50%"
    for lines in (200, 400):
        yield f"kvsketch eval {held_out.format(lines)} --methods {SEEDS} --bytes 1/4,1/8 {unseen}"
        yield f"kvsketch eval {held_out.format(lines)} --methods {SEEDS_IN_4_BITS} --bytes 1/8,1/16 {unseen}"
    needle = f"needle --together --lengths 4000 --depths {DEPTHS} --repeats 10 --max-new-tokens 12 --batch 5 --eager"
    papers = f"subgen:normalizer=paper,subgen:normalizer=paper:policy=grow,{PAPER}"
    yield f"kvsketch eval {needle} --methods {papers} --budgets 1/4,1/8 {unseen}"
    ruler = "ruler --tasks {} --lengths 4000 --texts 6 --questions 4 --max-new-tokens 48 --batch 6 --answers 16 --eager"
    few = "balancekv,kcenter,keyformer:share=model,keyformer:bits=4:share=model"
    for names in (NEEDLES, OTHERS):
        yield f"kvsketch eval {ruler.format(names)} --methods {few} --bytes 1/8 {unseen}"


def speeds() -> Iterator[str]:
    """ClusterKV's figures 12 and 13 and its cluster cache, Keyformer's figure 8 at the mean length of its runs."""
    cached = ",".join(f"{PAPER}:budget=1024:keep_steps={steps}" for steps in (0, 1, 2))
    offload = f"--methods {cached},infinigen:budget=1024,quest:budget=1024 --locality 0,0.96 --steps 40"
    yield f"kvsketch bench offload {offload} --out results/offload.jsonl"
    for beside in ("", " --beside"):
        methods = f"{PAPER}:budget=1024,clusterkv:budget=1024"
        yield f"kvsketch bench prefill --methods {methods} --repeats 5{beside} --out results/prefill.jsonl"
    checked = "--steps 25 --check-tokens 32 --baselines none --out results/decode.jsonl"
    for prompt in (8192, 16384, 32768):
        methods = f"full,{PAPER}:budget=1024,quest:budget=1024,infinigen:budget=1024"
        yield f"kvsketch bench decode --methods {methods} --prompt {prompt} --batches 1,8 --check-layers 3 {checked}"
    for budget in (512, 1024, 2048):
        methods = f"full,keyformer:budget={budget},h2o:budget={budget}"
        shape = f"--shape llama-2-7b --prompt {3 * budget} --batches 1,4,16 --check-layers 2"
        yield f"kvsketch bench decode {shape} --methods {methods} {checked}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("error: name the folder with L-Eval's files, or give --alone for the speeds")
    print("\n".join(speeds() if sys.argv[1] == "--alone" else commands(sys.argv[1])))
