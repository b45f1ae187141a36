"""The shortest workflow: generate, score, update. Advantage and loss come from the config (GRPO).

flowrl graph examples/three_lines.py
flowrl run configs/quickstart.yaml workflow=examples/three_lines.py roles.reward.backend=verify
"""

import flowrl as fl


@fl.workflow
def three_lines(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
    responses = actor.generate(prompts)
    rewards = reward.score(responses)
    actor.update(responses, rewards)


if __name__ == "__main__":
    fl.run(three_lines, "configs/quickstart.yaml")
