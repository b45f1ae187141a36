"""One policy learns in several environments at once: which one it acts in, the data row says.

As in Xi et al., "AgentGym-RL: training LLM agents for long-horizon decision making through
multi-turn reinforcement learning", 2025 (arXiv:2509.08755), whose policy is trained over tasks of
different environments; the objective is GRPO's (`grpo`) on whole episodes. The field `row` of the
data rows names the environment, a role. Episodes of all environments make one update; a group is of
one prompt, so that advantages compare episodes of one environment only.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def multi_environment(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    environments: list[fl.Environment],
    row: str = "environment",
    max_turns: int = 8,
    max_observation_tokens: int = 64,
    group_size: int | None = None,
    clip: float = 0.2,
) -> None:
    """An agent in several environments; `group_size=None` takes `train.group_size`."""
    played = [
        fl.interact(
            actor,
            environment,
            fl.where(prompts, row=row, equals=environment.name),
            n=group_size,
            max_turns=max_turns,
            max_observation_tokens=max_observation_tokens,
        )
        for environment in environments
    ]
    for environment, (_, scores) in zip(environments, played, strict=True):
        fl.log(f"{environment.name}/score", scores)
    rollout, scores = fl.concat(*played)
    advantages = fl.advantage.group_relative(scores)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(clip))
