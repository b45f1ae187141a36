"""Drawings of graphs, differences of two graphs, and pages of runs and plans."""

from flowrl.viz.diff import render_diff
from flowrl.viz.render import FORMATS, render, render_png

__all__ = ["FORMATS", "render", "render_diff", "render_png"]
