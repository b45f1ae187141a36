"""Shares of the sources of prompts, as a stage's configuration says them.

data:
  source: topic                     # a field of every training row
train:
  policies:
    fairness: {kind: weighted_shares, math: 3, code: 1}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flowrl.compiler import CompiledStage
from flowrl.config.schema import RunConfig
from flowrl.data import PromptMixture, PromptSet, Row, source_field
from flowrl.errors import ConfigError
from flowrl.rollout.policies import WeightedShares
from flowrl.runtime.driver.graph_parts import GraphParts
from flowrl.runtime.rollout_maker import settings_of, train_key

__all__ = ["PromptShares", "require_sources", "shares_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptShares:
    """Of one stage.

    Attributes:
        weights: By source.
        source_of: The source of a row.
        where: The config key.
    """

    weights: Mapping[str, float]
    source_of: Callable[[Row], str]
    where: str


def shares_of(config: RunConfig, stage: CompiledStage) -> PromptShares | None:
    """The shares of a stage that draws; None where sources are not told apart.

    Raises:
        ConfigError: there are shares, and no `data.source`.
    """
    parts = GraphParts(stage.graph).rollouts
    if not parts:
        return None
    fairness = settings_of(config, stage, parts[0]).fairness
    if not isinstance(fairness, WeightedShares):
        return None
    where = f"{train_key(config, stage)}.policies.fairness"
    if config.data.source is None:
        raise ConfigError(
            "sources have shares, but rows do not say their source",
            where="data.source",
            expected=f"the field of a row that names its source, for {where}",
        )
    return PromptShares(
        weights=dict(fairness.shares),
        source_of=source_field(config.data.source),
        where=where,
    )


def require_sources(config: RunConfig, stage: CompiledStage, prompts: PromptSet) -> None:
    """Checks that the data has the sources that shares are of, and no others.

    Raises:
        ConfigError: it has not; with the names.
    """
    shares = shares_of(config, stage)
    if shares is not None:
        PromptMixture(prompts, 0, shares.weights, shares.source_of, where=shares.where)
