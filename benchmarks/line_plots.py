"""Line plots as SVG text: a few lines over one axis, and rules at heights that others published.

>>> line = Line(name="here", points=((0, 1.0), (1, 2.0)))
>>> plot = Plot(title="t", x="x", y="y", lines=(line,), rules=(Rule(y=1.5, name="there"),))
>>> plot.svg().startswith("<svg ")
True
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["Line", "Plot", "Rule"]

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 190, 36, 48
_COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8a5a00", "#6a4c93")


@dataclass(frozen=True)
class Line:
    """Points in order of x."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Rule:
    """A dashed line at a height."""

    y: float
    name: str


@dataclass(frozen=True)
class Plot:
    """See the module."""

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    rules: tuple[Rule, ...]

    def svg(self) -> str:
        """The whole picture."""
        body = "\n".join(self._parts())
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            f'font-family="sans-serif" font-size="12">\n'
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
        )

    def _parts(self) -> Iterator[str]:
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        yield _text(_LEFT, 20, self.title, weight="bold")
        yield _text((_LEFT + right) / 2, _HEIGHT - 10, self.x, anchor="middle")
        yield _text(16, (_TOP + bottom) / 2, self.y, anchor="middle", turned=True)
        for value in self._ticks():
            y = self._y(value)
            yield _stroke(_LEFT, y, right, y, "#dddddd")
            yield _text(_LEFT - 8, y + 4, f"{value:g}", anchor="end")
        for value in sorted({x for line in self.lines for x, _ in line.points}):
            yield _text(self._x(value), bottom + 18, f"{value:g}", anchor="middle")
        labels: list[tuple[float, str, str]] = []
        for rule in self.rules:
            y = self._y(rule.y)
            yield _stroke(_LEFT, y, right, y, "#777777", dashed=True)
            labels.append((y, rule.name, "#777777"))
        for line, colour in zip(self.lines, _COLOURS, strict=False):
            places = [(self._x(x), self._y(y)) for x, y in line.points]
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            yield f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>'
            yield from (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places
            )
            labels.append((places[-1][1], line.name, colour))
        above = -math.inf
        for y, name, colour in sorted(labels):
            above = max(y, above + 14)  # labels do not lie on each other
            yield _text(right + 8, above + 4, name, colour=colour)

    def _heights(self) -> list[float]:
        return [y for line in self.lines for _, y in line.points] + [r.y for r in self.rules]

    def _ticks(self) -> list[float]:
        """Round numbers around all heights."""
        low, high = min(self._heights()), max(self._heights())
        rough = max(high - low, 1e-9) / 5
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
        first, last = math.floor(low / step), math.ceil(high / step)
        return [round(step * k, 10) for k in range(first, last + 1)]

    def _y(self, value: float) -> float:
        ticks = self._ticks()
        share = (value - ticks[0]) / (ticks[-1] - ticks[0])
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    def _x(self, value: float) -> float:
        values = [x for line in self.lines for x, _ in line.points]
        low, high = min(values), max(values)
        return _LEFT + 12 + (value - low) / (high - low) * (_WIDTH - _RIGHT - _LEFT - 24)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    weight: str = "normal",
    colour: str = "black",
    turned: bool = False,
) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{colour}"{turn}>{escape(text)}</text>'
    )


def _stroke(
    x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False
) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dash}/>'
    )
