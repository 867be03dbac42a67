"""Makes docs/pictures/marked_text.png: a text on the server's page, marked by what a real cache holds of it.

    python -m scripts.marked_text

Needs Chromium (Debian: apt-get install chromium) and the packages playwright and pillow. A few minutes on a CPU.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from kvsketch import models
from kvsketch.models import texts
from kvsketch.serve.server import Server, start_service
from tests.helpers.serving import started

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "marked_text.png"
WIDTH, SCALE = 800, 2  # points, and pixels of a point
LINES = 14  # of the text that are shown
COLOURS = 64


def main(model: str, method: str, speech: str, paragraphs: int, out: Path) -> None:
    loaded, tokenizer = models.load(model)
    text = "\n\n".join(texts.document(speech).split("\n\n")[:paragraphs])
    with tempfile.TemporaryDirectory() as folder:
        service = start_service(loaded, tokenizer, model, method, folder=Path(folder))
        with started(Server(service)) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WIDTH, "height": 1000}, device_scale_factor=SCALE)
            page.goto(address)
            read(page, text)
            print(page.locator("#numbers").inner_text())
            save(page, out)
            browser.close()
    print(f"{out}: {out.stat().st_size / 1000:.0f} kB")


def chromium() -> str:
    result = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if result is None:
        raise SystemExit("no Chromium here: apt-get install chromium")
    return result


def read(page: Page, text: str) -> None:
    page.get_by_text("Paste a text").click()
    page.get_by_label("Text", exact=True).fill(text)
    page.get_by_role("button", name="Read it").click()
    page.locator("#text span").first.wait_for(timeout=600_000)


def save(page: Page, out: Path) -> None:
    """The beginning of the text, in few colours, without the number that its heading has on the page."""
    page.locator("#passages-title").evaluate("each => { each.hidden = true; }")
    page.locator("#text").evaluate(f"each => {{ each.style.maxHeight = '{LINES}lh'; each.style.overflow = 'hidden'; }}")
    picture = Image.open(io.BytesIO(page.locator("#passages").screenshot()))
    picture.convert("RGB").quantize(COLOURS).save(out, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--method", default="rehearse:budget=1/4")
    parser.add_argument("--speech", default="1790-Washington-1")
    parser.add_argument("--paragraphs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=PICTURE)
    main(**vars(parser.parse_args()))
