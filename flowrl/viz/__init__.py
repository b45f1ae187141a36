"""Drawings of graphs: tree, canonical text, Mermaid, DOT, JSON; and what differs between two."""

from flowrl.viz.diff import render_diff
from flowrl.viz.render import FORMATS, render

__all__ = ["FORMATS", "render", "render_diff"]
