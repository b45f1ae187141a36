"""`flowrl plugin`: what installed packages add to flowrl, and a package that adds a backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

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


_TEMPLATES = Path(__file__).parent / "templates" / "plugin"
_PLACEHOLDER = "acme"


def run_new(name: str, kind: str, output: Path | None) -> None:
    """Writes a package with a plug-in that works, its entry point and its tests.

    Raises:
        ConfigError: The name is none for a package, there is no such kind, or the folder exists.
    """
    kinds = sorted(folder.name for folder in _TEMPLATES.iterdir() if folder.is_dir())
    if kind not in kinds:
        raise ConfigError(
            f"there is no plug-in of kind {kind!r}",
            where="--kind",
            found=kind,
            expected=", ".join(kinds),
            hint="a class in a file is enough for an environment: see docs/program-guide.md",
        )
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ConfigError(
            f"{name!r} is no name for a plug-in",
            where="NAME",
            found=name,
            expected="small letters, digits and _, such as my_engine",
            hint="name it as roles.NAME.backend is to name it",
        )
    folder = output or Path(f"flowrl-{name}")
    if folder.exists():
        raise ConfigError(
            "the folder exists already",
            where=str(folder),
            found="it would be overwritten",
            expected="a new folder",
            hint="name another one with --output",
        )
    words = {_PLACEHOLDER: name, _PLACEHOLDER.title(): name.title().replace("_", "")}
    if kind == "score":
        words["flowrl[torch]"] = "flowrl"
    parts = [_TEMPLATES / kind / part for part in ("flowrl_acme", "tests")]
    for source in (_TEMPLATES / "pyproject.toml", *(f for p in parts for f in p.glob("*.py"))):
        root = _TEMPLATES if source.suffix == ".toml" else _TEMPLATES / kind
        target = folder / str(source.relative_to(root)).replace(_PLACEHOLDER, name)
        text = source.read_text(encoding="utf-8")
        for word, replacement in words.items():
            text = text.replace(word, replacement)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    check = f"pytest {folder}" if kind == "score" else f"flowrl backends check {name}"
    print(f"wrote {folder}: pip install -e {folder}, then {check}")
