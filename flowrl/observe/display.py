"""What a person sees of a run while it goes on.

`Display` is what the executor talks to; every call returns at once. On a terminal it is a live
panel (`flowrl.observe.rich_display`); elsewhere, in files and pipes, plain lines without control
characters. Both end with the same short summary, whose last line is `Summary.headline`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Protocol, TextIO

from flowrl.observe.rows import SampleRow, StepMetrics, Summary, overlapping_work
from flowrl.wording import counted

__all__ = [
    "Display",
    "PlainDisplay",
    "RunInfo",
    "SilentDisplay",
    "TimeToGo",
    "format_rate",
    "format_seconds",
    "logged_numbers",
    "one_line",
    "open_display",
    "pick_samples",
    "reward_terms",
    "stale_samples",
    "step_line",
    "summary_lines",
    "token_rates",
    "visible",
]

_log = logging.getLogger(__name__)

_ENDS = ("consumed", "filtered", "dropped")
"""Of samples, as the summary counts them."""

_BETWEEN = ("evaluate", "log")
"""What a run does between the steps of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a run is called, where it lies, and the stages it goes through."""

    name: str
    folder: Path
    stages: tuple[str, ...]


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
        """A step is done; `eta_s` seconds are left of the stage, where that is known."""
        ...

    def samples(self, rows: Sequence[SampleRow]) -> None:
        """The samples of the step; a few of them are shown now and then."""
        ...

    def evaluation(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Held-out data was measured after `step` steps of `stage`."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line."""
        ...

    def warn(self, text: str) -> None:
        """Something that a person should look into."""
        ...

    def end(self, summary: Summary) -> None:
        """The run is over; the last line written is `summary.headline`."""
        ...

    def close(self) -> None:
        """Gives the terminal back, also after an error; idempotent."""
        ...


class TimeToGo:
    """Seconds left of a stage, from a running mean of the steps' times.

    >>> to_go = TimeToGo(10)
    >>> to_go.step(1, 2.0)
    18.0
    """

    def __init__(self, steps: int, *, weight: float = 0.1) -> None:
        self._steps = steps
        self._weight = weight
        self._mean: float | None = None

    def step(self, step: int, seconds: float) -> float:
        """Step `step` (from 1) took `seconds`."""
        old = self._mean
        self._mean = seconds if old is None else old + self._weight * (seconds - old)
        return max(0, self._steps - step) * self._mean


def format_seconds(seconds: float) -> str:
    """`0.8s`, `42s`, `3m 05s`, `2h 07m`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def format_rate(rate: float) -> str:
    """`870`, `23.1k`, `1.2M`."""
    if rate < 1000:
        return f"{rate:.0f}"
    return f"{rate / 1e3:.1f}k" if rate < 1e6 else f"{rate / 1e6:.1f}M"


def visible(text: str) -> str:
    """`text` with control characters as escapes, line breaks kept."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )


def one_line(text: str, width: int) -> str:
    """`text` on one line of at most `width` characters, control characters as escapes."""
    shown = visible(text).replace("\n", "\\n")
    return shown if len(shown) <= width else shown[: max(0, width - 3)] + "..."


def pick_samples(rows: Sequence[SampleRow], count: int) -> list[SampleRow]:
    """At most `count` samples that show the range: the best, the worst, then those between."""
    ranked = sorted(rows, key=lambda row: -_sortable(row.score))
    if len(ranked) <= count:
        return ranked
    if count == 1:
        return ranked[:1]
    return [ranked[i * (len(ranked) - 1) // (count - 1)] for i in range(count)]


def _sortable(score: float | None) -> float:
    return score if score is not None and score == score else float("-inf")


def summary_lines(summary: Summary) -> list[str]:
    """The end of a run as plain lines: steps and times, samples, folder, headline."""
    lines = []
    for stage, steps in summary.steps.items():
        seconds = dict(summary.seconds.get(stage, {}))
        whole = seconds.pop("step", None)
        parts = _parts(seconds)
        lines.append(
            f"{stage}: {counted(steps, 'step')}"
            + (f" in {format_seconds(whole)}" if whole is not None else "")
            + (f" ({parts})" if parts else "")
        )
    if summary.samples:
        # Not in the order in which a run met them first: two runs are read beside each other.
        counts = [(end, summary.samples.get(end, 0)) for end in _ENDS]
        ends = ", ".join(f"{count:,} {end}" for end, count in counts if count)
        lines.append(f"samples: {ends}; {summary.num_tokens:,} response tokens")
    if summary.num_example_tokens:
        lines.append(f"examples: {summary.num_example_tokens:,} response tokens")
    lines.append(f"took {format_seconds(summary.wall_s)}; everything is in {summary.folder}")
    lines.append(summary.headline)
    return lines


def _parts(seconds: Mapping[str, float]) -> str:
    """`wait 1.5s, update 0.3s; overlapping: drive 2.0s; between steps: evaluate 1.0s`.

    Only the first ones are parts of the steps, and sum to no more than these.
    """
    overlapping = overlapping_work(seconds)
    named: dict[str, list[str]] = {"": [], "overlapping: ": [], "between steps: ": []}
    # The longest first; work that would read 0.0s is left out.
    for kind, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        if spent >= 0.05:
            when = "overlapping: " if kind in overlapping else ""
            when = "between steps: " if kind in _BETWEEN else when
            named[when].append(f"{kind} {format_seconds(spent)}")
    return "; ".join(when + ", ".join(parts) for when, parts in named.items() if parts)


def token_rates(metrics: StepMetrics) -> list[str]:
    """`generate 23.1k`, for each kind of work in which a model reads tokens."""
    return [
        f"{kind} {format_rate(rate)}"
        for kind in ("generate", "logprobs", "values", "update")
        if (rate := metrics.tokens_per_second(kind)) is not None
    ]


def stale_samples(metrics: StepMetrics) -> list[str]:
    """`staleness 0.5 (max 2)`, where some sample was older than the newest weights."""
    oldest = metrics.extra.get("staleness/max", 0.0)
    if not oldest:
        return []
    return [f"staleness {metrics.extra['staleness/mean']:.1f} (max {oldest:.0f})"]


def reward_terms(metrics: StepMetrics) -> list[str]:
    """`format 0.900 (std 0.30, 2 failed)`, for each reward term, where a step has several."""
    parts: dict[str, dict[str, float]] = {}
    for key, value in metrics.extra.items():
        if key.startswith("terms/"):
            name, _, number = key.removeprefix("terms/").rpartition("/")
            parts.setdefault(name, {})[number] = value
    return [_term(name, numbers) for name, numbers in parts.items()] if len(parts) > 1 else []


def _term(name: str, numbers: Mapping[str, float]) -> str:
    failed = [f"{numbers['failures']:.0f} failed"] if numbers["failures"] else []
    if "mean" not in numbers:
        return f"{name} - ({', '.join(failed)})"
    spread = ", ".join([f"std {numbers['std']:.2f}", *failed])
    return f"{name} {numbers['mean']:.3f} ({spread})"


def logged_numbers(metrics: StepMetrics, logged: Sequence[str]) -> list[str]:
    """`surprise 0.693`, for each number that a program logs and that this step has."""
    found = metrics.extra
    return [f"{name} {found[name]:.4g}" for name in logged if name in found]


def step_line(
    metrics: StepMetrics, steps: int, eta_s: float | None, logged: Sequence[str] = ()
) -> str:
    """A step as one line; what does not apply to its stage is left out.

    Args:
        logged: Names of what the program logs.
    """
    parts = [f"{metrics.stage} {metrics.step}/{steps}".ljust(14)]
    if metrics.reward_mean is not None:
        spread = "" if metrics.reward_std is None else f" (std {metrics.reward_std:.2f})"
        parts.append(f"reward {metrics.reward_mean:.3f}{spread}")
    parts += reward_terms(metrics)
    if failed := metrics.extra.get("failed_rewards"):
        parts.append(f"rewards failed {failed:.0f}")
    if metrics.length_mean is not None:
        longest = "" if metrics.length_max is None else f" (max {metrics.length_max})"
        parts.append(f"length {metrics.length_mean:.1f}{longest}")
    if metrics.loss is not None:
        parts.append(f"loss {metrics.loss:.4f}")
    elif metrics.num_samples == 0 and not metrics.filtered_groups:
        parts.append("no update")
    elif metrics.num_samples == 0:
        by = " and ".join(spec.partition(":")[2] for spec in metrics.filtered_by)
        groups = counted(metrics.filtered_groups, "group")
        parts.append(f"no update, all {groups} filtered" + (f" by {by}" if by else ""))
    if metrics.grad_norm is not None:
        parts.append(f"grad norm {metrics.grad_norm:.3g}")
    if (entropy := metrics.extra.get("entropy")) is not None:
        parts.append(f"entropy {entropy:.3f}")
    if metrics.kl is not None:
        parts.append(f"kl {metrics.kl:.4f}")
    parts += stale_samples(metrics)
    parts += logged_numbers(metrics, logged)
    if metrics.skipped_updates:
        parts.append(f"updates skipped {metrics.skipped_updates}")
    rates = token_rates(metrics)
    if rates:
        parts.append("tokens/s " + " ".join(rates))
    if eta_s is not None:
        parts.append(f"to go {format_seconds(eta_s)}")
    return "  ".join(parts)


class PlainDisplay:
    """Plain lines: the first and last step of a stage and, between, one every `every_s` seconds.

    Args:
        stream: Where they go; standard output by default.
        every_s: Seconds between lines of steps; 0 writes every step.
        samples_every_s: Seconds between samples.
        clock: Seconds that only grow.
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
        """Nothing to give back."""


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
    """A live panel where `stream` (standard output by default) is a terminal, else plain lines."""
    stream = stream or sys.stdout
    if not stream.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return PlainDisplay(stream)
    # Loaded here because rich takes longer to import than everything else in this package.
    from flowrl.observe.rich_display import RichDisplay

    return RichDisplay(stream)
