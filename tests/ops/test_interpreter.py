"""What the tests keep between operations of Triton's interpreter is what it would make anew."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.interpreter import leave_out_dropped_assertions
from tests.ops.formula import needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU"),
]
if not torch.cuda.is_available():
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    import triton.language as tl

    @triton.jit
    def mixed(bytes_, halves, floats, wholes, out, N: tl.constexpr, M: tl.constexpr):
        """Each type beside others, blocks beside numbers, rows beside columns."""
        n, m = tl.arange(0, N), tl.arange(0, M)
        row = tl.load(bytes_ + m).to(tl.int32) * 2 + 1
        column = tl.load(halves + n, n < N - 1, other=0.5)
        block = row[None, :] * column[:, None] + tl.load(floats + n[:, None] * M + m[None, :])
        count = tl.sum((block > 0).to(tl.int32), 1)
        wide = tl.load(wholes + n) + count
        block = tl.where((wide % 2 == 0)[:, None], block, -block) + count[:, None]
        tl.store(out + n[:, None] * M + m[None, :], block)


@pytest.mark.parametrize(("n", "m"), [(4, 8), (8, 4), (4, 4), (1, 8)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_types_and_shapes_are_not_mixed_up(n: int, m: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(n * m)
    bytes_ = torch.randint(0, 256, (m,), generator=draw).to(torch.uint8)
    halves, floats = torch.randn(n, generator=draw).to(dtype), torch.randn(n, m, generator=draw)
    wholes, out = torch.randint(-(2**40), 2**40, (n,), generator=draw), torch.full((n, m), float("nan"))
    mixed[(1,)](bytes_, halves, floats, wholes, out, n, m)
    column = halves.clone()
    column[-1] = 0.5
    block = (bytes_.int() * 2 + 1)[None, :].to(dtype) * column[:, None] + floats
    count = (block > 0).sum(1)
    sign = torch.where((wholes + count) % 2 == 0, 1.0, -1.0)
    assert torch.allclose(out, sign[:, None] * block + count[:, None], rtol=1e-2 if dtype != torch.float32 else 1e-5)


def test_a_type_that_is_kept_has_the_fields_of_a_new_one() -> None:
    for element in (tl.int1, tl.int32, tl.float16, tl.pointer_type(tl.float16), tl.pointer_type(tl.int32)):
        for shape in ([4], [4, 1], [1, 4], [2, 2], [tl.constexpr(4)]):
            first, second = tl.core.block_type(element, shape), tl.core.block_type(element, shape)
            assert first == second and first.name == second.name and second.element_ty is element
            assert str(element) in second.name
            sizes = [getattr(size, "value", size) for size in shape]
            assert [int(size) for size in second.shape] == sizes and second.numel == 4
            made = tl.core.tensor(None, second)
            assert [size.value for size in made.shape] == sizes and made.numel.value == 4
            assert made.type is second and made.dtype is element
            assert second != tl.core.block_type(tl.int64, shape)
    number = tl.core.tensor(None, tl.int32)
    assert list(number.shape) == [] and number.numel.value == 1 and number.dtype is tl.int32


@pytest.mark.parametrize(("size", "error"), [(3, ValueError), (4.0, TypeError), (0, ValueError)])
def test_a_size_that_cannot_be_is_refused_every_time(size: float, error: type[Exception]) -> None:
    tl.core.block_type(tl.int32, [4])
    for _ in range(2):
        with pytest.raises(error):
            tl.core.block_type(tl.int32, [size])


@pytest.mark.parametrize("debug", [False, True])
def test_assertions_are_left_out_where_they_are_dropped(debug: bool) -> None:
    from triton.runtime.interpreter import InterpreterOptions

    builder = SimpleNamespace(options=InterpreterOptions(debug=debug, sanitize_overflow=True))
    leave_out_dropped_assertions(SimpleNamespace(interpreter_builder=builder))
    assert builder.options == InterpreterOptions(debug=debug, sanitize_overflow=debug)


def test_numbers_have_the_bits_of_their_type() -> None:
    from triton.runtime.interpreter import _get_np_dtype

    sizes = {tl.int1: 8, tl.uint8: 8, tl.int16: 16, tl.int32: 32, tl.int64: 64, tl.float16: 16, tl.bfloat16: 16}
    for _ in range(2):
        for element, bits in {**sizes, tl.float32: 32, tl.float64: 64}.items():
            assert [8 * _get_np_dtype(of).itemsize for of in (element, tl.block_type(element, [2]))] == [bits, bits]
            assert _get_np_dtype(tl.pointer_type(element)).itemsize == 8
            assert (_get_np_dtype(element).kind == "f") == (element.is_floating() and element != tl.bfloat16)


def test_results_have_the_type_that_their_operands_ask_for() -> None:
    from triton.runtime.interpreter import interpreter_semantic as semantic

    expected = {
        (tl.int32, False, tl.int64, False, False): tl.int64,
        (tl.int32, False, tl.int64, True, False): tl.int32,  # a number takes no part
        (tl.int32, True, tl.int64, False, False): tl.int64,
        (tl.float16, False, tl.int32, False, False): tl.float16,
        (tl.float16, False, tl.int32, False, True): tl.float32,  # a quotient
        (tl.bfloat16, False, tl.bfloat16, False, False): tl.bfloat16,
        (tl.bfloat16, False, tl.float16, False, False): tl.float16,
        (tl.uint8, False, tl.int32, False, False): tl.int32,
    }
    for _ in range(2):
        for operands, result in expected.items():
            assert semantic.computation_type_impl(*operands) == result
        with pytest.raises(TypeError, match="signedness"):
            semantic.computation_type_impl(tl.uint32, False, tl.int32, False, True)
    whole = tl.core.tensor(SimpleNamespace(data=np.array([3], np.int32), dtype=tl.int32), tl.int32)
    assert semantic._cast_to_computation_type(whole, tl.int32) is whole
    assert semantic._cast_to_computation_type(whole, tl.float32).handle.data.dtype == np.float32
    assert semantic._cast_to_computation_type(3, tl.int64).dtype == tl.int64
