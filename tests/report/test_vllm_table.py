"""The table of docs/vllm.md."""

from __future__ import annotations

from typing import Any

from kvsketch.report import vllm


def record(contender: str, batch: int, step_ms: float, **more: Any) -> dict[str, Any]:
    data = {"contender": contender, "shape": "llama-3.1-8b", "prompt": 32768, "batch": batch, "step_ms": step_ms}
    return {"kind": "vllm", "data": data | {"tokens_per_s": 1e3 * batch / step_ms} | more}


def test_each_contender_has_its_steps_and_its_best() -> None:
    records = [
        record("bf16", 1, 6.0, prefill_s=1.2, rows_that_fit=27.4),
        record("bf16", 16, 20.0),
        record("snapkv:budget=2048", 1, 5.0, prefill_s=1.1, rows_that_fit=424),
        record("snapkv:budget=2048", 16, 9.0),
        record("snapkv:budget=2048", 16, 8.0),
        record("snapkv:budget=2048", 64, 9.0, failed="out of memory"),
        {"kind": "serve", "data": {"method": "full"}},
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in vllm.table(records).splitlines()]
    assert lines[0][1:4] == ["step, ms: 1 row", "step, ms: 16 rows", "most tokens/s"]
    nothing = "not measured"
    assert lines[2] == ["vLLM, bf16 cache", "6.00", "20.00", "800 (16 rows)", "1.00", nothing, "1.20", "27"]
    method = ["`snapkv:budget=2048`", "5.00", "8.00", "2,000 (16 rows)", "2.50", nothing, "1.10", "424"]
    assert lines[3] == method, "the last of each batch counts, and what failed does not"
