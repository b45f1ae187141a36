"""A policy that works with a tool or in a world for several turns, and is rewarded at the end.

    flowrl graph examples/agent.py
    flowrl plan configs/agent_qwen25_7b.yaml --cluster configs/clusters/h100_8x8.yaml

GRPO on whole episodes: what an episode is worth against the others of its prompt. The environment
is whatever the config names, such as `Calculator` of examples/calculator.py.
"""

import flowrl as fl


@fl.workflow
def agent(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    world: fl.Environment,
    max_turns: int = 16,
    max_observation_tokens: int = 512,
):
    rollout, scores = fl.interact(
        actor,
        world,
        prompts,
        max_turns=max_turns,
        max_observation_tokens=max_observation_tokens,
    )
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    advantages = fl.advantage.group_relative(scores)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2))
