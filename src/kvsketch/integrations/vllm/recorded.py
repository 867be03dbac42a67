"""Single tokens in a forward that reads prompts too: each layer's work on them is recorded once, and then replayed.

vLLM captures a step of single tokens as a whole. Beside a prompt every layer is launched by itself, and its launches
take the processor longer than the GPU. Knows nothing of vLLM.

Legend: R rows that are recorded together, B of them in use, Hq query heads, H KV heads, D key size, Dv value size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsketch.decode.captured import recording
from kvsketch.integrations.vllm.joint_layers import Forward, JointLayers

SIZES = (8, 16, 32, 64, 128)  # R; more rows at a time keep the GPU busy by themselves
Run = Callable[[], None]
Record = Callable[[Run, int], Run]


@dataclass
class Rows:
    """What the recorded work of R rows reads and writes, in all layers."""

    pages: Tensor  # [R] int64; 0: no request
    seen: Tensor  # [R] int64
    q: Tensor  # [R, Hq, D]
    k: Tensor  # [R, H, D]
    v: Tensor  # [R, H, Dv]
    out: Tensor  # [R, Hq, Dv]
    layers: list[Run] = field(default_factory=list)
    forward: Forward | None = None  # while they are recorded: views of the pages outlive no forward

    @classmethod
    def like(cls, count: int, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        pages = torch.zeros(count, dtype=torch.int64, device=q.device)
        query, key, value = (x.new_zeros(count, *x.shape[1:]) for x in (q, k, v))
        return cls(pages, pages - 1, query, key, value, query.new_zeros(count, q.shape[1], v.shape[2]))


class RecordedSteps:
    """The work of all layers, for a few numbers of rows, over one pool of pages."""

    def __init__(self, joint: JointLayers, most: int, record: Record | None = None) -> None:
        """`most`: rows that a forward can have; `record`: makes a run and the number of its layer what replays it."""
        self.joint, self.record = joint, record
        self.sizes = [size for size, smaller in zip(SIZES, (0, *SIZES), strict=False) if smaller < most]
        self.pool: tuple[int, int] | None = None  # that is recorded: its address, and how many pages it has
        self.rows: dict[int, Rows] = {}

    def prepare(self, pool: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Records all, if this is another pool than before; q [B, Hq, D], k [B, H, D], v [B, H, Dv] like those to come.

        No row stands for a request then, and nothing is written to one.
        """
        lies = pool.data_ptr(), len(pool)
        if lies == self.pool:
            return
        self.pool, self.rows, made = lies, {}, {}
        record = self.record or _Graphs()
        for size in reversed(self.sizes):  # smaller ones take the memory of the largest
            rows = made[size] = Rows.like(size, q, k, v)
            runs = [self._run(rows, layer, pool) for layer in range(len(self.joint.places))]
            for run in runs:  # what is compiled or loaded at first use is there when it is recorded
                run()
            rows.layers = [record(run, layer) for layer, run in enumerate(runs)]
            rows.forward = None
        self.rows = {size: made[size] for size in self.sizes}

    def _run(self, rows: Rows, layer: int, pool: Tensor) -> Run:
        def run() -> None:
            held = self.joint.forward
            if layer == 0:
                rows.forward = Forward(self.joint.pages(pool))
            self.joint.forward = rows.forward
            try:
                rows.out.copy_(self.joint.decode(layer, rows.pages, rows.seen, rows.q, rows.k, rows.v))
            finally:
                self.joint.forward = held

        return run

    def decode(self, layer: int, pages: Tensor, seen: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`JointLayers.decode`, for a forward that is not captured itself. The result lasts until the next layer."""
        count = len(pages)
        rows = next((rows for size, rows in self.rows.items() if size >= count), None)
        if rows is None:
            return self.joint.decode(layer, pages, seen, q, k, v)
        if layer == 0:
            rows.pages[:count].copy_(pages)
            rows.pages[count:].zero_()
            rows.seen[:count].copy_(seen)
            rows.seen[count:].fill_(-1)
        for own, new in ((rows.q, q), (rows.k, k), (rows.v, v)):
            own[:count].copy_(new)
        rows.layers[layer]()
        return rows.out[:count]


class _Graphs:
    """Records graphs, all of which share their memory: no two numbers of rows run in one forward.

    What the first layer computes for the others lies apart, where only first layers write.
    """

    def __init__(self) -> None:
        self.pools = [torch.cuda.graph_pool_handle() for _ in range(2)]

    def __call__(self, run: Run, layer: int) -> Run:
        with recording(torch.device("cuda", torch.cuda.current_device()), self.pools[layer > 0]) as graph:
            run()
        replay: Run = graph.replay
        return replay
