"""Files of planner fixtures: what a published planner was asked, and what it answered.

    fixtures:
    - name: case
      devices: 128
      batch: 512                    # prompts of a step
      group_size: 16                # optional, 1
      num_minibatches: 4            # optional; replicas must divide the prompts of one
      graph: [[rollout, inference], [inference, actor]]
      tp: {actor: 2}                # optional, 1
      max_running_requests: 128     # optional: without it a rollout always scales with its devices
      whole_pool_cost_s: {actor: 101, rollout: 224, inference: 10}
      source_planner: {temporal_s: 335.0, spatial_s: 289.1}   # optional

or, for an environment and a rollout that exchange data in a cycle, `num_envs` and `cost_by_envs_s`
(seconds of each of the two by environments a replica); the stages of `whole_pool_cost_s` run
after it, or as `graph` says.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import networkx as nx
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from flowrl.config.nearest import listing
from flowrl.errors import ConfigError

__all__ = ["Fixture", "SourcePlanner", "read_fixtures"]


MOST_DEVICES = 4096
"""Of a fixture: a search looks at every number of them."""


def _no_truth(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not true or false")
    return value


Count = Annotated[int, BeforeValidator(_no_truth), Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(_no_truth), Field(gt=0, allow_inf_nan=False)]


class SourcePlanner(BaseModel):
    """What the published planner answered."""

    model_config = ConfigDict(extra="allow", frozen=True)

    temporal_s: Seconds | None = None
    spatial_s: Seconds | None = None
    spatial_devices: dict[str, Count] = Field(default_factory=dict)
    devices: dict[str, Count] = Field(default_factory=dict)


class Fixture(BaseModel):
    """One fixture; the module says what its keys mean."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    devices: Annotated[Count, Field(le=MOST_DEVICES)]
    batch: Count | None = None
    group_size: Count = 1
    num_minibatches: Count | None = None
    graph: list[tuple[str, str]] = Field(default_factory=list)
    tp: dict[str, Count] = Field(default_factory=dict)
    max_running_requests: Count | None = None
    whole_pool_cost_s: dict[str, Seconds] = Field(default_factory=dict)
    num_envs: Count | None = None
    cost_by_envs_s: dict[str, dict[Count, Seconds]] = Field(default_factory=dict)
    source_planner: SourcePlanner = Field(default_factory=SourcePlanner)
    measured_on_cluster: dict[str, object] = Field(default_factory=dict)
    note: str = ""

    @property
    def region(self) -> tuple[str, str] | None:
        """The two roles of the cycle."""
        names = tuple(self.cost_by_envs_s)
        return (names[0], names[1]) if len(names) == 2 else None

    @property
    def region_name(self) -> str:
        """The cycle as one stage."""
        return " with ".join(self.cost_by_envs_s)

    @property
    def unread(self) -> list[str]:
        """Keys that have no meaning here."""
        return sorted({*(self.model_extra or {}), *(self.source_planner.model_extra or {})})

    def stages(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Every stage with those it reads from, in an order in which they could run."""
        return self._stages

    @cached_property
    def _stages(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        graph: nx.DiGraph[str] = nx.DiGraph()
        named = self.region_name if self.region else ""
        graph.add_nodes_from(([named] if named else []) + list(self.whole_pool_cost_s))
        for edge in self.graph:
            source, target = (named if name in self.cost_by_envs_s else name for name in edge)
            if source != target or source != named:
                graph.add_edge(source, target)
        if named and not self.graph:
            order = [named, *self.whole_pool_cost_s]
            graph.add_edges_from(pairwise(order))
        if not nx.is_directed_acyclic_graph(graph):
            cycle = " -> ".join(str(edge[0]) for edge in nx.find_cycle(graph))
            raise ConfigError(
                f"The graph has a cycle: {cycle}",
                where="graph",
                hint="give its two roles in cost_by_envs_s",
            )
        return tuple(
            (name, tuple(graph.predecessors(name)))
            for name in nx.lexicographical_topological_sort(graph)
        )

    def half_digit(self, value: float) -> float:
        """Half a unit of the last digit that `value` is written with."""
        _, _, decimals = repr(value).partition(".")
        return 0.5 * 10.0 ** -len(decimals)


def _likely(names: list[str]) -> str:
    """The first file that is called after fixtures, or the first."""
    return next((name for name in names if "fixture" in Path(name).name), names[0])


def read_fixtures(path: str, name: str | None = None) -> list[Fixture | ConfigError]:
    """The fixtures of a file, or what is wrong with each.

    Raises:
        ConfigError: The file cannot be read at all, or has no fixture of this name.
    """
    if Path(path).is_dir():
        inside = sorted(str(one) for one in Path(path).iterdir() if one.suffix in (".yaml", ".yml"))
        raise ConfigError(
            "This is a folder, not a file of fixtures",
            where=path,
            found=f"{listing(inside)} in it" if inside else "no YAML file in it",
            hint=f"Name a file, such as {_likely(inside)}" if inside else "Name a YAML file",
        )
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "The file of fixtures cannot be read", where=path, found=str(error)
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError("The file is no YAML", where=path, found=str(error)) from None
    rows = tree.get("fixtures") if isinstance(tree, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(
            "The file has no fixtures", where=path, expected="a list under the key 'fixtures'"
        )
    found: list[Fixture | ConfigError] = []
    names = []
    for number, row in enumerate(rows):
        named = str(row.get("name", f"fixtures[{number}]")) if isinstance(row, dict) else ""
        names.append(named)
        if name is None or named == name:
            found.append(_read(row, f"{path}: {named or f'fixtures[{number}]'}"))
    if not found:
        raise ConfigError(f"There is no fixture {name!r}", where=path, expected=", ".join(names))
    return found


def _read(row: object, where: str) -> Fixture | ConfigError:
    try:
        fixture = Fixture.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        return ConfigError(first["msg"], where=f"{where}: {key}" if key else where)
    try:
        _check(fixture, where)
    except ConfigError as error:
        return error
    return fixture


def _check(fixture: Fixture, where: str) -> None:
    """Raises ConfigError for what a fixture lacks."""
    if fixture.cost_by_envs_s:
        if fixture.region is None:
            raise ConfigError(
                "A cycle has two roles",
                where=f"{where}: cost_by_envs_s",
                found=", ".join(fixture.cost_by_envs_s),
            )
        if fixture.num_envs is None:
            raise ConfigError("num_envs is missing beside cost_by_envs_s", where=where)
        if not all(fixture.cost_by_envs_s.values()):
            raise ConfigError("A role of the cycle has no costs", where=f"{where}: cost_by_envs_s")
    elif not fixture.whole_pool_cost_s:
        raise ConfigError("whole_pool_cost_s or cost_by_envs_s is missing", where=where)
    elif fixture.batch is None and len(fixture.whole_pool_cost_s) > 1:
        raise ConfigError(
            "batch is missing", where=where, expected="the number of prompts of a step"
        )
    costs = {*fixture.whole_pool_cost_s, *fixture.cost_by_envs_s}
    for key, names in (
        ("graph", [name for edge in fixture.graph for name in edge]),
        ("tp", list(fixture.tp)),
        ("source_planner.spatial_devices", list(fixture.source_planner.spatial_devices)),
        ("source_planner.devices", list(fixture.source_planner.devices)),
    ):
        for name in names:
            if name not in costs:
                raise ConfigError(
                    f"{name!r} has no costs",
                    where=f"{where}: {key}",
                    expected=f"one of {', '.join(sorted(costs))}",
                )
    try:
        fixture.stages()
    except ConfigError as error:
        error.where = f"{where}: {error.where}"
        raise
