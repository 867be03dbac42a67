"""What a model learns once from texts: directions for quantisation, and maps of a repetition (`kvsketch fit`).

    bases      the model reads; of each KV head the covariance of keys (after rotary embedding) and values around their
               mean in a text, without its first tokens, gives the directions of `basis=learned`
    queries    the model reads and repeats; a map of queries (`replay_map`)
    scores     once more with that map: a map of scores

Each is a sum over texts. What has been added up is written to a file while it grows, and after an error or Ctrl-C:
the same call goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvsketch.cache import latent
from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.replay import fitting
from kvsketch.cache.replay.fitting import QUERIES, SCORES, Learned
from kvsketch.cache.saving import sealed_file
from kvsketch.cache.streaming import prefill
from kvsketch.methods import replay_map
from kvsketch.methods.replay_map import Moments, ReplayMap
from kvsketch.ops.codec.basis import SHARES, Bases, Basis, shares_of
from kvsketch.slots.codes import EXACT

BASES = "bases"
SAVED_EVERY = 60.0  # seconds


class Stages(NamedTuple):
    """How many texts have been added up, and the sums, by name."""

    done: dict[str, int]
    sums: dict[str, Tensor]


def learn(
    model: Any,
    texts: Sequence[Tensor],
    said: Tensor | None = None,
    *,
    maps: bool = True,
    beside: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Learned:
    """Directions and maps of a model, from token ids [1, n] of texts.

    Models whose keys and values have no such directions (`has_directions`) get maps alone.
    said: the words that ask for a repetition. maps: False learns directions alone, which takes a fifth of the time.
    beside: a file in which sums are kept until all is done; the caller removes it then. progress(tokens, all) is called
    after each text.
    """
    names = (BASES,) * has_directions(model) + (QUERIES, SCORES) * maps
    if not names:
        raise ValueError(
            f"{model.config.model_type} has no directions to learn: they are those of heads whose size is a multiple "
            f"of {SHARES}, without latent attention"
        )
    digest = _digest(model, texts, names)
    state = _resumed(beside, digest) or Stages(dict.fromkeys(names, 0), {})
    cost = {BASES: 1, QUERIES: 2, SCORES: 2}
    total = sum(cost[name] * ids.shape[1] for name in names for ids in texts)
    passed = sum(cost[name] * ids.shape[1] for name in names for ids in texts[: state.done[name]])
    saved_at = time.monotonic()
    queries = _maps_of_queries(state.sums) if state.done.get(QUERIES) == len(texts) else {}
    try:
        for name in names:
            for ids in texts[state.done[name] :]:
                for key, sums in _of_text(model, ids, said, name, queries).items():
                    state.sums[key] = state.sums[key] + sums if key in state.sums else sums
                state.done[name] += 1
                passed += cost[name] * ids.shape[1]
                if progress is not None:
                    progress(passed, total)
                if beside is not None and time.monotonic() - saved_at > SAVED_EVERY:
                    _keep(beside, state, digest)
                    saved_at = time.monotonic()
            if name == QUERIES and not queries:
                queries = _maps_of_queries(state.sums)
    except BaseException:
        if beside is not None and any(state.done.values()):
            _keep(beside, state, digest)
        raise
    scores = {layer: moments.fit(replay_map.RIDGE) for layer, moments in _moments(state.sums, SCORES).items()}
    return Learned(ReplayMap(queries, scores) if maps else None, _bases(state.sums) if BASES in names else None)


def has_directions(model: Any) -> bool:
    """Whether keys and values of the model can be rounded along learned directions."""
    config = model.config.get_text_config(decoder=True)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size % SHARES == 0 and latent.sizes_of(model.config) is None


def _of_text(model: Any, ids: Tensor, said: Tensor | None, name: str, queries: dict[int, Tensor]) -> dict[str, Tensor]:
    """What a text adds to the sums of a stage."""
    ids = ids.to(model.device)
    if name == BASES:
        cache = CompressedCache(model, "full")
        prefill(model, ids, cache)
        return spreads(cache)
    method = fitting.Fitting(budget="100%", replay=fitting.EXACT, refit="none", bits=16)
    method = method.with_map(ReplayMap(dict(queries), {})) if queries else method
    prefill(model, ids, CompressedCache(model, method), instruction=said)
    own = method.sums[name]
    return {
        f"{name}.{layer}.{part}": getattr(moments, part).cpu()
        for layer, moments in own.items()
        for part in ("square", "product")
    }


def spreads(cache: CompressedCache) -> dict[str, Tensor]:
    """Of each layer: sums over tokens of products of channels around the mean [H, D, D], of keys and of values."""
    result = {"tokens": torch.tensor(float(cache.tokens_seen - EXACT), dtype=torch.float64)}
    for layer in cache.slot_layers:
        table = layer.table
        for what, slots in (("keys", table.key_slots()), ("values", table.value_slots())):
            near = slots[0, :, EXACT:].double()
            near = near - near.mean(1, keepdim=True)
            result[f"{what}.{table.context.layer_idx}"] = (near.mT @ near).cpu()
    return result


def _bases(sums: dict[str, Tensor]) -> Bases:
    parts: dict[str, dict[int, Basis]] = {"keys": {}, "values": {}}
    for name, total in sums.items():
        what, _, layer = name.partition(".")
        if what in parts:
            parts[what][int(layer)] = Basis.of(total / sums["tokens"])
    for own in parts.values():
        # One layout of codes for all layers.
        common = shares_of(torch.cat([basis.deviation.square() for basis in own.values()]))
        own.update({layer: replace(basis, shares=common) for layer, basis in own.items()})
    return Bases(parts["keys"], parts["values"])


def _moments(sums: dict[str, Tensor], kind: str) -> dict[int, Moments]:
    layers = [int(name.split(".")[1]) for name in sums if name.startswith(f"{kind}.") and name.endswith(".square")]
    return {layer: Moments(*(sums[f"{kind}.{layer}.{part}"] for part in ("square", "product"))) for layer in layers}


def _maps_of_queries(sums: dict[str, Tensor]) -> dict[int, Tensor]:
    return {layer: replay_map.fitted_queries(moments) for layer, moments in _moments(sums, QUERIES).items()}


def _digest(model: Any, texts: Sequence[Tensor], names: Sequence[str]) -> str:
    """What the sums belong to."""
    identity = fitting.of_maps(CompressedCache(model, "full").identity.describe())
    told = json.dumps([identity, names, [ids.flatten().tolist() for ids in texts]], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def _keep(path: Path, state: Stages, digest: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sealed_file.write(path, state.sums, {"of": digest, "done": json.dumps(state.done)})


def _resumed(path: Path | None, digest: str) -> Stages | None:
    """What an interrupted call has added up; None where there is none, or it is of other texts."""
    if path is None or not path.is_file():
        return None
    try:
        text = sealed_file.verified(path)
    except ValueError:
        return None
    return Stages(json.loads(text["done"]), load_file(path)) if text.get("of") == digest else None
