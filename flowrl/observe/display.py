"""The display of a run while it goes on.

The executor calls a `Display`; every call returns at once. On a terminal it is a live
panel (`flowrl.observe.rich_display`); in files and pipes it is plain lines without control
characters. Both end with the same short summary, whose last line is `Summary.headline`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Protocol, TextIO

from flowrl.observe.rows import RunInfo, SampleRow, StepMetrics, Summary
from flowrl.observe.run_text import one_line, pick_samples, step_line, summary_lines, visible
from flowrl.wording import counted

_log = logging.getLogger(__name__)


class Display(Protocol):
    """Shows a run: start, then for each stage its steps, then end and close.

    Calls come from one thread. Texts of the model or of data may hold anything; control characters
    in them are made visible, never sent to the terminal.
    """

    def start(self, info: RunInfo) -> None:
        """The run begins."""
        ...

    def stage(self, name: str, steps: int, logged: Sequence[str] = ()) -> None:
        """A stage of `steps` steps begins (or goes on, after a resume).

        Args:
            logged: Numbers that its program logs (`fl.log`), shown with each step.
        """
        ...

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        """A step is done.

        Args:
            eta_s: Seconds left of the stage; None where that is not known.
        """
        ...

    def samples(self, rows: Sequence[SampleRow]) -> None:
        """The samples of the step are known; a few of them are shown now and then."""
        ...

    def evaluation(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Held-out data was measured after `step` steps of `stage`."""
        ...

    def note(self, text: str) -> None:
        """Shows a line."""
        ...

    def warn(self, text: str) -> None:
        """Shows a warning, which a person should look into."""
        ...

    def end(self, summary: Summary) -> None:
        """The run is over; the last line written is `summary.headline`."""
        ...

    def close(self) -> None:
        """Releases the terminal, also after an error; idempotent."""
        ...


class TimeToGo:
    """Estimates the seconds left of a stage from a running mean of the steps' times.

    >>> to_go = TimeToGo(10)
    >>> to_go.step(1, 2.0)
    18.0
    """

    def __init__(self, steps: int, *, weight: float = 0.1) -> None:
        self._steps = steps
        self._weight = weight
        self._mean: float | None = None

    def step(self, step: int, seconds: float) -> float:
        """Takes the time of step `step` (from 1); returns the seconds left."""
        old = self._mean
        self._mean = seconds if old is None else old + self._weight * (seconds - old)
        return max(0, self._steps - step) * self._mean


class PlainDisplay:
    """Prints plain lines: the first and last step of a stage, and one every `every_s` seconds.

    Args:
        stream: Where the lines go; standard output by default.
        every_s: Seconds between lines of steps; 0 writes every step.
        samples_every_s: Seconds between samples.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        every_s: float = 5.0,
        samples_every_s: float = 30.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._stream = stream or sys.stdout
        self._every_s = every_s
        self._samples_every_s = samples_every_s
        self._clock = clock
        self._steps = 0
        self._logged: Sequence[str] = ()
        self._next_line = 0.0
        self._next_samples = clock() + samples_every_s
        self._broken = False

    def _print(self, text: str) -> None:
        if self._broken:
            return
        encoding = self._stream.encoding or "utf-8"
        safe = text.encode(encoding, errors="backslashreplace").decode(encoding)
        try:
            print(safe, file=self._stream, flush=True)
        except BrokenPipeError:
            # A reader that went away (`| head`) is no reason to lose a training run.
            self._broken = True
            _log.warning("nobody reads the output any more; the run goes on without it")
        except OSError as error:
            self._broken = True
            _log.warning(
                "the output cannot be written (%s); the run goes on without it", error.strerror
            )

    def start(self, info: RunInfo) -> None:
        self._print(f"run {info.name}: {' -> '.join(info.stages)}, folder {info.folder}")

    def stage(self, name: str, steps: int, logged: Sequence[str] = ()) -> None:
        self._steps = steps
        self._logged = logged
        self._next_line = self._clock()
        self._print(f"stage {name}: {counted(steps, 'step')}")

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        now = self._clock()
        if now >= self._next_line or metrics.step == self._steps:
            self._next_line = now + self._every_s
            self._print(step_line(metrics, self._steps, eta_s, self._logged))

    def samples(self, rows: Sequence[SampleRow]) -> None:
        now = self._clock()
        if rows and now >= self._next_samples:
            self._next_samples = now + self._samples_every_s
            for row in pick_samples(rows, 2):
                score = "-" if row.score is None else f"{row.score:.2f}"
                text = f"{one_line(row.prompt, 60)} => {one_line(row.response, 100)}"
                self._print(f"  sample {row.sample} score {score}: {text}")

    def evaluation(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        numbers = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        self._print(f"{stage} {step}/{self._steps}".ljust(14) + f"  held-out: {numbers}")

    def note(self, text: str) -> None:
        self._print(visible(text))

    def warn(self, text: str) -> None:
        self._print(f"warning: {visible(text)}")

    def end(self, summary: Summary) -> None:
        for line in summary_lines(summary):
            self._print(line)

    def close(self) -> None:
        """Does nothing: plain lines hold no terminal."""


class SilentDisplay:
    """Shows nothing: for tests, and for programs that read the run folder instead."""

    def start(self, info: RunInfo) -> None: ...
    def stage(self, name: str, steps: int, logged: Sequence[str] = ()) -> None: ...
    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None: ...
    def samples(self, rows: Sequence[SampleRow]) -> None: ...
    def evaluation(self, stage: str, step: int, metrics: Mapping[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def end(self, summary: Summary) -> None: ...
    def close(self) -> None: ...


def open_display(stream: TextIO | None = None) -> Display:
    """Returns a live panel where `stream` (by default standard output) is a terminal."""
    stream = stream or sys.stdout
    if not stream.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return PlainDisplay(stream)
    # Loaded here because rich takes longer to import than everything else in this package.
    from flowrl.observe.rich_display import RichDisplay

    return RichDisplay(stream)
