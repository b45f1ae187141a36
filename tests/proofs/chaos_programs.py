"""Synchronous programs of the chaos runs, whose weights do not depend on who shares a batch."""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def single(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """One response for a prompt; an engine's own logprobs differ with its batches."""
    rollout = actor.generate(prompts)
    advantages = fl.advantage.group_relative(verifier.score(rollout))
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(anchor="old"))


@fl.workflow
def episodes(prompts: fl.Prompts, *, actor: fl.Policy, game: fl.Environment) -> None:
    """Episodes of several turns."""
    rollout, scores = fl.interact(actor, game, prompts, max_turns=3, max_observation_tokens=1)
    advantages = fl.advantage.group_in_group(scores, rollout)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(anchor="old"))
