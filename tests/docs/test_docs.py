"""The documentation's code runs, its links lead somewhere, and methods from outside work as it says."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

import kvsketch
from kvsketch.cli import app
from kvsketch.methods.evict import EvictingMethod
from kvsketch_lab import reference
from tests.helpers import zoo
from tests.helpers.tiny import save_tiny_model

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a user's own on the path; its modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("keynorm", None)


def test_new_method_word_by_word(outside: Path) -> None:
    page = (DOCS / "new_method.md").read_text(encoding="utf-8")
    source, use, commands, saving, entry = re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)
    (outside / "keynorm.py").write_text(source, encoding="utf-8")
    model = zoo.build("llama")
    names: dict[str, Any] = {"model": model, "input_ids": zoo.tokens(1, 160)}
    exec(use, names)
    cache = names["cache"]
    assert cache.tokens_stored == 128 and cache.tokens_seen == 167
    assert str(cache.method) == "keynorm:KeyNorm:budget=128:recent=16"
    assert kvsketch.parse_method(str(cache.method)) == cache.method

    save_tiny_model(outside / "tiny")
    lines = [shlex.split(line) for line in commands.replace("smollm2-135m", "tiny").splitlines()]
    said = [CliRunner().invoke(app, words[1:]) for words in lines if words[0] == "kvsketch"]
    assert [done.exit_code for done in said] == [0, 0], [done.output for done in said]
    assert "keynorm (evict)" in said[0].stdout and "keynorm:KeyNorm:budget=128" in said[1].stderr

    exec(saving, names)
    assert names["cache"] is not cache and names["cache"].tokens_seen == cache.tokens_seen
    del sys.modules["keynorm"]
    with pytest.raises(ValueError, match=r"the module 'keynorm' of the method 'keynorm:KeyNorm' is not imported"):
        kvsketch.CompressedCache.load("prompt.kvs", model)

    ((group, named),) = tomllib.loads(entry)["project"]["entry-points"].items()
    info = outside / "keynorm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: keynorm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in named.items()))
    importlib.invalidate_caches()
    assert kvsketch.CompressedCache.load("prompt.kvs", model).tokens_seen == cache.tokens_seen
    assert str(kvsketch.parse_method("keynorm:budget=128")) == "keynorm:KeyNorm:budget=128"
    assert "\nkeynorm " in CliRunner().invoke(app, ["methods"]).stdout


@pytest.mark.parametrize("name", ["quickstart", "quantisation", "rehearse", "shared_heads", "agents"])
def test_the_code_of_a_page_runs(name: str, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    indented = [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n)+", page, re.MULTILINE)]
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL) + [each for each in indented if "(model, " in each]
    model, tokenizer = kvsketch.models.load(str(save_tiny_model(outside / "tiny")))
    monkeypatch.setattr(kvsketch.models, "load", lambda name: (model, tokenizer))
    (outside / "report.txt").write_text("The director is Dr. Miriam Okafor. " * 4, encoding="utf-8")
    names: dict[str, Any] = {"kvsketch": kvsketch, "CompressedCache": kvsketch.CompressedCache, "model": model}
    for each in code:
        exec(each, names | {"tokenizer": tokenizer, "input_ids": zoo.tokens(1, 160)})
    assert code


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.at_all:Norm", r"'nowhere.at_all:Norm': the module 'nowhere.at_all' cannot be imported.*PYTHONPATH"),
        ("keynorm:Norm", "'keynorm:Norm': 'Norm' is no Method; the module has: EvictingMethod, Bare"),
        ("keynorm:Bare", r"'keynorm:Bare': needs @dataclass\(frozen=True\) and a name"),
        ("keynorms", r"unknown method 'keynorms'.*snapkv.*package.module:Class"),
        ("snapkv:Norm", "snapkv: 'Norm' is not of the form key=value"),
    ],
)
def test_a_method_that_is_not_found_is_named(outside: Path, text: str, message: str) -> None:
    source = "from kvsketch.methods.evict import EvictingMethod\nclass Bare(EvictingMethod): name = 'bare'\n"
    (outside / "keynorm.py").write_text(source, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        kvsketch.parse_method(text)


def test_a_class_that_no_file_can_name_is_not_saved(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Local(EvictingMethod):
        name: ClassVar[str] = "local"

    model = zoo.build("llama")
    cache = kvsketch.CompressedCache(model, Local())
    model.generate(zoo.tokens(1, 8), past_key_values=cache, max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match=r"a saved file could not find the method .*Local.*top of a module"):
        cache.save(tmp_path / "local.kvs")


@pytest.mark.parametrize(
    "path", [p for p in (DOCS / "methods").glob("*.md") if p.stem != "README"], ids=lambda p: p.stem
)
def test_pages_of_methods_say_the_same_things(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert path.stem in kvsketch.METHODS and page.startswith(f"# {path.stem}\n")
    for word in ("**What it keeps.**", "**Guarantee.**", "**Cost.**", "**When to use it.**"):
        assert word in page
    assert f"]({path.name})" in (DOCS / "methods" / "README.md").read_text(encoding="utf-8")


LINK = re.compile(r"\]\(([^)\s]+)\)")


def _links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files and anchors inside the repository that a page links to."""
    text = re.sub(
        r"```.*?```|^    .*?$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for link in LINK.findall(text):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


def _anchors(page: Path) -> set[str]:
    """The names of its headings, as GitHub and mkdocs make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("start", [DOCS / "README.md", DOCS.parent / "README.md"], ids=["index", "README"])
def test_links_lead_somewhere_and_to_every_page(start: Path) -> None:
    reached, new = set[Path](), {start}
    while new:
        page = new.pop()
        reached.add(page)
        for path, anchor in _links(page):
            assert path.exists(), f"{page.name}: {path}"
            if path.suffix == ".md":
                assert not anchor or anchor in _anchors(path), f"{page.name}: {path.name}#{anchor}"
                new |= {path} - reached
    pages = {path for path in DOCS.rglob("*.md") if DOCS / "report" not in path.parents}
    assert pages <= reached, f"no link leads to {sorted(path.name for path in pages - reached)}"


def test_the_index_and_the_site_name_every_page() -> None:
    named = {path for path, _ in _links(DOCS / "README.md")}
    assert named >= {path for path in DOCS.glob("*.md") if path.name != "README.md"}
    site = set(re.findall(r"[\w/]+\.md", (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")))
    assert site == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def test_the_reference_is_made_from_the_docstrings() -> None:
    written = (DOCS / "api.md").read_text(encoding="utf-8")
    assert written == reference.page(), "run: kvsketch report --docs"
    assert all(f"ops.{name}" in written for name in kvsketch.ops.__all__)
