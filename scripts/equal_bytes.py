"""Prints the commands behind "The same bytes, any question" of docs/results.md, one a line, the most telling first.

    python -m scripts.equal_bytes | xargs -P 6 -I{} sh -c {}

Each takes some minutes on an H200; several at a time share it. A command that was stopped goes on where it ended, and
cells that failed for lack of memory are measured again with --retry-failed. Then run `kvsketch report --docs`.
"""

from __future__ import annotations

from collections.abc import Iterator

MODEL, OUT = "qwen2.5-coder-1.5b", "results/eval"
SHARES = "1/4,1/8,1/16,1/32"
BITS, SNAPKV = "full,full:bits=4,full:bits=2", "snapkv,snapkv:share=layer,snapkv:share=model"
# Methods of one process, and how the question comes.
GROUPS = (
    (BITS, "unseen"), ("rehearse", "unseen"), ("rehearse:replay=exact", "unseen"), ("kvzip,kvzip:bits=4", "unseen"),
    (SNAPKV, "unseen"), ("rehearse:replay=learned", "unseen"),
    ("expected", "unseen"), ("streamingllm", "unseen"), ("clusterkv", "unseen"), (f"{SNAPKV},streamingllm", "seen"),
)  # fmt: skip
NEEDLES = "niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multivalue,niah_multiquery"
OTHERS = "niah_multikey_2,niah_multikey_3,vt,cwe,fwe"
DEPTHS = "0,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1"


def tasks() -> Iterator[str]:
    """What is asked, each with at least a hundred questions a cell."""
    lines = "lines --lines {} --texts 10 --questions 12 --primed --max-new-tokens 8 --batch 5 --answers 16 --eager"
    ruler = "ruler --tasks {} --lengths {} --texts 6 --questions 4 --max-new-tokens 48 --batch 6 --answers 16 --eager"
    needle = f"needle --together --lengths {{}} --depths {DEPTHS} --repeats 10 --max-new-tokens 12 --batch 5 --eager"
    yield from map(lines.format, (200, 400))
    yield from (ruler.format(names, 4000) for names in (NEEDLES, OTHERS))
    yield needle.format(4000)
    yield from map(lines.format, (300, 600))
    yield from (ruler.format(names, 8000) for names in (NEEDLES, OTHERS))
    yield needle.format(8000)


def commands() -> Iterator[str]:
    common = f"--model {MODEL} --bytes {SHARES} --seeds 100 --out {OUT}"
    for task in tasks():
        for methods, question in GROUPS:
            yield f"kvsketch eval {task} --methods {methods} --question {question} {common}"
    for methods in dict.fromkeys(methods for methods, question in GROUPS if question == "unseen"):
        texts = "--protocol prefill --texts held-out:8 --tokens 4196 --bucket 4096 --steps 64"
        yield f"kvsketch eval perplexity {texts} --methods {methods} {common}"


if __name__ == "__main__":
    print("\n".join(commands()))
