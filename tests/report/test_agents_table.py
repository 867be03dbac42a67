"""The table and the picture of docs/agents.md."""

from __future__ import annotations

from typing import Any

from kvsketch_lab import records
from kvsketch_lab.report import agents


def run(method: str, seed: int, turns: int, step: float, right: list[int], **more: Any) -> dict[str, Any]:
    cell = {
        "model": "m",
        "dtype": "float32",
        "method": method,
        "budget": "",
        "sample": f"run={seed}",
        "turns": turns,
        **more,
    }
    outcome = {
        "prefill": [500, *[100] * (turns - 1)], "bytes": [step * 1e6 * turn for turn in range(1, turns + 1)],
        "correct": right, "right": sum(right) / turns, "right_system": 1.0, "right_file": 0.5,
    }  # fmt: skip
    return records.make_record("agents", {**cell, **outcome}, seed, tuple(cell), False)


RUNS = [
    run("rehearse:wait=compact:bits=16", 0, 4, 1.0, [1, 1, 0, 1], budget="1/8"),
    run("full", 0, 4, 2.0, [1, 1, 1, 1]),
    run("full", 1, 4, 4.0, [1, 0, 1, 1]),
    run("summary", 0, 4, 0.6, [0, 0, 1, 0], summary_at=4096),
    run("full", 0, 2, 9.0, [1, 1]),
]


def test_the_longest_runs_are_shown_beside_the_full_cache() -> None:
    text = agents.tables(RUNS)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert text.startswith("### m") and "4 turns" in text.splitlines()[0]
    assert [line[0] for line in lines[2:]] == [
        "`full`", "`rehearse:wait=compact:bits=16 tool=1/8`", "`summary:at=4096`",
    ]  # fmt: skip
    assert lines[2][1:] == ["88%", "100%", "50%", "200", "100", "12", "100%", "2"]
    assert lines[3][1:] == ["75%", "100%", "50%", "200", "100", "4", "33%", "1"]


def test_the_picture_has_a_curve_for_each_way() -> None:
    figure = agents.picture(RUNS)
    held, read, right = ([list(map(float, line.get_ydata())) for line in axes.lines] for axes in figure.axes)
    assert held == [[3, 6, 9, 12], [1, 2, 3, 4], [0.6, 1.2, 1.8, 2.4]]
    assert read[0] == [0.5, 0.6, 0.7, 0.8] and right[0] == [1.0, 0.75, 2.5 / 3, 0.875]
    assert agents.picture([]) is None and agents.tables([]) == ""


def test_the_model_with_the_longest_runs_comes_first_and_is_drawn() -> None:
    short = run("full", 0, 2, 9.0, [1, 1], model="other")
    assert (
        list(agents.longest([short, *RUNS]))
        == list(agents.longest([*RUNS, short]))
        == ["m (float32)", "other (float32)"]
    )
    assert len(agents.picture([short, *RUNS]).axes[0].lines) == 3
