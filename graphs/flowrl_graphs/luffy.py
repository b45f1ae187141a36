"""LUFFY: GRPO whose groups have demonstrations among the policy's own answers.

Yan et al., "Learning to reason under off-policy guidance", 2025 (arXiv:2504.14945): mixed-policy
GRPO with policy shaping. All samples of a prompt, its own answers and the solution of the data, are
compared together,

    A_i = (R_i - mean(R)) / std(R)

and with r = pi / pi_behaviour at each token

    J = mean over tokens of  min(r A, clip(r, 1 - clip, 1 + clip) A)    of the policy's answers
                             f(r) A,  f(x) = x / (x + gamma)            of the demonstrations

Whoever wrote a demonstration has no logprobs here. As in the paper its probability is taken as 1,
so that r = pi, and its ratio is not clipped; f weighs the gradient of unlikely tokens up.
"""

from __future__ import annotations

from typing import Any

import flowrl as fl

DEMONSTRATION = 1
"""The `source` of demonstrations: their place in `fl.concat`."""


@fl.loss.own(
    needs=("advantages", "behaviour_logprobs"),
    extra=("source",),
    corrects_behaviour=True,
    proportional=True,
)
def mixed_policy(logprobs: Any, batch: Any, *, clip: float = 0.2, gamma: float = 0.1) -> Any:
    """The loss of each token; `[R]`."""
    ratio = (logprobs - batch.behaviour_logprobs).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    own = (ratio * batch.advantages).minimum(clipped * batch.advantages)
    shaped = ratio / (ratio + gamma) * batch.advantages
    return -shaped.where(batch.extra["source"] == DEMONSTRATION, own)


@fl.workflow
def luffy(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    group_size: int | None = None,
    clip: float = 0.2,
    gamma: float = 0.1,
) -> None:
    """One demonstration and `group_size` answers; None takes `train.group_size`."""
    answers, solutions = actor.generate(prompts, n=group_size), fl.Examples.of(prompts)
    scored = (answers, verifier.score(answers)), (solutions, verifier.score(solutions))
    rollout, scores = fl.concat(*scored, missing_logprob=0.0)
    advantages = fl.advantage.group_relative(scores)
    actor.update(rollout, advantages=advantages, loss=mixed_policy(clip=clip, gamma=gamma))
