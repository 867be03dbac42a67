"""Only `slots/` writes a table: others call its verbs, so that how slots are stored can change in one room.

What is seen: assignments of all kinds (also in loops, `with`, `del` and unpacking), setattr and its kin, writes through
`vars` and `__dict__`, and tensors of a table that are changed in place, by `x.copy_()`, `out=x`, `x[...] =` or `x +=
y`; through names that a function gives to a table, to one of several, or to a tensor of it. A table that is handed to a
function under another name without a type is not.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvsketch
from kvsketch.slots import table as tables_of
from kvsketch.slots.parts import NUMBERS, VECTORS

SOURCE = Path(kvsketch.__file__).parent
KINDS = [kind for kind in vars(tables_of).values() if dataclasses.is_dataclass(kind) and "Table" in str(kind)]
# What a forward knows is in an object of its own.
FIELDS = {field.name for kind in KINDS for field in dataclasses.fields(kind)} - {"forward"} | {*VECTORS, *NUMBERS}
NAMES = {"table", "tables", "bounded", "copied", "previous"}
SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}
DICTIONARIES = {"update", "pop", "setdefault", "popitem"}
# Calls that give another view of the same tensor, or of the same tables.
VIEWS = {
    "view", "view_as", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "transpose", "permute",
    "narrow", "select", "split", "chunk", "unbind", "detach", "as_strided", "values", "reversed", "enumerate", "zip",
    "list", "tuple", "sorted", "iter", "next",
}  # fmt: skip
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)


def test_nobody_else_assigns_the_fields_of_a_table() -> None:
    result = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent.name != "slots" or path.parent.parent != SOURCE
        for line in writes(ast.parse(path.read_text()))
    ]
    assert not result, f"a field of a table is written outside slots/; use a verb of the table: {result}"


WRITES = """
table.seen = 1
layer.table.seen += 1
tables[0].keys, other = 1, 2
[*table.keys, rest] = parts
table.index[:, 0] = -1
del table.keys
setattr(table, "keys", 1)
setattr(table, name, 1)
object.__setattr__(table, "keys", 1)
delattr(table, "keys")
vars(table)["keys"] = 1
vars(table).update(keys=1)
table.__dict__.update(seen=1)
table.__dict__ |= known
table.next_slot.fill_(3)
self.table.log_den[0].copy_(x)
torch.Tensor.copy_(table.keys, x)
torch.mul(x, 2, out=table.keys)
table.keys *= 2
for table.seen in range(3): pass
for each in tables: each.seen = 1
for each, other in zip(tables, x): each.keys[0] = other
for number, each in enumerate(tables): each.seen += number
def f(t: SlotTable): t.seen = 1
def f(t: "SlotTable"): t.seen = 1
def f(t: Sequence[SlotTable]): t[0].seen = 1
def f(layer): t = layer.table; t.seen = 1
def f(layer): keys = layer.table.keys; keys.fill_(0)
def f(layer): keys, values = layer.table.keys, 1; keys[0] = 1
def f(layer): keys = layer.table.keys.view(-1)[:3]; keys += 1
def f(layer): (t := layer.table).seen = 1
def f(layer): [each.keys.zero_() for each in layer.tables]
with x as table.seen: pass
"""
READS = """
table.add_row(1)
view.keys = 2
setattr(view, "keys", 2)
setattr(table, "of_others", 1)
x = table.keys.clone(); x.fill_(0)
x = table.keys + 1; x += 1
table = replace(table, keys=x)
def f(t: Tensor): t.seen = 1
def f(keys): keys[0] = 1
seen = table.seen
table.state.score = x
"""


@pytest.mark.parametrize("line", WRITES.strip().splitlines())
def test_every_way_to_write_is_seen(line: str) -> None:
    assert [*writes(ast.parse(line))] == [1]


@pytest.mark.parametrize("line", READS.strip().splitlines())
def test_what_writes_no_table_is_let_through(line: str) -> None:
    assert [*writes(ast.parse(line))] == []


def writes(tree: ast.AST) -> Iterator[int]:
    """Lines that assign to a field of a table, or change a tensor in it in place."""
    # Of names, attributes, and annotations in quotes.
    names = {str(getattr(node, field, "")) for node in ast.walk(tree) for field in ("id", "attr", "value")}
    if not names & NAMES and not any("Table" in name for name in names):
        return
    yield from sorted(_of_scope(tree, Known({*NAMES}, set())))


@dataclasses.dataclass(frozen=True)
class Known:
    """Names that stand for a table or for several, and for tensors of one."""

    tables: set[str]
    tensors: set[str]

    def is_table(self, owner: ast.expr) -> bool:
        owner = _behind_views(owner)
        if isinstance(owner, ast.NamedExpr):
            return self.is_table(owner.value)
        if isinstance(owner, ast.Name):
            return owner.id in self.tables
        return isinstance(owner, ast.Attribute) and owner.attr in NAMES

    def is_field(self, target: ast.expr) -> bool:
        """Whether an expression is a field of a table, or an attribute dictionary of one."""
        target = _behind_views(target)
        if isinstance(target, ast.Name):
            return target.id in self.tensors
        if isinstance(target, ast.Call) and _name(target.func) == "vars" and target.args:
            return self.is_table(target.args[0])
        if not isinstance(target, ast.Attribute):
            return False
        return target.attr in {*FIELDS, "__dict__"} and self.is_table(target.value)


def _of_scope(scope: ast.AST, outer: Known) -> Iterator[int]:
    known = Known({*outer.tables}, {*outer.tensors})
    own = [*_own_nodes(scope)]
    for argument in ast.walk(scope.args) if isinstance(scope, SCOPES) and not isinstance(scope, ast.Module) else ():
        if isinstance(argument, ast.arg):
            kind = "" if argument.annotation is None else ast.unparse(argument.annotation)
            known.tensors.discard(argument.arg)
            if "Table" in kind and "State" not in kind and "Callable" not in kind:
                known.tables.add(argument.arg)
            elif kind:
                known.tables.discard(argument.arg)
    bindings = [each for node in own for each in _bindings(node) if isinstance(each[0], ast.Name)]
    for _ in range(3):  # names of names
        for target, value in bindings:
            assert isinstance(target, ast.Name)
            if known.is_table(value):
                known.tables.add(target.id)
            elif known.is_field(value):
                known.tensors.add(target.id)
    for node in own:
        if any(_writes(node, known)):
            yield node.lineno  # type: ignore[attr-defined]
        if isinstance(node, SCOPES):
            yield from _of_scope(node, known)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """What is in a scope, but not in the functions in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, SCOPES):
            yield from _own_nodes(child)


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Names and what they are given."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _pairs(target, node.value)
    elif isinstance(node, ast.NamedExpr | ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield from _pairs(node.target, node.iter)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Parts of a target with the parts of a value that they are given, as far as these can be told apart."""
    if not isinstance(target, ast.Tuple | ast.List):
        yield target, value
        return
    parts: list[ast.expr] = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    if isinstance(value, ast.Call) and _name(value.func) == "zip":
        parts = value.args
    if isinstance(value, ast.Call) and _name(value.func) == "enumerate":
        parts = [ast.Constant(0), value.args[0]]
    for each, part in zip(target.elts, parts, strict=False):
        yield from _pairs(each, part)


def _writes(node: ast.AST, known: Known) -> Iterator[bool]:
    for target in _targets(node):
        inside = isinstance(target, ast.Subscript) or isinstance(node, ast.AugAssign)
        # A plain name is given something else, but in place where it is a tensor.
        yield known.is_field(target) and (inside or not isinstance(target, ast.Name))
    if not isinstance(node, ast.Call):
        return
    yield from (known.is_field(each.value) for each in node.keywords if each.arg == "out")
    name, first = _name(node.func), node.args[0] if node.args else None
    if name in SETTERS and first is not None and known.is_table(first):
        given = node.args[1] if len(node.args) > 1 else None
        yield not isinstance(given, ast.Constant) or given.value in FIELDS
    in_place = name.endswith("_") and not name.endswith("__")
    if isinstance(node.func, ast.Attribute) and (in_place or name in DICTIONARIES):
        owner = node.func.value
        yield known.is_field(owner) and (in_place or not isinstance(_behind_views(owner), ast.Name))
        yield (
            in_place
            and first is not None
            and ast.unparse(owner) in ("torch", "Tensor", "torch.Tensor")
            and (known.is_field(first))
        )


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement writes to, tuples taken apart."""
    given: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        given = [*node.targets]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
        given = [node.target]
    elif isinstance(node, ast.With | ast.AsyncWith):
        given = [each.optional_vars for each in node.items if each.optional_vars is not None]
    while given:
        target = given.pop()
        if isinstance(target, ast.Tuple | ast.List):
            given += target.elts
        elif isinstance(target, ast.Starred):
            given.append(target.value)
        else:
            yield target


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _behind_views(value: ast.expr) -> ast.expr:
    """What an expression is a part or a view of."""
    while True:
        if isinstance(value, ast.Subscript | ast.Starred):
            value = value.value
        elif isinstance(value, ast.Call) and _name(value.func) in VIEWS:
            is_method = isinstance(value.func, ast.Attribute)
            if not is_method and not value.args:
                return value
            value = value.func.value if is_method else value.args[0]  # type: ignore[attr-defined]
        else:
            return value
