"""The page in a real browser: it runs without errors or network, sorts, filters, shades, toggles and fits a phone.

Needs Chromium (Debian: apt-get install chromium) and the package playwright; skipped where one of them is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from sample_records import write_all, write_two_models

from kvsketch.report.contents import gather
from kvsketch.report.page import page
from kvsketch.report.reading import read_folder

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("records")
    target = folder / "report.html"
    target.write_text(page(gather(read_folder(write_all(folder)))), encoding="utf-8")
    return target.as_uri()


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("two")
    target = folder / "report.html"
    target.write_text(page(gather(read_folder(write_two_models(folder)))), encoding="utf-8")
    return target.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        # A root user, as in containers, has no sandbox.
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Opened:
    """A page of the report, with what it complained of and what it fetched."""

    def __init__(self, browser: Any, address: str, width: int = 1280, scheme: str = "light") -> None:
        self.complaints: list[str] = []
        self.fetched: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.fetched.append(request.url))
        self.page.set_default_timeout(10_000)
        self.page.goto(address)

    def column(self, name: str) -> list[str]:
        """The texts of a column of the results table."""
        heads = self.page.locator("#results-table thead th").all_inner_texts()
        place = next(at for at, head in enumerate(heads) if head.startswith(name))
        cells: list[str] = self.page.eval_on_selector_all(
            "#results-table tbody tr", "(rows, at) => rows.map((row) => row.cells[at].textContent)", place
        )
        return cells

    def choose(self, section: str, label: str, value: str) -> None:
        self.page.locator(f"#{section}").get_by_label(label, exact=True).select_option(value)


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Opened]:
    found = Opened(browser, address)
    yield found
    found.page.close()
    assert found.complaints == []


def test_it_draws_everything_without_errors_or_network(opened: Opened, address: str) -> None:
    sections = opened.page.eval_on_selector_all("section", "(all) => all.map((each) => each.id)")
    assert sections == [
        *("glance", "results", "lines", "needle", "needle-maps", "longbench", "perplexity", "positions", "recall"),
        *("tokens", "clusters", "provenance"),
    ]
    assert opened.page.locator("#lines .series").count() == 14
    assert opened.page.locator("#results details summary").inner_text() == "2 measurements failed"
    assert opened.fetched == [address]


def _size(budget: str) -> float:
    top, _, bottom = budget.partition("/")
    return int(top) / int(bottom or 1)


def test_the_table_sorts_by_mouse_and_by_keyboard(opened: Opened) -> None:
    opened.page.get_by_role("button", name="n", exact=True).click()
    rising = [int(text) for text in opened.column("n")]
    assert rising == sorted(rising) and rising[0] < rising[-1]
    head = opened.page.locator("#results-table").get_by_role("button", name="budget")
    head.focus()
    opened.page.keyboard.press("Enter")
    budgets = [_size(text) for text in opened.column("budget") if text != "all"]
    assert budgets == sorted(budgets) and len(set(budgets)) > 3
    opened.page.keyboard.press("Enter")
    again = [_size(text) for text in opened.column("budget") if text != "all"]
    assert again == sorted(budgets, reverse=True)
    assert opened.page.locator("#results-table th[aria-sort]").get_attribute("aria-sort") == "descending"


def test_the_table_is_filtered_by_words_and_experiment(opened: Opened) -> None:
    everything = len(opened.column("method"))
    opened.page.get_by_label("words").fill("snapkv 1/8")
    assert 0 < len(opened.column("method")) < everything
    assert set(opened.column("method")) == {"snapkv"} and set(opened.column("budget")) == {"1/8"}
    opened.choose("results", "experiment", "Needle")
    assert all(text.startswith("Needle") for text in opened.column("experiment"))


def test_methods_are_hidden_and_shown_by_the_legend(opened: Opened) -> None:
    key = opened.page.locator("#lines .legend").get_by_role("button", name="snapkv", exact=True)
    drawn = opened.page.locator('#lines .series[data-name="snapkv"]')
    assert drawn.count() == 1 and key.get_attribute("aria-pressed") == "true"
    key.click()
    assert drawn.count() == 0 and key.get_attribute("aria-pressed") == "false"
    key.press("Enter")
    assert drawn.count() == 1


def test_a_point_tells_its_values(opened: Opened) -> None:
    marker = opened.page.locator('#lines .series[data-name="streamingllm"] path').last
    marker.scroll_into_view_if_needed()
    marker.hover()
    text = opened.page.locator("#tip").inner_text()
    assert text.startswith("streamingllm 1/2") and "right answers: " in text and "tokens: " in text


def test_the_choice_of_layer_and_method_changes_the_shading(opened: Opened) -> None:
    def shades() -> list[str]:
        found: list[str] = opened.page.eval_on_selector_all(
            "#tokens .tokens span", "(all) => all.map((each) => getComputedStyle(each).backgroundColor)"
        )
        return found

    assert opened.page.locator("#tokens .marked").inner_text().strip() == "48213"
    mean = shades()
    opened.choose("tokens", "layer", "layer 14")
    layer = shades()
    opened.choose("tokens", "KV head", "1")
    head = shades()
    opened.choose("tokens", "method and budget", "full")
    full = shades()
    assert len(mean) == len(layer) == 160
    assert len({tuple(each) for each in (mean, layer, head, full)}) == 4
    assert len(set(full)) < len(set(layer)), "the full cache keeps every token"


def test_needle_maps_show_a_budget_or_a_method(opened: Opened) -> None:
    assert opened.page.locator("#needle-maps .tile").count() == 14
    opened.choose("needle-maps", "method", "snapkv")
    assert opened.page.locator("#needle-maps .tile h3").all_inner_texts() == [
        "snapkv 1/16",
        "snapkv 1/8",
        "snapkv 1/4",
        "snapkv 1/2",
    ]


def test_settings_budgets_and_layers_are_chosen(opened: Opened) -> None:
    def path() -> str:
        return str(opened.page.locator('#lines .series[data-name="snapkv"] path').first.get_attribute("d"))

    whole = path()
    opened.choose("lines", "setting", "lines 400")
    assert path() != whole
    assert opened.page.evaluate("document.activeElement.name") == "setting", "who chose by keyboard stays there"
    opened.choose("lines", "against", "budget")
    assert "1/16" in opened.page.locator("#lines svg text").all_text_contents()
    opened.choose("clusters", "layer", "1")
    assert "No picture" in opened.page.locator("#clusters").inner_text()
    opened.choose("clusters", "layer", "3")
    assert opened.page.locator("#clusters .tile svg").count() == 2


def test_two_models_and_two_kinds_of_budgets_are_chosen(browser: Any, two_models: str) -> None:
    found = Opened(browser, two_models)
    small, large = "qwen2.5-coder-0.5b (bfloat16)", "qwen2.5-coder-1.5b (bfloat16)"

    def chosen(section: str, label: str) -> str:
        control = found.page.locator(f"#{section}").get_by_label(label, exact=True)
        return str(control.evaluate("(each) => each.selectedOptions[0].text"))

    def path() -> str:
        return str(found.page.locator('#lines .series[data-name="clusterkv"] path').first.get_attribute("d"))

    sections = ("glance", "lines", "needle", "needle-maps", "perplexity", "positions", "recall")
    assert [chosen(section, "model") for section in sections] == [large] * 7, "the one measured more comes first"
    before = path()
    found.choose("lines", "model", small)
    assert chosen("lines", "against") == "memory, share of the full cache" and path() != before
    found.choose("lines", "setting", "all numbers of lines, budgets of equal bytes")
    assert chosen("lines", "against") == "device memory, share of the full cache"
    found.choose("glance", "measured", "budgets of equal bytes")
    assert "+ 100% host" in found.page.locator("#glance").inner_text()
    assert found.page.locator("#glance thead a").all_inner_texts() == ["Line retrieval"]
    for section, label in (("tokens", "document"), ("clusters", "model")):
        assert chosen(section, label).startswith(large)
        found.choose(section, label, "1")
        assert chosen(section, label).startswith(small)
    assert found.page.locator("#tokens .tokens span").count() == 160
    assert found.complaints == []
    found.page.close()


def wider_than_the_page(found: Opened) -> list[str]:
    outside: list[str] = found.page.evaluate(
        """() => [...document.querySelectorAll('main *')].filter((node) => !node.closest('.scroll, svg')
            && node.getBoundingClientRect().right > innerWidth + 0.5).map((node) => node.outerHTML.slice(0, 80))"""
    )
    return outside


def test_long_names_of_models_fit_a_phone(browser: Any, two_models: str) -> None:
    found = Opened(browser, two_models, width=360)
    assert wider_than_the_page(found) == []
    box = found.page.locator("#clusters").get_by_label("model", exact=True).bounding_box()
    assert box is not None and box["width"] > 300, "a name of a model has a line of its own"
    found.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_on_a_phone_in_both_schemes(browser: Any, address: str, scheme: str) -> None:
    found = Opened(browser, address, width=360, scheme=scheme)
    assert wider_than_the_page(found) == []
    assert found.page.evaluate("document.documentElement.scrollWidth") == 360
    for selector in (
        ".lead",
        ".text",
        ".hint",
        "nav a",
        "thead button",
        "td .interval",
        ".failed",
        "h2",
        ".legend button",
    ):
        assert found.page.evaluate(CONTRAST, selector) >= 4.5, selector
    assert found.complaints == []
    found.page.close()


def test_the_scheme_can_be_switched(opened: Opened) -> None:
    def ground() -> str:
        return str(opened.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = ground()
    opened.page.get_by_role("button", name="dark scheme").click()
    assert ground() != light
    opened.page.get_by_role("button", name="light scheme").click()
    assert ground() == light


# Contrast of the text of the first element with the nearest ground that is painted behind it.
CONTRAST = """(selector) => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  let node = document.querySelector(selector);
  const ink = parts(getComputedStyle(node).color);
  while (node && (parts(getComputedStyle(node).backgroundColor)[3] ?? 1) === 0) node = node.parentElement;
  const ground = parts(getComputedStyle(node || document.body).backgroundColor);
  const light = (colour) => colour.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const [high, low] = [light(ink), light(ground)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}"""
