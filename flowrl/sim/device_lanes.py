"""The devices of a plan as lanes: those that always work together are one lane.

Each engine and each operation is a set of devices. Two devices are on one lane if every such set
has both of them or neither, so a set is some whole lanes:

    engines on 0-3 and 4-7, an update on 0-7, a reference on 8-15
    -> lanes 0-3, 4-7 and 8-15; the update takes the first two at once
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flowrl.plan.names import device_names
from flowrl.sim.model import LaneModel


@dataclass(frozen=True, slots=True)
class DeviceLanes:
    """Lanes of some sets of devices.

    >>> lanes = DeviceLanes([("a:0", "a:1"), ("a:0",), ("b:0",)])
    >>> lanes.of(("a:0", "a:1")), lanes.of(("b:0",))
    (('a:0', 'a:1'), ('b:0',))
    """

    sets: Iterable[Sequence[str]]
    _lane_of: dict[str, str] = field(default_factory=dict)
    _devices: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inside: dict[str, list[int]] = {}
        for number, devices in enumerate(dict.fromkeys(tuple(one) for one in self.sets)):
            for device in devices:
                inside.setdefault(device, []).append(number)
        alike: dict[tuple[int, ...], list[str]] = {}
        for device, numbers in inside.items():
            alike.setdefault(tuple(numbers), []).append(device)
        for together in alike.values():
            name = device_names(together)
            self._devices[name] = tuple(together)
            self._lane_of.update(dict.fromkeys(together, name))

    def of(self, devices: Iterable[str]) -> tuple[str, ...]:
        """The lanes of a set of devices, in order."""
        return tuple(dict.fromkeys(self._lane_of[device] for device in devices))

    def models(self) -> tuple[LaneModel, ...]:
        """All of them."""
        return tuple(
            LaneModel(name=name, device=name, num_devices=len(devices))
            for name, devices in self._devices.items()
        )
