"""The table of docs/vllm.md."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvsketch_lab.report import vllm


def record(contender: str, batch: int, step_ms: float, **more: Any) -> dict[str, Any]:
    data = {"contender": contender, "shape": "llama-3.1-8b", "prompt": 32768, "batch": batch, "step_ms": step_ms}
    return {"kind": "vllm", "data": data | {"tokens_per_s": 1e3 * batch / step_ms} | more}


def test_chats_stand_beside_those_of_the_fp8_cache() -> None:
    """The last time of each number of chats, however many turns it had."""

    def timed(contender: str, chats: int, seconds: float, turns: int = 2) -> dict[str, Any]:
        data = {
            "contender": contender, "shape": "llama-3.1-8b", "prompt": 100, "chats": chats, "turns": turns, "new": 8,
            "answer": 5, "chats_s": seconds, "first_turns_s": 1.0, "later_s": 0.1, "latest_s": 0.2, "start_s": 9.0,
        }  # fmt: skip
        return {"kind": "vllm", "data": data}

    records = [timed("rehearse", 16, 99.0, turns=3), timed("rehearse", 16, 6.0), timed("fp8", 16, 5.0),
               timed("rehearse", 128, 50.0), timed("fp8", 128, 100.0), timed("rehearse", 7, 2.0)]  # fmt: skip
    records.append(timed("rehearse", 128, 40.0))
    records[-1]["data"]["host_gb"] = 64.0
    assert vllm.measured(records) == []
    lines = [[cell.strip() for cell in line.split("|")[1:6]] for line in vllm.conversations(records).splitlines()[2:]]
    assert lines == [
        ["`rehearse`", "7", "2.0", "not measured", "1.0"],
        ["`rehearse`", "16", "6.0", "0.83", "1.0"],
        ["vLLM, prefix caching, fp8", "16", "5.0", "1.00", "1.0"],
        ["`rehearse`", "128", "50.0", "2.00", "1.0"],
        ["vLLM, prefix caching, fp8", "128", "100.0", "1.00", "1.0"],
        ["`rehearse, kvsketch_host_gb=64`", "128", "40.0", "2.50", "1.0"],
    ]
    assert vllm.shapes_of_chats(records) == [(2, 100, 8, 5)]


def test_each_contender_has_its_steps_and_its_best() -> None:
    records = [
        record("bf16", 1, 6.0, prefill_s=1.2, rows_that_fit=27.4),
        record("bf16", 16, 20.0),
        record("snapkv:budget=2048", 1, 5.0, prefill_s=1.1, rows_that_fit=424),
        record("snapkv:budget=2048", 16, 9.0),
        record("snapkv:budget=2048", 16, 8.0),
        record("snapkv:budget=2048", 64, 9.0, failed="out of memory"),
        record("rehearse:budget=64", 64, 16.0, sustained_per_s=3000.0),
        {"kind": "serve", "data": {"method": "full"}},
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in vllm.table(records).splitlines()]
    assert lines[0][1:5] == ["step, ms: 1 row", "step, ms: 16 rows", "step, ms: 64 rows", "most tokens/s"]
    nothing, speed = "not measured", "800 (16 rows)"
    assert lines[2] == [
        "vLLM, bf16 cache", "6.00", "20.00", "does not fit", speed, "1.00", nothing, speed, "1.20", "27",
    ]  # fmt: skip
    speed = "2,000 (16 rows)"
    method = ["`snapkv:budget=2048`", "5.00", "8.00", nothing, speed, "2.50", nothing, speed, "1.10", "424"]
    assert lines[3] == method, "the last of each batch counts, and what failed does not"
    assert lines[4][1:8] == [nothing, nothing, "16.00", "4,000 (64 rows)", "5.00", nothing, "3,000"]


def test_readme_counts_the_rehearsals() -> None:
    """A user whose answer is long pays for them; vLLM's own caches have none."""
    records = [
        record("bf16", 16, 20.0, rows_that_fit=26, sustained_per_s=1.0),
        record("rehearse:budget=64", 64, 16.0, rows_that_fit=163, sustained_per_s=3000.0),
    ]
    sizes = SimpleNamespace(user_gb=lambda name, prompt: 4.0 if name == "bf16" else 0.5)
    lines = vllm.short(records, sizes, {"bf16": "0.9", "rehearse": "0.8"}).splitlines()[2:]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines] == [
        ["vLLM, bf16 cache", "4.00 GB", "26", "800", "0.9"], ["kvsketch in vLLM", "0.50 GB", "163", "3,000", "0.8"],
    ]  # fmt: skip
    talk = {"contender": "rehearse:budget=9", "shape": "llama-3.1-8b", "prompt": 9, "turns": 2}
    talks = [{"kind": "vllm", "data": talk | {"chats": count, "chats_s": 2.0 * count}} for count in (128, 16)]
    head, _, *told = vllm.short(records + talks, sizes, {"bf16": "0.9", "rehearse": "0.8"}).splitlines()
    assert "| 128 chats, s | right answers" in head
    assert "|  | 0.9 |" in told[0] and "| 256 | 0.8 |" in told[1]
