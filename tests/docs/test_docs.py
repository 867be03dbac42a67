"""The documentation's code runs, and every method has a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import kvsketch
from tests.helpers import zoo

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_method_works_without_registration() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "new_method.md").read_text(encoding="utf-8"), re.S)
    names: dict[str, object] = {}
    exec(compile(code, "new_method.md", "exec", dont_inherit=True), names)
    model = zoo.build("llama")
    cache = kvsketch.CompressedCache(model, names["KeyNorm"](budget=16, sinks=2, recent=4))  # type: ignore[operator]
    ids = zoo.tokens(1, 60)
    model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert cache.tokens_stored == 16 and cache.tokens_seen == 67
    table = cache.slot_layers[0].table
    kept = table.key_slots().float().norm(dim=-1)[table.index_slots() >= 0]
    assert kept.isfinite().all() and torch.is_tensor(kept)


@pytest.mark.parametrize(
    "path", [p for p in (DOCS / "methods").glob("*.md") if p.stem != "README"], ids=lambda p: p.stem
)
def test_pages_of_methods_say_the_same_things(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert path.stem in kvsketch.METHODS and page.startswith(f"# {path.stem}\n")
    for word in ("**What it keeps.**", "**Guarantee.**", "**Cost.**", "**When to use it.**"):
        assert word in page
    assert f"]({path.name})" in (DOCS / "methods" / "README.md").read_text(encoding="utf-8")


def test_links_lead_somewhere() -> None:
    for page in DOCS.rglob("*.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
