"""The files that come first are there, and they do."""

from __future__ import annotations

from types import SimpleNamespace

from tests.conftest import FIRST, TESTS, pytest_collection_modifyitems


def test_they_are_there() -> None:
    assert [name for name in FIRST if not (TESTS / name).is_file()] == []


def test_they_come_first_and_all_else_stays_as_it_was() -> None:
    others = [(TESTS / "cache/test_bits.py", number) for number in (2, 1)] + [(TESTS / "serve/test_compile.py", 0)]
    named = [(TESTS / name, number) for name in FIRST for number in (2, 1)]
    items = [SimpleNamespace(path=path, number=number) for path, number in [*others, *named[6:], *named[:6]]]
    pytest_collection_modifyitems(items)
    assert [(item.path, item.number) for item in items] == [*named, *others]
