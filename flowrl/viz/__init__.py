"""Drawings of graphs: tree, canonical text, Mermaid, DOT, JSON; and differences of two graphs."""

from flowrl.viz.diff import render_diff
from flowrl.viz.render import FORMATS, render

__all__ = ["FORMATS", "render", "render_diff"]
