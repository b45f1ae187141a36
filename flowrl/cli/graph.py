"""`flowrl graph`: a workflow as a tree, text, Mermaid, dot or JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flowrl.cli.output import write_output
from flowrl.errors import ConfigError
from flowrl.graph import Graph
from flowrl.viz import render

__all__ = ["run"]

FORMATS = ("tree", "text", "mermaid", "dot", "json")
LEVELS = ("traced", "lowered")


def run(target: str, overrides: Sequence[str], form: str, level: str, output: Path | None) -> None:
    """Traces `target` and prints or writes its graph.

    Raises:
        ConfigError: an unknown format or level, overrides without a config, no such target.
        TraceError, GraphError: the workflow is wrong.
    """
    _one_of("--format", form, FORMATS)
    _one_of("--level", level, LEVELS)
    graph = _load(target, overrides, level)
    color = output is None and sys.stdout.isatty()
    text = render(graph, form, color=color)
    text = text if text.endswith("\n") else text + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        write_output(output, text)


def _load(target: str, overrides: Sequence[str], level: str) -> Graph:
    if target.endswith((".yaml", ".yml")):
        from flowrl import api

        stage = api.compile(None, Path(target), overrides=overrides).stages[-1]
        return stage.graph if level == "lowered" else stage.traced
    if overrides:
        raise ConfigError(
            "overrides need a config file",
            where=overrides[0],
            hint=f"`flowrl graph CONFIG.yaml workflow={target} {overrides[0]}`",
        )
    from flowrl.program.registry import load_workflow

    workflow = load_workflow(target)
    if level == "lowered":
        from flowrl.compiler import lower

        return lower(workflow)
    return workflow.trace()


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"unknown value of {option}", found=value, expected=" | ".join(allowed))
