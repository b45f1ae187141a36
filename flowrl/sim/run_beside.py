"""Whether a run that a simulation is put beside is one of the same job, and what makes it so.

A prediction says nothing of a run that draws other samples, or draws them in another way. What
differs is told together with the words of the command line that make the two alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flowrl.compiler import CompiledStage
from flowrl.config.load import LoadedConfig, load_config
from flowrl.errors import ConfigError
from flowrl.observe.run_folder import RunFolder
from flowrl.plan import PlacementPlan, load_plan
from flowrl.plan.local import LocalChoice, local_choice

_OF_STAGE = (
    "train.max_staleness",
    "train.policies",
    "train.prompts_per_step",
    "train.group_size",
    "train.mini_batches",
    "train.micro_batch",
    "train.refill",
    "train.sampling.max_tokens",
    "args",
    "bind",
)
"""Keys of a stage that decide what a step does."""

_OF_ROLE = ("backend", "model", "num_slots", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that differs.

    Attributes:
        what: In words, with both values.
        words: Of the command line, that make it alike; empty where it takes another configuration.
    """

    what: str
    words: tuple[str, ...] = ()


def check_run(folder: Path, stage: CompiledStage) -> None:
    """A run of another program has no step to put beside.

    Raises:
        ConfigError: the run's stage of this name ran another workflow.
    """
    ran = _plan(folder, stage.name)
    if ran is not None and ran.graph != stage.plan.graph:
        raise ConfigError(
            "the run has another workflow",
            where=f"--against {folder}",
            found=ran.graph,
            expected=stage.plan.graph,
            hint=f"name a run of {stage.plan.graph}, or give the configuration of this one: "
            f"{RunFolder.open(folder).config_path}",
        )


def differences(
    loaded: LoadedConfig, stage: CompiledStage, folder: Path, *, engines: int | None = None
) -> list[Difference]:
    """What a run did otherwise than a simulation of `stage`.

    Args:
        loaded: The configuration that is simulated.
        engines: Simulated in the place of the plan's.

    Raises:
        FlowError: the run's configuration or plan cannot be read.
    """
    ran = load_config(RunFolder.open(folder).config_path)
    return [*_of_configs(loaded, ran, stage), *_of_plans(stage, folder, engines)]


def differences_text(found: list[Difference], folder: Path) -> str:
    """A warning for people."""
    words = list(dict.fromkeys(word for one in found for word in one.words))
    alike = f"; {' '.join(words)} makes these equal" if words else ""
    if any(not one.words for one in found):
        alike += f"; {RunFolder.open(folder).config_path} is the configuration of the run"
    return (
        f"warning: --against {folder}: the run has another configuration, so it says little about "
        f"this prediction: {', '.join(one.what for one in found)}{alike}"
    )


def _of_configs(
    loaded: LoadedConfig, ran: LoadedConfig, stage: CompiledStage
) -> Iterator[Difference]:
    prefix = dict(loaded.stage_prefixes())[stage.name]
    mine = loaded.config.stage_config(stage.name).model_dump(mode="json")
    other = ran.config.stage_config(stage.name).model_dump(mode="json")
    for key in _OF_STAGE:
        yield from _changed(f"{prefix}{key}", _at(mine, key), _at(other, key))
    roles = {name: role.model_dump(mode="json") for name, role in loaded.config.roles.items()}
    for name in stage.plan.placements:
        there = ran.config.roles.get(name.role)
        if there is None or name.role not in roles:
            continue
        dumped = there.model_dump(mode="json")
        for key in _OF_ROLE:
            yield from _changed(f"roles.{name.role}.{key}", roles[name.role][key], dumped[key])


def _at(values: Mapping[str, object], key: str) -> object:
    found: object = values
    for part in key.split("."):
        assert isinstance(found, Mapping)
        found = found[part]
    return found


def _changed(key: str, mine: object, other: object) -> Iterator[Difference]:
    """Mappings that both have are compared key by key."""
    if isinstance(mine, dict) and isinstance(other, dict):
        for inner in dict.fromkeys((*mine, *other)):
            yield from _changed(f"{key}.{inner}", mine.get(inner), other.get(inner))
    elif mine != other:
        value = other if isinstance(other, str) else json.dumps(other)
        what = f"{key} is {value} there and {_short(mine)} here"
        if isinstance(other, dict | list):
            yield Difference(what=f"{key} differs")
        else:
            yield Difference(what=what, words=(f"{key}={value}",))


def _short(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _of_plans(stage: CompiledStage, folder: Path, engines: int | None) -> Iterator[Difference]:
    ran = _plan(folder, stage.name)
    if ran is None:
        return
    if ran.schedule is None and stage.plan.schedule is not None:
        yield Difference(
            what="it ran on one machine and is planned for a cluster here",
            words=(f"--plan {_plan_path(folder, stage.name)}",),
        )
        return
    there, here = local_choice(ran), local_choice(stage.plan)
    if there is None or here is None or there == here:
        return
    if engines is not None and {max(1, number) for _, number in there.engines} == {engines}:
        return
    yield Difference(
        what=f"it is {_words(there)} there and {_words(here)} here",
        words=(f"--plan {_plan_path(folder, stage.name)}",),
    )


def _words(choice: LocalChoice) -> str:
    return f"{choice.kind} ({choice})"


def _plan(folder: Path, stage: str) -> PlacementPlan | None:
    path = _plan_path(folder, stage)
    return load_plan(path, alone=False) if path.is_file() else None


def _plan_path(folder: Path, stage: str) -> Path:
    return folder / f"plan.{stage}.json"
