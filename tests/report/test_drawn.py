"""A figure of docs/ is drawn again only if it, or what it follows from, has changed."""

from __future__ import annotations

from pathlib import Path

from kvsketch_lab.report.drawn import drawn
from tests.report.sample_records import record, write


def test_figures_are_drawn_again_when_something_has_changed(tmp_path: Path) -> None:
    runs = []

    def draw() -> list[Path]:
        runs.append(len(runs))
        result = [tmp_path / "docs" / f"{name}.png" for name in ("b", "a")]
        for path in result:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(f"drawn {path.name}".encode())
        return result

    records = tmp_path / "results" / "lines.jsonl"
    write(records, [record("lines", {"score": 1.0})])
    first = drawn(tmp_path, draw)
    assert drawn(tmp_path, draw) == first and [path.stem for path in first] == ["b", "a"] and len(runs) == 1
    write(tmp_path / "results" / "more.jsonl", [record("lines", {"score": 0.0})])
    assert drawn(tmp_path, draw) == first and len(runs) == 2, "a record more"
    first[0].write_bytes(b"other")
    assert drawn(tmp_path, draw) == first and len(runs) == 3, "a figure that is not as it was drawn"
    first[1].unlink()
    assert drawn(tmp_path, draw) == first and len(runs) == 4, "a figure that is gone"
    assert drawn(tmp_path, draw) == first and len(runs) == 4
