"""What a simulation says: a row a step, and what they come to.

Everything follows from the inputs, so that equal inputs give equal text, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from flowrl.files import encode_json
from flowrl.sim.lanes import LaneUse
from flowrl.wording import HOURS, counted, hours_text, percent

REPORT_VERSION = 1

_OVERLAP = 1.005
"""Shares that add up to more than this are told: less is rounding."""

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimStep:
    """One step.

    Attributes:
        version: Weight publications before it.
        begin_s: When it began.
        wall_s: How long it took.
        seconds: By kind of work: of the busiest engine for `generate`, of waiting for rewards once
            all engines are done for `score`, of the driver for prompts (`offer`), ends of samples
            (`drive`) and scores (`answer`), of the trainer's process beside its operations for
            `host`, of waiting for a batch that is drawn all the time for `wait`. Where drawing is
            part of the step, what is left of it while the busiest engine drew nothing is
            `environment` for the only rollout, which plays with one, and `wait` for others; on
            this machine it is in `generate`, as in runs.
        num_samples: Samples that were learned from.
        num_rows: Rows of data that were learned from, where there is no rollout.
        ages: Samples that were learned from, by how many publications they were behind.
        num_filtered: Samples of groups that a filter took out.
        num_tokens: Response tokens of both.
        length_max: Of the longest of them.
    """

    step: int
    version: int
    begin_s: float
    wall_s: float
    seconds: Mapping[str, float]
    num_samples: int
    num_filtered: int
    num_tokens: int
    length_max: int
    num_rows: int = 0
    ages: Mapping[int, int] = field(default_factory=dict)

    @property
    def staleness(self) -> tuple[int, float] | None:
        """The largest and the mean age of samples that were learned from; None without any."""
        num = sum(self.ages.values())
        if not num:
            return None
        return max(self.ages), sum(age * n for age, n in self.ages.items()) / num


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the plan predicts, to be shown beside.

    Attributes:
        idle_share: Of the time of the devices that it uses; None where it does not say it.
        lengths: Those that it was made for, where others were simulated.
        faults: Some were simulated, which it has none of.
    """

    step_s: float
    idle_share: float | None = None
    lengths: str | None = None
    faults: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SimReport:
    """A whole simulation.

    Attributes:
        name: Of the stage.
        workload: Where prompts and lengths come from.
        times: Where step times come from.
        sim_s: Simulated seconds.
        lanes: What each lane did.
        ages: Samples that were learned from, by how many publications they were behind.
        samples: Samples by end; `admitted` is the sum of the others.
        reasons: Of samples that were filtered or dropped, `END: reason`.
        engines: `tokens`, `steps`, `preempted`, `lost` and `kv_peak` (of one) of all engines.
        num_events: Events that schedulers handled.
        ahead: Batches that are drawn beyond the one that is learned from; 0 if none.
    """

    name: str
    seed: int
    workload: str
    times: str
    num_engines: int
    sim_s: float
    steps: Sequence[SimStep]
    lanes: Sequence[LaneUse]
    ages: Mapping[int, int]
    samples: Mapping[str, int]
    reasons: Mapping[str, int]
    engines: Mapping[str, int]
    num_events: int
    notes: tuple[str, ...] = field(default=())
    ahead: int = 0

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return median(step.wall_s for step in self.steps) if self.steps else 0.0

    @property
    def num_ramp(self) -> int:
        """First steps that are not like those that follow: until samples are as old as they get.

        They fill what is drawn ahead. None where not more steps than those follow.
        """
        return _ramp(self.ages, len(self.steps))

    @property
    def later(self) -> Sequence[SimStep]:
        """The steps after those: of them are all means and shares."""
        return self.steps[self.num_ramp :]

    @property
    def later_s(self) -> float:
        """What they take together."""
        return sum(step.wall_s for step in self.later)

    @property
    def num_enough(self) -> int | None:
        """Steps of which enough follow the first ones; None where there are as many as that."""
        oldest = max(self.ages, default=0)
        if not max(oldest, self.ahead) or 2 * (max(oldest, 1) + 1) < len(self.steps):
            return None
        return 2 * (max(oldest, self.ahead) + 1) + 1

    @property
    def overlaps(self) -> bool:
        """Whether kinds of work are done at once: in most steps they come to more than the step."""
        over = [sum(step.seconds.values()) / step.wall_s for step in self.steps if step.wall_s]
        return bool(over) and median(over) > _OVERLAP

    @property
    def period_s(self) -> float:
        """Mean seconds of a step after those, which is what plans predict.

        Batches that overlap may end in pairs, so that long and short steps take turns.
        """
        return self.later_s / len(self.later) if self.later else 0.0

    def seconds(self, kind: str) -> float:
        """Median seconds of a kind of work."""
        return median(step.seconds.get(kind, 0.0) for step in self.steps) if self.steps else 0.0

    @property
    def kinds(self) -> list[str]:
        """Kinds of work, in order of their first appearance; those of episodes side by side."""
        found = dict.fromkeys(kind for step in self.steps for kind in step.seconds)
        drawing = [kind for kind in ("generate", "environment") if kind in found]
        return list(dict.fromkeys((*drawing, *found)))

    @property
    def samples_per_s(self) -> float:
        """Samples learned from in a simulated second, once steps are like those that follow."""
        return self._rate([step.num_samples for step in self.later])

    @property
    def rows_per_s(self) -> float:
        """Rows of data learned from in such a second."""
        return self._rate([step.num_rows for step in self.later])

    @property
    def num_devices(self) -> int:
        """Accelerators that the plan puts something on."""
        return sum(lane.num_devices for lane in self.lanes if lane.in_use)

    @property
    def idle_share(self) -> float | None:
        """Of these accelerators' time; None without one."""
        number = self.num_devices
        idle = sum(lane.num_devices * lane.idle_share for lane in self.lanes if lane.in_use)
        return idle / number if number else None

    @property
    def tokens_per_s(self) -> float:
        """Response tokens of steps in such a second."""
        return self._rate([step.num_tokens for step in self.later])

    def _rate(self, numbers: Sequence[int]) -> float:
        """Of what each of the later steps has, in a second."""
        return sum(numbers) / self.later_s if self.later_s else 0.0


def steady_from(steps: Sequence[SimStep], ages: Mapping[int, int]) -> float:
    """When the steps begin that means and idle shares are of (`SimReport.later`).

    Args:
        ages: Samples that were learned from, by how many publications they were behind.
    """
    return steps[_ramp(ages, len(steps))].begin_s if steps else 0.0


def _ramp(ages: Mapping[int, int], num_steps: int) -> int:
    oldest = max(ages, default=0)
    ramp = oldest + 1 if oldest else 0
    return ramp if 2 * ramp < num_steps else 0


def report_json(report: SimReport, planned: Planned | None = None) -> str:
    """The report as JSON text."""
    walls = sorted(step.wall_s for step in report.steps)
    return encode_json(
        {
            "format": "flowrl simulation",
            "version": REPORT_VERSION,
            "stage": report.name,
            "seed": report.seed,
            "workload": report.workload,
            "times": report.times,
            "num_engines": report.num_engines,
            "notes": list(report.notes),
            "sim_s": _short(report.sim_s),
            "left_out_steps": report.num_ramp,
            "step_s": {
                "median": _short(report.step_s),
                "mean": _short(sum(walls) / len(walls)) if walls else 0.0,
                "min": _short(walls[0]) if walls else 0.0,
                "max": _short(walls[-1]) if walls else 0.0,
            },
            "seconds": {kind: _short(report.seconds(kind)) for kind in report.kinds},
            "planned": None if planned is None else _planned_json(report, planned),
            "samples_per_s": _short(report.samples_per_s),
            "rows_per_s": _short(report.rows_per_s),
            "tokens_per_s": _short(report.tokens_per_s),
            "idle_share": None if report.idle_share is None else _short(report.idle_share),
            "devices": [
                {
                    "device": lane.device,
                    "lane": lane.lane,
                    "num_devices": lane.num_devices,
                    "busy_s": _short(lane.busy_s),
                    "idle_share": _short(lane.idle_share),
                }
                for lane in report.lanes
            ],
            "ages": {str(age): report.ages[age] for age in sorted(report.ages)},
            "samples": dict(report.samples),
            "reasons": {reason: report.reasons[reason] for reason in sorted(report.reasons)},
            "engines": dict(report.engines),
            "num_events": report.num_events,
            "steps": [_step_json(step) for step in report.steps],
        }
    )


def _planned_json(report: SimReport, planned: Planned) -> dict[str, object]:
    other = _not_compared(report, planned)
    return {
        "step_s": _short(planned.step_s),
        "simulated_s": _short(report.period_s),
        "difference": None if other else _short(report.period_s / planned.step_s - 1),
        "not_compared": other,
        "idle_share": None if planned.idle_share is None else _short(planned.idle_share),
    }


def _step_json(step: SimStep) -> dict[str, object]:
    return {
        "step": step.step,
        "version": step.version,
        "begin_s": _short(step.begin_s),
        "wall_s": _short(step.wall_s),
        "seconds": {kind: _short(value) for kind, value in step.seconds.items()},
        "num_samples": step.num_samples,
        "num_rows": step.num_rows,
        "num_filtered": step.num_filtered,
        "num_tokens": step.num_tokens,
        "length_max": step.length_max,
        **_staleness_json(step),
    }


def _staleness_json(step: SimStep) -> dict[str, object]:
    """Named as in a run's metrics."""
    if step.staleness is None:
        return {}
    oldest, mean = step.staleness
    return {"staleness/max": oldest, "staleness/mean": _short(mean)}


def _short(value: float) -> float:
    """To the nanosecond: what is below is rounding."""
    return round(value, 9)


def report_text(report: SimReport, planned: Planned | None = None) -> str:
    """The report for people, as plain lines.

    Args:
        planned: Is shown beside what was simulated.
    """
    engines = f", {counted(report.num_engines, 'engine')}" if report.num_engines else ""
    lines = [
        f"simulation of {report.name}: {counted(len(report.steps), 'step')}{engines}, "
        f"seed {report.seed}",
        f"  lengths  {report.workload}",
        f"  times    {report.times}",
        *(f"  note     {note}" for note in report.notes),
        "",
        *_step_lines(report),
        "",
        f"throughput{_after(report)}: {_throughput(report)}",
        "",
        f"idle{_after(report)}",
        *_idle_lines(report.lanes),
        *_idle_devices(report),
        *_sample_lines(report),
        *(_planned_lines(report, planned) if planned is not None else ()),
    ]
    return "\n".join(lines) + "\n"


def _throughput(report: SimReport) -> str:
    if not report.samples_per_s and report.rows_per_s:
        return f"{report.rows_per_s:,.1f} rows/s"
    # Tokens are of all samples, so that those of a filtered one are told too.
    filtered = any(step.num_filtered for step in report.later)
    learned, drawn = (" consumed", " generated") if filtered else ("", "")
    return (
        f"{report.samples_per_s:,.1f} samples/s{learned}, "
        f"{report.tokens_per_s:,.0f} tokens/s{drawn}"
    )


def _after(report: SimReport) -> str:
    """Which steps a mean or a share is of, where not of all."""
    return f" after {counted(report.num_ramp, 'step')}" if report.num_ramp else ""


def _not_compared(report: SimReport, planned: Planned) -> str | None:
    """Why what was simulated says nothing of the plan's seconds; None where it does."""
    found = []
    if planned.lengths is not None:
        found.append(f"the plan is for lengths {planned.lengths}, simulated were {report.workload}")
    if report.num_enough is not None:
        found.append(
            "too few steps to compare, because the first ones fill the prefetched batches; "
            f"--steps {report.num_enough} is enough"
        )
    return "; ".join(found) or None


def _planned_lines(report: SimReport, planned: Planned) -> list[str]:
    if not report.period_s:
        return []
    other = _not_compared(report, planned)
    more = percent(report.period_s / planned.step_s - 1, 1, signed=True)
    faults = (" without faults", " with them") if planned.faults else ("", "")
    lines = [
        "",
        f"the plan predicts {seconds_text(planned.step_s)} a step{faults[0]}, simulated "
        f"{seconds_text(report.period_s)} on average{_after(report)}{faults[1]}: "
        f"{other or more}",
    ]
    idle, found = planned.idle_share, report.idle_share
    if idle is not None and found is not None and report.num_enough is None:
        lines.append(
            f"it predicts that {percent(idle, 1)} of device time is idle, simulated "
            f"{percent(found, 1)}"
        )
    return lines


def _step_lines(report: SimReport) -> list[str]:
    walls = [step.wall_s for step in report.steps]
    if not walls:
        return ["no step"]
    head = (
        f"step time: {seconds_text(report.step_s)} median, {seconds_text(min(walls))} to "
        f"{seconds_text(max(walls))}"
    )
    parts = [(kind, report.seconds(kind)) for kind in report.kinds]
    if report.overlaps:
        shares = sum(spent for _, spent in parts) / report.step_s
        head += f"; kinds of work overlap, so shares add up to {percent(shares)}"
    width = max((len(kind) for kind, _ in parts), default=0)
    return [
        head,
        *(
            f"  {kind:<{width}}  {seconds_text(spent):>9}  {percent(spent / report.step_s):>6}"
            for kind, spent in parts
            if report.step_s
        ),
    ]


def _idle_lines(lanes: Sequence[LaneUse]) -> list[str]:
    """Each lane; where many differ by numbers alone (`engine[0]` ...), their mean and range.

    Lanes that nothing took time of, such as a driver's that no times are known of, are left out,
    but for accelerators.
    """
    alike: dict[str, list[LaneUse]] = {}
    for lane in [lane for lane in lanes if lane.busy_s or lane.num_devices] or lanes:
        alike.setdefault(_NUMBER.sub("#", lane.lane), []).append(lane)
    rows = []
    for some in alike.values():
        if len(some) <= 4:
            rows += [
                (_devices_of(lane), lane.lane, percent(lane.idle_share, 1), "") for lane in some
            ]
            continue
        shares = [lane.idle_share for lane in some]
        devices = {lane.device for lane in some}
        number = sum(lane.num_devices for lane in some) or len(devices)
        rows.append(
            (
                next(iter(devices)) if len(devices) == 1 else f"{number} devices",
                f"{some[0].lane} to {some[-1].lane}",
                percent(sum(shares) / len(shares), 1),
                f"({percent(min(shares), 1)} to {percent(max(shares), 1)})",
            )
        )
    rows.insert(
        0, ("device", "resource", "idle", "(min to max)" if any(r[3] for r in rows) else "")
    )
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [
        f"  {d:<{widths[0]}}  {n:<{widths[1]}}  {share:<{widths[2]}}  {span}".rstrip()
        for d, n, share, span in rows
    ]


def _devices_of(lane: LaneUse) -> str:
    """A lane of accelerators has their names."""
    return counted(lane.num_devices, "device") if lane.device == lane.lane else lane.device


def _idle_devices(report: SimReport) -> list[str]:
    """The share of all devices together, in the words that plans have for it."""
    if report.idle_share is None:
        return []
    known = sum(lane.num_devices for lane in report.lanes)
    idle = f"  {percent(report.idle_share, 1)} of device time is idle"
    used = report.num_devices
    return [idle if used == known else f"{idle}, of the {used} of {known} that are used"]


def _sample_lines(report: SimReport) -> list[str]:
    ends = [(end, n) for end, n in report.samples.items() if end != "admitted" and n]
    lines = []
    if report.samples and report.num_engines:
        summed = " + ".join(f"{n:,} {end}" for end, n in ends)
        lines.append(f"samples: {report.samples.get('admitted', 0):,} = {summed or '0'}")
        lines += [f"  {reason}: {n:,}" for reason, n in sorted(report.reasons.items())]
    total = sum(report.ages.values())
    if total:
        lines.append("staleness of consumed samples, in versions")
        lines += [
            f"  {age:>2}  {report.ages[age]:>9,}  {percent(report.ages[age] / total, 1):>7}"
            for age in sorted(report.ages)
        ]
    faults = {k: n for k, n in report.engines.items() if k in ("lost", "preempted") and n}
    lines += [f"engines {kind}: {n:,}" for kind, n in faults.items()]
    return ["", *lines] if lines else []


def seconds_text(value: float) -> str:
    """Seconds with a unit that suits them.

    >>> [seconds_text(x) for x in (0.0, 0.00005, 0.0123, 0.123, 4.5, 300.0, 13140.0)]
    ['0', '50 us', '12.3 ms', '123 ms', '4.50 s', '300 s', '3 h 39 min']
    """
    if value >= HOURS:
        return hours_text(value)
    if value < 1e-9:
        return "0"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < 1.0:
        return f"{value * 1e3:.{1 if value < 0.1 else 0}f} ms"
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"
