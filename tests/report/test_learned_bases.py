"""Learned directions beside random ones, in docs/quantisation.md."""

from __future__ import annotations

from typing import Any

from kvsketch_lab.report import bits, docs
from tests.report.sample_records import record

MODEL = docs.BIG.partition(" ")[0]


def answer(method: str, text: int, score: float, budget: str = "", seed: int = 100) -> Any:
    data = {
        "model": MODEL, "dtype": "bfloat16", "budgets_in": "bytes", "method": method, "budget": budget, "lines": 200,
        "question": "unseen", "sample": f"text={text} question=0", "score": score, "device_bytes": 15,
        "full_bytes": 100, "text_sha256": f"{text}",
    }  # fmt: skip
    return {**record("lines", data), "seed": seed}


def test_the_same_questions_are_compared() -> None:
    """Random directions were asked eight, learned ones three, which both have right but for one."""
    own = [answer("full:bits=2", text, float(text != 1)) for text in range(8)]
    own += [answer("full:bits=2:basis=learned", text, 1.0) for text in range(3)]
    own += [answer("full:bits=3:basis=learned", 0, 1.0)]  # nothing to compare it with
    own += [answer("full:bits=2:basis=learned", 0, 0.0, seed=7)]  # chosen by, not held out
    (line,) = bits.learned(own, docs.BIG).splitlines()[2:]
    method, held, told, difference, *others = (cell.strip() for cell in line.split("|")[1:-1])
    assert (method, held, told) == ("`full:bits=2:basis=learned`", "15.0%", "1.00 / 0.67 (3)")
    assert difference.startswith("+0.33 [") and others == ["", "", "", ""]
    assert bits.learned(own[:8], docs.BIG) == ""
