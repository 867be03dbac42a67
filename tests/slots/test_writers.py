"""Only `slots/` writes a table: others call its verbs, so that how slots are stored can change in one room."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import kvsketch
from kvsketch.slots.table import BoundedTable

SOURCE = Path(kvsketch.__file__).parent
FIELDS = {field.name for field in dataclasses.fields(BoundedTable)}


def test_nobody_else_assigns_the_fields_of_a_table() -> None:
    result = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent.name != "slots" or path.parent.parent != SOURCE
        for line in writes(ast.parse(path.read_text()))
    ]
    assert not result, f"a field of a table is written outside slots/; use a verb of the table: {result}"


def test_the_test_sees_every_way_to_write() -> None:
    code = """
table.seen = 1
layer.table.seen += 1
tables[0].keys, other = 1, 2
table.index[:, 0] = -1
setattr(table, "keys", 1)
table.next_slot.fill_(3)
self.table.log_den[0].copy_(x)
table.add_row(1)
view.keys = 2
"""
    assert sorted(writes(ast.parse(code))) == [2, 3, 4, 5, 6, 7, 8]


def writes(tree: ast.AST) -> Iterator[int]:
    """Lines that assign to a field of something called a table, or change a tensor in it in place."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Delete) else [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
            targets = [] if node.func.attr.endswith("__") else [node.func.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            targets = [ast.Attribute(node.args[0], "keys", ast.Store())]
        flat = [part for t in targets for part in (t.elts if isinstance(t, ast.Tuple | ast.List) else [t])]
        if any(is_field(target) for target in flat):
            yield node.lineno


def is_field(target: ast.expr) -> bool:
    while isinstance(target, ast.Subscript):
        target = target.value
    return isinstance(target, ast.Attribute) and target.attr in FIELDS and is_table(target.value)


def is_table(owner: ast.expr) -> bool:
    while isinstance(owner, ast.Subscript):
        owner = owner.value
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    return name in ("table", "tables", "bounded", "copied", "previous")
