"""The README tells the truth: its example runs, its table and its file tree match the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.real_model
def test_the_examples_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, Any] = {}
    # A smaller model and fewer tokens, for less time.
    for long, short in (("max_new_tokens=100", "max_new_tokens=40"), ("qwen2.5-coder-0.5b", "smollm2-135m")):
        assert long in first
        first = first.replace(long, short)
    exec(compile(first, "README.md", "exec"), names)
    cache = names["cache"]
    assert cache.tokens_stored == cache.tokens_seen > 64
    assert capsys.readouterr().out.strip().endswith(f"{cache.tokens_seen} {cache.tokens_seen} {cache.device_bytes}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text("Dr. Miriam Okafor became director of the observatory on 1 June.\n")
    exec(compile(second, "README.md", "exec"), names)
    assert "Okafor" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["src/kvsketch", "lab/kvsketch_lab"])
def test_the_file_tree_is_the_one_on_disk(folder: str) -> None:
    tree = re.split(rf"^    {folder}/.*\n", README, flags=re.MULTILINE)[1]
    tree = re.split(r"^    \w", tree, flags=re.MULTILINE)[0]
    named = set(re.findall(r"^      (\w+(?:\.py|/)) ", tree, flags=re.MULTILINE))
    package = ROOT / folder
    there = {f"{path.name}/" for path in package.iterdir() if any(path.glob("*.py"))}
    there |= {path.name for path in package.glob("*.py") if path.name != "__init__.py"}
    assert named == there
