"""`flowrl graph`: a workflow as a tree, text, Mermaid, dot or JSON, or beside another one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.cli.other_machines import offering_cluster
from flowrl.cli.output import format_of, require_output, write_output
from flowrl.config.nearest import listing, one_of_them
from flowrl.errors import ConfigError
from flowrl.graph import Graph
from flowrl.passes import Context, run_passes
from flowrl.viz import FORMATS, render, render_diff

__all__ = ["GraphOptions", "run"]

_OF_ENDS = {
    ".txt": ("tree", "text", "mermaid", "dot"),
    **dict.fromkeys((".mmd", ".mermaid"), ("mermaid",)),
    **dict.fromkeys((".dot", ".gv"), ("dot",)),
    ".json": ("json",),
}
"""What a file of each end may hold; the first where no format is asked for."""
LEVELS = ("traced", "lowered", "placed")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """What `flowrl graph` was asked for.

    Attributes:
        form: How the graph is drawn; None draws what the end of `output` says, else a tree.
        level: Of the graph; looking at passes lowers it, and no further, whatever this says.
        print_after: Passes after which the graph is shown, in the place of the last one.
        disable_pass: Passes that are left out.
        diff: The workflow or config whose graph is compared with the first one.
        stage: Of a config; None takes the last one, and says which there are.
        output: A file to write to.
    """

    form: str | None = None
    level: str = "traced"
    print_after: Sequence[str] = ()
    disable_pass: Sequence[str] = ()
    diff: str | None = None
    stage: str | None = None
    output: Path | None = None


def run(target: str, overrides: Sequence[str], options: GraphOptions) -> None:
    """Traces `target` and prints or writes its graph.

    Below a tree, which people look at, stands which of a config's several stages it is, where
    nobody chose one; what programs read has the graph alone.

    Raises:
        ConfigError: an unknown format, level, stage or pass, options that exclude each other,
            overrides or a stage without a config, no such target.
        TraceError, GraphError: a workflow is wrong.
    """
    options = _checked(options)
    _check_overrides(target, overrides, options)
    written: list[str] = []
    stages: list[str] = []
    graph = _load(target, overrides, options, written, stages)
    if options.diff is not None:
        text = render_diff(graph, _load(options.diff, overrides, options, written, []))
    elif options.print_after:
        text = "\n".join(written)
    else:
        color = options.output is None and sys.stdout.isatty()
        text = render(graph, str(options.form), color=color)
        if options.form == "tree" and options.stage is None and len(stages) > 1:
            text = f"{text.rstrip()}\n\n{_told(stages)}"
    text = text if text.endswith("\n") else text + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        write_output(options.output, text, _what(graph, options))


def _what(graph: Graph, options: GraphOptions) -> str | None:
    """What is in a file, in words; of JSON, which programs ask for, nothing is said."""
    if options.form == "json":
        return None
    if options.diff is not None:
        return f"{graph.name} beside {options.diff}"
    if options.print_after:
        return f"{graph.name} after {', '.join(options.print_after)}"
    return f"graph of {graph.name}, {graph.level}, as {options.form}"


def _checked(options: GraphOptions) -> GraphOptions:
    """The options with their format, when they go together and the output can be written."""
    if options.form is not None:
        _one_of("--format", options.form, FORMATS)
    _one_of("--level", options.level, LEVELS)
    if options.output is not None:
        held = format_of(options.output, _OF_ENDS, FORMATS)
        if options.form not in (None, *held):
            raise ConfigError(
                "the file's name and the format contradict each other",
                where="--output",
                found=f"{options.output} beside {options.form}",
                expected=f"--format {' or '.join(held)} for {options.output.suffix}",
                hint="leave --format out: the end of the name says it",
            )
        require_output(options.output)
        options = replace(options, form=options.form or held[0])
    options = replace(options, form=options.form or "tree")
    for option, given in (("--diff", options.diff), ("--print-after", options.print_after)):
        if given and options.form not in ("tree", "text"):
            raise ConfigError(
                f"{option} gives text, and no {options.form}",
                where=option,
                hint="leave --format and --json out",
            )
    if options.diff is not None and options.print_after:
        raise ConfigError(
            "--diff and --print-after cannot be given together",
            where="--print-after",
            hint="compare the lowered graphs: --diff OTHER --level lowered",
        )
    return options


def _check_overrides(target: str, overrides: Sequence[str], options: GraphOptions) -> None:
    if overrides and not any(map(_is_config, (target, options.diff or ""))):
        raise ConfigError(
            "overrides need a config file",
            where=overrides[0],
            hint=f"`flowrl graph CONFIG.yaml workflow={target} {overrides[0]}`",
        )
    if options.stage is not None and not any(map(_is_config, (target, options.diff or ""))):
        raise ConfigError(
            "a workflow alone has no stages",
            where=f"--stage {options.stage}",
            found=target,
            expected="a config file",
            hint=f"`flowrl graph CONFIG.yaml workflow={target}`, or leave --stage out",
        )


def _is_config(target: str) -> bool:
    return target.endswith((".yaml", ".yml"))


def _load(
    target: str,
    overrides: Sequence[str],
    options: GraphOptions,
    written: list[str],
    stages: list[str],
) -> Graph:
    """The graph of a target.

    Args:
        written: What `--print-after` asks for is appended.
        stages: Names of a config's stages are appended.
    """
    inspects = bool(options.print_after or options.disable_pass)
    if _is_config(target):
        from flowrl import api

        if options.level == "traced" and not inspects:
            programs = api.trace(Path(target), overrides=overrides)
            stages += programs
            return programs[_stage(list(programs), options.stage, target)]
        # Which plan is fastest shows in a placed graph alone.
        placed = options.level == "placed"
        with offering_cluster(Path(target), overrides, "cluster=FILE"):
            compiled = api.compile(
                None, Path(target), overrides=overrides, measured=placed, runs=False
            )
        stages += [stage.name for stage in compiled.stages]
        chosen = _stage(stages, options.stage, target)
        stage = next(one for one in compiled.stages if one.name == chosen)
        if not inspects:
            return stage.placed if placed else stage.graph
        traced, context = stage.traced, stage.context
    else:
        from flowrl.program.registry import load_workflow

        if options.level == "placed":
            raise ConfigError(
                "a workflow alone says nothing of devices, so its graph cannot be placed",
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
                hint=f"`flowrl plan {target}` shows a plan that was written",
            )
        workflow = load_workflow(target, where=f"command line ({target})")
        traced, context = workflow.trace(), Context(max_staleness=workflow.max_staleness or 0)
    if options.level == "traced" and not inspects:
        return traced
    return run_passes(
        traced,
        context,
        print_after=options.print_after,
        disable=options.disable_pass,
        write=written.append,
    )


def _stage(names: Sequence[str], name: str | None, target: str) -> str:
    """The stage that was asked for; without a name the last one."""
    if name is None:
        return names[-1]
    if name not in names:
        raise ConfigError(
            f"{target} has no stage {name!r}",
            where=f"--stage {name}",
            expected=f"one of {listing(names)}",
            hint=one_of_them(name, names),
        )
    return name


def _told(stages: Sequence[str]) -> str:
    """Which of several stages the last one is."""
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
