"""The page in a real browser: documents, conversations, hostile answers, keyboards, light, dark and phones.

Needs Chromium (Debian: apt-get install chromium) and the package playwright; skipped where one of them is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.serving import started
from tests.helpers.tiny import save_tiny_model
from tests.helpers.waiting import LONGEST_WAIT

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
for package in ("starlette", "openai", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="not installed: pip install 'kvsketch[serve]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

SHOTS = os.environ.get("KVSKETCH_SHOTS")  # a folder for pictures of the page
METHOD = "h2o:budget=25%:sinks=2:recent=8"
TEXT = "The harbour was rebuilt in 1921. 🚢 Its second basin is 14 metres deep. " * 4


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from kvsketch.serve.server import Server, start_service

    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    service = start_service(model, tokenizer, "tiny", METHOD, folder=tmp_path_factory.mktemp("documents"))
    with started(Server(service, api_key="secret")) as result:
        yield result


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright.expect.set_options(timeout=1000 * LONGEST_WAIT)
    with playwright.sync_playwright() as started:
        # A root user, as in containers, has no sandbox.
        result = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield result
        result.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """With the key given and answers of 12 tokens; what the page complains about fails the test."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    context.set_default_timeout(1000 * LONGEST_WAIT)
    context.add_init_script("""
        sessionStorage.setItem('kvsketch-key', 'secret');
        if (!localStorage.length) localStorage.setItem('kvsketch-settings', '{"max_tokens": 12}');
    """)
    complaints: list[str] = []
    result = context.new_page()
    result.on("pageerror", lambda error: complaints.append(str(error)))
    result.on("dialog", lambda dialog: dialog.accept())
    result.on(
        "request", lambda r: None if r.url.removeprefix("blob:").startswith(address) else complaints.append(r.url)
    )
    result.goto(address)
    result.get_by_text("tiny · reads up to").wait_for()
    yield result
    context.close()
    assert complaints == []


def read(page: Any, folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    page.locator("#file").set_input_files(folder / name)
    page.get_by_text(f"{name} is read; ask about it").wait_for()


def question(page: Any) -> Any:
    return page.get_by_label("Question", exact=True)


def ask(page: Any, words: str) -> None:
    before = page.locator(".turn").count()
    question(page).fill(words)
    page.keyboard.press("Enter")
    page.locator(".turn").nth(before).wait_for()


def answered(page: Any) -> None:
    page.locator("#stop").wait_for(state="hidden")


def documents(page: Any, *names: str) -> list[Any]:
    body = page.evaluate("fetch('v1/documents', {headers: {Authorization: 'Bearer secret'}}).then(r => r.json())")
    return sorted(each["method"] for each in body["data"] if each["name"] in names)


def answers_with(page: Any, *texts: str, **usage: Any) -> list[Any]:
    """The server says these one after the other, the last for ever; the bodies of the requests."""
    bodies: list[Any] = []

    def answer(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        text = texts[min(len(bodies), len(texts)) - 1]
        pieces = [{"index": 0, "delta": {"content": text[at : at + 9]}} for at in range(0, len(text), 9)]
        last = {"prompt_tokens": 9, "completion_tokens": 5, **usage}
        told = [{"choices": [each]} for each in pieces] + [{"choices": [], "usage": last}]
        body = "".join(f"data: {json.dumps(each)}\n\n" for each in told)
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    return bodies


def asked_of(body: Any) -> list[str]:
    return [each["content"] for each in body["messages"]]


def said(page: Any) -> list[str]:
    return [str(each) for each in page.locator(".said").all_inner_texts()]


def test_a_document_is_read_asked_and_compared(browser: Any, address: str, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(1000 * LONGEST_WAIT)
    complaints: list[str] = []
    elsewhere: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: elsewhere.append(request.url) if address not in request.url else None)
    page.on("request", lambda request: asked.append("begins") if "chat" in request.url else None)
    page.on("requestfinished", lambda request: asked.append("ends") if "chat" in request.url else None)
    page.goto(address)
    page.get_by_label("This server asks for its API key").fill("secret")
    page.keyboard.press("Enter")
    page.get_by_text("tiny · reads up to").wait_for()
    (tmp_path / "harbour.txt").write_text(TEXT)
    page.locator("#file").set_input_files(tmp_path / "harbour.txt")
    page.get_by_role("heading", name="What is in the cache").wait_for()
    page.locator("#text span").first.wait_for()
    assert page.locator("#text").inner_text().strip() == TEXT.strip(), "marked, and nothing is lost"
    assert page.locator("#text .l8").count() > 0 and page.locator("#text .l0").count() > 0
    assert page.locator("#slots i").count() == 4, "two layers of two heads"
    assert "of full" in page.locator("#numbers").inner_text()
    assert page.locator("#numbers wbr").count() > 0, "a method folds between its parameters"
    page.locator("#settings summary").click()
    page.get_by_label("Longest answer").fill("12")
    page.get_by_label("then ask the full cache too").check()
    question(page).fill("How deep is the basin?")
    page.keyboard.press("Enter")
    page.locator(".took:not(:empty)").nth(1).wait_for()
    answered(page)
    assert len(said(page)) == 2 and all(said(page)) and "first word after" in page.locator(".took").first.inner_text()
    titles = page.locator(".answer h4").all_inner_texts()
    assert re.fullmatch(r"Answer from the compressed cache, [\d.]+% of the full one", titles[0])
    assert titles[1:] == ["Answer from the full cache"]
    assert asked == ["begins", "ends", "begins", "ends"], "each side is measured alone"
    assert complaints == [] and elsewhere == []
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete harbour.txt").click()
    page.locator("#list li").wait_for(state="detached")
    page.close()


def test_a_conversation_stays_with_its_document_and_a_deletion_leaves_nothing(page: Any, tmp_path: Path) -> None:
    read(page, tmp_path, "first.txt", "First. " + TEXT)
    ask(page, "Asked of the first?")
    answered(page)
    read(page, tmp_path, "second.txt", "Second. " + TEXT)
    ask(page, "Asked of the second?")
    answered(page)
    page.locator(".choose", has_text="first.txt").click()
    page.get_by_text("About first.txt").wait_for()
    waiting: list[Any] = []
    bodies: list[Any] = []
    page.route("**/v1/documents", lambda r: waiting.append(r) if r.request.method == "POST" else r.continue_())
    page.on("request", lambda r: bodies.append(json.loads(r.post_data)) if "chat/completions" in r.url else None)
    page.get_by_label("then ask the full cache too").check()
    ask(page, "Asked of the first again?")
    page.locator(".answer.plain").wait_for()
    page.locator(".choose", has_text="second.txt").click()
    page.get_by_text("About second.txt").wait_for()
    assert len(waiting) == 1, "the full cache is about to be read"
    waiting[0].continue_()
    page.unroute("**/v1/documents")
    page.locator(".choose", has_text="first.txt").click()
    page.locator(".answer.plain .took:not(:empty)").wait_for()
    answered(page)
    asked = [[m["content"] for m in body["messages"] if m["role"] == "user"] for body in bodies]
    assert asked == [["Asked of the first?", "Asked of the first again?"]] * 2
    assert len({body["document"] for body in bodies}) == 2
    both = ("first.txt", "second.txt")
    assert documents(page, *both) == ["full", METHOD, METHOD]
    for name, left in (("second.txt", ["full", METHOD]), ("first.txt", [])):
        page.get_by_role("button", name=f"Delete {name}").click()
        page.locator(".choose", has_text=name).wait_for(state="detached")
        assert documents(page, *both) == left
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.includes('talk'))") == []


# In the page, so that no answer ends before the click, however busy the machine is.
CLICK_STOP = """
new MutationObserver((changes, own) => {
  const stop = [...document.querySelectorAll("button")].find((each) => each.textContent.trim() === "Stop");
  if (!stop || !stop.offsetParent || !document.querySelectorAll(".said")[1]?.textContent) return;
  own.disconnect();
  stop.click();
}).observe(document.body, { childList: true, subtree: true, characterData: true, attributes: true });
"""


def test_a_stopped_answer_and_a_refused_file_say_so(page: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    page.locator("#file").set_input_files(tmp_path / "empty.txt")
    told = page.locator("#upload.wrong")
    told.wait_for()
    assert told.inner_text().startswith("empty.txt is empty; ") and page.locator("#status").inner_text() == ""
    page.route("**/v1/chat/completions", lambda route: None)
    ask(page, "Will it be stopped?")
    ask(page, "And this one?")
    second = page.locator(".turn > .note").nth(1)
    assert second.inner_text() == "waiting: another answer comes first"
    page.keyboard.press("Escape")
    answered(page)
    assert page.locator(".answer .note").all_inner_texts() == ["stopped before the first word"]
    assert second.inner_text() == "stopped before it was asked"
    page.unroute("**/v1/chat/completions")
    page.evaluate("localStorage.setItem('kvsketch-settings', '{\"max_tokens\": 2000}')")
    page.evaluate(CLICK_STOP)
    ask(page, "Again?")
    answered(page)
    assert page.locator(".answer .note").nth(1).inner_text() == "stopped"


def test_a_lost_server_is_told_in_words_and_found_again(page: Any, address: str) -> None:
    here = f"**://{urlsplit(address).netloc}/**"
    page.route(here, lambda route: route.abort("connectionrefused"))
    ask(page, "Is anybody there?")
    page.locator("#status.wrong", has_text="the server does not answer").wait_for()
    assert page.locator(".answer .note.wrong").inner_text().startswith("interrupted: the server does not answer")
    assert "Failed to fetch" not in page.locator("body").inner_text()
    page.unroute(here)
    page.locator("#status:not(.wrong)", has_text="the server is back").wait_for()
    bodies = answers_with(page, "Here.")
    ask(page, "And now?")
    answered(page)
    assert said(page)[1] == "Here." and asked_of(bodies[0]) == ["And now?"], (
        "what failed is no part of the conversation"
    )


def test_a_conversation_is_kept_copied_changed_and_exported(page: Any) -> None:
    bodies = answers_with(page, "One.", "Two:\n\n```sh\nls -l\n```", "Three.", "Four.")
    for words in ("First?", "Second?\nSurely?"):
        ask(page, words)
        answered(page)
    page.get_by_label("Copy this code").click()
    page.get_by_text("copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "ls -l"
    page.get_by_label("Copy this answer").first.click()
    page.wait_for_function("async () => await navigator.clipboard.readText() === 'One.'")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as over plain http
    page.get_by_label("Copy this code").click()
    question(page).press("Control+V")
    assert question(page).input_value() == "ls -l"
    page.reload()
    page.locator(".turn").nth(1).wait_for()
    assert said(page)[0] == "One." and "ls -l" in said(page)[1]
    with page.expect_download() as file:
        page.get_by_role("button", name="Export as Markdown").click()
    text = Path(file.value.path()).read_text()
    assert file.value.suggested_filename.endswith(".md")
    assert "> First?\n" in text and "> Second?\n> Surely?\n" in text and "\n```sh\nls -l\n```\n" in text
    assert page.get_by_role("button", name="Ask this again").count() == 1, "of the last question alone"
    page.get_by_role("button", name="Ask this again").click()
    page.get_by_text("Three.").wait_for()
    assert asked_of(bodies[2]) == ["First?", "One.", "Second?\nSurely?"] and len(said(page)) == 2
    page.get_by_label("Edit this question").first.click()
    assert question(page).input_value() == "First?"
    page.keyboard.press("Escape")
    assert question(page).input_value() == "" and len(said(page)) == 2
    page.get_by_label("Edit this question").first.click()
    question(page).fill("Changed?")
    page.keyboard.press("Enter")
    page.get_by_text("Four.").wait_for()
    assert asked_of(bodies[3]) == ["Changed?"] and said(page) == ["Four."]
    page.get_by_role("button", name="New conversation").click()
    page.reload()
    page.get_by_text("tiny · reads up to").wait_for()
    assert page.locator(".turn").count() == 0


def test_two_pages_share_a_conversation(page: Any, address: str) -> None:
    other = page.context.new_page()
    other.goto(address)
    other.get_by_text("tiny · reads up to").wait_for()
    other.route("**/v1/chat/completions", lambda route: None)
    with other.expect_request("**/v1/chat/completions"):
        ask(other, "From the other?")
    page.get_by_text("is being answered on another page").wait_for()
    other.goto("about:blank")
    page.get_by_text("interrupted: the page was closed").wait_for()
    bodies = answers_with(page, "Yes.")
    page.get_by_role("button", name="Ask this again").click()
    page.get_by_text("Yes.", exact=True).wait_for()
    assert asked_of(bodies[0]) == ["From the other?"]


def test_what_was_not_answered_when_the_page_was_left_is_told(page: Any) -> None:
    page.route("**/v1/chat/completions", lambda route: None)
    ask(page, "First?")
    ask(page, "Second?")
    page.reload()
    page.locator(".turn").nth(1).wait_for()
    assert page.locator(".answer .note").all_inner_texts() == ["interrupted: the page was closed"]
    assert page.locator(".turn > .note").nth(1).inner_text() == "not asked: the page was closed"


def test_what_the_browser_keeps_is_bounded(page: Any) -> None:
    kept = page.evaluate("""async () => {
        const kept = await import('/kept.js');
        const turn = (length) => ({ question: 'q', answers: { held: { said: 'x'.repeat(length) } } });
        for (let id = 0; id < 60; id++) kept.save_talk(`small-${id}`, [turn(10)]);
        const small = Object.keys(localStorage).filter((key) => key.includes('talk')).length;
        for (let id = 0; id < 9; id++) kept.save_talk(`large-${id}`, [turn(300000), turn(300000)]);
        kept.save_talk('endless', Array.from({ length: 64 }, () => turn(50000)));
        const size = Object.values(localStorage).reduce((sum, each) => sum + each.length, 0);
        localStorage.setItem('kvsketch-talk:broken', '1\\n{"no');
        return { small, size, last: kept.load_talk('endless').length, broken: kept.load_talk('broken') };
    }""")
    assert kept["small"] == 40 and kept["size"] < 2_001_000
    assert kept["last"] == 16 and kept["broken"] == [], "the last turns of a conversation that is too long"
    page.locator("#settings summary").click()
    page.get_by_role("button", name="Delete all conversations").click()
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.includes('talk'))") == []


def test_settings_are_kept_and_sent(page: Any) -> None:
    bodies = answers_with(page, "Yes.")
    page.locator("#settings summary").click()
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Longest answer").fill("33")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Longest answer").fill("0")
    page.reload()
    page.get_by_text("tiny · reads up to").wait_for()
    ask(page, "Is it?")
    answered(page)
    assert bodies[0]["temperature"] == 0.7 and bodies[0]["max_tokens"] == 33, "0 tokens are refused"
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    page.locator("#settings summary").click()
    page.get_by_role("button", name="Default settings").click()
    ask(page, "Again?")
    answered(page)
    assert (bodies[1]["temperature"], bodies[1]["max_tokens"]) == (0, 512) and asked_of(bodies[1])[0] == "Is it?"


def test_a_question_about_a_document_that_is_read_waits_in_line(page: Any, tmp_path: Path) -> None:
    bodies = answers_with(page, "It is deep.")
    reading = [True]
    sending: list[Any] = []

    def slowly(route: Any) -> None:
        if route.request.method != "GET":
            return sending.append(route)
        body = route.fetch().json()
        for each in body["data"]:
            each["status"] = "reading" if reading[0] else each["status"]
        route.fulfill(json=body)

    page.route("**/v1/documents", slowly)
    (tmp_path / "slow.txt").write_text(TEXT)
    page.locator("#file").set_input_files(tmp_path / "slow.txt")
    question(page).fill("How deep?")
    page.keyboard.press("Enter")
    page.get_by_text("waiting: the file is being sent").wait_for()
    sending[0].continue_()
    page.locator(".turn").wait_for()
    ask(page, "How old?")
    notes = page.locator(".turn > .note")
    assert notes.all_inner_texts() == ["waiting: the document is being read"] * 2 and bodies == []
    assert page.locator("#status").inner_text() == ""
    assert page.locator("#stop").is_visible()
    reading[0] = False
    page.locator(".took:not(:empty)").nth(1).wait_for()
    assert [asked_of(each)[-1] for each in bodies] == ["How deep?", "How old?"] and bodies[0]["document"]
    assert asked_of(bodies[1]) == ["How deep?", "It is deep.", "How old?"] and notes.all_inner_texts() == ["", ""]


def asked_while_it_opens(page: Any, *questions: str) -> list[Any]:
    """Asks a page that waits for its list of documents; the request for the list, which nobody has answered."""
    looks: list[Any] = []
    page.route("**/v1/documents", lambda route: looks.append(route))
    with page.expect_request("**/v1/documents"):
        page.reload()
    page.get_by_text("connecting…").wait_for()
    for words in questions:
        question(page).fill(words)
        page.keyboard.press("Enter")
    return looks


def test_a_question_asked_while_the_page_opens_waits_for_its_document(page: Any, tmp_path: Path) -> None:
    bodies = answers_with(page, "It is deep.")
    read(page, tmp_path, "early.txt", "Early. " + TEXT)
    looks = asked_while_it_opens(page, "How deep?", "How old?")
    assert bodies == [], "none is asked before the page has chosen a document"
    assert page.locator("#status").inner_text() == "waiting: the page is being opened"
    assert page.locator("#about").inner_text() == "", "nothing is promised before it is known"
    page.unroute("**/v1/documents")
    looks[0].continue_()
    page.get_by_text("About early.txt").wait_for()
    page.locator(".took:not(:empty)").nth(1).wait_for()
    answered(page)
    assert [asked_of(each)[-1] for each in bodies] == ["How deep?", "How old?"]
    assert all(each.get("document") for each in bodies), "asked about what the page shows"
    assert page.locator(".asked").all_inner_texts() == ["How deep?", "How old?"]
    assert page.locator("#status").inner_text() == ""


def test_a_page_that_opens_without_documents_says_so(page: Any) -> None:
    page.route("**/v1/documents", lambda route: route.fulfill(json={"data": []}))
    page.reload()
    page.get_by_text("Without a document, questions go to the model alone.").wait_for()


def test_a_question_is_not_lost_with_a_server_that_is_away_when_the_page_opens(page: Any) -> None:
    bodies = answers_with(page, "Here.")
    looks = asked_while_it_opens(page, "Is anybody there?", "And where?")
    question(page).fill("The next one, half")
    page.unroute("**/v1/documents")
    looks[0].abort("connectionrefused")
    page.locator("#status.wrong", has_text="not asked: the server does not answer").wait_for()
    words = "Is anybody there?\nAnd where?\nThe next one, half"
    assert question(page).input_value() == words and bodies == []
    page.locator("#status:not(.wrong)", has_text="the server is back").wait_for()
    page.keyboard.press("Enter")
    page.get_by_text("Here.", exact=True).wait_for()
    assert asked_of(bodies[0]) == [words]


def test_a_question_tries_again_to_open_a_page_that_could_not_be_opened(page: Any) -> None:
    bodies = answers_with(page, "Here.")
    page.route("**/v1/documents", lambda route: route.fulfill(status=500, json={"error": {"message": "not ready"}}))
    page.reload()
    page.locator("#status.wrong", has_text="not ready").wait_for()
    question(page).fill("Is anybody there?")
    page.keyboard.press("Enter")
    page.locator("#status.wrong", has_text="not asked").wait_for()
    assert question(page).input_value() == "Is anybody there?" and bodies == []
    page.unroute("**/v1/documents")
    page.keyboard.press("Enter")
    page.get_by_text("Here.", exact=True).wait_for()
    assert asked_of(bodies[0]) == ["Is anybody there?"]


def test_what_is_typed_after_an_edit_was_sent_stays(page: Any, tmp_path: Path) -> None:
    answers_with(page, "One.", "Two.", "Three.")
    ask(page, "First?")
    answered(page)
    sending: list[Any] = []
    page.route("**/v1/documents", lambda r: sending.append(r) if r.request.method == "POST" else r.continue_())
    (tmp_path / "edited.txt").write_text("Edited. " + TEXT)
    page.locator("#file").set_input_files(tmp_path / "edited.txt")
    page.get_by_label("Edit this question").click()
    question(page).fill("Changed?")
    page.keyboard.press("Enter")
    page.get_by_text("waiting: the file is being sent").wait_for()
    question(page).fill("The next one, half")
    page.unroute("**/v1/documents")
    sending[0].continue_()
    page.get_by_text("Two.", exact=True).wait_for()
    answered(page)
    assert page.locator(".asked").all_inner_texts() == ["Changed?"]
    assert question(page).input_value() == "The next one, half"


def test_an_edit_lasts_while_its_conversation_is_shown(page: Any, tmp_path: Path) -> None:
    bodies = answers_with(page, "One.", "Two.")
    read(page, tmp_path, "other.txt", "Other. " + TEXT)
    read(page, tmp_path, "edited.txt", "Edited again. " + TEXT)
    ask(page, "First?")
    answered(page)
    page.get_by_label("Edit this question").click()
    question(page).fill("Changed?")
    page.get_by_role("button", name="Delete other.txt").click()
    page.locator(".choose", has_text="other.txt").wait_for(state="detached")
    page.get_by_text("About edited.txt").wait_for()
    assert question(page).input_value() == "Changed?"
    question(page).press("Enter")
    page.get_by_text("Two.", exact=True).wait_for()
    assert asked_of(bodies[1]) == ["Changed?"] and page.locator(".turn").count() == 1, "it is an edit still"


def test_questions_about_a_file_that_is_not_sent_go_back_into_the_box(page: Any, tmp_path: Path) -> None:
    sending: list[Any] = []
    page.route("**/v1/documents", lambda r: sending.append(r) if r.request.method == "POST" else r.continue_())
    (tmp_path / "lost.txt").write_text(TEXT)
    page.locator("#file").set_input_files(tmp_path / "lost.txt")
    for words in ("How deep?", "How old?"):
        question(page).fill(words)
        page.keyboard.press("Enter")
    sending[0].fulfill(status=500, json={"error": {"message": "no room"}})
    page.locator("#status.wrong", has_text="not asked: the file was not sent").wait_for()
    assert question(page).input_value() == "How deep?\nHow old?" and page.locator(".turn").count() == 0


def test_a_server_that_is_back_leaves_the_conversation_without_a_document(
    page: Any, address: str, tmp_path: Path
) -> None:
    answers_with(page, "One.")
    read(page, tmp_path, "left.txt", "Left. " + TEXT)
    page.locator(".choose", has_text="left.txt").click()
    page.get_by_text("Without a document").wait_for()
    ask(page, "Of the model alone?")
    answered(page)
    here = f"**://{urlsplit(address).netloc}/**"
    page.route(here, lambda route: route.abort("connectionrefused"))
    ask(page, "Is anybody there?")
    page.locator("#status.wrong", has_text="the server does not answer").wait_for()
    page.unroute(here)
    page.locator("#status:not(.wrong)", has_text="the server is back").wait_for()
    assert page.get_by_text("Without a document").is_visible()
    assert page.locator(".asked").all_inner_texts() == ["Of the model alone?", "Is anybody there?"]


def test_a_file_sent_while_the_page_opens_stays_chosen(page: Any, tmp_path: Path) -> None:
    bodies = answers_with(page, "It is deep.")
    read(page, tmp_path, "before.txt", "Before. " + TEXT)
    late: list[Any] = []

    def first_comes_late(route: Any) -> None:
        if late:
            return route.continue_()
        late.append((route, route.fetch()))

    page.route("**/v1/documents", first_comes_late)
    with page.expect_request("**/v1/documents"):
        page.reload()
    page.get_by_text("connecting…").wait_for()
    read(page, tmp_path, "sent.txt", "Sent. " + TEXT)
    question(page).fill("How deep?")
    page.keyboard.press("Enter")
    late[0][0].fulfill(response=late[0][1])
    page.get_by_text("It is deep.", exact=True).wait_for()
    assert page.get_by_text("About sent.txt").is_visible()
    assert bodies[0]["document"] == page.locator(".choose", has_text="sent.txt").get_attribute("data-id")


# Answers once with "One.", and presses Enter at one moment of its end: a name, or after so many microtasks.
AT_THE_END = """(moment) => {
    const box = document.getElementById('question'), plain = window.fetch;
    const at = (now) => {
        if (now !== moment) return;
        box.value = 'And?';
        box.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', bubbles: true, cancelable: true }));
    };
    const turns = document.getElementById('turns'), stop = document.getElementById('stop');
    const watch = (now, node, is_busy) => {
        let begun = false;
        new MutationObserver((_, observer) => {
            begun ||= is_busy();
            if (!begun || is_busy()) return;
            observer.disconnect();
            at(now);
        }).observe(node, { attributes: true, childList: true, subtree: true });
    };
    watch('written', turns, () => turns.querySelector('.writing') !== null);
    watch('no stop', stop, () => !stop.hidden);
    const end = async (stream) => {
        at('last words');
        const event = { choices: [{ index: 0, delta: { content: 'One.' } }] };
        stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(event)}\\n\\n`));
        at('before the end');
        stream.close();
        for (let passed = 0; passed < 40; passed++) {
            at(passed);
            await null;
        }
    };
    window.fetch = async (path, options) => {
        if (path !== 'v1/chat/completions') return plain(path, options);
        window.fetch = plain;
        return new Response(new ReadableStream({ start(stream) { setTimeout(end, 20, stream); } }));
    };
}"""


def test_enter_at_any_moment_of_the_end_of_an_answer_asks(page: Any) -> None:
    bodies = answers_with(page, "Two.")
    for moment in ("last words", "before the end", "written", "no stop", *range(40)):
        page.evaluate(AT_THE_END, moment)
        ask(page, "First?")
        playwright.expect(page.locator(".said")).to_have_text(["One.", "Two."])
        answered(page)
        assert page.locator(".asked").all_inner_texts() == ["First?", "And?"], moment
        assert asked_of(bodies[-1]) == ["First?", "One.", "And?"] and question(page).input_value() == "", moment
        page.get_by_role("button", name="New conversation").click()


def test_a_click_on_a_passage_goes_to_its_place(page: Any, tmp_path: Path) -> None:
    answers_with(page, "The lighthouse keeper was Dr. Vance.")
    text = (
        TEXT * 3
        + "\n\n11. The lighthouse 🚢\nDr. Vance kept the lighthouse, cf. Fig. 3. It is lit at night.\n\n"
        + TEXT * 3
    )
    read(page, tmp_path, "long.txt", text)
    ask(page, "Who kept the lighthouse?")
    answered(page)
    passage = page.locator(".near > .passage", has_text="Dr. Vance kept the lighthouse, cf. Fig. 3.")
    assert re.search(r"long\.txt · [\d.]+% of the heads store it", passage.inner_text())
    passage.click()
    place = page.locator("#text mark")
    assert place.inner_text() == "Dr. Vance kept the lighthouse, cf. Fig. 3."
    assert page.locator("#text").inner_text().strip() == text.strip()
    playwright.expect(place).to_be_in_viewport()
    playwright.expect(place).to_be_focused()
    page.get_by_role("button", name="Back to the answer").press("Enter")
    playwright.expect(passage).to_be_focused()


def test_a_high_doubt_is_told_in_words(page: Any) -> None:
    for told, usage in ((1, {"doubt": 0.9}), (1, {"doubt": 0.1}), (1, {}), (2, {"doubt": 0.5})):
        answers_with(page, "Perhaps.", **usage)
        ask(page, "Is it?")
        answered(page)
        assert page.get_by_text("Uncertain:").count() == told


@pytest.fixture(scope="module")
def modules(browser: Any, address: str) -> Iterator[Any]:
    """A page that runs no script of its own and can import those of the server."""
    result = browser.new_page()
    result.set_default_timeout(1000 * LONGEST_WAIT)
    result.goto(f"{address}/page.css")
    yield result
    result.close()


MARKDOWN = [
    ("a **b *c* d** `e*f*`", "<p>a <strong>b <em>c</em> d</strong> <code>e*f*</code></p>"),
    ("snake_case_name, 2 * 3 * 4, \\*no\\*", "<p>snake_case_name, 2 * 3 * 4, *no*</p>"),
    ("# One\n## Two ~~3~~\n---", "<h5>One</h5><h6>Two <s>3</s></h6><hr>"),
    ("- a\n  - b\n\n  c\n- d", "<ul><li><p>a</p><ul><li>b</li></ul><p>c</p></li><li><p>d</p></li></ul>"),
    ("3. a\n4. b\n\nin\n1921. So", '<ol start="3"><li>a</li><li>b</li></ol><p>in\n1921. So</p>'),
    ("- [x] a\n- [ ] b", "<ul><li>☑ a</li><li>☐ b</li></ul>"),
    ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    ("a < b && c > d &amp; <b>x</b>", "<p>a &lt; b &amp;&amp; c &gt; d &amp; &lt;b&gt;x&lt;/b&gt;</p>"),
    ("`` a ` b `` and ` alone", "<p><code>a ` b</code> and ` alone</p>"),
]  # fmt: skip
RENDERED = """async (text) => {
    const { render } = await import('/markdown.js');
    const box = document.createElement('div');
    for (let end = 0; end < text.length; end += Math.ceil(text.length / 20)) render(box, text.slice(0, end));
    render(box, text);
    document.body.append(box);
    box.id = 'rendered';
    return text.length < 1000 ? box.innerHTML : '';
}"""


def tight(html: str) -> str:
    """Without the line breaks between elements."""
    return re.sub(r"(?<=>)\n+|\n+(?=<[/uo])", "", html)


def test_markdown_becomes_elements(modules: Any) -> None:
    for source, wanted in MARKDOWN:
        assert tight(modules.evaluate(RENDERED, source)) == wanted, "also while it grows"
    table = tight(modules.evaluate(RENDERED, "| a | b |\n|---|:-:|\n| 1 | *2* |\n\nend"))
    assert "<th>a</th><th>b</th>" in table and "<td>1</td><td><em>2</em></td>" in table and table.endswith("<p>end</p>")
    code = modules.evaluate(RENDERED, "x\n```py\n**a** <b>\n```\ny")
    assert "<code>**a** &lt;b&gt;</code>" in code and "<span>py</span>" in code and code.endswith("<p>y</p>")
    links = modules.evaluate(
        RENDERED, "[a](https://x.org/b_c_d) <mailto:a@x.org> (see http://x.org/q?a=1). ![p](https://x.org/p.png)"
    )
    hrefs = re.findall(r'href="([^"]*)"', links)
    assert hrefs == ["https://x.org/b_c_d", "mailto:a@x.org", "http://x.org/q?a=1", "https://x.org/p.png"]
    assert links.count('rel="noopener noreferrer nofollow"') == 4


HOSTILE = [
    "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>", "<svg/onload=window.hit=1>",
    "[a](javascript:hit=1) [b](JaVaScRiPt:window.hit=1) [c](java\tscript:window.hit=1) <javascript:window.hit=1>",
    "[d](data:text/html,<script>window.hit=1</script>) [e](//evil.example) [f](vbscript:x) ![g](javascript:hit=1)",
    '[h](https://x.org/"onmouseover="window.hit=1) [i](https://x.org "t\\" onclick=window.hit=1 ")',
    "```html\n<script>window.hit = 1</script>", "~~~\n```\n<iframe srcdoc='<script>parent.hit=1</script>'>",
    "```` ``` `",
    '```"><script>window.hit=1</script>\nx\n```', "| <img src=x onerror=window.hit=1> | b |\n|---|---|\n| <b> | ** |",
    "> " * 3000 + "deep", "\n".join("  " * depth + "- a" for depth in range(300)), "x" * 200_000, "*a **b _c " * 20_000,
    "[" * 50_000 + "](" * 50_000, "`" * 9_999 + " " + "`" * 9_998, "![" * 30_000, "*" * 60_000, "- " * 30_000,
    "|" * 30_000 + "\n" + "|-" * 30_000, "https://" * 20_000, "\\" * 60_001, "<https:" * 20_000,
]  # fmt: skip


def test_hostile_answers_stay_text(page: Any, modules: Any) -> None:
    for text in HOSTILE:
        start = monotonic()
        modules.evaluate(RENDERED, text)
        seen = modules.evaluate("""() => {
            const box = document.getElementById('rendered'), all = [...box.querySelectorAll('*')];
            const result = [[...new Set(all.map((each) => each.localName))],
                [...new Set(all.flatMap((each) => each.getAttributeNames()))],
                all.filter((each) => each.href).map((each) => new URL(each.href).protocol), box.textContent.length];
            box.remove();
            return result;
        }""")
        assert monotonic() - start < LONGEST_WAIT, text[:40]
        assert set(seen[0]) <= {
            "p", "a", "code", "pre", "figure", "figcaption", "span", "button", "div", "table", "thead", "tbody", "tr",
            "th", "td", "ul", "ol", "li", "blockquote", "strong", "em", "s", "h5", "h6", "hr", "br",
        }, text[:40]  # fmt: skip
        assert set(seen[1]) <= {
            "class",
            "href",
            "title",
            "target",
            "rel",
            "start",
            "type",
            "aria-label",
            "role",
            "tabindex",
        }
        assert set(seen[2]) <= {"http:", "https:", "mailto:"}
    bodies = answers_with(page, "\n\n".join(HOSTILE[:10]))
    ask(page, "Will you?")
    answered(page)
    assert len(bodies) == 1 and page.evaluate("window.hit") is modules.evaluate("window.hit") is None


def test_vendored_files_are_those_of_their_table() -> None:
    from kvsketch.serve import app

    folder = Path(app.__file__).parent / "page" / "vendor"
    rows = re.findall(
        r"^\| (\S+) \| .* \| \d+\.\d+\.\d+ \| .*\((\S+)\) \| (\w{64}) \|$", (folder / "README.md").read_text(), re.M
    )
    named = {name: digest for name, _, digest in rows}
    assert named == {
        each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.iterdir() if "js" in each.suffix
    }
    assert all((folder / licence).is_file() for _, licence, _ in rows) and len(rows) == 2


# A bar for each end.
SENTENCES = [
    "11. Costs of works|\nThe repair cost 5 million.| It was paid.|",
    "See Section 11. The rest of Fig. 3 is Dr. J. Vance's, e.g. this.|",
    "It opened in 1921.| Then, at 9 a.m. on Dec. 3, no. 4 sank.| Why?!| So.|",
    "He said no.| She left at 3.5 knots.| “Go.”| They went.|",
    "A line that was wrapped by an editor goes on and\nends here.| Next.|\n\nLast|",
    "- one thing|\n- another|\n2.1. Depth.| It is 14 m.|",
]


def test_sentences_end_where_they_end(modules: Any) -> None:
    split = "async (text) => (await import('/text.js')).sentences(text).map(([from, to]) => text.slice(from, to))"
    for wanted in SENTENCES:
        ends = modules.evaluate(split, wanted.replace("|", ""))
        assert ends == [each.strip() for each in wanted.split("|")[:-1]]
    many = modules.evaluate(split, "word " * 20_000 + "\n" + "a. " * 20_000)
    assert sum(map(len, many)) > 150_000


CONTRASTS = """() => {
    const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
    const over = (top, under) => [0, 1, 2].map((at) => top[at] * (top[3] ?? 1) + under[at] * (1 - (top[3] ?? 1)));
    const linear = (part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const own = (node) => numbers(getComputedStyle(node).backgroundColor);
    const ground = (node) => node ? over(own(node), ground(node.parentElement)) : [255, 255, 255];
    const opacity = (node) => node ? getComputedStyle(node).opacity * opacity(node.parentElement) : 1;
    const ratio = (color, node) => {
        const [a, b] = [light(over(color, ground(node))), light(ground(node))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
    };
    const result = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let text = walker.nextNode(); text; text = walker.nextNode()) {
        const node = text.parentElement;
        if (!text.data.trim() || !node.checkVisibility()) continue;
        if (opacity(node) < 1) result.push([0, text.data]);
        result.push([ratio(numbers(getComputedStyle(node).color), node), text.data.slice(0, 40)]);
    }
    for (const node of document.querySelectorAll('[placeholder]')) {
        result.push([ratio(numbers(getComputedStyle(node, '::placeholder').color), node), 'placeholder']);
    }
    return result;
}"""
NAMELESS = re.compile(
    r"^\s*- (?:button|checkbox|link|textbox|spinbutton|region|img|log|list|dialog|progressbar)(?: \[.*\])?:?$", re.M
)
ANSWER = """# Found

See https://example.org/a/very/long/address/that/goes/on/and/on/without/a/space/in/it.html and `code_of_the_basin`.

| a rather long title of a column | another rather long title | and a third one that is long |
|---|---|---|
| 1 | 2 | 3 |

> quoted

```python
return {1: 9.0, 2: 14.0}[basin]  # a line of code that is wider than any phone, and that must not widen the page
```
"""


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_it_fits_can_be_read_and_needs_no_mouse(page: Any, look: str, tmp_path: Path) -> None:
    answers_with(page, ANSWER, "w" * 300, doubt=0.9)
    page.emulate_media(color_scheme="dark" if look == "dark" else "light")
    page.set_viewport_size({"width": 360, "height": 740} if look == "phone" else {"width": 1280, "height": 900})
    read(page, tmp_path, "harbour.txt", TEXT)
    page.locator("#settings summary").click()
    page.get_by_label("then ask the full cache too").check()
    for words in ("How deep?", "And how old? " + "o" * 200):
        ask(page, words)
        answered(page)
    playwright.expect(question(page)).to_be_in_viewport(ratio=1)
    assert (
        page.locator("#end").evaluate("each => each.getBoundingClientRect().top")
        <= page.locator("#ask").bounding_box()["y"]
    )
    page.locator(".near > .passage").first.wait_for()
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{look}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    weak = [each for each in page.evaluate(CONTRASTS) if each[0] < 4.5]
    assert weak == []
    names = page.locator("body").aria_snapshot()
    assert not NAMELESS.search(names), names
    places = focused(page)
    wanted = (
        "file|", "Paste a text", "choose|", "remove|", "export|", "forget|", "Settings", "temperature|", "usual|",
        "Edit", "Retry", "question|", "send|", "compare|", "text|",
    )  # fmt: skip
    starts = [
        [at for at, place in enumerate(places) if place.startswith(name) or f"|{name}" in place] for name in wanted
    ]
    order = [each[0] for each in starts if each]
    assert len(order) == len(wanted) and order == sorted(order), places


def focused(page: Any) -> list[str]:
    """What the tab key goes through, from the top; nothing of it may lie behind the question."""
    page.evaluate("document.querySelector('.skip').focus()")
    places: list[str] = []
    while len(places) < 60 and not any(each.startswith("text|") for each in places):
        page.keyboard.press("Tab")
        place, covered = page.evaluate("""() => {
            const node = document.activeElement, box = node.getBoundingClientRect();
            const top = document.elementFromPoint(box.x + box.width / 2, box.y + Math.min(box.height / 2, 10));
            const covered = node.id !== 'file' && !(top && (node.contains(top) || top.contains(node)));
            return [`${node.id || node.className}|${node.textContent.trim().slice(0, 20)}`, covered];
        }""")
        assert not covered, place
        places.append(place)
    return places


def test_keys_and_a_long_conversation(page: Any) -> None:
    answers_with(page, "\n\n".join(["A paragraph."] * 12))
    question(page).fill("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.locator(".turn").wait_for()
    answered(page)
    assert page.locator(".asked").inner_text() == "One\ntwo" and question(page).input_value() == ""
    for words in ("And?", "So?"):
        ask(page, words)
        answered(page)
    playwright.expect(question(page)).to_be_in_viewport(ratio=1)
    playwright.expect(page.locator(".said").nth(2).locator("p").last).to_be_in_viewport()
    page.keyboard.press("Enter")
    assert page.locator(".turn").count() == 3, "nothing is asked"


def delete_all(page: Any) -> None:
    page.evaluate("""async () => {
        const headers = { Authorization: 'Bearer secret' };
        const { data } = await (await fetch('v1/documents', { headers })).json();
        for (const { id } of data) await fetch(`v1/documents/${id}`, { headers, method: 'DELETE' });
    }""")


def test_a_first_visit_offers_a_sample_and_three_questions(page: Any) -> None:
    from kvsketch.serve import app

    # A model that reads letter by letter has room for one chapter of it.
    sample = (Path(app.__file__).parent / "page" / "sample.md").read_text()
    chapter = sample[sample.index("## 3. Visitors") : sample.index("## 4.")]
    page.route("**/sample.md", lambda route: route.fulfill(body=chapter) if route.fetch().text() == sample else None)
    delete_all(page)
    page.reload()
    bodies = answers_with(page, "20 crowns.")
    offered = page.locator("#sample button")
    playwright.expect(offered).to_have_count(3)
    offered.filter(has_text="family ticket").click()
    page.get_by_text("About Skerrow Lighthouse (sample)").wait_for()
    playwright.expect(offered).to_have_count(2)
    answered(page)
    assert bodies[0]["document"] and asked_of(bodies[0]) == ["What does a family ticket cost?"]
    cited = page.locator(".near > .passage").inner_text()
    assert "A family ticket, for two adults and all their children, costs 20 crowns." in cited
    offered.first.click()
    page.locator(".near > .passage").nth(1).wait_for()
    assert len(bodies) == 2 and bodies[1]["document"] == bodies[0]["document"]
    page.get_by_role("button", name="Delete Skerrow Lighthouse (sample)").click()
    playwright.expect(offered).to_have_count(3)


def test_a_citation_names_the_page_of_a_pdf(page: Any, tmp_path: Path) -> None:
    pytest.importorskip("pypdf", reason="not installed: pip install 'kvsketch[pdf]'")
    from tests.helpers.pdf import pdf

    answers_with(page, "It is deep.")
    (tmp_path / "harbour.pdf").write_bytes(pdf(pages=3))
    page.locator("#file").set_input_files(tmp_path / "harbour.pdf")
    page.get_by_text("harbour.pdf is read; ask about it").wait_for()
    ask(page, "How deep is the harbour?")
    page.locator(".near > .passage", has_text="harbour.pdf, page 1").wait_for()
    page.locator(".near summary", has_text="2 more").click()
    assert [f"page {n}" in each for n, each in enumerate(page.locator(".passage small").all_inner_texts(), 1)] == [
        True
    ] * 3
    page.get_by_role("button", name="Delete harbour.pdf").click()


def test_several_files_are_one_document_or_many(page: Any, tmp_path: Path) -> None:
    answers_with(page, "The keeper was Vance.")
    for name, text in (("port.txt", "🚢 " + TEXT), ("light.txt", "The keeper of the light was Dr. Vance. " + TEXT)):
        (tmp_path / name).write_text(text)
    both = [tmp_path / "port.txt", tmp_path / "light.txt"]
    page.locator("#file").set_input_files(both)
    assert page.locator("#several-title").inner_text() == "2 files: port.txt, light.txt"
    page.get_by_role("button", name="Cancel").click()
    assert page.locator("#several").is_hidden() and page.locator(".choose", has_text="port.txt").count() == 0
    page.locator("#file").set_input_files(both)
    page.get_by_role("button", name="Read as one document").click()
    page.get_by_text("port.txt, light.txt is read; ask about it").wait_for()
    page.locator(".choose", has_text="port.txt, light.txt").wait_for()
    ask(page, "Who was the keeper of the light?")
    cited = page.locator(".near > .passage")
    cited.wait_for()
    assert cited.locator("b").inner_text() == "light.txt" and "Dr. Vance" in cited.inner_text()
    page.get_by_role("button", name="Delete port.txt, light.txt").click()
    page.locator("#file").set_input_files(both)
    page.get_by_role("button", name="Read each by itself").click()
    page.get_by_text("light.txt is read").wait_for()
    for name in ("port.txt", "light.txt"):
        page.get_by_role("button", name=f"Delete {name}").click()
        page.locator(".choose", has_text=name).wait_for(state="detached")


def test_reading_and_sending_can_be_cancelled(page: Any, tmp_path: Path) -> None:
    def reading(route: Any) -> None:
        if route.request.method != "GET":
            return route.continue_()
        body = route.fetch().json()
        for each in body["data"]:
            each |= {"status": "reading", "tokens_read": each["tokens"] // 3}
        route.fulfill(json=body)

    page.route("**/v1/documents", reading)
    (tmp_path / "slow.txt").write_text(TEXT)
    page.locator("#file").set_input_files(tmp_path / "slow.txt")
    page.get_by_role("progressbar", name="Reading slow.txt").wait_for()
    page.get_by_text("reading slow.txt: 33%").wait_for()
    page.get_by_role("button", name="Cancel reading slow.txt").click()
    page.get_by_text("slow.txt was not read").wait_for()
    assert documents(page, "slow.txt") == [] and page.locator(".choose", has_text="slow.txt").count() == 0
    page.unroute("**/v1/documents")
    page.route("**/v1/documents", lambda r: None if r.request.method == "POST" else r.continue_())
    page.locator("#file").set_input_files(tmp_path / "slow.txt")
    page.locator("#cancel").click()
    page.locator("#upload:not(.wrong)", has_text="slow.txt was not sent").wait_for()
    assert page.locator("#cancel").is_hidden()


def test_documents_of_other_methods_and_models_are_listed_and_deleted(page: Any, tmp_path: Path) -> None:
    def others(route: Any) -> None:
        body = route.fetch().json()
        for each in body["data"]:
            if each["name"] == "old.txt":
                each["method"] = "snapkv:budget=64"
            if each["name"] == "foreign.txt":
                each["status"] = "other_model"
        route.fulfill(json=body)

    for name in ("old.txt", "foreign.txt"):
        read(page, tmp_path, name, name + TEXT)
    page.route("**/v1/documents", others)
    page.reload()
    old, foreign = (page.locator(".choose", has_text=name) for name in ("old.txt", "foreign.txt"))
    assert "compressed with another method, snapkv:budget=64" in old.inner_text() and old.is_enabled()
    assert "read with another model" in foreign.inner_text() and foreign.is_disabled()
    for each in (old, foreign):
        assert each.locator("small").evaluate("it => it.scrollWidth <= it.clientWidth"), "nothing of it is cut off"
    for name in ("old.txt", "foreign.txt"):
        page.get_by_role("button", name=f"Delete {name}").click()
        page.locator(".choose", has_text=name).wait_for(state="detached")
    assert documents(page, "old.txt", "foreign.txt") == []


def test_nothing_is_left_of_a_document_that_was_deleted_elsewhere(page: Any, tmp_path: Path) -> None:
    answers_with(page, "It is deep.")
    read(page, tmp_path, "gone.txt", TEXT)
    ask(page, "How deep?")
    page.locator(".near > .passage").wait_for()
    page.locator("#text span").first.wait_for()
    delete_all(page)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.locator("#upload", has_text="the document was deleted").wait_for()
    page.get_by_text("Without a document, questions go to the model alone.").wait_for()
    assert page.locator("#cache").is_hidden() and page.locator("#passages").is_hidden()
    assert page.locator("#text").text_content() == "" and page.locator(".turn").count() == 0
    assert page.evaluate("location.hash") == "" and "gone.txt" not in page.locator("body").inner_text()
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.includes('talk'))") == []


def test_a_wrong_key_is_told(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.set_default_timeout(1000 * LONGEST_WAIT)
    page.goto(address)
    key = page.get_by_label("This server asks for its API key")
    key.fill("no")
    assert page.locator("#key-wrong").is_hidden()
    page.keyboard.press("Enter")
    playwright.expect(page.get_by_role("alert")).to_contain_text("That key is wrong")
    key.fill("secret")
    page.keyboard.press("Enter")
    page.get_by_text("tiny · reads up to").wait_for()
    assert not page.locator("#key").is_visible()
    page.close()


def test_an_idle_page_finds_its_server_again(page: Any, address: str) -> None:
    here = f"**://{urlsplit(address).netloc}/**"
    page.route(here, lambda route: route.abort("connectionrefused"))
    page.get_by_text("not connected: trying again").wait_for()
    page.unroute(here)
    page.get_by_text("the server is back").wait_for()
    page.get_by_text("tiny · reads up to").wait_for()


def test_the_question_is_in_sight_on_a_phone(page: Any, tmp_path: Path) -> None:
    answers_with(page, "\n\n".join(["A paragraph of the answer, long enough for two lines on a phone."] * 12))
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    playwright.expect(question(page)).to_be_in_viewport(ratio=1)
    playwright.expect(page.locator("#send")).to_be_in_viewport(ratio=1)
    read(page, tmp_path, "phone.txt", TEXT * 5)
    for where in ("0", "document.body.scrollHeight / 2", "document.body.scrollHeight"):
        page.evaluate(f"scrollTo(0, {where})")
        playwright.expect(question(page)).to_be_in_viewport(ratio=1)
        playwright.expect(page.locator("#send")).to_be_in_viewport(ratio=1)
    assert page.locator("#ask").bounding_box()["height"] < 844 / 4
    ask(page, "How deep?")
    answered(page)
    playwright.expect(page.locator(".said p").last).to_be_in_viewport()
    page.get_by_role("button", name="Delete phone.txt").click()
    page.locator(".choose", has_text="phone.txt").wait_for(state="detached")
