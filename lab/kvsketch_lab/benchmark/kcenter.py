"""Farthest-first centers, one layer: time of the exact and the coarse form, and the radius of one against the other.

    kvsketch bench kcenter --out results/kcenter.jsonl

Shapes of Llama-3.1-8B: 8 KV heads, head size 128, bfloat16; 32,768 keys, 2,048 centers per head, 32 layers. A layer's
time is judged against its share of a prefill (`--prefill-ms`, measured in the same process unless given): at most 40%
for the exact form, 10% for the coarse one. Times are of whole calls, host included, because the host reads the progress
of the heads. The plain greedy loop, one pass over the keys per center, is timed on a few centers and scaled up for
comparison. Results are first compared with the reference, and nothing is reported when they differ.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.farthest_first import FORMS, Centers
from kvsketch_lab.benchmark import runner
from kvsketch_lab.benchmark.layers import HEAD_SIZE, KEYS, KV_HEADS, LAYERS, OfPrefill, make_keys
from kvsketch_lab.benchmark.runner import Fields, by_reference, target_text
from kvsketch_lab.options import option

TARGETS = {"exact": 0.40, "coarse": 0.10}  # share of prefill
LOOP_CENTERS = 48  # timed of the plain loop
# Sums in another order may swap keys that are equally far, and later centers may then differ a little.
SAME_CENTERS, SAME_RADIUS, TRUE_RADIUS = 0.9, 1e-2, 1e-3


def difference(keys: Tensor, ours: Centers, expected: Centers) -> str | None:
    """What is wrong with our centers: too few of the expected ones, another radius, or a radius that is not theirs."""
    same = float((_marks(keys, ours) & _marks(keys, expected)).sum() / expected.index.numel())
    error = _largest_error(ours.radius, expected.radius)
    untrue = _largest_error(ours.radius, true_radius(keys, ours))
    if same > SAME_CENTERS and error < SAME_RADIUS and untrue < TRUE_RADIUS:
        return None
    return f"same centers {same:.0%}, radius off by {error:.1e}, and by {untrue:.1e} from that of its own centers"


def _marks(keys: Tensor, centers: Centers) -> Tensor:  # [B, H, N] bool
    return torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device).scatter_(2, centers.index, True)


def true_radius(keys: Tensor, centers: Centers) -> Tensor:  # [B, H]
    """Distance of the farthest key from its nearest center."""
    chosen = keys.gather(2, centers.index[..., None].expand(-1, -1, -1, keys.shape[3]))
    return torch.cdist(keys.float(), chosen.float()).amin(-1).amax(-1)


def _largest_error(ours: Tensor, expected: Tensor) -> float:
    return float(((ours - expected).abs() / expected.clamp_min(1e-6)).max())


@dataclass
class KCenter(OfPrefill):
    name, kind, operation = "kcenter", "farthest-first", "farthest_first"
    columns = (
        "keys | form | ms a layer=layer_ms:.2f | of prefill=share_of_prefill:.1% | target=judged | "
        "radius / exact=radius_over_exact:.3f"
    )
    length: int = option(32768, "keys per head", least=1)
    centers: int = option(2048, "centers per head", least=1)
    keys: tuple[str, ...] = option(tuple(KEYS), "kinds of keys, comma-separated", choices=tuple(KEYS))
    repeats: int = option(7, "calls that are timed", least=1)

    def headline(self, rows: list[Fields]) -> str:
        return f"Farthest-first centers, one layer; prefill {rows[0]['prefill_ms']:.0f} ms"

    def shown(self, row: Fields, rows: list[Fields]) -> Fields:
        return {"judged": target_text(row)}

    def wrong(self, most: int = 8192) -> Iterator[str]:
        length, count = min(most, self.length), min(most // 16, self.centers)
        for kind, form in itertools.product(("normal", "rotated"), FORMS):
            keys = make_keys(kind, length, self.seed, self.on)
            call = functools.partial(ops.farthest_first, keys, count, form=form)
            if problem := difference(keys, call(), by_reference(call)):
                yield f"{kind} keys, {form}: {problem}"

    def cells(self) -> Iterator[Fields]:
        return ({"keys": kind} for kind in self.keys)

    def measure(self, keys: str) -> Iterator[Fields]:
        drawn = make_keys(keys, self.length, self.seed, self.on)
        exact = ops.farthest_first(drawn, self.centers).radius
        for form in FORMS:
            call = functools.partial(ops.farthest_first, drawn, self.centers, form=form)
            ratio = call().radius / exact.clamp_min(1e-6)
            yield self.row(keys, form, self.on.milliseconds(call, self.repeats), ratio.tolist()[0])
        few = min(LOOP_CENTERS, self.centers)
        loop = functools.partial(by_reference, functools.partial(ops.farthest_first, drawn, few))
        times = [time * self.centers / few for time in self.on.milliseconds(loop, 3)]
        yield self.row(keys, "plain loop", times, [1.0]) | {"scaled_from": few}

    def row(self, kind: str, form: str, times: list[float], ratio: list[float]) -> Fields:
        layer_ms = statistics.median(times)
        share = self.share_of_prefill(layer_ms, self.length)
        return {
            "operation": "farthest_first", "keys": kind, "form": form, "length": self.length, "centers": self.centers,
            "kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "dtype": self.on.dtype_name, "layer_ms": layer_ms,
            "least_ms": min(times), "most_ms": max(times), "repeats": len(times), "layers": LAYERS, **share,
            "target": TARGETS.get(form),
            "within_target": share["share_of_prefill"] <= TARGETS[form] if form in TARGETS else None,
            "radius_over_exact": statistics.mean(ratio), "largest_radius_over_exact": max(ratio),
        }  # fmt: skip


command = functools.partial(runner.command, KCenter)
