"""The page in a real browser: a document is read, asked about, compared with the full cache; it fits a phone.

Needs Chromium (Debian: apt-get install chromium) and the package playwright; skipped where one of them is missing.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """With the key given and nothing read; answers are short."""

    def shortened(route: Any) -> None:
        route.continue_(post_data=json.dumps({**json.loads(route.request.post_data), "max_tokens": 12}))

    result = browser.new_page(viewport={"width": 1280, "height": 900})
    result.on("dialog", lambda dialog: dialog.accept())
    result.route("**/v1/chat/completions", shortened)
    result.goto(address)
    result.get_by_label("This server asks for its API key").fill("secret")
    result.keyboard.press("Enter")
    result.get_by_text("tiny · h2o").wait_for()
    yield result
    result.close()


def read(page: Any, folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    page.locator("#file").set_input_files(folder / name)
    page.get_by_text(f"{name} is read; ask about it").wait_for()


def ask(page: Any, question: str) -> None:
    page.get_by_label("Question").fill(question)
    page.keyboard.press("Enter")


def answered(page: Any) -> None:
    page.locator("#stop").wait_for(state="hidden")


def documents(page: Any) -> list[Any]:
    body = page.evaluate("fetch('v1/documents', {headers: {Authorization: 'Bearer secret'}}).then(r => r.json())")
    return [each["method"] for each in body["data"]]


def test_a_conversation_stays_with_its_document_and_a_deletion_leaves_nothing(page: Any, tmp_path: Path) -> None:
    read(page, tmp_path, "first.txt", TEXT)
    ask(page, "Asked of the first?")
    answered(page)
    read(page, tmp_path, "second.txt", TEXT + "It is lit at night.")
    ask(page, "Asked of the second?")
    answered(page)
    page.locator(".choose", has_text="first.txt").click()
    page.get_by_text("About first.txt").wait_for()
    waiting: list[Any] = []
    bodies: list[Any] = []

    def held_back(route: Any) -> None:
        if route.request.method == "POST":
            waiting.append(route)
        else:
            route.continue_()

    page.route("**/v1/documents", held_back)
    page.on("request", lambda r: bodies.append(json.loads(r.post_data)) if "chat/completions" in r.url else None)
    page.get_by_label("show the full cache").check()
    ask(page, "Asked of the first again?")
    page.wait_for_timeout(300)
    page.locator(".choose", has_text="second.txt").click()
    page.get_by_text("About second.txt").wait_for()
    assert len(waiting) == 1, "the full cache is about to be read"
    waiting[0].continue_()
    page.unroute("**/v1/documents")
    answered(page)
    asked = [[m["content"] for m in body["messages"] if m["role"] == "user"] for body in bodies]
    assert asked == [["Asked of the first?", "Asked of the first again?"]] * 2
    assert len({body["document"] for body in bodies}) == 2
    assert sorted(documents(page)) == ["full", METHOD, METHOD]
    for name, left in (("second.txt", ["full", METHOD]), ("first.txt", [])):
        page.get_by_role("button", name=f"Delete {name}").click()
        page.locator(".choose", has_text=name).wait_for(state="detached")
        assert sorted(documents(page)) == left


def test_a_stopped_answer_and_a_refused_file_say_so(page: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    page.locator("#file").set_input_files(tmp_path / "empty.txt")
    told = page.locator("#upload.wrong")
    told.wait_for()
    assert told.inner_text().startswith("empty.txt: ") and page.locator("#status").inner_text() == ""
    page.route("**/v1/chat/completions", lambda route: None)
    ask(page, "Will it be stopped?")
    page.get_by_role("button", name="Stop").click()
    answered(page)
    assert page.locator(".said").inner_text() == "stopped before the first word"
    page.unroute("**/v1/chat/completions")
    ask(page, "Again?")
    playwright.expect(page.locator(".said").nth(1)).to_have_text(re.compile(".{3}", re.DOTALL), timeout=30_000)
    page.get_by_role("button", name="Stop").click()
    answered(page)
    assert page.locator(".took").nth(1).inner_text().endswith(" · stopped")


def test_a_lost_server_is_told_in_words_and_found_again(page: Any, address: str) -> None:
    here = f"**://{urlsplit(address).netloc}/**"
    page.route(here, lambda route: route.abort("connectionrefused"))
    ask(page, "Is anybody there?")
    page.locator("#status.wrong", has_text="the server does not answer").wait_for()
    assert "Failed to fetch" not in page.locator("body").inner_text()
    page.unroute(here)
    page.locator("#status:not(.wrong)", has_text="the server is back").wait_for()
    ask(page, "And now?")
    answered(page)
    assert len(page.locator(".said").nth(1).inner_text()) > 3
