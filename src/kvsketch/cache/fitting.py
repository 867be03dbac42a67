"""Maps from a virtual to a real repetition, fitted once for a model (`kvsketch fit`, `rehearse:replay=learned`).

The model reads texts and repeats them, twice: the first time the map of the queries is fitted, then that of the scores
which these queries give. A file holds the maps of all layers and what identifies the model; it lies in the folder of
fetched files, named after the model's identity, or where `rehearse:map=FILE` says.
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvsketch import ops
from kvsketch.cache.saving import sealed_file
from kvsketch.cache.saving.model_identity import ModelIdentity
from kvsketch.methods import replay_map
from kvsketch.methods.base import Method
from kvsketch.methods.rehearse import EXACT, LEARNED, Rehearse
from kvsketch.methods.replay import Piece, positions_of
from kvsketch.methods.replay_map import Moments, ReplayMap
from kvsketch.methods.waiting import Waiting, newest_slots
from kvsketch.models.files import home
from kvsketch.ops.rotate_keys import whole_turns
from kvsketch.slots.table import SlotTable

QUERIES, SCORES = "queries", "scores"
KEPT = {QUERIES: torch.bfloat16, SCORES: torch.float32}  # in a file


@dataclass(frozen=True)
class Fitting(Rehearse):
    """Repeats all of a text, keeps everything, and adds up what a fit needs, by layer."""

    sums: dict[str, dict[int, Moments]] = field(default_factory=dict, compare=False, kw_only=True)
    # of each layer: queries of the first reading; once these have a map, features of the tokens
    first: dict[int, Tensor] = field(default_factory=dict, compare=False, kw_only=True)

    def _add(self, kind: str, layer: int, moments: Moments) -> None:
        own = self.sums.setdefault(kind, {})
        own[layer] = own[layer] + moments if layer in own else moments

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        super().compress(table, queries)
        if self.learned is None:
            self.first[table.layer_idx] = _unrotated(table, queries, positions_of(table, queries.shape[2]))
        elif self.queue(table).unrepeated:
            self.score(table, queries)
            self.first[table.layer_idx] = self.replayer(table).features(table)
            state = table.state_of(Waiting)
            state.score = state.again = state.chunks = None

    def learn(self, table: SlotTable, queries: Tensor, copies: Tensor, piece: Piece) -> None:
        if self.learned is None:
            behind = table.seen + copies.shape[2] - piece.tokens
            places = torch.arange(behind, behind + piece.tokens, device=queries.device).expand(len(queries), -1)
            first = self.first[table.layer_idx][:, :, piece.begin : piece.end]
            self._add(QUERIES, table.layer_idx, replay_map.query_moments(first, _unrotated(table, queries, places)))
        super().learn(table, queries, copies, piece)

    def settle(self, tables: Sequence[SlotTable]) -> None:
        repeated = self.learned is not None and not self.queue(tables[0]).unrepeated
        for table in tables if repeated else ():
            state = table.state_of(Waiting)
            if state.score is not None:
                real = state.score.gather(2, newest_slots(table, state.scored))
                moments = Moments.of_scores(self.first[table.layer_idx], real)
                self._add(SCORES, table.layer_idx, Moments(moments.square.sum(0), moments.product.sum(0)))
        super().settle(tables)


def _unrotated(table: SlotTable, queries: Tensor, places: Tensor) -> Tensor:
    return ops.rotate_queries(queries.float(), -places, whole_turns(tuple(table.rotary), queries.device))


def fit(read: Callable[[Method], None]) -> ReplayMap:
    """The maps of a model; `read` lets it read all texts with a method, each in a cache of its own."""
    method = Fitting(budget="100%", replay=EXACT, refit="none", bits=16)
    read(method)
    queries = {layer: replay_map.fitted_queries(moments) for layer, moments in method.sums[QUERIES].items()}
    method = method.with_map(ReplayMap(queries, {}))
    read(method)
    return ReplayMap(queries, {layer: moments.fit(replay_map.RIDGE) for layer, moments in method.sums[SCORES].items()})


def save(path: Path, maps: ReplayMap, identity: dict[str, Any]) -> None:
    """Writes the maps of a model (`ModelIdentity.describe`) to a file, in half precision."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {QUERIES: maps.queries, SCORES: maps.scores}
    tensors = {f"{kind}.{layer}": x.to("cpu", KEPT[kind]) for kind, own in parts.items() for layer, x in own.items()}
    sealed_file.write(path, tensors, {"model": json.dumps(_of_maps(identity))})


def _of_maps(identity: dict[str, Any]) -> dict[str, Any]:
    """What maps depend on: not the dtype of the weights."""
    return {**identity, "dtype": None}


def default_path(identity: dict[str, Any]) -> Path:
    """Where the maps of a model lie unless a method names a file."""
    digest = hashlib.sha256(json.dumps(_of_maps(identity), sort_keys=True).encode()).hexdigest()
    return home() / "maps" / f"{identity['model_type']}-{digest[:16]}.safetensors"


def with_map(method: Method, identity: ModelIdentity, head_share: Any) -> Method:
    """The method with the maps of its model, where it asks for them; warns where there are none."""
    if not isinstance(method, Rehearse) or method.replay != LEARNED or method.learned is not None:
        return method
    path = Path(method.map).expanduser() if method.map else default_path(identity.describe(head_share))
    if not path.is_file():
        if method.map:
            raise ValueError(f"there is no file {path}; write it with `kvsketch fit MODEL --text FILES --out {path}`")
        warnings.warn(
            "rehearse:replay=learned finds no map of this model and rehearses as replay=virtual; `kvsketch fit MODEL "
            "--text FILES` makes one",
            stacklevel=3,
        )
        return method
    maps, saved = _load(path, path.stat().st_mtime_ns)
    if differences := identity.differences(saved, head_share):
        raise ValueError(f"{path} belongs to another model: {'; '.join(differences)}; run `kvsketch fit` for this one")
    return method.with_map(maps)


@functools.lru_cache(maxsize=4)
def _load(path: Path, changed: int) -> tuple[ReplayMap, dict[str, Any]]:
    """The maps of a file and the identity of their model; `changed`: its time, so that a new file is read again."""
    text = sealed_file.verified(path)
    if "model" not in text:
        raise ValueError(f"{path} holds no maps of a model; write it with `kvsketch fit`")
    parts: dict[str, dict[int, Tensor]] = {QUERIES: {}, SCORES: {}}
    for name, tensor in load_file(path).items():
        kind, _, layer = name.partition(".")
        parts[kind][int(layer)] = tensor
    return ReplayMap(parts[QUERIES], parts[SCORES]), json.loads(text["model"])
