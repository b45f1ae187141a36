"""Predicts decode and prefill steps of inference engines that somebody published.

A file has `decode` and `prefill` rows: `system`, `model`, `tp` (and `pp`), `moe` with `moe_tp` and
`moe_ep` where experts are divided, `batch`, `context` or `input_len`, and `step_ms` or
`prefill_ms`; and `model_shapes` for models that no folder has. Times are of kernels alone, so the
cost is one without the engine's host, and a prefill is one pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.layout import Layout
from flowrl.cost.models import ModelShape
from flowrl.cost.source import Cost
from flowrl.errors import PlanError
from flowrl.testing.published_rows import (
    Row,
    Unusable,
    is_positive,
    machine_of,
    median,
    shape_of,
    share_below,
)

__all__ = ["KERNELS", "StepError", "StepGroup", "group_errors", "predict_steps"]

KERNELS = AnalyticCost(host_s=0.0, chunk_tokens=None)
"""As published steps are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepError:
    """A row that was predicted.

    Attributes:
        kind: `decode` or `prefill`.
        layout: `tp 4`, `tp 4, ep 4`.
    """

    kind: str
    system: str
    model: str
    layout: str
    batch: int
    tokens: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative; above 0 where the prediction is too long."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroup:
    """Absolute errors of rows that belong together."""

    name: tuple[str, ...]
    num: int
    median: float
    p90: float
    bias: float


def predict_steps(
    document: Row, models: Path, cost: Cost = KERNELS
) -> tuple[list[StepError], dict[str, int]]:
    """All rows of a file, and how many could not be predicted, by reason."""
    shapes = document.get("model_shapes")
    errors: list[StepError] = []
    refused: dict[str, int] = {}
    known: dict[str, ModelShape] = {}
    for kind in ("decode", "prefill"):
        for row in _rows(document, kind):
            try:
                name = str(row.get("model"))
                if name not in known:
                    given = shapes.get(name) if isinstance(shapes, dict) else None
                    known[name] = shape_of(row.get("model"), given, models)
                errors.append(_predict(kind, row, known[name], cost))
            except Unusable as why:
                for reason in why.reasons:
                    refused[reason] = refused.get(reason, 0) + 1
    return errors, refused


def group_errors(errors: Iterable[StepError], *keys: str) -> list[StepGroup]:
    """Errors by the named attributes, in the order in which groups first come."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for found in errors:
        groups.setdefault(tuple(getattr(found, key) for key in keys), []).append(found.error)
    return [
        StepGroup(
            name=name,
            num=len(values),
            median=median([abs(value) for value in values]),
            p90=share_below([abs(value) for value in values], 0.9),
            bias=sum(values) / len(values),
        )
        for name, values in groups.items()
    ]


def _rows(document: Row, kind: str) -> list[Row]:
    rows = document.get(kind)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _predict(kind: str, row: Row, shape: ModelShape, cost: Cost) -> StepError:
    machine = machine_of(row.get("system"))
    layout = _layout(row, shape)
    measured, length = ("step_ms", "context") if kind == "decode" else ("prefill_ms", "input_len")
    batch, tokens, seconds = (_number(row, key) for key in ("batch", length, measured))
    if kind == "decode":
        found = cost.decode_step(shape, layout, machine, batch=int(batch), context=tokens)
    else:
        found = cost.prefill(shape, layout, machine, rows=int(batch), tokens=int(tokens))
    return StepError(
        kind=kind,
        system=str(row["system"]),
        model=str(row["model"]),
        layout=layout.describe(),
        batch=int(batch),
        tokens=int(tokens),
        predicted_s=found.seconds,
        measured_s=seconds / 1e3,
    )


def _layout(row: Row, shape: ModelShape) -> Layout:
    moe = row.get("moe") or {}
    if not isinstance(moe, dict):
        raise Unusable("moe is no object with moe_tp and moe_ep")
    if max(_count(row, "attention_dp"), _count(moe, "attention_dp")) > 1:
        raise Unusable("attention by data ranks is not modelled")
    precision = str(row.get("precision") or row.get("dtype") or "bf16")
    if precision not in ("bf16", "bfloat16"):
        raise Unusable(f"only bfloat16 is modelled, not {precision}")
    if moe and shape.experts is None:
        raise Unusable(f"{row['model']} has no experts to divide")
    tp, ep = int(_number(row, "tp")), _count(moe, "moe_ep")
    if moe and ep * _count(moe, "moe_tp") not in (tp, 1):
        raise Unusable(f"moe_tp x moe_ep is not tp {tp}: {dict(moe)}")
    pp = _count(row, "pp")
    if pp > shape.num_layers:
        raise Unusable(f"pp {pp} is more than the {shape.num_layers} layers of {row['model']}")
    try:
        return Layout(tp=tp, ep=ep, pp=pp)
    except PlanError as error:
        raise Unusable(str(error)) from error


def _count(row: Row, key: str) -> int:
    """A whole number above 0; 1 where there is none."""
    return 1 if row.get(key) is None else int(_number(row, key))


def _number(row: Row, key: str) -> float:
    value = row.get(key)
    if not is_positive(value):
        raise Unusable(f"{key} is missing" if value is None else f"{key} is no number above 0")
    return float(value)
