"""A program with functions of its own in every place that takes one."""

from __future__ import annotations

from typing import Any

import flowrl as fl


@fl.map(reads=("score", "response_mask"), per_sample=True)
def brief(batch: Any, *, scale: float = 0.01) -> Any:
    return batch["score"] - scale * batch.lengths


@fl.map(reads="rollout_logprobs", gives="surprise/tokens")
def surprise(batch: Any) -> Any:
    return -batch["rollout_logprobs"]


@fl.advantage.own(needs="mask")
def by_length(batch: Any, *, power: float = 0.5) -> Any:
    return batch.scores / batch.mask.sum(1) ** power


@fl.loss.own(
    needs=("advantages", "behaviour_logprobs"),
    extra="surprise",
    corrects_behaviour=True,
    aggregation="sequence-mean-token-mean",
)
def nearby(logprobs: Any, batch: Any, *, beta: float = 0.1) -> Any:
    gap = logprobs - batch.behaviour_logprobs
    return -batch.advantages * gap.exp() + beta * gap.square() * batch.extra["surprise"]


@fl.workflow
def own_parts(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    reference: fl.Policy,
    judge: fl.Reward,
    target: float | None = None,
) -> None:
    rollout = actor.generate(prompts)
    scores = brief(judge.score(rollout), rollout, scale=0.5)
    fl.log("brief", scores)
    actor.update(
        rollout,
        advantages=by_length(scores, rollout),
        reference=reference.logprobs(rollout),
        kl=fl.kl.k3(0.1, target=target),
        loss=nearby(),
        extra=surprise(rollout),
    )
