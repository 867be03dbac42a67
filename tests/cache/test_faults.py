"""Killed at random moments, twice each; `scripts/faults.py` does it fifty times."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("needs fork and SIGKILL", allow_module_level=True)
pytest.importorskip("gguf")
pytest.importorskip("accelerate")
from scripts import fault_kinds, faults
from tests.helpers.common import also


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(fault_kinds.CATALOG, fault_kinds.PullFault.model, None)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["eval", "save", *also("pull")])
def test_everything_goes_on_after_a_kill(name: str, tmp_path: Path) -> None:
    data = faults.run(faults.faults(name, tmp_path / name, real_pip=False), kills=2, seed=1)
    assert data["problems"] == []
    assert data["killed"] == 2


class Torn(fault_kinds.Fault):
    """Writes a file in place, so that a kill leaves half of it."""

    name = "torn"

    def reset(self) -> None:
        (self.folder / "file").unlink(missing_ok=True)

    def work(self) -> int:
        with (self.folder / "file").open("a", buffering=1) as file:
            for _ in range(40):
                file.write("line\n")
                time.sleep(0.02)
        return 0

    def damage(self) -> list[str]:
        return []

    def outcome(self) -> Any:
        return (self.folder / "file").read_text()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_program_that_does_not_go_on_is_noticed(tmp_path: Path) -> None:
    # Kills of this seed come late, so that a child that starts slowly has written a part of its file.
    data = faults.run(Torn(tmp_path / "torn"), kills=3, seed=5)
    assert data["killed"] == 3
    assert "the run after the kill left something else than an undisturbed run" in data["problems"]
