"""Drawings of graphs: tree, canonical text, Mermaid, DOT, JSON."""

from flowrl.viz.render import FORMATS, render

__all__ = ["FORMATS", "render"]
