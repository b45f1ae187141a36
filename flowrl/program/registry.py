"""Finds workflows: by registered name, or in a Python file."""

from __future__ import annotations

from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.program.workflow import Workflow
from flowrl.user_files import import_file
from flowrl.wording import listing, suggestion

GROUP = "flowrl.graphs"
"""The entry point group under which distributions register workflows."""


def load_workflow(ref: str, *, where: str | None = None) -> Workflow:
    """The workflow that `ref` names.

    Args:
        ref: A registered name, `FILE.py` (the only workflow in it) or `FILE.py:NAME`.
        where: The config key or argument that named it, for messages.

    Raises:
        ConfigError: no such name, file, or workflow in the file.
        TraceError: the file raises; `user_frames` holds its traceback.
    """
    path, _, name = ref.partition(":")
    if path.endswith(".py"):
        return _from_file(Path(path), name, where)
    if "/" in ref or Path(ref).is_dir():
        raise ConfigError(
            f"no workflow is called '{ref}'",
            where=where,
            expected="a registered name, FILE.py or FILE.py:NAME",
            hint="name the file itself, such as mine.py or mine.py:NAME",
        )
    # Reading distributions' metadata is a third of what `import flowrl` would cost.
    from flowrl.entry_points import find_entry

    entry = find_entry(GROUP, ref, kind="workflow", error=ConfigError, where=where)
    loaded = entry.load(ConfigError)
    if not isinstance(loaded, Workflow):
        raise ConfigError(
            f"'{ref}' is registered as a workflow, but is none",
            where=entry.origin,
            found=f"{entry.target}: {type(loaded).__name__}",
            expected="a function marked @fl.workflow",
            hint="mark the function @fl.workflow, or take it out of the entry points",
        )
    return loaded


def _from_file(path: Path, name: str, where: str | None) -> Workflow:
    module = import_file(path, where=where)
    all_found = {key: v for key, v in vars(module).items() if isinstance(v, Workflow)}
    # Workflows that the file imports are its building blocks, not its own.
    own = {key: v for key, v in all_found.items() if v.__module__ == module.__name__}
    if name:
        if name not in all_found:
            raise ConfigError(
                f"{path} has no workflow '{name}'",
                where=where,
                expected=f"one of {listing(all_found)}" if all_found else None,
                hint=suggestion(name, all_found) or "mark the function @fl.workflow",
            )
        return all_found[name]
    workflows = own or all_found
    if not workflows:
        raise ConfigError(
            f"{path} holds no workflow", where=where, hint="mark the function @fl.workflow"
        )
    if len(set(map(id, workflows.values()))) > 1:
        first = next(iter(workflows))
        raise ConfigError(
            f"{path} holds {len(workflows)} workflows",
            where=where,
            found=listing(workflows),
            hint=f"say which: {path}:{first}",
        )
    return next(iter(workflows.values()))
