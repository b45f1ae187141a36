"""`flowrl plugin`: what installed packages add to flowrl."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata

from flowrl.backend import registry
from flowrl.config import rewards
from flowrl.config.rewards import INSTALLED_TERMS, RewardTerm
from flowrl.config.roles import ENVIRONMENTS
from flowrl.config.schema import TRACKERS
from flowrl.config.section import kinds_of, models_in
from flowrl.entry_points import Entry, entries
from flowrl.errors import ConfigError, FlowError
from flowrl.files import encode_json
from flowrl.program.registry import GROUP as WORKFLOWS
from flowrl.wording import table


def _import(entry: Entry) -> object:
    return entry.load(ConfigError)


_KINDS: dict[str, tuple[str, Callable[[Entry], object]]] = {
    "backend": (registry.GROUP, lambda entry: registry.find(entry.name)),
    "workflow": (WORKFLOWS, _import),
    "reward": (INSTALLED_TERMS.group, lambda entry: INSTALLED_TERMS.find(entry.name)),
    "environment": (ENVIRONMENTS, _import),
    "tracker": (TRACKERS, _import),
}
"""Each kind's group of entry points, and how one of them is opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One addition; `problem` says why it cannot be used, and is empty if it can."""

    kind: str
    name: str
    target: str
    package: str
    problem: str = ""


def _rows() -> Iterator[Row]:
    for kind, (group, open_entry) in _KINDS.items():
        if kind == "reward":
            yield from _own_rewards()
        for entry in entries(group):
            problem = ""
            try:
                open_entry(entry)
            except FlowError as reason:
                problem = f"{reason.what}: {reason.found}" if reason.found else reason.what
            yield Row(
                kind=kind,
                name=entry.name,
                target=entry.target,
                package=entry.origin,
                problem=problem,
            )


def _own_rewards() -> Iterator[Row]:
    """Yields flowrl's own kinds of rewards, which are no entry points."""
    package = f"flowrl {metadata.version('flowrl')}"
    for model in models_in(RewardTerm):
        if model.__module__ == rewards.__name__:
            target = f"{model.__module__}:{model.__name__}"
            for name in kinds_of(model):
                yield Row(kind="reward", name=name, target=target, package=package)


def run_list(*, as_json: bool) -> None:
    """Prints a line for each addition, and why one cannot be used."""
    rows = list(_rows())
    if as_json:
        print(encode_json({"plugins": [asdict(row) for row in rows]}), end="")
        return
    cells = [(row.kind, row.name, row.package) for row in rows]
    head, *lines = table(("kind", "name", "from"), cells)
    print(head)
    for row, line in zip(rows, lines, strict=True):
        print(line)
        if row.problem:
            print(f"  unusable: {row.problem}")
