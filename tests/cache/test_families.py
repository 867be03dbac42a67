"""docs/models.md says what a run gives: some families here, all of them by `python -m scripts.families`."""

from __future__ import annotations

import pytest
import transformers

from scripts.families import PAGE, by_text, try_family
from tests.helpers import zoo

LINES = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
# Those that tell their attention use_cache=False in any case, and those that are refused for reasons of their own.
TRIED = ["cwm", "laguna", "mellum", "mimo_v2_flash", "mpt", "deepseek_v2", "doge", "falcon_h1", "rwkv"]


def line_of(family: str) -> str:
    (line,) = (line for line in LINES if f"`{family}`" in line.rpartition(" | ")[2])
    return line


@pytest.mark.skipif(
    f"transformers {transformers.__version__}:" not in PAGE.read_text(encoding="utf-8"), reason="another transformers"
)
@pytest.mark.parametrize("family", TRIED)
def test_the_page_says_what_came_out(family: str) -> None:
    (text,) = by_text([try_family(family)])
    assert line_of(family).startswith(f"| {text} | "), f"{text}; run: python -m scripts.families"


def test_every_family_of_the_other_tests_is_on_the_page_as_served() -> None:
    first_refused = next(number for number, line in enumerate(LINES) if line.startswith("| refused"))
    for family, _ in zoo.FAMILIES.values():
        assert LINES.index(line_of(family)) < first_refused, family
