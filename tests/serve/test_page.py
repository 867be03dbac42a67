"""The page in a real browser: a document is read, asked about, compared with the full cache; it fits a phone.

Needs Chromium (Debian: apt-get install chromium) and the package playwright; skipped where one of them is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny import save_tiny_model

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
for package in ("starlette", "openai", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="not installed: pip install 'kvsketch[serve]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

METHOD = "h2o:budget=25%:sinks=2:recent=8"
TEXT = "The harbour was rebuilt in 1921. 🚢 Its second basin is 14 metres deep. " * 4


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from kvsketch.serve.server import Server, start_service

    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    service = start_service(model, tokenizer, "tiny", METHOD, folder=tmp_path_factory.mktemp("documents"))
    with Server(service, api_key="secret").started() as result:
        yield result


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        # A root user, as in containers, has no sandbox.
        result = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield result
        result.close()


def test_a_document_is_read_asked_and_compared(browser: Any, address: str, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    elsewhere: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: elsewhere.append(request.url) if address not in request.url else None)
    page.goto(address)
    page.get_by_label("This server asks for its API key").fill("secret")
    page.keyboard.press("Enter")
    page.get_by_text("tiny · h2o").wait_for()
    (tmp_path / "harbour.txt").write_text(TEXT)
    page.locator("#file").set_input_files(tmp_path / "harbour.txt")
    page.get_by_role("heading", name="What the cache holds").wait_for()
    page.locator("#text span").first.wait_for()
    assert page.locator("#text").inner_text().strip() == TEXT.strip(), "marked, and nothing is lost"
    assert page.locator("#text .l8").count() > 0 and page.locator("#text .l0").count() > 0
    assert page.locator("#slots i").count() == 4, "two layers of two heads"
    assert "of full" in page.locator("#numbers").inner_text()
    page.get_by_label("show the full cache").check()
    page.get_by_label("Question").fill("How deep is the basin?")
    page.keyboard.press("Enter")
    page.locator(".said:not(.writing)").nth(1).wait_for()
    page.locator("#stop").wait_for(state="hidden")
    said = page.locator(".answer .said").all_inner_texts()
    assert len(said) == 2 and all(said) and "first word after" in page.locator(".took").first.inner_text()
    page.locator(".near summary").click()
    assert "held in" in page.locator(".near small").first.inner_text()
    assert complaints == [] and elsewhere == []
    # A phone opens the same document again: nothing is wider than its screen.
    page.set_viewport_size({"width": 360, "height": 740})
    page.reload()
    page.locator("#text span").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete harbour.txt").click()
    page.locator("#list li").wait_for(state="detached")
    page.close()
