"""Costs for the simulator: an engine's `StepTime` from a `Cost`, for machines one does not have;
and the way back: what a profile measured, as a `Cost` reads it.

    step = AnalyticStep(AnalyticCost(), shape, Layout(tp=2), machine)      # one replica
    measured = measured_models(profile, {"actor": shape}, device="H100-SXM-80GB")
"""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.cluster.hardware import Machine
from flowrl.cost.layout import Layout
from flowrl.cost.measured import BatchLine, MeasuredModel
from flowrl.cost.models import ModelShape
from flowrl.cost.source import Cost
from flowrl.sim.costs import LinearCost
from flowrl.sim.profile import Profile

_FORWARD_OPS = ("logprobs", "values", "score")


class AnalyticStep:
    """The `StepTime` of one replica, by a cost.

    A step's time is asked once for each batch at two contexts and is linear between and beyond,
    which is exact for a roofline; a rollout asks for a hundred thousand steps.

    Args:
        layout: Of the role; one replica of it is meant.
        contexts: Where a step is asked for: two, the first below the second.
    """

    __slots__ = ("_contexts", "_cost", "_lines", "_prefills", "_where")

    def __init__(
        self,
        cost: Cost,
        shape: ModelShape,
        layout: Layout,
        machine: Machine,
        *,
        contexts: tuple[float, float] = (256.0, 8192.0),
    ) -> None:
        self._cost = cost
        self._where = (shape, layout, machine)
        self._contexts = contexts
        self._lines: dict[int, tuple[float, float]] = {}
        self._prefills: dict[tuple[int, int], float] = {}

    def decode_s(self, batch: int, context: float, longest: float) -> float:
        """See `StepTime`; engines of such machines pay for what rows hold, not for the longest."""
        line = self._lines.get(batch)
        if line is None:
            near, far = self._contexts
            low, high = (
                self._cost.decode_step(*self._where, batch=batch, context=at).seconds
                for at in (near, far)
            )
            slope = (high - low) / (far - near)
            line = self._lines[batch] = (low - slope * near, slope)
        return line[0] + line[1] * context

    def prefill_s(self, rows: int, tokens: int) -> float:
        """See `StepTime`."""
        if rows < 1 or tokens < 1:
            return 0.0
        key = (rows, tokens)
        found = self._prefills.get(key)
        if found is None:
            each = max(1, round(tokens / rows))
            once = self._cost.prefill(*self._where, rows=rows, tokens=each)
            found = self._prefills[key] = once.seconds
        return found

    def leave_s(self) -> float:
        """See `StepTime`: an engine with paged memory loses nothing when rows end."""
        return 0.0


def measured_models(
    profile: Profile,
    shapes: Mapping[str, ModelShape],
    *,
    device: str,
    layouts: Mapping[str, Layout] | None = None,
) -> tuple[MeasuredModel, ...]:
    """What a profile measured of the roles whose shapes are given.

    Args:
        device: The catalogue's name of the devices that it was measured on.
        layouts: Of the replicas that were measured, by role; one device where a role is not there.
    """
    models: dict[tuple[ModelShape, Layout], MeasuredModel] = {}
    for role, shape in shapes.items():
        layout = (layouts or {}).get(role, Layout())
        mine = _measured_role(profile, role, shape, device, layout)
        earlier = models.get((shape, layout))
        models[shape, layout] = mine if earlier is None else _joined(earlier, mine)
    return tuple(models.values())


def _measured_role(
    profile: Profile, role: str, shape: ModelShape, device: str, layout: Layout
) -> MeasuredModel:
    engine = next((engine for engine in profile.engines if engine.role == role), None)
    lines = {op.op: _line(op.cost) for op in profile.ops if op.role == role}
    return MeasuredModel(
        shape=shape,
        device=device,
        layout=layout,
        decode=()
        if engine is None
        else tuple((point.batch, point.context, point.seconds) for point in engine.decode),
        prefill=None if engine is None else engine.prefill,
        forward=next((lines[op] for op in _FORWARD_OPS if op in lines), None),
        train=lines.get("update"),
    )


def _joined(first: MeasuredModel, second: MeasuredModel) -> MeasuredModel:
    """Two roles of one model, as an actor and its reference: each fills in what the other lacks."""
    return MeasuredModel(
        shape=first.shape,
        device=first.device,
        layout=first.layout,
        decode=first.decode or second.decode,
        prefill=first.prefill or second.prefill,
        forward=first.forward or second.forward,
        train=first.train or second.train,
        recompute=first.recompute,
    )


def _line(cost: LinearCost) -> BatchLine:
    return BatchLine(
        call_s=cost.call_s,
        pass_s=cost.pass_s,
        row_s=cost.row_s,
        token_s=cost.token_s,
        distinct_s=cost.distinct_s,
    )
