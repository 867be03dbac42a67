"""The README tells the truth: its example runs, its table and its file tree match the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.real_model
def test_the_example_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert "qwen2.5-coder-0.5b" in example
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text("Dr. Miriam Okafor became director of the observatory on 1 June.\n" * 8)
    exec(compile(example.replace("qwen2.5-coder-0.5b", "smollm2-135m"), "README.md", "exec"), names)
    cache, printed = names["cache"], capsys.readouterr().out.strip()
    assert "Okafor" in printed and printed.endswith(f"{cache.tokens_seen} {cache.tokens_per_head} {cache.device_bytes}")
    assert cache.device_bytes < 23_040 * cache.tokens_seen / 2  # bytes of a token of this model in bf16


def test_it_fits_on_a_screen_and_shows_commands_early() -> None:
    lines = README.splitlines()
    assert len(lines) < 90
    assert next(number for number, line in enumerate(lines) if "make demo" in line) < 30
