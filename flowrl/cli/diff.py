"""`flowrl diff A B`: what differs between two configurations, graphs, plans or runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.cli.files import (
    format_of,
    given_options,
    is_plan,
    machine_words,
    offering_cluster,
    refuse_plan,
    require_output,
    write_output,
)
from flowrl.errors import ConfigError
from flowrl.wording import nearest_file, one_of_them

if TYPE_CHECKING:
    from flowrl.graph import Graph
    from flowrl.graph.serialization import Json
    from flowrl.plan import PlacementPlan


class Content(StrEnum):
    """What a target of the command line is."""

    CONFIG = "a configuration"
    RUN = "the folder of a run"
    PLAN = "a plan's file"
    GRAPH = "a graph's file"
    WORKFLOW = "a workflow"


_COMPARABLE = {
    "configs": {Content.CONFIG},
    "graphs": {Content.CONFIG, Content.GRAPH, Content.WORKFLOW},
    "plans": {Content.CONFIG, Content.PLAN},
    "runs": {Content.RUN},
}
"""The contents that are compared as each kind; the first kind that fits both targets is taken."""

_OPTIONS_OF = {
    "--level": "graphs",
    "--stage": "graphs",
    "--cluster": "plans",
    "--pin": "plans",
    "--output": "runs",
}
"""The only kind of comparison in which an option has a meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """The options of the command line; `flowrl.cli.app` describes each."""

    kind: str | None = None
    level: str | None = None
    stage: str | None = None
    cluster: str | None = None
    pin: Sequence[str] = ()
    output: Path | None = None
    json: bool = False


def run(before: str, after: str, overrides: Sequence[str], options: DiffOptions) -> None:
    """Prints what differs between two targets.

    Args:
        before: A configuration, a plan's file, a graph's JSON file, a workflow as `flowrl graph`
            takes it, or the folder of a run.
        after: A second target, with which `before` is compared.
        overrides: Changes to the configurations among the targets.

    Raises:
        FlowError: A target cannot be read, the two cannot be compared, or an option has no meaning
            for this comparison.
    """
    contents = _content(before), _content(after)
    found = f"{before} is {contents[0]}, {after} is {contents[1]}"
    kind = _kind(contents, options, found)
    of_configs = [*overrides, *(["--stage"] if options.stage is not None else [])]
    if of_configs and Content.CONFIG not in contents:
        raise ConfigError(
            f"{of_configs[0]} is for a configuration, and neither target is one",
            where=of_configs[0],
            found=found,
            hint=f"name a configuration, or leave {of_configs[0]} out",
        )
    match kind:
        case "configs":
            lines = _config_lines(Path(before), Path(after), overrides)
        case "runs":
            lines = _run_lines(Path(before), Path(after), options.output)
        case "graphs":
            lines = _graph_lines(before, after, overrides, options)
        case _:
            lines = _plan_lines(Path(before), Path(after), overrides, options)
    if options.json:
        print(json.dumps(lines, indent=2))
    else:
        print("\n".join(lines) or f"the {kind} are equal")


def _content(target: str) -> Content:
    """Returns what a target is: by its content where it is a file of YAML or JSON.

    Raises:
        ConfigError: There is no such file.
    """
    path = Path(target)
    if path.is_dir():
        return Content.RUN
    if path.suffix not in (".yaml", ".yml", ".json"):
        return Content.WORKFLOW
    if not path.exists():
        raise ConfigError(
            "no such file",
            where=target,
            expected="a configuration, a plan's file or a graph's file",
            hint=nearest_file(path) or "`flowrl plan CONFIG -o FILE.json` writes a plan",
        )
    if path.suffix == ".json":
        return Content.GRAPH if "nodes" in _json_object(path) else Content.PLAN
    return Content.PLAN if is_plan(path) else Content.CONFIG


def _json_object(path: Path) -> Mapping[str, Json]:
    """Returns the object in a file; an empty one where the file has none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _kind(contents: tuple[Content, Content], options: DiffOptions, found: str) -> str:
    """Returns as what the targets are compared."""
    possible = [kind for kind, allowed in _COMPARABLE.items() if allowed.issuperset(contents)]
    if not possible or options.kind not in (None, *possible):
        wanted = "" if options.kind is None else f" as {options.kind}"
        raise ConfigError(
            f"these two cannot be compared{wanted}",
            where="--as" if options.kind else "command line",
            found=found,
            expected=" | ".join(possible) or "two configurations, graphs, plans or runs",
            hint=one_of_them(options.kind or "", possible)
            if possible
            else "name the configuration of one of them in its place",
        )
    kind = options.kind or possible[0]
    for option in given_options(options):
        only = _OPTIONS_OF.get(option, kind)
        if kind != only:
            add = f"add --as {only}, or " if only in possible else ""
            raise ConfigError(
                f"{option} has a meaning for {only}, and these are compared as {kind}",
                where=option,
                found=found,
                hint=f"{add}leave {option} out",
            )
    return kind


# Configurations


def _config_lines(before: Path, after: Path, overrides: Sequence[str]) -> list[str]:
    from flowrl.config.load import load_config

    old, new = (
        load_config(path, overrides).config.model_dump(mode="json") for path in (before, after)
    )
    return list(_changed("", old, new, (before, after)))


def _changed(key: str, old: object, new: object, files: tuple[Path, Path]) -> Iterator[str]:
    """Yields a line for each key whose value differs, defaults included.

    Args:
        files: The files of `old` and of `new`.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys((*old, *new)):
            inner = f"{key}.{name}" if key else name
            lone = old.get(name) if name not in new else new.get(name)
            if (name in old) != (name in new) and isinstance(lone, Mapping):
                yield f"{inner}: only in {files[name in new]}"
            else:
                yield from _changed(inner, old.get(name), new.get(name), files)
    elif old != new:
        yield f"{key}: {_value(old)} -> {_value(new)}"


def _value(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


# Runs


def _run_lines(before: Path, after: Path, output: Path | None) -> list[str]:
    from flowrl.observe.run_folder import RunFolder
    from flowrl.viz.run_diff import diff_numbers, render_run_diff

    if output is not None:
        format_of(output, {".html": "html"})
        require_output(output)
    folders = RunFolder.open(before), RunFolder.open(after)
    changed = _config_lines(folders[0].config_path, folders[1].config_path, ())
    if output is not None:
        write_output(
            output, render_run_diff((before, after), changed), "page; open it in a browser"
        )
    return changed + diff_numbers((before, after))


# Graphs


def _graph_lines(
    before: str, after: str, overrides: Sequence[str], options: DiffOptions
) -> list[str]:
    from flowrl.viz import render_diff

    old, new = (_graph(target, overrides, options) for target in (before, after))
    return render_diff(old, new).rstrip("\n").split("\n")


def _graph(target: str, overrides: Sequence[str], options: DiffOptions) -> Graph:
    from flowrl.cli.graph import GraphOptions, load_graph
    from flowrl.graph import graph_from_json

    if target.endswith(".json"):
        return graph_from_json(_json_object(Path(target)))
    level = options.level or "traced"
    stage = options.stage if _content(target) is Content.CONFIG else None
    return load_graph(target, overrides, GraphOptions(level=level, stage=stage)).graph


# Plans


def _plan_lines(
    before: Path, after: Path, overrides: Sequence[str], options: DiffOptions
) -> list[str]:
    from flowrl.plan.show.diff import diff_plans

    for option in ("--cluster", "--pin"):
        if option in given_options(options) and is_plan(before) and is_plan(after):
            refuse_plan(before, option, "give a configuration in a plan's place")
    words = [*overrides, *machine_words(options.cluster, options.pin, overrides)]
    old, new = _plan(before, words), _plan(after, words)
    if old.graph != new.graph:
        print(
            f"warning: the plans are of different workflows, {old.graph!r} and {new.graph!r}",
            file=sys.stderr,
        )
    return list(diff_plans(old, new))


def _plan(path: Path, words: Sequence[str]) -> PlacementPlan:
    if is_plan(path):
        from flowrl.plan import load_plan

        return load_plan(path)
    from flowrl import api

    with offering_cluster(path, words, "--cluster FILE"):
        return api.compile(None, path, overrides=words).plan
