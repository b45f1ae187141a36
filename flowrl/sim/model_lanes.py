"""Makes the lanes and groups of lanes that a model names."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.sim.lanes import Lane, LaneGroup, Recorder
from flowrl.sim.model import LaneModel


def lanes_of(
    models: Sequence[LaneModel], recorder: Recorder | None
) -> tuple[dict[str, Lane], dict[str, LaneGroup]]:
    """Lanes, and groups of them, by name.

    Args:
        recorder: Is told of what each lane did; None records nothing.
    """
    lanes = {
        model.name: Lane(
            name=model.name,
            device=model.device,
            num_devices=model.num_devices,
            in_use=model.in_use,
            process=model.process,
            recorder=recorder,
        )
        for model in models
        if not model.parts
    }
    groups = {
        model.name: LaneGroup(
            name=model.name, device=model.device, lanes=tuple(lanes[part] for part in model.parts)
        )
        for model in models
        if model.parts
    }
    return lanes, groups
