"""What a run is doing now: status.json of its folder, and the text that people read of it.

The process of the run writes the file about once a second, whatever it waits for; `flowrl status`
reads it, together with the lock that a living process holds. No server is needed. Rows of steps are
written at once, so they may be newer than the file: they say which steps are done.
"""

from __future__ import annotations

import textwrap
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from flowrl.errors import CheckpointError
from flowrl.files import write_json_atomic
from flowrl.observe.rows import StepMetrics
from flowrl.observe.run_folder import RunFolder
from flowrl.observe.run_text import format_seconds, go_on_text, one_line, token_rates, visible
from flowrl.wording import counted, table

_FILE = "status.json"
_WIDTH = 100
_LATE_S = 10.0
"""Age of the file from which the process counts as one that does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """An engine of a rollout.

    Attributes:
        weights: Version of the weights that new samples get there.
        samples: Samples that it has now.
        capacity: Samples that it is given at once.
        state: `ready`, or why it gets no samples.
    """

    name: str
    weights: int
    samples: int
    capacity: int
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatus:
    """A rollout of the stage that runs.

    Attributes:
        samples: Samples without an end by their state: `queued`, `running`, `scoring`, `ready`.
        staleness: Samples that have begun, by the versions published since their first token.
        waits: Who waits for whom, a line each.
    """

    name: str
    samples: Mapping[str, int]
    staleness: Mapping[int, int]
    engines: Sequence[EngineStatus]
    waits: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a worker did last: the driver, a trainer, an engine, a scorer.

    Attributes:
        node: Name of the machine that it is on.
        did: The operation, or what it waited for.
        ended_s: When that ended, in seconds since 1970.
    """

    name: str
    node: str
    did: str
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A look at a run.

    Attributes:
        pid: Its process.
        executor: What runs it, and where.
        state: `running`, `ended`, `stopped` (asked to) or `failed`.
        error: Why it failed; empty otherwise.
        step: Number of the step that is being made, from 1; 0 before the first.
        steps: Steps of the stage.
        doing: What the trainer does.
        written_s: When this was written, in seconds since 1970.
        moved_s: When something last moved.
        stall_timeout_s: Seconds without a movement after which the run gives up.
    """

    pid: int
    executor: str = ""
    state: str = "running"
    error: str = ""
    stage: str = ""
    step: int = 0
    steps: int = 0
    doing: str = ""
    written_s: float = 0.0
    moved_s: float = 0.0
    stall_timeout_s: float = 0.0
    rollouts: Sequence[RolloutStatus] = ()
    workers: Sequence[WorkerStatus] = ()


_READER = TypeAdapter(RunStatus)


def write_status(folder: Path, status: RunStatus) -> None:
    """Replaces status.json."""
    write_json_atomic(folder / _FILE, asdict(status))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What is known of a run.

    Attributes:
        state: `running`, `stalled` (nothing moves), `silent` (its process does not answer),
            `ended`, `stopped`, `failed` or `killed` (its process is gone without a word).
        verdict: The same in a sentence.
        checkpoint: Name of the newest complete checkpoint.
    """

    folder: str
    state: str
    verdict: str
    status: RunStatus | None
    last: StepMetrics | None
    checkpoint: str | None

    def to_json(self) -> dict[str, object]:
        """Returns the JSON form, for scripts."""
        return {
            "folder": self.folder,
            "state": self.state,
            "verdict": self.verdict,
            "status": None if self.status is None else asdict(self.status),
            "last_step": None if self.last is None else self.last.to_json(),
            "checkpoint": self.checkpoint,
        }

    def __str__(self) -> str:
        lines = _wrapped("run", f"{self.folder}: {self.verdict}")
        status = self.status
        if status is not None and self.is_alive:
            lines += _wrapped("executor", status.executor) if status.executor else []
            doing = "made" if self._is_older else status.doing
            lines.append(f"{self.progress}: {doing}" if status.stage else doing)
            for rollout in status.rollouts:
                lines += _rollout_lines(rollout)
            lines += _worker_lines(status)
        elif self.progress:
            lines.append(f"{self.progress} made")
        if (last := self.last) is not None:
            lines += _wrapped("last step", "  ".join(_step_parts(last)))
        lines.append(f"newest checkpoint: {self.checkpoint or 'none'}")
        if self.state in ("killed", "failed", "stopped"):
            lines.append(go_on_text(self.folder, failed=self.state == "failed"))
        return "\n".join(lines)

    @property
    def progress(self) -> str:
        """The step that is being made, or of a run that does nothing any more the last one made."""
        status, last = self.status, self.last
        if status is not None and status.stage and self.is_alive and not self._is_older:
            return f"stage {status.stage}, step {status.step} of {status.steps}"
        if last is None:
            return ""
        whole = f" of {status.steps}" if status is not None and status.stage == last.stage else ""
        return f"stage {last.stage}, step {last.step}{whole}"

    @property
    def _is_older(self) -> bool:
        """True if steps were made since the status was written."""
        status, last = self.status, self.last
        if status is None or last is None:
            return False
        return last.stage == status.stage and last.step > status.step

    @property
    def is_alive(self) -> bool:
        """True if the process of the run is there."""
        return self.state in ("running", "stalled", "silent")


def report_of(path: Path, *, now_s: float | None = None) -> RunReport:
    """Reads what a run does, or how it ended.

    Args:
        now_s: The time, in seconds since 1970; by default the present.

    Raises:
        CheckpointError: The folder has no run, or its status is damaged.
    """
    folder = RunFolder.open(path)
    # Before the lock: a run that ends in between is not taken for a killed one.
    holder = folder.holder()
    status = _read(path / _FILE)
    now_s = time.time() if now_s is None else now_s
    if status is not None and holder not in (None, status.pid):
        status = None  # of a process before
    state, verdict = _verdict(folder, status, holder, now_s)
    rows = deque(folder.steps(), maxlen=1)
    return RunReport(
        folder=str(folder),
        state=state,
        verdict=verdict,
        status=status,
        last=rows[0] if rows else None,
        checkpoint=_newest_checkpoint(folder.checkpoints),
    )


def list_reports(reports: Sequence[RunReport]) -> str:
    """Returns the table of several runs, a line each."""
    rows = [
        (report.folder, report.state, report.progress or "-", report.checkpoint or "-")
        for report in reports
    ]
    return "\n".join(table(("run", "state", "progress", "newest checkpoint"), rows))


def _newest_checkpoint(folder: Path) -> str | None:
    names = [path.parent.name for path in folder.glob("[0-9]*-*/MANIFEST.json")]
    return max(names, key=lambda name: int(name.partition("-")[0]), default=None)


def _read(path: Path) -> RunStatus | None:
    try:
        return _READER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as reason:
        raise CheckpointError(
            "this status cannot be read",
            where=str(path),
            found=one_line(str(reason), 200),
            hint="remove it; a running run writes it again",
        ) from reason


def _verdict(
    folder: RunFolder, status: RunStatus | None, holder: int | None, now_s: float
) -> tuple[str, str]:
    if holder is None:
        if folder.read_summary() is not None:
            return "ended", "ended; all steps are made"
        if status is None or status.state == "running":
            pid = "its process" if status is None else f"process {status.pid}"
            return "killed", f"killed; {pid} is gone and said nothing at its end"
        if status.state in ("stopped", "ended"):  # without its result it was left early
            return "stopped", "stopped, as it was asked to"
        return "failed", f"failed: {visible(status.error)}"
    if status is None:
        return "running", f"running, process {holder}; it is being opened"
    late_s, idle_s = now_s - status.written_s, now_s - status.moved_s
    if late_s > _LATE_S:
        shown = format_seconds(late_s)
        return "silent", f"process {holder} is there but has written no status for {shown}"
    shown = format_seconds(max(0.0, idle_s))
    if status.stall_timeout_s and idle_s > status.stall_timeout_s / 2:
        limit = format_seconds(status.stall_timeout_s)
        text = (
            f"stalled, process {holder}; nothing moved for {shown}, and it gives up after {limit}"
        )
        return "stalled", text
    return "running", f"running, process {holder}; something moved {shown} ago"


def _rollout_lines(rollout: RolloutStatus) -> Iterator[str]:
    yield f"rollout {rollout.name}"
    live = [f"{number} {state}" for state, number in rollout.samples.items()]
    yield from _wrapped("  samples", "  ".join(live) or "none")
    if rollout.staleness:
        ages = [f"{age}: {counted(n, 'sample')}" for age, n in sorted(rollout.staleness.items())]
        yield from _wrapped("  versions old", "  ".join(ages))
    if rollout.engines:
        head = ("engine", "weights", "samples now", "at most", "state")
        rows = [
            (each.name, str(each.weights), str(each.samples), str(each.capacity), each.state)
            for each in rollout.engines
        ]
        yield from (f"  {line}" for line in table(head, rows))
    for line in rollout.waits:
        yield from _wrapped("  waits", line)


def _worker_lines(status: RunStatus) -> list[str]:
    if not status.workers:
        return []
    rows = [
        (each.name, each.node, each.did, f"{format_seconds(max(0.0, ago_s))} ago")
        for each in status.workers
        for ago_s in [status.written_s - each.ended_s]
    ]
    return table(("worker", "node", "did last", "until"), rows)


def _step_parts(last: StepMetrics) -> Iterator[str]:
    yield f"{last.stage} {last.step}: {format_seconds(last.wall_s)}"
    if last.reward_mean is not None:
        yield f"reward {last.reward_mean:.3f}"
    if last.num_tokens:
        yield f"{last.num_tokens} tokens"
    if rates := token_rates(last):
        yield "tokens/s " + " ".join(rates)
    if "staleness/max" in last.extra:
        mean, most = last.extra["staleness/mean"], last.extra["staleness/max"]
        yield f"staleness {mean:.1f} (max {most:.0f})"


def _wrapped(label: str, text: str) -> list[str]:
    """Returns the lines of a text below each other, each as far as it fits."""
    first, *others = text.split("\n")
    lines = _filled(first, f"{label}: ", " " * (len(label) + 2))
    return lines + [line for other in others for line in _filled(other.strip(), "  ", "    ")]


def _filled(text: str, first: str, further: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=further,
        break_on_hyphens=False,
        break_long_words=False,
    )
