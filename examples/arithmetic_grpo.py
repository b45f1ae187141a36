"""A workflow and a reward of one's own: a tiny model learns to add two-digit numbers.

    flowrl graph examples/arithmetic_grpo.py      # what it does, as a picture
    python examples/arithmetic_grpo.py            # run it: a warm start from examples, then GRPO

The config `configs/quickstart.yaml` brings the model, the data and the warm start; here the last
stage's workflow and the reward are replaced.
"""

import flowrl as fl


@fl.workflow(max_staleness=0)
def arithmetic_grpo(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    group_size: int | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
):
    """GRPO without KL, with clip-higher, on the groups that have something to teach."""
    rollout = actor.generate(prompts, n=group_size)
    scores = verifier.score(rollout)
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    advantages = fl.advantage.group_relative(scores, std="group")
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(clip_low, clip_high))


def exact(prompt: str, response: str, answer: str, row: dict) -> float:
    """1 for the right sum, 0 for anything else; `23+45=` wants `068`."""
    return 1.0 if response.strip() == answer else 0.0


if __name__ == "__main__":
    fl.run(
        arithmetic_grpo,
        "configs/quickstart.yaml",
        overrides=[
            f"rewards.terms=[{{kind: python, name: accuracy, function: '{__file__}:exact'}}]",
        ],
    )
