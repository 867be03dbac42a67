"""Triton's interpreter with less work for each operation, and the same results.

Nearly all its time goes into types, not into numbers: each operation makes its block type and the shape of its tensor
anew, from objects for single numbers. What depends on a type alone is kept here. What is left out changes nothing:

- The functions of triton.language are replaced for each launch, and then again for each call of one device function by
  another, tl.sum among them. The latter takes a millisecond.
- Sums and products of integers are computed a second time in 64 bits, for an assertion that is dropped without debug.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def hasten() -> None:
    """Raises ImportError or AttributeError where Triton is missing or of another make; what it changed is sound."""
    from triton.runtime import interpreter

    replace_the_language_once_per_launch(interpreter)
    leave_out_dropped_assertions(interpreter)
    keep_numpy_types(interpreter)
    keep_block_types(interpreter.tl.core)
    keep_shapes_of_tensors(interpreter.tl.core)
    compare_types_by_identity_first(interpreter.tl.core)
    broadcast_where_shapes_differ(type(interpreter.interpreter_semantic))
    keep_types_of_results(type(interpreter.interpreter_semantic))


def replace_the_language_once_per_launch(interpreter: Any) -> None:
    patch, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    known: dict[Any, set[Any]] = {}
    replaced: set[Any] = set()

    def patch_once(fn: Any) -> Any:
        if fn not in known:
            known[fn] = {module for module in language if any(value is module for value in fn.__globals__.values())}
        modules = known[fn]
        if modules <= replaced:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        restore = scope.restore
        replaced.update(modules)
        scope.restore = lambda: (replaced.clear(), restore())
        return scope

    interpreter._patch_lang = patch_once


def leave_out_dropped_assertions(interpreter: Any) -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def keep_numpy_types(interpreter: Any) -> None:
    find = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def numpy_type(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = find(of)
        return known[name]

    interpreter._get_np_dtype = numpy_type


def keep_block_types(core: Any) -> None:
    make = core.block_type.__init__
    known: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [getattr(size, "value", size) for size in shape]
        key = (element_ty.name, *sizes)
        # 4.0 and True are keys like 4 and 1, and refused.
        if key not in known or any(type(size) is not int for size in sizes):
            make(self, element_ty, shape)
            self.shape = shapes.setdefault(key[1:], self.shape)
            known[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        else:
            self.__dict__.update(known[key])
            self.element_ty = element_ty

    core.block_type.__init__ = init


def keep_shapes_of_tensors(core: Any) -> None:
    make = core.tensor.__init__
    if set(vars(core.tensor(None, core.int32))) != {"handle", "shape", "numel", "type", "dtype"}:
        raise AttributeError("tensors of this Triton have other fields")
    known: dict[str, tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            make(self, handle, type)
            known[type.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[type.name]

    core.tensor.__init__ = init


def compare_types_by_identity_first(core: Any) -> None:
    equal, unwrap = core.dtype.__eq__, core._unwrap_if_constexpr
    plain = {int, bool, float, str, type(None), core.tensor, core.dtype}

    def unwrapped(o: Any) -> Any:
        kind = type(o)
        return o.value if kind is core.constexpr else o if kind in plain else unwrap(o)

    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core._unwrap_if_constexpr = unwrapped


def broadcast_where_shapes_differ(semantic: Any) -> None:
    """Equal shapes are one object, see `keep_block_types`."""
    broadcast = semantic.broadcast_impl_value

    def compatible(self: Any, lhs: Any, rhs: Any) -> Any:
        shapes = [getattr(each.type, "shape", None) for each in (lhs, rhs)]
        return (lhs, rhs) if shapes[0] is shapes[1] else broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = compatible


def keep_types_of_results(semantic: Any) -> None:
    """What the operands of a sum, a product or a comparison become; an operand that is of that type stays as it is."""
    find, cast = semantic.computation_type_impl, semantic._cast_to_computation_type
    known: dict[Any, Any] = {}

    def result_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
        if key not in known:
            known[key] = find(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    def become(self: Any, value: Any, dtype: Any) -> Any:
        return value if getattr(value, "dtype", None) is dtype else cast(self, value, dtype)

    semantic.computation_type_impl, semantic._cast_to_computation_type = result_type, become
