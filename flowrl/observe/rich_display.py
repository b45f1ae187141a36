"""The live panel of a run on a terminal.

Steps only store their arguments; a thread redraws at most `_REFRESH_PER_SECOND` times a second,
so that the display costs the same however fast steps are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from time import monotonic
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowrl.observe.rows import RunInfo, SampleRow, StepMetrics, Summary
from flowrl.observe.run_text import (
    format_seconds,
    logged_numbers,
    one_line,
    pick_samples,
    policy_drift,
    reward_terms,
    stale_samples,
    summary_lines,
    token_rates,
    visible,
)
from flowrl.wording import percent

_REFRESH_PER_SECOND = 2
_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 512
"""The most steps that the curve shows."""
_NUM_SAMPLES = 3
"""The number of samples that are shown at once."""
_SAMPLES_S = 4.0
"""Seconds for which samples stay, so that they can be read."""


def sparkline(values: Sequence[float], width: int) -> str:
    """Returns at most `width` bars; each is the mean of an equal span where there are more values.

    >>> sparkline([0.0, 0.5, 1.0], 10)
    '▁▅█'
    """
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite or width < 1:
        return ""
    if len(finite) > width:
        edges = [i * len(finite) // width for i in range(width + 1)]
        finite = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in finite)


class RichDisplay:
    """A panel with progress, rewards, lengths, speeds and a few samples; see `Display`.

    Args:
        stream: The terminal.
        clock: Returns monotonic seconds.
    """

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = monotonic) -> None:
        self.console = Console(file=stream, highlight=False)
        self._clock = clock
        self._live: Live | None = None
        self._info: RunInfo | None = None
        self._stage = ""
        self._steps = 0
        self._logged: Sequence[str] = ()
        self._last: StepMetrics | None = None
        self._eta: tuple[float, float] | None = None
        self._curve: deque[float] = deque(maxlen=_HISTORY)
        self._samples: Sequence[SampleRow] = ()
        self._samples_until = 0.0

    def start(self, info: RunInfo) -> None:
        self._info = info
        self._live = Live(
            console=self.console,
            get_renderable=self.render,
            refresh_per_second=_REFRESH_PER_SECOND,
            transient=True,
        )
        self._live.start()

    def stage(self, name: str, steps: int, logged: Sequence[str] = ()) -> None:
        if self._last is not None:
            self._print(self._stage_line(self._last))
        self._stage, self._steps, self._logged = name, steps, logged
        self._last = self._eta = None
        self._curve.clear()
        self._samples, self._samples_until = (), 0.0

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        self._last = metrics
        self._eta = None if eta_s is None else (eta_s, self._clock())
        value = metrics.reward_mean if metrics.reward_mean is not None else metrics.loss
        if value is not None:
            self._curve.append(value)

    def samples(self, rows: Sequence[SampleRow]) -> None:
        now = self._clock()
        if now >= self._samples_until:
            self._samples, self._samples_until = rows, now + _SAMPLES_S

    def evaluation(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        numbers = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        self._print(Text(f"held-out after {stage} step {step}: {numbers}", style="green"))

    def note(self, text: str) -> None:
        self._print(Text(visible(text)))

    def warn(self, text: str) -> None:
        self._print(Text(f"warning: {visible(text)}", style="yellow"))

    def end(self, summary: Summary) -> None:
        if self._last is not None:
            self._print(self._stage_line(self._last))
        self.close()
        *lines, headline = summary_lines(summary)
        for line in lines:
            self._print(Text(line))
        self._print(Text(headline, style="bold"))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)

    def _stage_line(self, metrics: StepMetrics) -> Text:
        parts = [f"{metrics.stage}: {metrics.step}/{self._steps} steps"]
        if metrics.reward_mean is not None:
            parts.append(f"reward {metrics.reward_mean:.3f}")
        if metrics.loss is not None:
            parts.append(f"loss {metrics.loss:.4f}")
        parts += logged_numbers(metrics, self._logged)
        return Text("  ".join(parts), style="dim")

    def render(self) -> RenderableType:
        """Returns the panel for what the steps have stored; the refreshing thread calls this."""
        info, last = self._info, self._last
        width = max(40, self.console.width) - 4
        parts: list[RenderableType] = [self._progress(last)]
        if last is not None:
            parts.append(self._numbers(last, width))
        rows = pick_samples(self._samples, _NUM_SAMPLES)
        if rows:
            parts.append(Text())
            parts.extend(_sample_text(row, width) for row in rows)
        title = Text(f"{info.name} · {info.folder}" if info else "flowrl")
        return Panel(Group(*parts), title=title, title_align="left", border_style="dim")

    def _progress(self, last: StepMetrics | None) -> RenderableType:
        step = last.step if last else 0
        eta = self._eta
        to_go = ""
        if eta is not None:
            left = max(0.0, eta[0] - (self._clock() - eta[1]))
            to_go = f"{format_seconds(left)} to go"
        line = Table.grid(padding=(0, 2))
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        line.expand = True
        line.add_row(
            Text(f"{self._stage or 'starting'} {step}/{self._steps}", style="bold"),
            ProgressBar(total=max(1, self._steps), completed=step),
            Text(to_go),
        )
        return line

    def _numbers(self, last: StepMetrics, width: int) -> RenderableType:
        lines = Text(no_wrap=True, overflow="ellipsis")
        curve = sparkline(list(self._curve), min(40, width - 40))
        if last.reward_mean is not None:
            spread = "" if last.reward_std is None else f" std {last.reward_std:.2f}"
            lines.append(f"reward    {last.reward_mean:.3f}{spread}  ")
            lines.append(f"{curve}\n", style="cyan")
        elif last.loss is not None:
            lines.append(f"loss      {last.loss:.4f}  ")
            lines.append(f"{curve}\n", style="cyan")
        if terms := reward_terms(last):
            lines.append(f"terms     {'  '.join(terms)}\n")
        if last.length_mean is not None:
            longest = "" if last.length_max is None else f", longest {last.length_max}"
            cut = f", {percent(last.truncated)} truncated" if last.truncated else ""
            lines.append(f"length    {last.length_mean:.1f} tokens{longest}{cut}\n")
        rates = token_rates(last)
        if rates:
            lines.append(f"tokens/s  {'  '.join(rates)}\n")
        lines.append("update    " + "  ".join(_update_parts(last)))
        logged = logged_numbers(last, self._logged)
        if logged:
            lines.append("\nlogged    " + "  ".join(logged))
        return lines


def _update_parts(last: StepMetrics) -> list[str]:
    named = (
        ("loss", last.loss if last.reward_mean is not None else None),
        ("grad norm", last.grad_norm),
        ("lr", last.learning_rate),
        ("entropy", last.extra.get("entropy")),
        ("kl", last.kl),
    )
    parts = [f"{name} {value:.3g}" for name, value in named if value is not None]
    parts += policy_drift(last)
    parts += stale_samples(last)
    for name, count in (
        ("groups filtered", last.filtered_groups),
        ("rewards failed", int(last.extra.get("failed_rewards", 0))),
        ("samples dropped", last.dropped_samples),
        ("updates skipped", last.skipped_updates),
    ):
        if count:
            parts.append(f"{count} {name}")
    return parts


def _sample_text(row: SampleRow, width: int) -> Text:
    score = "    -" if row.score is None else f"{row.score:5.2f}"
    half = max(12, (width - 12) // 2)
    text = Text(f"{score}  ", no_wrap=True, overflow="ellipsis")
    text.append(one_line(row.prompt, half), style="dim")
    text.append("  ")
    text.append(one_line(row.response, half))
    return text
