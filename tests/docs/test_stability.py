"""docs/stability.md names everything that is public, and CONTRIBUTING.md what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvsketch
from kvsketch.cache import saving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")


def test_every_public_name_is_there() -> None:
    assert [name for name in kvsketch.__all__ if f"`{name}`" not in PAGE] == []
    assert f"writes format {saving.VERSION} " in PAGE


def test_every_endpoint_is_there() -> None:
    pytest.importorskip("starlette", reason="not installed: pip install 'kvsketch[serve]'")
    app = pytest.importorskip("kvsketch.serve.app", reason="not installed: pip install 'kvsketch[serve]'")
    paths = {route.path.replace(":path", "") for route in app.Routes.all(app.Routes.__new__(app.Routes))}
    own = {path for path in paths if path.startswith("/v1") and path not in app.MISSING}
    assert own | {"/health", "/metrics"} == set(re.findall(r"`(/[\w/{}]+)`", PAGE.split("## Endpoints")[1]))


def test_the_tree_names_what_is_there() -> None:
    """The indentation of a line says what folder it belongs to."""
    tree = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Where things are")[1].split("\n##")[0]
    folder, named = "", set[str]()
    for spaces, name in re.findall(r"^    ( *)(\S+)", tree, re.MULTILINE):
        folder = folder if spaces else name
        named.add(folder + name if spaces else name)
    assert {name for name in named if not (ROOT / name).exists()} == set()
    parts = {path.name for path in (ROOT / "src/kvsketch").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {f"src/kvsketch/{part}/" for part in parts} <= named
