"""The page in a real browser: it shows figures and tables without errors, scripts or network, and fits a phone.

Needs Chromium (Debian: apt-get install chromium) and the package playwright; skipped where one of them is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from kvsketch_lab.report.render import render
from tests.report.sample_records import clusterability, lines, needle, perplexity, recall, write

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("records")
    for experiment in (lines, needle, perplexity, recall, clusterability):
        write(folder / f"{experiment.__name__}.jsonl", experiment())
    render(folder, folder / "report")
    return (folder / "report" / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        # A root user, as in containers, has no sandbox.
        result = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield result
        result.close()


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_the_page_fits_and_fetches_nothing(browser: Any, address: str, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    complaints: list[str] = []
    fetched: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(address)
    assert complaints == [] and [url for url in fetched if not url.startswith("data:")] == [address]
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "only tables and figures scroll sideways"
    pictures = page.evaluate("[...document.images].map(each => [each.naturalWidth, each.width])")
    assert len(pictures) > 8 and all(natural > 300 and shown <= max(width, 640) for natural, shown in pictures)
    assert page.locator("table").count() > 6
    ground, ink = page.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    assert (ground != ink) and (sum(map(int, ground[4:-1].split(","))) < 200) == (scheme == "dark")
    page.close()
