"""Bars over time, in rows: of what is planned, simulated or measured alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowrl.plan.show.many import seconds_text
from flowrl.viz.labels import RoleColour

_WIDTH = 1000
"""Units of the picture for the whole time."""
_LINE = 15
_MARGIN = 8
_CHARACTER = 6.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that takes time.

    Attributes:
        row: Who does it.
        names: What it is called; the picture has the first that fits into the bar.
        note: A second line, if there is room for a name.
        title: What is shown under the mouse.
        href: The id of an element that the bar leads to.
        is_marked: True for a thick border.
    """

    row: str
    begin_s: float
    end_s: float
    names: Sequence[str]
    note: str = ""
    title: str
    colour: RoleColour
    href: str = ""
    is_marked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A bar in units of the picture."""

    bar: Bar
    x: float
    y: float
    width: float
    height: float
    lines: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gantt:
    """A picture, which `gantt.html` draws.

    Attributes:
        rows: `(name, y, height)`.
        ticks: `(x, seconds)`.
    """

    width: float
    height: float
    rows: Sequence[tuple[str, float, float]]
    ticks: Sequence[tuple[float, str]]
    blocks: Sequence[Block]


def gantt(bars: Iterable[Bar], end_s: float) -> Gantt:
    """Returns the picture of bars from 0 to `end_s`; those of a row that overlap have two lanes."""
    by_row: dict[str, list[Bar]] = {}
    for bar in bars:
        by_row.setdefault(bar.row, []).append(bar)
    lines = 2 if any(bar.note for own in by_row.values() for bar in own) else 1
    lane_height = lines * _LINE + 2 * _MARGIN
    unit = _WIDTH / end_s if end_s else 0.0
    rows, blocks, y = [], [], 0
    for row, own in by_row.items():
        lanes: list[float] = []  # where each ends
        for bar in sorted(own, key=lambda each: (each.begin_s, -each.end_s)):
            free = (at for at, end in enumerate(lanes) if end <= bar.begin_s + 1e-9)
            lane = next(free, len(lanes))
            lanes[lane : lane + 1] = [bar.end_s]
            width = (bar.end_s - bar.begin_s) * unit
            name = next((n for n in bar.names if len(n) * _CHARACTER <= width), None)
            blocks.append(
                Block(
                    bar=bar,
                    x=round(bar.begin_s * unit, 2),
                    y=y + lane * lane_height + _MARGIN // 2,
                    width=round(max(width, 1.0), 2),
                    height=lane_height - _MARGIN,
                    lines=[line for line in (name, bar.note) if line] if name else [],
                )
            )
        rows.append((row, y, len(lanes) * lane_height))
        y += len(lanes) * lane_height
    ticks = [(_WIDTH * i / 5, seconds_text(end_s * i / 5)) for i in range(6)]
    return Gantt(width=_WIDTH, height=y, rows=rows, ticks=ticks, blocks=blocks)
