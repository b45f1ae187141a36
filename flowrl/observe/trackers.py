"""Trackers: programs that show the numbers of a run over its steps, such as TensorBoard.

A distribution makes a tracker known in its own pyproject.toml, and `tracking.to` names it:

    [project.entry-points."flowrl.trackers"]
    mine = "my_package.tracker:open_tracker"

The entry is a function that takes a `TrackerContext` and returns a `Tracker`. A tracker whose call
raises is warned about and gets no further numbers; the run goes on, and metrics.jsonl has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from flowrl.config.schema import TRACKERS
from flowrl.entry_points import find_entry
from flowrl.errors import ConfigError
from flowrl.observe.metric_names import NAMES, MetricNames
from flowrl.observe.rows import EvaluationRow, StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerContext:
    """The run whose numbers a tracker shows.

    Attributes:
        name: The run's name.
        folder: Its run folder; a tracker writes into a subfolder of its own.
        config: The resolved config as JSON values.
        options: The tracker's own options, `tracking.options.NAME`.
        resumed_at: The stage and the step of it after which the run continues; None for a new run.
            Later steps of that stage may have been logged before and will be logged again.
    """

    name: str
    folder: Path
    config: Mapping[str, object]
    options: Mapping[str, object]
    resumed_at: tuple[str, int] | None = None


class Tracker(Protocol):
    """Receives the numbers of a run."""

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Takes numbers of a step, or of the held-out data after it.

        Args:
            stage: The stage of the run; steps count within it.
            step: Steps of the stage that were made.
            values: Finite numbers and NaN by name, in the names that `tracking.names` selects.
        """
        ...

    def close(self) -> None:
        """Writes what is buffered; idempotent."""
        ...


class Trackers:
    """The trackers of one run, which are sent each row of its logs.

    Args:
        named: The names of the trackers.
        names: The names of the numbers: `flowrl`, `verl` or `mindspeed_rl`.
        context: Returns the context of a tracker by its name.
        devices: Returns the number of devices that a stage uses, by the stage's name.
        warn: Shows a warning.

    Raises:
        ConfigError: No distribution declares a tracker, or it cannot be opened.
    """

    def __init__(
        self,
        named: Sequence[str],
        names: str,
        context: Callable[[str], TrackerContext],
        devices: Callable[[str], int],
        warn: Callable[[str], None],
    ) -> None:
        self._names: MetricNames = NAMES[names]
        self._devices = devices
        self._warn = warn
        self._open: dict[str, Tracker] = {}
        try:
            for name in named:
                self._open[name] = _open_tracker(name, context(name))
        except BaseException:
            self.close()
            raise

    def step(self, row: StepMetrics) -> None:
        """Sends the numbers of a step."""
        if self._open:
            values = self._names.step(row, self._devices(row.stage))
            self._send(lambda tracker: tracker.log(row.stage, row.step, values))

    def evaluation(self, row: EvaluationRow) -> None:
        """Sends the held-out metrics after a step."""
        if self._open:
            values = self._names.evaluation(row)
            self._send(lambda tracker: tracker.log(row.stage, row.step, values))

    def close(self) -> None:
        """Closes every tracker; idempotent."""
        self._send(lambda tracker: tracker.close())
        self._open.clear()

    def _send(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as reason:  # foreign code; the numbers are in metrics.jsonl as well
                del self._open[name]
                with suppress(Exception):
                    tracker.close()
                self._warn(
                    f"the tracker {name!r} gets no more numbers, because it raised "
                    f"{type(reason).__name__}: {reason}; metrics.jsonl has all of them"
                )


def _open_tracker(name: str, context: TrackerContext) -> Tracker:
    entry = find_entry(TRACKERS, name, kind="tracker", error=ConfigError, where="tracking.to")
    make = cast("Callable[[TrackerContext], Tracker]", entry.load(ConfigError))
    try:
        return make(context)
    except ConfigError:
        raise
    except Exception as reason:
        raise ConfigError(
            f"the tracker {name!r} cannot be opened",
            where=f"tracking.options.{name}",
            found=f"{type(reason).__name__}: {reason}",
            hint="correct its options, or remove it from tracking.to",
        ) from reason
