"""Predicts decode steps and prefills of inference engines that somebody published.

Published times are of kernels alone, so the cost model has no host time, and a prefill is one pass.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from flowrl.cluster.hardware import Machine, device_spec
from flowrl.cost.aiconfigurator import SYSTEMS
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.layout import Layout
from flowrl.cost.models import ModelShape
from flowrl.errors import FlowError
from published.schema import DecodeStep, EngineSteps, Prefill
from published.stages import shape_of

KERNELS = AnalyticCost(host_s=0.0, chunk_tokens=None)
"""The cost of kernels alone, as published steps are measured."""

DEVICES = {system: device for device, system in SYSTEMS.items()}
"""Devices of the catalogue by the names of AIConfigurator's database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepError:
    """A predicted row; `layout` is a text such as `tp 4, ep 4`."""

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
        """Relative error; above 0 where the prediction is too long."""
        return self.predicted_s / self.measured_s - 1.0


def predict_steps(document: EngineSteps, models: Path) -> tuple[list[StepError], Counter[str]]:
    """Predicts all rows of a file; returns the errors, and counts of refused rows by reason."""
    errors: list[StepError] = []
    refused = Counter[str]()
    rows: list[DecodeStep | Prefill] = [*document.decode, *document.prefill]
    for row in rows:
        try:
            shape = shape_of(row.model, document.model_shapes.get(row.model), models)
            errors.append(_predict(row, shape))
        except FlowError as error:
            refused[" ".join(str(error).split())] += 1
    return errors, refused


def _predict(row: DecodeStep | Prefill, shape: ModelShape) -> StepError:
    machine = Machine(spec=device_spec(DEVICES.get(row.system, row.system)), node_size=8)
    layout = Layout(tp=row.tp, ep=(row.moe or {}).get("moe_ep", 1))
    if isinstance(row, DecodeStep):
        kind, tokens, ms = "decode", row.context, row.step_ms
        found = KERNELS.decode_step(shape, layout, machine, batch=row.batch, context=tokens)
    else:
        kind, tokens, ms = "prefill", row.input_len, row.prefill_ms
        found = KERNELS.prefill(shape, layout, machine, rows=row.batch, tokens=tokens)
    return StepError(
        kind=kind,
        system=row.system,
        model=row.model,
        layout=layout.describe(),
        batch=row.batch,
        tokens=tokens,
        predicted_s=found.seconds,
        measured_s=ms / 1e3,
    )
