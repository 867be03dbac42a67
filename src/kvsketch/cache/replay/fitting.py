"""What `kvsketch fit` learns of a model once (`learning`), in a file, and methods that ask for it.

    maps     from a virtual to a real repetition (`rehearse:replay=learned`). The model reads texts and repeats them,
             twice: the first time the map of the queries is fitted, then that of the scores which these queries give
    bases    directions in which keys and values are rounded (`basis=learned`, `ops.codec.basis`)
    doubt    the threshold from which on an answer is asked again (`kvsketch serve --doubtful retry`, `doubt_threshold`)

A file holds those of all layers and what identifies the model; it lies in the folder of fetched files, named after the
model's identity, or where `rehearse:map=FILE` says. One that lacks some of them serves the others.
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvsketch import ops
from kvsketch.cache.saving import sealed_file
from kvsketch.cache.saving.model_identity import ModelIdentity
from kvsketch.doubt_threshold import DoubtThreshold
from kvsketch.methods import replay_map
from kvsketch.methods.base import Method
from kvsketch.methods.parameters import RANDOM
from kvsketch.methods.rehearse import AUTO, EXACT, LEARNED, VIRTUAL, Rehearse
from kvsketch.methods.replay import Piece, positions_of
from kvsketch.methods.replay_map import Moments, ReplayMap
from kvsketch.methods.waiting import Waiting, newest_slots
from kvsketch.models.files import home
from kvsketch.ops.codec.basis import BASIS_PARTS, Bases, Basis
from kvsketch.ops.rotate_keys import whole_turns
from kvsketch.slots.table import SlotTable

QUERIES, SCORES = "queries", "scores"
MAPS = {QUERIES: torch.bfloat16, SCORES: torch.float32}  # in a file
DIRECTIONS = ("keys", "values")  # of each layer two tensors, `BASIS_PARTS`


class Learned(NamedTuple):
    """What is learned of a model; None: not that."""

    maps: ReplayMap | None
    bases: Bases | None
    doubt: DoubtThreshold | None = None


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
            self.first[table.context.layer_idx] = _unrotated(table, queries, positions_of(table, queries.shape[2]))
        elif self.queue(table).unreplayed:
            self.score(table, queries)
            self.first[table.context.layer_idx] = self.replayer(table).features(table)
            state = table.state_of(Waiting)
            state.score = state.again = state.chunks = None

    def learn(self, table: SlotTable, queries: Tensor, copies: Tensor, piece: Piece) -> None:
        if self.learned is None:
            behind = table.seen + copies.shape[2] - piece.tokens
            places = torch.arange(behind, behind + piece.tokens, device=queries.device).expand(len(queries), -1)
            first = self.first[table.context.layer_idx][:, :, piece.begin : piece.end]
            self._add(
                QUERIES, table.context.layer_idx, replay_map.query_moments(first, _unrotated(table, queries, places))
            )
        super().learn(table, queries, copies, piece)

    def settle(self, tables: Sequence[SlotTable]) -> None:
        repeated = self.learned is not None and not self.queue(tables[0]).unreplayed
        for table in tables if repeated else ():
            state = table.state_of(Waiting)
            if state.score is not None:
                real = state.score.gather(2, newest_slots(table, state.scored))
                moments = Moments.of_scores(self.first[table.context.layer_idx], real)
                self._add(SCORES, table.context.layer_idx, Moments(moments.square.sum(0), moments.product.sum(0)))
        super().settle(tables)


def _unrotated(table: SlotTable, queries: Tensor, places: Tensor) -> Tensor:
    return ops.rotate_queries(queries.float(), -places, whole_turns(tuple(table.context.rotary), queries.device))


def fit(read: Callable[[Method], None]) -> ReplayMap:
    """The maps of a model; `read` lets it read all texts with a method, each in a cache of its own."""
    method = Fitting(budget="100%", replay=EXACT, refit="none", bits=16)
    read(method)
    queries = {layer: replay_map.fitted_queries(moments) for layer, moments in method.sums[QUERIES].items()}
    method = method.with_map(ReplayMap(queries, {}))
    read(method)
    return ReplayMap(queries, {layer: moments.fit(replay_map.RIDGE) for layer, moments in method.sums[SCORES].items()})


def save(path: Path, learned: Learned, identity: dict[str, Any]) -> None:
    """Writes what was learned of a model (`ModelIdentity.describe`): maps in half precision, directions in 8 bits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    maps = learned.maps or ReplayMap({}, {})
    parts = {QUERIES: maps.queries, SCORES: maps.scores}
    tensors = {f"{kind}.{layer}": x.to("cpu", MAPS[kind]) for kind, own in parts.items() for layer, x in own.items()}
    for kind in DIRECTIONS if learned.bases is not None else ():
        for layer, basis in getattr(learned.bases, kind).items():
            tensors |= {f"{kind}.{layer}.{part}": getattr(basis, part) for part in BASIS_PARTS}
    doubt = {} if learned.doubt is None else {"doubt": json.dumps(asdict(learned.doubt))}
    sealed_file.write(path, tensors, {"model": json.dumps(of_maps(identity)), **doubt})


def of_maps(identity: dict[str, Any]) -> dict[str, Any]:
    """What maps depend on: not the dtype of the weights."""
    return {**identity, "dtype": None}


def default_path(identity: dict[str, Any]) -> Path:
    """Where the maps of a model lie unless a method names a file."""
    digest = hashlib.sha256(json.dumps(of_maps(identity), sort_keys=True).encode()).hexdigest()
    return home() / "maps" / f"{identity['model_type']}-{digest[:16]}.safetensors"


def with_learned(method: Method, identity: ModelIdentity, head_share: Any) -> Method:
    """The method with what was learned of its model, where it asks for it; warns where there is nothing.

    `replay=auto` becomes learned where there are maps, else virtual, without a warning.
    """
    asks_maps, asks_bases = asks_for(method)
    if not asks_maps and not asks_bases:
        return method
    named = named_file(method)
    path = Path(named).expanduser() if named else default_path(identity.describe(head_share))
    learned = read(path, identity, head_share)
    if named and not path.is_file():
        raise ValueError(f"there is no file {path}; write it with `kvsketch fit MODEL --out {path}`")
    again = " --again" if path.is_file() else ""
    if asks_maps and isinstance(method, Rehearse):
        if method.replay == AUTO:
            method = replace(method, replay=VIRTUAL if learned.maps is None else LEARNED)
        elif learned.maps is None:
            _warn(f"{method.name}:replay=learned found no maps of this model and uses replay=virtual", again)
        if learned.maps is not None:
            method = method.with_map(learned.maps)
    if asks_bases:
        if learned.bases is None:
            _warn(f"basis={method.basis} found no directions of this model and uses basis=random", again)
        else:
            method = method.with_bases(learned.bases)
    return method


def asks_for(method: Method) -> tuple[bool, bool]:
    """Whether a method asks for maps and for directions that it does not have yet."""
    maps = isinstance(method, Rehearse) and method.replay in (LEARNED, AUTO) and method.learned is None
    return maps, method.basis != RANDOM and method.bases is None


def named_file(method: Method) -> str:
    """The file that a method names for its maps; empty: none."""
    return method.map if isinstance(method, Rehearse) else ""


def found(asked: Method, method: Method) -> str:
    """A line about the replay of a method: what was asked for, what runs, and why; empty for other methods."""
    if not isinstance(asked, Rehearse) or not isinstance(method, Rehearse) or asked.replay not in (LEARNED, AUTO):
        return ""
    if method.learned is not None:
        return f"replay={asked.replay}: learned, with the maps of this model"
    return f"replay={asked.replay}: virtual, for this model has no maps; `kvsketch fit MODEL` makes them"


def is_there(path: Path, maps: bool, bases: bool) -> bool:
    """Whether a file holds maps, if these are wanted, and directions, if these are; False for a damaged one."""
    if not path.is_file():
        return False
    try:
        learned, _ = _load(path, path.stat().st_mtime_ns)
    except ValueError:
        return False
    return not (maps and learned.maps is None) and not (bases and learned.bases is None)


def read(path: Path, identity: ModelIdentity, head_share: Any = None) -> Learned:
    """What a file says of this model, nothing where there is no file; ValueError for a file of another model."""
    if not path.is_file():
        return Learned(None, None)
    learned, saved = _load(path, path.stat().st_mtime_ns)
    if differences := identity.differences(saved, head_share):
        raise ValueError(f"{path} belongs to another model: {'; '.join(differences)}; run `kvsketch fit` for this one")
    return learned


def known_doubt(path: Path) -> DoubtThreshold | None:
    """The threshold of doubt in a file; None where there is none, or the file is damaged."""
    try:
        return _load(path, path.stat().st_mtime_ns)[0].doubt
    except (OSError, ValueError):
        return None


def threshold_of(identity: ModelIdentity, head_share: Any = None) -> DoubtThreshold | None:
    """The threshold of doubt in the file of a model; None: there is none."""
    return read(default_path(identity.describe(head_share)), identity, head_share).doubt


def _warn(what: str, again: str) -> None:
    warnings.warn(f"{what}; `kvsketch fit MODEL{again}` makes them", stacklevel=4)


@functools.lru_cache(maxsize=4)
def _load(path: Path, changed: int) -> tuple[Learned, dict[str, Any]]:
    """What a file holds, and the identity of its model; `changed`: its time, so that a new file is read again."""
    text = sealed_file.verified(path)
    if "model" not in text:
        raise ValueError(f"{path} contains nothing learned of a model; make it with `kvsketch fit`")
    parts: dict[str, dict[int, Any]] = {kind: {} for kind in (QUERIES, SCORES, *DIRECTIONS)}
    tensors = load_file(path)
    for name, tensor in tensors.items():
        kind, layer, *part = name.split(".")
        if not part:
            parts[kind][int(layer)] = tensor
        elif part == [BASIS_PARTS[0]]:
            parts[kind][int(layer)] = Basis(*(tensors[f"{kind}.{layer}.{each}"] for each in BASIS_PARTS))
    maps = ReplayMap(parts[QUERIES], parts[SCORES]) if parts[QUERIES] else None
    bases = Bases(*(parts[kind] for kind in DIRECTIONS)) if parts[DIRECTIONS[0]] else None
    return Learned(maps, bases, _threshold(path, text.get("doubt"))), json.loads(text["model"])


def _threshold(path: Path, text: str | None) -> DoubtThreshold | None:
    """That of a file; files that were written before there were thresholds have none."""
    if text is None:
        return None
    try:
        told = json.loads(text)
        return DoubtThreshold(**{**told, "methods": tuple(told["methods"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: its threshold of doubt cannot be read ({error}); run `kvsketch fit` again") from None
