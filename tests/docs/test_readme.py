"""The README tells the truth: its example runs, its table and its file tree match the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.real_model
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    cache = names["cache"]
    assert cache.tokens_stored == 64 < cache.tokens_seen
    assert capsys.readouterr().out.strip().endswith(f"{cache.tokens_seen} 64 {cache.device_bytes}")


def test_the_file_tree_is_the_one_on_disk() -> None:
    tree = README.partition("src/kvsketch/\n")[2]
    named = set(re.findall(r"^      (\w+(?:\.py|/)) ", tree, flags=re.MULTILINE))
    package = ROOT / "src" / "kvsketch"
    there = {f"{path.name}/" for path in package.iterdir() if any(path.glob("*.py"))}
    there |= {path.name for path in package.glob("*.py") if path.name != "__init__.py"}
    assert named == there
