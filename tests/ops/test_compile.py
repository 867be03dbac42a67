"""Every Triton kernel is compiled for an H200, without a GPU.

Triton's interpreter, which the other tests use where there is no GPU, accepts programs that the compiler refuses: a
name that changes its type in a loop, an operation that the device does not have. Here the operations are called in a
process without the interpreter, under a driver that compiles every launch and runs none. The launches are those of a
GPU: bfloat16, and float32 where a program is long, early starts, and as many optional parts in one call as it can have.

Triton's first stages find such mistakes and take a tenth of the time. The others (layouts, LLVM, ptxas) give the same
result for the same program, so they run for programs that `compiled.json` does not list; `make test-thorough` runs them
for all. To list the programs of today, which takes minutes: python -m tests.ops.test_compile note
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.layer_bytes import query_bytes
from kvsketch.ops import refit_steps as steps
from kvsketch.ops.codec import Codec, Coded, CodedSlots, encode, encode_into
from kvsketch.ops.codec.basis import Basis, LearnedCodec, Parts
from kvsketch.ops.common.ragged import Readers
from kvsketch.ops.fold_token import Layout as Folded
from kvsketch.ops.fold_token import State
from kvsketch.ops.gather_rows import Sources, gather_rows_of
from kvsketch.ops.hot_rows import Buffer, Store, new_places
from kvsketch.ops.join_attention import Part
from kvsketch.ops.kmeans import METRICS
from kvsketch.ops.page_rows import Front, Rows, Worth
from kvsketch.ops.token_blocks import BlockShape, Reading, TokenBlocks, block_attention, write_tokens
from kvsketch.ops.work_list import fixed_work_list
from kvsketch.slots.layout import Layout
from tests.helpers.common import also
from tests.ops.formula import needs_triton

B, HQ, H, N, S, D = 1, 8, 2, 64, 256, 64  # batch rows, query heads, KV heads, queries, slots, head size
MOST_LINES = 20_000  # of PTX; a thousand take up to half a second
LISTED = Path(__file__).with_name("compiled.json")  # programs that were compiled the whole way, and by which Triton


def has_nvidia_backend() -> bool:
    try:
        return importlib.util.find_spec("triton.backends.nvidia") is not None
    except ImportError:
        return False


@needs_triton
@pytest.mark.skipif(not has_nvidia_backend(), reason="Triton has no NVIDIA backend here")
@pytest.mark.parametrize(("calls", "way"), [("CALLS", "listed"), *also(("CALLS", "whole"), ("OTHER_CALLS", "whole"))])
def test_every_kernel_compiles_for_an_h200(calls: str, way: str, tmp_path: Path) -> None:
    compiled = compiled_in_a_process(tmp_path, calls, way)
    assert calls != "CALLS" or launches_in_the_source() == {name for name, _, _ in compiled}, "add a call to CALLS"
    long = {name: lines for name, _, lines in compiled if int(lines) > MOST_LINES}
    assert not long, f"{long} lines of PTX take a minute to compile: smaller tiles, or products on the tensor cores"
    new = {name for name, mark, _ in compiled if mark not in listed()}
    assert way == "listed" or not listed() or not new, f"{new} compile, slowly: python -m tests.ops.test_compile note"


@needs_triton
@pytest.mark.skipif(not has_nvidia_backend(), reason="Triton has no NVIDIA backend here")
def test_a_program_that_is_not_listed_is_compiled_the_whole_way(tmp_path: Path) -> None:
    compiled = compiled_in_a_process(tmp_path, "SHORT_CALLS", "none")
    assert len(compiled) == 1 and int(compiled[0][2]) > 100


@needs_triton
@pytest.mark.skipif(not has_nvidia_backend(), reason="Triton has no NVIDIA backend here")
def test_steps_of_any_number_of_rows_run_the_same_programs(tmp_path: Path) -> None:
    """Those of some rows are compiled before the first request; another number must not wait for a compiler."""
    launches = compiled_in_a_process(tmp_path, "NUMBERS_OF_ROWS", "half")
    assert len(launches) == 3 * 8 + 3 + 5 * 3 + 4 + 3
    assert len({mark for _, mark, _ in launches}) == len({name for name, _, _ in launches}) == 3 + 1 + 5 + 1, launches


def compiled_in_a_process(cache: Path, calls: str, way: str) -> list[list[str]]:
    """Name, mark and lines of PTX of each launch; compiled in an empty cache, else a program is not made again."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.ops.test_compile", calls, way], env=environment, cwd=Path(__file__).parents[2],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [line.split() for line in ran.stdout.splitlines()]


def listed() -> set[str]:
    """The marks of programs that this Triton has compiled."""
    import triton

    known = json.loads(LISTED.read_text())
    return set(known["programs"]) if known["triton"] == triton.__version__ else set()


def launches_in_the_source() -> set[str]:
    """`operation.kernel` for all that is launched as kernel[grid](...) in the package."""
    result = set()
    for file in Path(ops.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                result.add(f"{file.parent.name}.{ast.unparse(node.func.value)}")
    return result


class OnGpu(Tensor):
    """A tensor in host memory that says that it lies on a GPU."""

    is_cuda = property(lambda self: True)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().as_subclass(OnGpu)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)


def ints(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.int32)


def longs(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.int64)


def weighted_attention() -> None:
    log_num, log_den = zeros(B, H, S), zeros(B, H, S)
    ops.weighted_attention(
        normal(B, HQ, 1, D), normal(B, H, S, D), normal(B, H, S - 9, D), log_num, log_den, 0.1,
        bias=zeros(B, HQ, 1, S), softcap=9.0, sink_logits=zeros(HQ), lengths=ints(B, H), clip=1.0, return_logits=True,
    )  # fmt: skip


def encoded() -> None:
    encode(normal(B, H, S, D), zeros(B, H, D), Codec(4, D))


def coded_attention() -> None:
    parts = []
    for bits in (4, 3):
        codes, steps = zeros(B, H, S, D * bits // 8, dtype=torch.uint8), zeros(B, H, S, dtype=torch.float16)
        parts.append(CodedSlots(Codec(bits, D), zeros(B, H, D), zeros(B, H, 4, D), ints(B, H, 4), codes, steps))
    ops.weighted_attention(normal(B, HQ, 1, D), *parts, zeros(B, H, S), zeros(B, H, S), 0.1, return_logits=True)


def learned_attention(dtype: torch.dtype, value_bits: int = 0) -> None:
    """Keys in learned directions, and values too unless they have bits of their own."""
    cov = torch.diag_embed(torch.linspace(9.0, 1.0, D)).expand(H, D, D)
    codec = LearnedCodec(2, D, basis=Basis.of(cov))
    codec.held[torch.device("cpu")] = on_gpu(codec.parts(torch.device("cpu")))
    codes, steps = zeros(B, H, S, D // 4, dtype=torch.uint8), zeros(B, H, S, dtype=torch.float16)
    slots = CodedSlots(codec, zeros(B, H, D), zeros(B, H, 4, D), ints(B, H, 4), codes, steps)
    values = slots if not value_bits else replace(slots, codec=Codec(value_bits, D))
    q, whole = normal(B, HQ, 1, D).to(dtype), dtype == torch.float32
    ops.weighted_attention(q, slots, values, zeros(B, H, S), zeros(B, H, S), 0.1, return_logits=whole)


def on_gpu(parts: Parts) -> Parts:
    return parts._replace(back=parts.back.as_subclass(OnGpu), fields=parts.fields.as_subclass(OnGpu))


def mixed_attention() -> None:
    """Short keys in 4 bits beside plain values, and as many query heads as make a product of 16 columns."""
    codes, steps = zeros(B, 1, S, D // 2, dtype=torch.uint8), zeros(B, 1, S, dtype=torch.float16)
    keys = CodedSlots(Codec(4, D), zeros(B, 1, D), zeros(B, 1, 4, D), ints(B, 1, 4), codes, steps)
    ops.weighted_attention(normal(B, 8, 1, D), keys, normal(B, 1, S, D), zeros(B, 1, S), zeros(B, 1, S), 0.1)


def short_coded_attention() -> None:
    """One tile for each program, in half precision."""
    codes, steps = zeros(B, H, S, D // 2, dtype=torch.uint8), zeros(B, H, S, dtype=torch.float16)
    slots = CodedSlots(Codec(4, D), zeros(B, H, D), zeros(B, H, 4, D), ints(B, H, 4), codes, steps)
    ops.weighted_attention(normal(B, HQ, 1, D).half(), slots, slots, zeros(B, H, S), zeros(B, H, S), 0.1)


def ragged_attention(queries: int = 1) -> None:
    """Of one query, or of those of rows that read a document together, each head of which lies apart."""
    # So many pieces are combined in a loop.
    layout = replace(Layout.of(longs(B, H) + S, coded=True), most_pieces=400)
    codec, center = Codec(4, D), zeros(B, H, D)
    codes, steps = zeros(layout.total, D // 2, dtype=torch.uint8), zeros(layout.total, dtype=torch.float16)
    slots = CodedSlots(codec, center, zeros(B, H, 4, D), ints(B, H, 4), codes, steps)
    weights = zeros(layout.total)
    q = normal(B, queries, HQ, D).transpose(1, 2)
    ops.weighted_attention(q, slots, slots, weights, weights, 0.1, ragged=layout)


def paged_attention() -> None:
    pool, weights = normal(5, H, S, D), zeros(B, H, S)
    ops.weighted_attention(normal(B, HQ, 1, D), pool, pool, weights, weights, 0.1, pages=longs(B), return_logits=True)


def coded_pages() -> CodedSlots:
    codec, spans, end = Codec(4, D), [], 0
    shapes = ((H, D), (H, 4, D), (H, 4), (H, S, codec.code_bytes), (H, S))
    dtypes = (torch.float32, torch.float32, torch.int32, torch.uint8, torch.float16)
    for shape, dtype in zip(shapes, dtypes, strict=True):
        spans.append((end, end := end + prod(shape) * dtype.itemsize))
    pool = zeros(5, end, dtype=torch.uint8)
    parts = (pool[:, a:b].view(t).unflatten(1, s) for (a, b), t, s in zip(spans, dtypes, shapes, strict=True))
    return CodedSlots(codec, *parts)


def coded_paged_attention() -> None:
    slots, weights = coded_pages(), zeros(B, H, S)
    ops.weighted_attention(normal(B, HQ, 1, D), slots, slots, weights, weights, 0.1, pages=longs(B), return_logits=True)


def coded_paged_slot_update() -> None:
    slots, new, shape = coded_pages(), normal(B, H, 1, D), (B, H, S)
    ops.write_token(
        slots, slots, ints(*shape), zeros(*shape), None, longs(B, H, 1), longs(1), new, new, zeros(*shape),
        pages=longs(B),
    )  # fmt: skip


def token_blocks(*bits: int) -> None:
    shape = BlockShape(H, *(Codec(each, D) for each in bits))
    blocks = TokenBlocks.of(shape, zeros(5, shape.nbytes, dtype=torch.uint8), zeros(H, D), zeros(H, D))
    write_tokens(blocks, normal(S, H, D), normal(S, H, D), longs(S))
    block_attention(normal(B, HQ, D), blocks, Reading.of(ints(B, 4), ints(B), shape), 0.1)


def decoded(some: bool = False) -> None:
    codec, codes, steps = Codec(3, D), zeros(B, H, S, 24, dtype=torch.uint8), zeros(B, H, S, dtype=torch.float16)
    slots = CodedSlots(codec, zeros(B, H, D), zeros(B, H, 4, D), ints(B, H, 4), codes, steps)
    if some:
        slots.decoded_at(longs(B, H, 90), torch.bfloat16)
    else:
        slots.decoded(torch.bfloat16)


def replay_scores(dtype: torch.dtype) -> None:
    q, k, sinks = normal(B, HQ, S, D).to(dtype), normal(B, H, S, D).to(dtype), normal(B, H, 4, D).to(dtype)
    bare = longs(B) if dtype == torch.bfloat16 else 1
    ops.replay_scores(q, q, k, sinks, 0.1, hidden=longs(B), copies=k, chunks=2, bare=bare)


def refit_steps() -> None:
    gram, w, ridge, values, plain = normal(3, S, S), zeros(3, S), zeros(3, 1), zeros(3, S, D), normal(3, S, D)
    steps.weight_steps(steps.Descent(gram, w, w, ridge, w, w), [0.5])
    state = steps.Conjugate(w, ridge, values, normal(8, 3, S, D), zeros(8, 3, D))
    steps.value_step(state, 0, values)
    steps.stepped_values(state, plain)
    steps.weighed(values, w, values, out=plain)
    steps.errors(values, w, values, w)


def gather_rows() -> None:
    gather_rows_of(Sources([normal(N, D)], longs(1)), longs(3), longs(3), longs(3, S), 2)


def take_rows() -> None:
    ops.take_rows(normal(S, 2, D), longs(N))
    ops.take_rows(normal(S), longs(N), 1.0)


def keep_queries() -> None:
    held = torch.zeros(B, HQ // H * H, S, query_bytes(D), dtype=torch.uint8, device=longs(1).device)
    ops.keep_queries(held, normal(B, HQ, 1, D), longs(1), H, longs(B))


def join_attention() -> None:
    parts = [Part(normal(B, HQ, N, D), normal(B, HQ, N).float()) for _ in range(2)]
    ops.join_attention(*parts)
    rows = Part(normal(B, HQ, 1, D), normal(B, HQ, 1).float())
    ops.join_attention(rows, parts[0], longs(B))


def rotate_queries() -> None:
    ops.rotate_queries(normal(B, HQ, N, D), longs(B, 2), longs(D // 4))


def kept_attention() -> None:
    hidden = zeros(3, S, dtype=torch.bool)
    q, k, v = normal(3, N, D), normal(3, S, D), normal(3, S, D)
    ops.kept_attention(q, k, v, longs(3, 128), 0.1, hidden, normal(3, 128, D), zeros(3, N))


def chunk_attention() -> None:
    past = ops.Past(normal(B, H, S, D), normal(B, H, S - 70, D), zeros(B, H, S), zeros(B, H, S))
    ops.chunk_attention(
        normal(B, HQ, N, D), normal(B, H, S, D), normal(B, H, S, D), 0.1,
        past=past, hidden=ints(B), softcap=9.0, sink_logits=zeros(HQ), clip=1.0,
    )  # fmt: skip


def past_attention(key_bits: int, value_bits: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Few queries, so that programs share the slots: both kernels."""

    def part(bits: int) -> CodedSlots:
        codes, steps = zeros(H * S, D * bits // 8, dtype=torch.uint8), zeros(H * S, dtype=torch.float16)
        return CodedSlots(Codec(bits, D), zeros(1, H, D), zeros(1, H, 4, D), ints(1, H, 4), codes, steps)

    layout = Layout.of(torch.full((1, H), S), coded=True)
    ops.past_attention(
        normal(1, HQ, 20, D).to(dtype), part(key_bits), part(value_bits), zeros(H * S), zeros(H * S), 0.1,
        starts=ints(2), softcap=9.0, ragged=layout,
    )  # fmt: skip


def past_attention_to_blocks() -> None:
    ops.past_attention(
        normal(B, HQ, 2048, D), normal(9, H, 64, D), normal(9, H, 64, D), None, None, 0.1,
        lengths=longs(B, H), blocks=ints(B, 4),
    )  # fmt: skip


def indexed_attention() -> None:
    ops.indexed_attention(
        normal(B, HQ, 1, D), normal(B, H, S, D), normal(B, H, S, D), ints(B, HQ, N), 0.1,
        spans=ints(B, 2, 2), max_span=40, softcap=9.0, sink_logits=zeros(HQ),
        extra_k=zeros(B, H, 30, D), extra_v=zeros(B, H, 30, D), extra_log_weight=zeros(B, HQ, 30),
        extra_cut=ints(B, HQ, 3),
    )  # fmt: skip


def coded_indexed_attention(extra: bool) -> None:
    """`extra`: beside slots that are no codes, which `indexed_attention` reads too."""
    codec = Codec(4, D)
    codes, steps = zeros(B, H, S, D // 2, dtype=torch.uint8), zeros(B, H, S, dtype=torch.float16)
    store = CodedSlots(codec, zeros(B, H, D), zeros(B, H, 4, D), ints(B, H, 4), codes, steps)
    more = {"extra_k": zeros(B, H, 30, D), "extra_v": zeros(B, H, 30, D), "extra_log_weight": zeros(B, HQ, 30)}
    more["extra_cut"] = ints(B, HQ, 3)
    ops.indexed_attention(
        normal(B, HQ, 1, D), store, store, ints(B, HQ, N), 0.1, spans=ints(B, 2, 2), max_span=40,
        **(more if extra else {}),
    )  # fmt: skip


def mass_of_a_prompt() -> None:
    ops.attention_mass(
        normal(B, HQ, N, D), normal(B, H, S, D), 0.1,
        index=ints(B, H, S), seen=S, padding=longs(B), temperature=ops.Temperature(1.0, 2.0, 9), noise=ops.Noise(1, 2),
    )  # fmt: skip


def mass_of_a_token() -> None:
    options: dict[str, Any] = {"padding": longs(B), "noise": ops.Noise(1, 2)}
    ops.attention_mass(normal(B, HQ, 1, D), normal(B, H, S, D), 0.1, index=ints(B, H, S), seen=longs(1), **options)


def mass_from_logits() -> None:
    options: dict[str, Any] = {"padding": longs(B), "reduce": "max", "fade": 0.9}
    options["temperature"] = ops.Temperature(1.0, 2.0, 9, since=longs(B))
    ops.mass_from_logits(zeros(B, HQ, S), ints(B, H, S), longs(1), noise=ops.Noise(1, 2), **options)


def mass_from_known_sums() -> None:
    ops.mass_from_logits(zeros(B, HQ, S), ints(B, H, S), longs(1), row_lse=zeros(B, HQ), padding=longs(B))


def rotate_keys() -> None:
    ops.rotate_keys(normal(B, H, S, D), ints(B, H, S), longs(1), longs(D // 4))


def kmeans(metric: str) -> None:
    ops.kmeans(normal(B, H, S, D), 20, start=longs(B), rounds=1, metric=metric)


def select_clusters() -> None:
    scores = ops.cluster_scores(normal(B, HQ, 1, D), zeros(B, H, 20, D))
    ops.select_clusters(scores, ints(B, H, 20), ints(B, H, 20), ints(B, H, S), 50, budgets=ints(B))
    ops.select_clusters(scores, ints(B, H, 20), ints(B, H, 20), None, 50)


def select_pages() -> None:
    low, high = normal(B, H, 16, D), normal(B, H, 16, D)
    ops.select_pages(normal(B, HQ, 1, D), low, high, longs(1), 4, 16, padding=longs(B), budgets=ints(B))
    ops.widen_pages(low, high, normal(B, H, S, D), longs(1), 16, padding=longs(B), slot=longs(B, H, 1))


def leader_clustering() -> None:
    valid = torch.ones(B, H, S, dtype=torch.bool)
    ops.leader_clustering(normal(B, H, S, D), valid, normal(B, H, 20, D), longs(B, H), zeros(B, H), longs(B, H) + 20)


def farthest_first() -> None:
    ops.farthest_first(normal(B, H, S, D), 20)


def coarse_farthest_first() -> None:
    ops.farthest_first(normal(B, H, S, D), 20, form="coarse")


def slot_update() -> None:
    index, log_den, log_num, slot, clock = ints(B, H, S), zeros(B, H, S), zeros(B, H, S), longs(B, H, 1), longs(1)
    keys, values, new = normal(B, H, S, D), normal(B, H, S, D), normal(B, H, 1, D)
    ops.write_token(keys, values, index, log_den, log_num, slot, clock, new, new, zeros(B, H, S), pages=longs(B))
    ops.free_lowest(zeros(B, H, S), index, log_den, log_num, slot, longs(B), clock, 2, 5)


def work_list() -> None:
    fixed_work_list(longs(2, S), 4096, Readers(1584, 64))


def page_rows() -> None:
    held = Worth(ints(B, H, S), zeros(B, H, S), zeros(B, H, S))
    rows = Rows(longs(B), longs(B), longs(B))
    ops.open_rows(held, rows, Front(longs(B, S), S - 3, 2))
    ops.close_rows(held, rows, held)


def coded_slot_update() -> None:
    codec, shape = Codec(4, D), (B, H, S)
    codes, steps = zeros(*shape, codec.code_bytes, dtype=torch.uint8), zeros(*shape, dtype=torch.float16)
    slots = CodedSlots(codec, zeros(B, H, D), zeros(B, H, 4, D), ints(B, H, 4), codes, steps)
    new, score = normal(B, H, 1, D), zeros(*shape)
    ops.write_token(slots, slots, ints(*shape), zeros(*shape), zeros(*shape), longs(B, H, 1), longs(1), new, new, score)


def reservoir() -> None:
    ops.reservoir(longs(B, H), longs(B, N), longs(B, H, N), 30, longs(B, H, N), 3)


def fold_token() -> None:
    layout = Folded(4, 9, 0, 40, 10, 3)
    state = State(
        normal(B, H, layout.total, D), normal(B, H, layout.valued, D), ints(B, H, layout.total),
        zeros(B, H, layout.total), zeros(B, H, layout.total), longs(B, H, 1), longs(1), longs(B), longs(B, 6),
        normal(B, H, 10, D), ints(B, H, 10), zeros(B, H), zeros(B, H, dtype=torch.float64), zeros(B, H, 40),
        longs(B, H, 3), zeros(B, H, 40), longs(B, H),
    )  # fmt: skip
    ops.fold_token(state, layout, True)


def balance_walk(dtype: torch.dtype) -> None:
    k = normal(B, H, S, D).to(dtype)
    ops.balance_walk(k, k, longs(B, H, 2, 100), 0.1, weights=zeros(B, H, S), constant=0.1)


def hot_rows() -> None:
    store = Store(normal(B, H, S, D), normal(B, H, S, D), ints(B))
    buffer = Buffer(normal(B, H, S, D), normal(B, H, S, D), 0, 100)
    ops.hot_rows(ints(B, HQ, 20), ints(B), new_places(B, H, S, 100, torch.device("cpu")), store, buffer)


def coded_hot_rows() -> None:
    codes, steps = normal(B, H, S, D // 4).view(torch.uint8), normal(B, H, S, 1)
    store = Store(codes, codes, ints(B), (steps, steps))
    buffer = Buffer(codes, codes, 0, 100, (steps, steps))
    ops.hot_rows(ints(B, HQ, 20), ints(B), new_places(B, H, S, 100, torch.device("cpu")), store, buffer)


def decoder_layer() -> None:
    from kvsketch.ops.decoder_layer import kernel

    x, q, cos = normal(B, 1, 512), normal(B, HQ, 1, D), normal(B, 1, D)
    kernel.add_rms_norm(x, x, x[0, 0], 1e-6)
    kernel.rotate_both(q, normal(B, H, 1, D), cos, cos)
    kernel.gated_silu(x, x)


def skinny_matmul(rows: int) -> None:
    from kvsketch.ops.skinny_matmul import kernel

    x, weight = normal(rows, 512), normal(256, 512)
    kernel.linears(x, [weight] * 3, [weight[:, 0].contiguous()] * 3)
    kernel.gated_linear(x, weight, weight)


CALLS: tuple[Callable[[], None], ...] = (
    weighted_attention, encoded, coded_attention, decoded, ragged_attention, paged_attention,
    coded_paged_slot_update, partial(token_blocks, 4, 4), partial(past_attention, 4, 4),
    chunk_attention, indexed_attention, partial(coded_indexed_attention, False), kept_attention,
    mass_of_a_prompt, mass_of_a_token, mass_from_logits, mass_from_known_sums, rotate_keys, rotate_queries,
    join_attention, partial(kmeans, METRICS[0]), select_clusters, select_pages,
    leader_clustering, farthest_first, coarse_farthest_first,
    refit_steps, gather_rows, take_rows, keep_queries, slot_update, work_list, page_rows, reservoir,
    fold_token, hot_rows, decoder_layer, partial(skinny_matmul, 1),
    partial(replay_scores, torch.bfloat16), partial(balance_walk, torch.bfloat16),
)  # fmt: skip

# The same kernels in other bits, dtypes, shapes and places.
OTHER_CALLS: tuple[Callable[[], None], ...] = (
    mixed_attention, short_coded_attention, partial(learned_attention, torch.bfloat16),
    partial(learned_attention, torch.bfloat16, 2), partial(learned_attention, torch.float32),
    partial(ragged_attention, 4), coded_paged_attention, partial(decoded, some=True), coded_slot_update, coded_hot_rows,
    partial(coded_indexed_attention, True), partial(token_blocks, 8, 3), partial(past_attention, 8, 3),
    partial(past_attention, 2, 4, torch.float32), past_attention_to_blocks,
    *(partial(kmeans, metric) for metric in METRICS[1:]),
    partial(skinny_matmul, 4), partial(replay_scores, torch.float32), partial(balance_walk, torch.float32),
)  # fmt: skip


def rows_of_a_step(rows: int) -> None:
    """A work list of 8 heads a row, and queries that wait in pages; numbers of rows lie behind each other."""
    numbers = longs(3, rows)
    with contextlib.suppress(LaunchedTwice):
        fixed_work_list(longs(2, 8 * rows), 4096, Readers(1584, 64))
    held = zeros(20, H, 200, query_bytes(D), dtype=torch.uint8)
    ops.keep_queries(held, normal(rows, HQ, 64, D), numbers[1], H, numbers[0], numbers[2])


def steps_that_begin_at(start: int) -> None:
    """Codes of a page, whose steps of two bytes begin anywhere."""
    codes = zeros(B, H, S, D // 2, dtype=torch.uint8)
    steps = zeros(B * H * S + start, dtype=torch.float16)[start:].view(B, H, S)
    ops.codec.CodedSlots(Codec(4, D), zeros(B, H, D), zeros(B, H, 4, D), ints(B, H, 4), codes, steps).decoded(
        torch.bfloat16
    )


def token_behind(slots: int, at: int) -> None:
    """A token of a store of so many slots, counted on the clock that is number `at` of several."""
    codec, codes = Codec(4, D), zeros(slots, D // 2, dtype=torch.uint8)
    held = CodedSlots(codec, zeros(B, H, D), zeros(B, H, 4, D), ints(B, H, 4), codes, zeros(slots, dtype=torch.float16))
    clock, new = longs(3)[at : at + 1], normal(B, H, 1, D)
    ops.write_token(
        held, held, ints(slots), zeros(slots), None, longs(B, H, 1), clock, new, new, zeros(slots), longs(B, H)
    )


def turn_of(tokens: int, rows: int = 1) -> None:
    """New tokens of requests behind their pages, which are not filled up: queries, keys and values of one product."""
    layout = replace(Layout.of(longs(rows, H) + S, coded=True), most_pieces=400)
    codes, steps = zeros(layout.total, D // 2, dtype=torch.uint8), zeros(layout.total, dtype=torch.float16)
    slots = CodedSlots(Codec(4, D), zeros(rows, H, D), zeros(rows, H, 4, D), ints(rows, H, 4), codes, steps)
    product = normal(rows, tokens, HQ + 2 * H, D).transpose(1, 2)
    q, k, v = product.split([HQ, H, H], 1)
    weights = zeros(layout.total)
    with contextlib.suppress(LaunchedTwice):
        ops.past_attention(q, slots, slots, weights, weights, 0.1, ragged=layout)
    own, state = ops.chunk_attention(q, k, v, 0.1, return_state=True)
    part = Part(own, state[1])
    ops.join_attention(part, part)
    encode_into(Coded(codes, steps), k, slots.center, slots.codec, longs(rows, H, tokens))


NUMBERS_OF_ROWS: tuple[Callable[[], None], ...] = (
    *(partial(rows_of_a_step, rows) for rows in range(9, 17)), *(partial(steps_that_begin_at, at) for at in (0, 1, 3)),
    # Nine requests are so many tiles that no programs share the slots of a head.
    *(partial(turn_of, tokens) for tokens in (128, 513, 600)), partial(turn_of, 576, rows=9),
    *(partial(token_behind, slots, at) for slots, at in ((4096, 0), (4097, 1), (5003, 2))),
)  # fmt: skip


SHORT_CALLS: tuple[Callable[[], None], ...] = (rotate_queries,)


class LaunchedTwice(Exception):
    """A call launches a kernel again. Nothing was computed, so that it may never see a reason to stop."""


class HalfCompiled(Exception):
    """Raised to leave out the stages behind the first ones; it stands for the program then."""

    asm: ClassVar[dict[str, str]] = {"ptx": ""}


class Everything:
    def __contains__(self, mark: object) -> bool:
        return True


def compile_half(known: Collection[str] | Everything) -> dict[int, str]:
    """Has Triton leave out the stages behind the first ones for programs whose marks are known. The result holds the
    mark of each program: two launches have the same if they share a program.
    """
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction

    add, compile_program = CUDABackend.add_stages, JITFunction._do_compile
    marks: dict[int, str] = {}
    last = [""]

    def add_stages(self: Any, stages: dict[str, Any], options: Any, *more: Any) -> None:
        add(self, stages, options, *more)
        go_on = stages["ttgir"]

        def stage(module: Any, metadata: Any) -> Any:
            # What a program does and how it is compiled, without the lines of the source that it came from.
            last[0] = hashlib.sha256((options.hash() + module.str_nodebug()).encode()).hexdigest()[:16]
            if last[0] in known:
                raise HalfCompiled
            return go_on(module, metadata)

        stages["ttgir"] = stage

    def program_of(self: Any, key: Any, signature: Any, device: Any, *more: Any, **named: Any) -> Any:
        try:
            program = compile_program(self, key, signature, device, *more, **named)
        except HalfCompiled as half:
            program = self.device_caches[device][0][key] = half.with_traceback(None)
        marks[id(program)] = last[0]
        return program

    CUDABackend.add_stages, JITFunction._do_compile = add_stages, program_of
    return marks


def compile_all(calls: Sequence[Callable[[], None]], report: Callable[[str, Any], None]) -> None:
    """Makes the calls; `report` gets the name and the compiled program of each launch."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from kvsketch.ops.common import device, dispatch, early_start

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    launched: set[Any] = set()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if self in launched:
            raise LaunchedTwice
        launched.add(self)
        program = run(self, *args, grid=grid, warmup=True, **options)
        report(f"{self.fn.__module__.split('.')[-2]}.{self.fn.__name__}", program)

    h200 = device.Device(multiprocessors=132, shared_bytes=227 * 1024, overlap=True)
    driver.set_active(Driver())
    JITFunction.run = compile_only
    early_start.possible = lambda device: True
    dispatch.kernel_for = lambda operation, device: dispatch._load_kernel(operation)
    device.device_traits = lambda device: h200
    for call in calls:
        launched.clear()
        with contextlib.suppress(LaunchedTwice):
            call()


def note() -> None:
    """Lists all programs that compile today."""
    import triton

    marks = compile_half(())
    made: set[str] = set()
    compile_all((*CALLS, *OTHER_CALLS), lambda name, program: made.add(marks[id(program)]))
    LISTED.write_text(json.dumps({"triton": triton.__version__, "programs": sorted(made)}, indent=0) + "\n")


def main(calls: str, way: str) -> None:
    known = {"listed": listed(), "half": Everything()}.get(way, ())
    marks = compile_half(known)

    def show(name: str, program: Any) -> None:
        # Programs of the same text that are made apart are two.
        mark = marks[id(program)] if way != "half" else str(id(program))
        print(name, mark, program.asm["ptx"].count("\n"), flush=True)

    chosen = {
        "CALLS": CALLS,
        "OTHER_CALLS": OTHER_CALLS,
        "SHORT_CALLS": SHORT_CALLS,
        "NUMBERS_OF_ROWS": NUMBERS_OF_ROWS,
    }
    compile_all(chosen[calls], show)


if __name__ == "__main__":
    note() if sys.argv[1:] == ["note"] else main(*sys.argv[1:])
