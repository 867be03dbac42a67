"""Options declared once: what the command line makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from click.testing import CliRunner

from kvsketch_lab.options import Options, command, option


@dataclass
class Flags(Options):
    check: bool = option(True, "on unless told otherwise")
    again: bool = option(False, "off unless told otherwise")


@pytest.mark.parametrize(
    ("line", "check", "again"),
    [
        ("", True, False),
        ("--no-check", False, False),
        ("--check --again", True, True),
        ("--no-check --again", False, True),
    ],
)
def test_flags_can_be_set_whatever_their_default(line: str, check: bool, again: bool) -> None:
    given: list[Flags] = []

    def run(each: Flags) -> int:
        given.append(each)
        return 0

    made: Any = command("flags", Flags, run, "Two flags.")
    assert CliRunner().invoke(made, line.split(), standalone_mode=False).exit_code == 0
    assert given == [Flags(check=check, again=again)]


def test_a_flag_that_is_off_has_no_second_name() -> None:
    made: Any = command("flags", Flags, lambda _: 0, "Two flags.")
    assert CliRunner().invoke(made, ["--no-again"]).exit_code == 2
