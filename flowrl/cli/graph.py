"""`flowrl graph`: a workflow as a tree, text, Mermaid, dot, JSON or a picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.cli.files import format_of, offering_cluster, require_output, stage_named, write_output
from flowrl.errors import ConfigError
from flowrl.graph import Graph
from flowrl.passes import Context, run_passes
from flowrl.viz import FORMATS, render, render_png
from flowrl.wording import one_of_them

_FORMATS_OF_SUFFIXES = {
    ".txt": ("tree", "text", "mermaid", "dot"),
    **dict.fromkeys((".mmd", ".mermaid"), ("mermaid",)),
    **dict.fromkeys((".dot", ".gv"), ("dot",)),
    ".json": ("json",),
    ".svg": ("svg",),
    ".html": ("html",),
    ".png": ("png",),
}
"""The formats that a file of each suffix may hold; the first is the default."""
LEVELS = ("traced", "lowered", "placed")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """The options of the command line; `flowrl.cli.app` describes each."""

    form: str | None = None
    level: str = "traced"
    print_after: Sequence[str] = ()
    disable_pass: Sequence[str] = ()
    stage: str | None = None
    output: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedGraph:
    """A target's graph.

    Attributes:
        stages: Names of a config's stages; empty for a workflow.
        after_passes: The texts that `print_after` asks for.
    """

    graph: Graph
    stages: Sequence[str] = ()
    after_passes: Sequence[str] = ()


def run(target: str, overrides: Sequence[str], options: GraphOptions) -> None:
    """Traces `target` and prints or writes its graph.

    Below a tree, a line says which of a config's stages it is where none was chosen; the other
    formats, which programs read, have the graph alone.

    Raises:
        ConfigError: An unknown format, level, stage or pass, options that exclude each other,
            overrides or a stage without a config, or no such target.
        TraceError, GraphError: The workflow is wrong.
    """
    options = _checked(options)
    _check_overrides(target, overrides, options)
    loaded = load_graph(target, overrides, options)
    if options.form == "png" and options.output is not None:
        write_output(options.output, render_png(loaded.graph), _summary(loaded.graph, options))
        return
    if options.print_after:
        text = "\n".join(loaded.after_passes)
    else:
        color = options.output is None and sys.stdout.isatty()
        text = render(loaded.graph, str(options.form), color=color)
        if options.form == "tree" and options.stage is None and len(loaded.stages) > 1:
            text = f"{text.rstrip()}\n\n{_stage_note(loaded.stages)}"
    text = text if text.endswith("\n") else text + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        write_output(options.output, text, _summary(loaded.graph, options))


def _summary(graph: Graph, options: GraphOptions) -> str | None:
    """Returns what is in a file, in words; None for JSON, which programs ask for."""
    if options.form == "json":
        return None
    if options.print_after:
        return f"{graph.name} after {', '.join(options.print_after)}"
    return f"graph of {graph.name}, {graph.level}, as {options.form}"


def _checked(options: GraphOptions) -> GraphOptions:
    """Returns the options with their format; they go together and the output can be written."""
    if options.form is not None:
        pixels = ("png",) if options.output is not None else ()  # which are no text to print
        _one_of("--format", options.form, (*FORMATS, *pixels))
    if options.output is not None:
        held = format_of(options.output, _FORMATS_OF_SUFFIXES, FORMATS)
        if options.form not in (None, *held):
            raise ConfigError(
                "the file's name and the format contradict each other",
                where="--output",
                found=f"{options.output} with --format {options.form}",
                expected=f"--format {' or '.join(held)} for {options.output.suffix}",
                hint="leave --format out: the end of the name says it",
            )
        require_output(options.output)
        options = replace(options, form=options.form or held[0])
    options = replace(options, form=options.form or "tree")
    if options.print_after and options.form not in ("tree", "text"):
        raise ConfigError(
            f"--print-after gives text, and no {options.form}",
            where="--print-after",
            hint="leave --format and --json out",
        )
    return options


def _check_overrides(target: str, overrides: Sequence[str], options: GraphOptions) -> None:
    if overrides and not _is_config(target):
        raise ConfigError(
            "overrides need a config file",
            where=overrides[0],
            hint=f"`flowrl graph CONFIG.yaml workflow={target} {overrides[0]}`",
        )
    if options.stage is not None and not _is_config(target):
        raise ConfigError(
            "a workflow alone has no stages",
            where=f"--stage {options.stage}",
            found=target,
            expected="a config file",
            hint=f"`flowrl graph CONFIG.yaml workflow={target}`, or leave --stage out",
        )


def _is_config(target: str) -> bool:
    return target.endswith((".yaml", ".yml"))


def load_graph(target: str, overrides: Sequence[str], options: GraphOptions) -> LoadedGraph:
    """Returns the graph of a workflow or config at the level that is asked for.

    Raises:
        ConfigError: An unknown level, stage or pass, or no such target.
        TraceError, GraphError: The workflow is wrong.
    """
    _one_of("--level", options.level, LEVELS)
    if (config := Path(target) / "config.yaml").is_file():
        raise ConfigError(
            "this is a run's folder, whose config has the graph",
            where=f"command line ({target})",
            expected="FILE.py, FILE.py:NAME, a registered name or a config file (.yaml)",
            hint=f"name {config} in its place",
        )
    stages: Sequence[str] = ()
    inspects = bool(options.print_after or options.disable_pass)
    if _is_config(target):
        from flowrl import api

        if options.level == "traced" and not inspects:
            programs = api.trace(Path(target), overrides=overrides)
            chosen = stage_named(list(programs), options.stage, target)
            return LoadedGraph(graph=programs[chosen], stages=list(programs))
        # Only a placed graph depends on which plan is fastest.
        placed = options.level == "placed"
        with offering_cluster(Path(target), overrides, "cluster=FILE"):
            compiled = api.compile(
                None, Path(target), overrides=overrides, measured=placed, runs=False
            )
        stages = [stage.name for stage in compiled.stages]
        chosen = stage_named(stages, options.stage, target)
        stage = next(stage for stage in compiled.stages if stage.name == chosen)
        if not inspects:
            return LoadedGraph(graph=stage.placed if placed else stage.graph, stages=stages)
        traced, context = stage.traced, stage.context
    else:
        from flowrl.program.registry import load_workflow

        if options.level == "placed":
            raise ConfigError(
                "a workflow alone names no devices, so its graph cannot be placed",
                where="--level placed",
                found=target,
                expected="a config file, whose cluster the graph is placed on",
                hint=f"`flowrl graph CONFIG.yaml workflow={target} --level placed`",
            )
        if target.endswith(".json"):
            raise ConfigError(
                "this names no workflow",
                where=f"command line ({target})",
                expected="FILE.py, FILE.py:NAME, a registered name or a config file (.yaml)",
                hint=f"`flowrl plan {target}` shows a plan's file",
            )
        workflow = load_workflow(target, where=f"command line ({target})")
        traced, context = workflow.trace(), Context(max_staleness=workflow.max_staleness or 0)
    if options.level == "traced" and not inspects:
        return LoadedGraph(graph=traced)
    after_passes: list[str] = []
    graph = run_passes(
        traced,
        context,
        print_after=options.print_after,
        disable=options.disable_pass,
        write=after_passes.append,
    )
    return LoadedGraph(graph=graph, stages=stages, after_passes=after_passes)


def _stage_note(stages: Sequence[str]) -> str:
    """Returns a line that says which of several stages is the last one."""
    others = ", ".join(f"--stage {name}" for name in stages[:-1])
    shows = "shows the other" if len(stages) == 2 else "show the others"
    return f"stage {stages[-1]}, the last of {' -> '.join(stages)}; {others} {shows}"


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"unknown value of {option}",
            found=value,
            expected=" | ".join(allowed),
            where=option,
            hint=one_of_them(value, allowed),
        )
