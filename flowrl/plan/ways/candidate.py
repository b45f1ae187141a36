"""One way to run a task, and which of many ways are worth having."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.cost.layout import Layout
from flowrl.cost.source import Estimate, Recompute
from flowrl.plan.ways.regions import Played

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")

MEMORY_STEPS = 16
"""Steps of a device's memory in which ways are told apart."""

HANDICAP = 0.02
"""Of a way's time, for each thing that makes it less plain, when ways are compared."""

MOST_FORMS = 4
"""Forms of parameters that several tasks may hold at once, on one number of devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run a task.

    Attributes:
        estimate: Of its work, without moves to and from the host.
        move_s: Those, once a step.
        resident: Bytes on a device while others work, without the framework's.
        peak: While it works, `resident` included.
        weight_bytes: Of `resident`, parameters that may be held once with other tasks.
        micro_tokens: Tokens of a packed micro-batch on one replica; 0 of a rollout.
        kv_tokens: Tokens that the cache of one replica holds; 0 elsewhere.
        slots: Samples that one replica decodes at once; 0 elsewhere.
        offload: What goes to the host: `optimizer` states that stay there, `all` between turns.
        host: Bytes that this puts into the host's memory, for each device.
        played: Of a task whose samples are episodes, the environment.
        overlaps: It is of use only where samples may be stale, for batches that overlap.
    """

    layout: Layout
    estimate: Estimate
    move_s: float = 0.0
    resident: int
    peak: int
    weight_bytes: int = 0
    form: str = ""
    recompute: Recompute = "none"
    micro_tokens: int = 0
    kv_tokens: int = 0
    slots: int = 0
    offload: tuple[str, ...] = ()
    host: int = 0
    played: Played | None = None
    overlaps: bool = False

    @property
    def devices(self) -> int:
        """That it runs on, those of its environment included."""
        own = 0 if self.played is None else self.played.split.own
        return self.layout.num_devices + own

    @property
    def seconds(self) -> float:
        """Of a step, moves included."""
        return self.estimate.seconds + self.move_s

    @property
    def period_s(self) -> float:
        """Of a step, where batches follow each other without a gap."""
        steady = self.estimate.steady_s
        return self.seconds if steady is None else steady + self.move_s

    @property
    def dense_s(self) -> float:
        """Of `period_s`, what is a batch's own however many are under way at once: all of it but
        for engines, in whose steps samples progress together."""
        if self.estimate.steady_s is None:
            return self.seconds
        return self.estimate.dense_s + self.move_s

    @property
    def plainness(self) -> tuple[int, ...]:
        """Smaller is plainer: fewer kinds of division, less moved, less computed again."""
        one = self.layout
        apart = self.played is not None and self.played.split.mode == "apart"
        return (
            (one.tp > 1) + (one.pp > 1) + (one.cp > 1) + (one.ep > 1) + apart,
            len(self.offload),
            RECOMPUTE.index(self.recompute),
            one.model_devices,
        )


def pareto(
    found: Sequence[Candidate], budget: int, *, shared: bool, overlap: bool = False
) -> tuple[Candidate, ...]:
    """Those that no other one beats in time and bytes, fastest first; of equal ones the plain.

    Bytes are compared in steps of `budget / MEMORY_STEPS`, or the search would be slower by
    hundreds of options that differ in little else.

    Args:
        shared: Ways that hold parameters are compared within one form of them only, of which the
            `MOST_FORMS` with the fastest ways are kept.
        overlap: Their periods are compared too.
    """
    kept: list[Candidate] = []
    # Steps of resident and peak bytes, form, period.
    beaten_by: list[tuple[int, int, str, float]] = []
    forms: set[str] = set()
    step = max(1, budget // MEMORY_STEPS)
    for one in sorted(found, key=by_time):
        held = one.form if shared and one.weight_bytes else ""
        if held and held not in forms and len(forms) == MOST_FORMS:
            continue
        resident, peak = one.resident // step, one.peak // step
        period = one.period_s * _handicap(one) if overlap else 0.0
        if any(
            less <= resident and lower <= peak and held in ("", form) and sooner <= period
            for less, lower, form, sooner in beaten_by
        ):
            continue
        if held:
            forms.add(held)
        kept.append(one)
        beaten_by.append((resident, peak, one.form, period))
    return tuple(kept)


class Rivals:
    """Ways that are known, against which others are held before their time is.

        if not rivals.beat(way, at_least):
            rivals.add(replace(way, estimate=cost.rollout(...)))

    Only of ways that hold no parameters in a form that others share, and of tasks whose periods do
    not matter: there `pareto` compares nothing but what is compared here.
    """

    def __init__(self, budget: int) -> None:
        self._step = max(1, budget // MEMORY_STEPS)
        self._known: list[tuple[int, int, float]] = []

    def add(self, one: Candidate) -> None:
        """Takes a way whose time is known."""
        self._known.append((one.resident // self._step, one.peak // self._step, by_time(one)[0]))

    def beat(self, one: Candidate, seconds: float) -> bool:
        """Whether a way in no more bytes is faster, so that `pareto` would drop this one.

        Args:
            seconds: That this one takes at least.
        """
        resident, peak = one.resident // self._step, one.peak // self._step
        least = seconds * _handicap(one)
        return any(
            held <= resident and most <= peak and sooner < least
            for held, most, sooner in self._known
        )


def by_time(one: Candidate) -> tuple[float, int, int]:
    """Seconds, a little longer for every kind of division, offload or recomputation in it."""
    return (one.seconds * _handicap(one), one.peak, one.resident)


def _handicap(one: Candidate) -> float:
    return 1 + HANDICAP * sum(one.plainness[:3])
