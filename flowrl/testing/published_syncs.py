"""Predicts how long weights took to reach engines, in runs that somebody published.

A file has `weight_syncs`: rows with `model`, `devices: {type, num}`, `train_parallel` and
`rollout_parallel` (each for all of `num` devices), `apart` (on devices of their own, or in place)
and `sync_s`.
"""

from __future__ import annotations

from pathlib import Path

from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.source import Cost
from flowrl.errors import FlowError
from flowrl.testing.published_layout import GivenLayout, read_layout
from flowrl.testing.published_rows import Row, Unusable, is_positive, machine_of, shape_of
from flowrl.testing.published_stages import Prediction, StagePrediction
from flowrl.testing.published_words import as_bool, as_number, in_our_words

__all__ = ["predict_syncs"]


def predict_syncs(document: Row, models: Path, cost: Cost | None = None) -> list[Prediction]:
    """All rows of a file; those that lack something say what."""
    cost = cost or AnalyticCost()
    rows = document.get("weight_syncs")
    found = []
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, dict):
            continue
        name = str(row.get("name", "a row without a name"))
        try:
            found.append(Prediction(name=name, step=_predict(row, models, cost)))
        except Unusable as why:
            found.append(Prediction(name=name, missing=why.reasons))
        except FlowError as error:
            found.append(Prediction(name=name, missing=(" ".join(str(error).split()),)))
    return found


def _predict(row: Row, models: Path, cost: Cost) -> StagePrediction:
    words = in_our_words(row, {})
    if words.refused:
        raise Unusable(*words.refused)
    row = words.row
    devices = row.get("devices")
    devices = devices if isinstance(devices, dict) else {}
    shape = shape_of(row.get("model"), row.get("model_shape"), models)
    machine = machine_of(devices.get("type"), node_size=devices.get("node_size"))
    train = _layout(row, "train_parallel", devices.get("num"))
    rollout = _layout(row, "rollout_parallel", devices.get("num"))
    apart = as_bool(row.get("apart"))
    if apart is None:
        raise Unusable("apart is missing: whether engines have devices of their own")
    seconds = as_number(row.get("sync_s"))
    if not is_positive(seconds):
        raise Unusable("sync_s is no number above 0")
    if max(train.layout.pp, rollout.layout.pp) > shape.num_layers:
        raise Unusable(f"pp is more than the {shape.num_layers} layers")
    predicted = cost.weight_sync(
        shape, train.layout, rollout.layout, machine, apart=apart, shard=train.shard
    ).seconds
    return StagePrediction(stage="sync_s", predicted_s=predicted, measured_s=float(seconds))


def _layout(row: Row, key: str, num: object) -> GivenLayout:
    given = row.get(key)
    if not isinstance(given, dict) or not given:
        raise Unusable(f"{key} is missing")
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise Unusable(f"devices.num is no whole number above 0: {num!r}")
    return read_layout(key, given, num)
