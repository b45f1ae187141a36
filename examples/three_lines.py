"""The shortest workflow: generate, score, update. Advantage and loss come from the config (GRPO).

From the root of the repository, any of

    flowrl graph examples/three_lines.py
    python examples/three_lines.py
    flowrl run configs/quickstart.yaml workflow=examples/three_lines.py roles.reward.backend=verify
"""

import flowrl as fl


@fl.workflow
def three_lines(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
    responses = actor.generate(prompts)
    rewards = reward.score(responses)
    actor.update(responses, rewards)


if __name__ == "__main__":
    fl.run(three_lines, "configs/quickstart.yaml", overrides=["roles.reward.backend=verify"])
