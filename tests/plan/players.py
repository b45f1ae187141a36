"""Programs in which policies play several games in a step."""

from __future__ import annotations

from functools import partial

import flowrl as fl

play = partial(fl.interact, max_turns=16, max_observation_tokens=600)


@fl.workflow
def both_play(
    prompts: fl.Prompts, *, red: fl.Policy, blue: fl.Policy, world: fl.Environment
) -> None:
    """Two policies, each in episodes of its own with one environment."""
    for policy in (red, blue):
        rollout, scores = play(policy, world, prompts)
        policy.update(rollout, advantages=fl.advantage.group_relative(scores))


@fl.workflow
def two_worlds(
    prompts: fl.Prompts, *, red: fl.Policy, world: fl.Environment, other: fl.Environment
) -> None:
    """A policy in two environments."""
    played = [play(red, one, prompts) for one in (world, other)]
    for rollout, scores in played:
        red.update(rollout, advantages=fl.advantage.group_relative(scores))


@fl.workflow
def twice(prompts: fl.Prompts, *, red: fl.Policy, world: fl.Environment) -> None:
    """A policy that plays one environment twice."""
    played = [play(red, world, prompts) for _ in range(2)]
    for rollout, scores in played:
        red.update(rollout, advantages=fl.advantage.group_relative(scores))


@fl.workflow
def debate(prompts: fl.Prompts, *, red: fl.Policy, blue: fl.Policy, world: fl.Environment) -> None:
    """Two policies take turns in an episode."""
    for policy, (turns, scores) in zip((red, blue), play((red, blue), world, prompts), strict=True):
        policy.update(turns, advantages=fl.advantage.group_relative(scores))
