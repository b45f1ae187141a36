"""Applies a framework's table (`tables/NAME.yaml`) to the keys of a configuration.

Rules of a table are applied in their order, first to the keys of the file, then to the framework's
defaults that the file leaves alone. The first rule that writes a key of flowrl has it: what a later
one would write differently is left out, and its entry says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TypeAlias

from pydantic import Field

from flowrl.config.schema import RunConfig
from flowrl.config.section import Section
from flowrl.config.tree import Value
from flowrl.errors import ConfigError
from flowrl.synonyms import meanings
from flowrl.wording import listing


class Status(StrEnum):
    """What became of a key."""

    MAPPED = "mapped"
    CHANGED = "changed in meaning"
    LEFT_OUT = "without a counterpart"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a rule makes of one key.

    Attributes:
        writes: Values by dotted key of flowrl; `rewards.terms.NAME` is the term of that name.
        note: What is different here, or the reason for which a key is left out.
    """

    status: Status
    writes: Mapping[str, object] = field(default_factory=dict)
    note: str = ""


class Table(Section):
    """How configurations of a framework are translated.

    Attributes:
        title: Name of the framework.
        sign: Expression that matches some key of each of its configurations, and of no other's.
        estimator: Key of the advantage estimator; none if there is one algorithm.
        prompts: Keys whose product is the number of prompts of a step.
        group: Key of the number of samples of a prompt.
        base: What every result has.
        rules: The rule of each key or pattern (`*` is any text), as text, in the order in which
            they are applied.
        rewards: Kinds of reward terms by the framework's reward functions; for verl, by a part of
            a file's name.
        notes: Differences in meaning, by key.
        left_out: Keys and patterns without a counterpart, by the reason.
        defaults: The framework's values of keys that a file may leave out, where flowrl's differ.
    """

    title: str
    sign: str
    estimator: str = ""
    prompts: tuple[str, ...]
    group: str
    base: dict[str, object]
    rules: dict[str, str]
    rewards: dict[str, str] = Field(default_factory=dict)
    notes: dict[str, str] = Field(default_factory=dict)
    left_out: dict[str, str]
    defaults: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What rules read.

    Attributes:
        values: The values of a configuration, over the defaults of its framework.
        rules: The rules of the table, and of the keys that it leaves out.
        workflow: The workflow that the result runs.
    """

    values: Mapping[str, Value]
    table: Table
    rules: Mapping[str, Rule]
    workflow: str

    def is_on(self, key: str) -> bool:
        """True for a switch that is on."""
        return self.values.get(key) is True

    def number(self, key: str) -> float:
        """Returns the number of a key.

        Raises:
            ConfigError: Its value is none.
        """
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                "this key has no number",
                where=key,
                found=repr(value),
                expected="a number",
                hint="write the number itself in the file",
            )
        return value

    @property
    def prompts(self) -> int:
        """Prompts of a step."""
        product = 1
        for key in self.table.prompts:
            product *= int(self.number(key))
        return product


Rule: TypeAlias = Callable[[Value, Settings], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key of the other framework and what became of it.

    Attributes:
        is_default: True for a default of the framework that the file does not write.
    """

    key: str
    value: Value
    outcome: Outcome
    is_default: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import.

    Attributes:
        framework: Name of the framework.
        entries: Every key of the file, once, in its order; then the framework's defaults that
            write something.
        config: The configuration of flowrl, nested.
    """

    framework: str
    entries: Sequence[Entry]
    config: Mapping[str, object]


def translate(settings: Settings, values: Mapping[str, Value], name: str) -> Imported:
    """Returns the configuration of flowrl for the keys of a file.

    Args:
        settings: The keys of the file over the framework's defaults.
        values: The keys of the file.
        name: Name of the run, if the file has none.

    Raises:
        ConfigError: A value that others are computed from is no number.
    """
    table = settings.table
    owners: dict[str, str] = {}
    written: dict[str, object] = {}
    entries: dict[str, Entry] = {}
    order = {key: place for place, key in enumerate(settings.rules)}
    for is_default in (False, True):
        keys = set(settings.values) - set(values) if is_default else set(values)
        for key in sorted(keys, key=lambda key: (order.get(key, len(order)), key)):
            value = settings.values[key]
            outcome = _without_conflicts(_outcome(key, value, settings), written, owners)
            if outcome.writes or not is_default:
                entries[key] = Entry(key=key, value=value, outcome=outcome, is_default=is_default)
            owners = {**dict.fromkeys(outcome.writes, key), **owners}
            written |= outcome.writes
    return Imported(
        framework=table.title,
        entries=[entries[key] for key in {**values, **settings.values} if key in entries],
        config=_nested(settings, written, name),
    )


def _outcome(key: str, value: Value, settings: Settings) -> Outcome:
    rules = settings.rules
    pattern = key if key in rules else next((p for p in rules if fnmatchcase(key, p)), None)
    if pattern is None:
        similar = meanings("key", key.rpartition(".")[2])
        hint = f"flowrl has {listing(similar)}" if similar else ""
        return Outcome(status=Status.UNKNOWN, note=hint)
    outcome = rules[pattern](value, settings)
    notes = [outcome.note] if outcome.note else []
    status = outcome.status
    if key in settings.table.notes and (outcome.writes or status is not Status.MAPPED):
        notes.insert(0, settings.table.notes[key])
        status = Status.CHANGED if outcome.writes else status
    if isinstance(value, str) and re.search(r"\$[\w{(]", value):
        notes.append("the file does not set this variable")
    return replace(outcome, status=status, note="; ".join(notes))


def _without_conflicts(
    outcome: Outcome, written: Mapping[str, object], owners: Mapping[str, str]
) -> Outcome:
    """Returns an outcome without what other keys have written differently."""
    lost = [key for key, value in outcome.writes.items() if written.get(key, value) != value]
    if not lost:
        return outcome
    own = {key: value for key, value in outcome.writes.items() if key not in lost}
    by = listing(dict.fromkeys(owners[key] for key in lost))
    return Outcome(
        status=outcome.status if own else Status.LEFT_OUT,
        writes=own,
        note=f"{listing(lost)} comes from {by}",
    )


def _nested(settings: Settings, written: Mapping[str, object], name: str) -> dict[str, object]:
    """Returns the configuration, with the roles of its workflow."""
    flat: dict[str, object] = {"name": name, "stages": [settings.workflow]}
    flat |= settings.table.base
    flat["roles.verifier.backend"] = "verify"
    if written.get("args.kl"):
        flat["roles.reference.copy_of"] = "actor"
    if settings.workflow == "ppo":
        flat["roles.critic.copy_of"] = "actor"
    terms: list[object] = []
    root: dict[str, object] = {}
    for target, value in {**flat, **written}.items():
        if target.startswith("rewards.terms."):
            terms.append({"name": target.removeprefix("rewards.terms."), **_mapping(value)})
            root["rewards"] = {"terms": terms}
            continue
        section = root
        *above, last = target.split(".")
        for part in above:
            section = section.setdefault(part, {})  # type: ignore[assignment]
        section[last] = value
    return {key: root[key] for key in RunConfig.model_fields if key in root}


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping)
    return value
