"""Numbers in a file that point to nothing are refused, and none that a cache really holds is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvsketch import CompressedCache
from kvsketch.cache.saving import sealed_file
from kvsketch.slots import SlotTable
from kvsketch.slots.checks import require_ranges, require_shapes
from kvsketch.slots.codes import coded
from tests.cache.test_saving import RECALL, VARIANTS, read, step
from tests.helpers import zoo
from tests.helpers.common import padded, thinned

MORE = [
    "balancekv:budget=24:sinks=2:recent=4:form=stream:block=8",
    "balancekv:budget=24:sinks=2:recent=4:form=paper:block=8",
    "subgen:budget=16:sinks=2:recent=4:normalizer=clipped",
    "infinigen:budget=16:skip_layers=0",
    *(method.replace("budget=16", "budget=40%") + ":offload=host" for method in RECALL),
    "kcenter:budget=30%:sinks=2:recent=4",
]
# Hash states, ages, the bytes of coded queries and counts say nothing of a place.
NO_PLACES = ("streams", "last_read", "queries", "hot.counts")
# Any count of tokens will do.
LOWER_ONLY = ("schedule", "limits", "batch")


def altered(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy with a right checksum whose tensors `change` has rewritten."""
    text, tensors = sealed_file.verified(source), load_file(source)
    text.pop("checksum")
    change(tensors)
    sealed_file.write(target, tensors, text)
    return target


@pytest.mark.parametrize("method", thinned([*VARIANTS, *MORE]))
def test_numbers_that_point_to_nothing_are_refused(method: str, tmp_path: Path) -> None:
    model = zoo.build("llama")
    cache, _ = read(model, method, 11, [0, 7])
    cache.save(tmp_path / "whole.kvs")
    CompressedCache.load(tmp_path / "whole.kvs", model)
    tensors = {n: t for n, t in load_file(tmp_path / "whole.kvs").items() if n.startswith("1.") and t.numel()}
    names = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
    assert len(names) >= (1 if cache.slot_layers[1].table.exact else 4)
    for name in names:
        short = "hot.counts" if name.endswith("hot.counts") else name.rpartition(".")[2]
        for sign in (-1, 1):

            def change(tensors: dict[str, torch.Tensor], name: str = name, sign: int = sign) -> None:
                tensor = tensors[name].view(-1)
                limit = torch.iinfo(tensor.dtype)
                # A little outside, so that an addition does not wrap around.
                tensor[-1] = -3 if sign < 0 else min(limit.max, 1 << 20)

            if short in NO_PLACES[:3] or (sign > 0 and short in (*NO_PLACES, *LOWER_ONLY)):
                continue
            path = altered(tmp_path / "whole.kvs", tmp_path / "forged.kvs", change)
            with pytest.raises(ValueError, match=r".{20}"):
                CompressedCache.load(path, model)


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Vectors that are twice as wide."""
    return torch.cat([x, x], -1)


def forged_tables() -> dict[str, tuple[str, Callable[[SlotTable], None]]]:
    clusterkv = next(method for method in RECALL if method.startswith("clusterkv"))
    offloaded = f"{clusterkv}:offload=host"
    subgen = "subgen:budget=16:sinks=2:recent=4:normalizer=clipped"
    return {
        "more tokens than slots": ("full", lambda t: setattr(t, "seen", 10_000)),
        "an index of too many tokens": (clusterkv, lambda t: t.state.order[0, 0, 0].fill_(t.seen)),
        "clusters beyond the order": (clusterkv, lambda t: t.state.sizes.fill_(t.state.order.shape[2])),
        "fewer sizes than clusters": (clusterkv, lambda t: setattr(t.state, "sizes", t.state.sizes[..., :-1])),
        "a tail that ends elsewhere": (clusterkv, lambda t: t.state.tail_shift.fill_(3)),
        "no order": (clusterkv, lambda t: setattr(t.state, "order", None)),
        "more sinks than slots": (offloaded, lambda t: setattr(t.hot, "sinks", 99)),
        "no hot set": (offloaded, lambda t: setattr(t.hot, "place_of", None)),
        "more hot places than slots": (
            offloaded, lambda t: vars(t.hot).update(token_of=torch.zeros(1, 2, 99).int(),
                                                    last_read=torch.zeros(1, 2, 99).int())),
        "a longer tail than slots": (offloaded, lambda t: (setattr(t, "seen", 400), t.clock.fill_(400))),
        "another plan on the device": (subgen, lambda t: t.state.plan.sub_(1).clamp_(min=0)),
        "a larger layout": (subgen, lambda t: t.state.host[:, 4].add_(1)),
        "fewer representatives": (
            subgen, lambda t: vars(t.state).update(representatives=t.state.representatives[:, :, :1],
                                                   counts=t.state.counts[:, :, :1])),
        "whole numbers as scores": ("h2o:budget=16:recent=4", lambda t: setattr(t.state, "score", t.index.long())),
        "shorter scores": ("h2o:budget=16:recent=4", lambda t: setattr(t.state, "score", torch.zeros(1, 2, 3))),
        "queries of other heads": ("rehearse", lambda t: setattr(t.state, "queries", t.state.queries[:, :3])),
        "shorter queries": ("rehearse", lambda t: setattr(t.state, "queries", t.state.queries[..., 2:])),
        "queries in another dtype": ("rehearse", lambda t: setattr(t.state, "queries", t.state.queries.float())),
        "wider values": ("full", lambda t: t.parts.update(values=t.values.moved(doubled))),
        "wider keys": ("h2o:budget=16:recent=4", lambda t: t.parts.update(keys=t.keys.moved(doubled))),
        "wider quantised values": (
            "h2o:budget=16:recent=4:bits=8", lambda t: t.parts.update(values=coded(doubled(t.value_slots()), 8, None))),
        "whole numbers as keys": ("full", lambda t: t.parts.update(keys=t.keys.moved(torch.Tensor.long))),
    }  # fmt: skip


@pytest.mark.parametrize("forgery", forged_tables())
def test_tables_that_do_not_hold_together_are_refused(forgery: str, tmp_path: Path) -> None:
    method, change = forged_tables()[forgery]
    model = zoo.build("llama")
    cache, _ = read(model, method, 5, [0])
    cache.save(tmp_path / "whole.kvs")
    CompressedCache.load(tmp_path / "whole.kvs", model)
    for layer in cache.slot_layers:
        change(layer.table)
    cache.save(tmp_path / "forged.kvs")
    with pytest.raises(ValueError, match=r".{20}"):
        CompressedCache.load(tmp_path / "forged.kvs", model)


@pytest.mark.parametrize("method", thinned([*VARIANTS, *MORE]))
def test_every_state_of_a_cache_is_in_range(method: str) -> None:
    """Steps, several tokens, drafts taken back in part, beams, and tables bounded before they are full."""
    model = zoo.build("llama")
    ids, mask = padded(zoo.tokens(2, 120), [0, 7])

    def check() -> None:
        for layer in cache.slot_layers:
            require_shapes(layer.table)
            require_ranges(layer.table)

    for prompt in (6, 40):
        cache = CompressedCache(model, method, seed=3)
        done = 0
        for new in (prompt, 1, 1, 7, *[1] * 9, 11, 1):
            step(model, ids[:, done : done + new], cache, mask[:, : done + new])
            done += new
            check()
        cache.reorder_cache(torch.tensor([1, 1]))
        mask[0] = mask[1]
        check()
        cache.activate_past_recording()
        for kept in (4, 1, 0):
            step(model, ids[:, done : done + 4], cache, mask[:, : done + 4])
            check()
            cache.crop(kept - 4)
            done += kept
            check()
        ids, mask = padded(zoo.tokens(2, 120), [0, 7])
    cache = CompressedCache(model, method)
    step(model, ids[:, :12], cache, mask[:, :12])
    for layer in cache.slot_layers:
        if layer.table.exact:
            layer.method.bound(layer.table, 26)
    check()
    for done in range(12, 26):
        step(model, ids[:, done : done + 1], cache, mask[:, : done + 1])
        check()


def test_a_large_header_is_refused_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, length = tmp_path / "large.kvs", 50_000_000
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + b'{"__metadata__":[')
        file.truncate(length + 100)
    monkeypatch.setattr(sealed_file, "safe_open", lambda *a, **k: pytest.fail("it was parsed"))
    with pytest.raises(ValueError, match=r"large\.kvs is no saved cache.*header of 50000000 bytes"):
        CompressedCache.load(path, zoo.build("llama"))


def test_a_table_of_many_layers_fits_the_header(tmp_path: Path) -> None:
    model: Any = zoo.build("llama")
    cache, _ = read(model, f"{RECALL[1]}:offload=host", 5, [0])
    cache.save(tmp_path / "prompt.kvs")
    header = int.from_bytes((tmp_path / "prompt.kvs").read_bytes()[:8], "little")
    assert header / len(cache.layers) * 400 < sealed_file.LONGEST_HEADER
