"""Data for figures other than result curves: needle heat maps, values by position, clusterability."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import FAILED, Record, budget_value
from kvsketch_lab.report.kinds import Data, model_name, variants
from kvsketch_lab.report.palette import order
from kvsketch_lab.report.rows import Observation


def _sorted(groups: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Groups by (model, ..., method, budget), methods in their own order and budgets by size."""
    return sorted(groups.items(), key=lambda item: (item[0][:-2], order(item[0][-2]), budget_value(item[0][-1])))


def needle_maps(observations: Iterable[Observation]) -> list[Data]:
    """For each method and budget the share found and the counts, by depth (rows) and length (columns)."""
    groups = grouped(
        observations, lambda each: ("; ".join([each.model, *variants(each.data)]), each.method, each.budget)
    )
    return [
        {"model": model, "method": method, "budget": budget, **_grid(members)}
        for (model, method, budget), members in _sorted(groups)
    ]


def _grid(members: Sequence[Observation]) -> Data:
    cells = grouped(members, lambda each: (float(each.data["depth"]), int(each.data["length"])))
    depths, lengths = sorted({depth for depth, _ in cells}), sorted({length for _, length in cells})
    grid = [[_cell(cells.get((depth, length), [])) for length in lengths] for depth in depths]
    return {"depths": depths, "lengths": lengths, "cells": grid}


def _cell(members: Sequence[Observation]) -> list[Any] | None:
    if not members:
        return None
    measured = [each for each in members if each.value is not None]
    mean = sum(each.value or 0 for each in measured) / len(measured) if measured else None
    return [mean, len(measured), len(members) - len(measured)]


def by_position(observations: Iterable[Observation], estimator: Any) -> list[Data]:
    """For each setting, method and budget the estimate and its interval at each position of the text."""
    known = [each for each in observations if each.value is not None and "position" in each.data]
    groups = grouped(known, lambda each: (each.model, each.setting, each.method, each.budget))
    result = []
    for (model, setting, method, budget), members in _sorted(groups):
        places = grouped(members, lambda each: int(each.data["position"]))
        values = [estimator(places[place]) for place in sorted(places)]
        edges = zip(*values, strict=True)
        named = dict(zip(("mean", "low", "high"), map(list, edges), strict=True))
        result.append(
            {"model": model, "setting": setting, "method": method, "budget": budget, "x": sorted(places), **named}
        )
    return result


def clusters(records: Iterable[Record], remarks: list[str]) -> list[Data]:
    """For each model and text the layers: t-SNE pictures, radius curves and cluster counts in the mean over heads."""
    groups: dict[tuple[str, str], dict[int, Data]] = {}
    for record, data in _measured(records):
        try:
            layer = _layer(data)
            name = f"{data['tokens']:,} tokens of {data['sample']}"
        except (KeyError, TypeError) as error:
            remarks.append(lacking(record, error))
            continue
        layers = groups.setdefault((model_name(data), name), {})
        # A layer measured with a picture and again without keeps the picture.
        kept = layers.get(data["layer"], {}).get("tsne")
        layers[data["layer"]] = layer | ({"tsne": kept} if kept and "tsne" not in data else {})
    return [
        {"name": f"{model}; {text}", "layers": [layers[number] for number in sorted(layers)]}
        for (model, text), layers in sorted(groups.items())
    ]


def _layer(data: Data) -> Data:
    norm = {name: data["query_norm"][name] for name in ("mean", "low", "high")}
    radius = {part: _falls(data[part]["radius"]) for part in ("keys", "values")}
    counts = {part: _head_means(data[part]["clusters"]) for part in ("keys", "values")}
    return {
        "layer": data["layer"],
        "query_norm": norm,
        "radius": radius,
        "clusters": counts,
        "tsne": data.get("tsne"),
    }


def _falls(radius: dict[str, list[float]]) -> dict[str, float]:
    """r(k) / r(1), mean over heads; heads whose vectors are all the same have no radius to compare with."""
    first = radius["1"]
    ratios = {k: [r / one for r, one in zip(values, first, strict=True) if one] for k, values in radius.items()}
    return _head_means({k: values for k, values in ratios.items() if values})


def _head_means(values: dict[str, list[float]]) -> dict[str, float]:
    return {key: sum(heads) / len(heads) for key, heads in sorted(values.items(), key=lambda item: float(item[0]))}


def _measured(records: Iterable[Record]) -> list[tuple[Record, Data]]:
    return [(record, record["data"]) for record in records if not record["data"].get(FAILED)]


def lacking(record: Record, error: Exception) -> str:
    """A remark about a record that cannot be shown."""
    reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return (
        f"{record.get('place', record['kind'])}: a record of {record['kind']} that cannot be shown ({reason}); left out"
    )
