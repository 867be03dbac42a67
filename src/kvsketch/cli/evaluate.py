"""kvsketch eval: the experiments, a command each."""

from __future__ import annotations

from kvsketch.cli.lazy import group

EXPERIMENTS = {
    "attention-error": "Error of the attention output against the tokens kept or read.",
    "lines": "Retrieval of one of many numbered lines, as in LongEval.",
    "ruler": "Needles, variables and words in texts of any length: RULER's tasks.",
    "needle": "A passkey hidden in real text, by length and depth.",
    "longbench": "The 21 tasks of LongBench, from a local copy or the hub.",
    "perplexity": "Perplexity of a long text against the full cache, by position.",
    "recall": "How many of the best tokens a recall method reads, and how often they were on the device.",
    "speculation": "Recall of a layer that scores with a query predicted from the layer before.",
    "clusterability": "How keys and values cluster: t-SNE, k-center radii, cluster counts, query norms.",
    "bits": "Keys and values in few bits: error, divergence, bytes, time; ours, QuantizedCache and fp8.",
    "token-life": "How long each token of a document stays in the cache, by layer and head.",
}

eval_app = group(
    "evaluation", EXPERIMENTS, "Measure quality on a real model; `kvsketch eval NAME --help` lists the options of one."
)
