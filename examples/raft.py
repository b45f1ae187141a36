"""Rejection sampling: a policy imitates those of its own answers that are right.

    flowrl graph examples/raft.py        # what it does, as a picture
    python examples/raft.py              # run it: a warm start from examples, then RAFT
    flowrl run configs/quickstart.yaml workflow=examples/raft.py args.at_least=0.5

Each prompt is answered `train.group_size` times, and the answers that score at least `at_least` are
learnt by cross-entropy, without an advantage or a ratio. RAFT (Dong et al., 2023, arXiv:2304.06767)
imitates the best of each group, which is `fl.select.top(rollout, scores, k=1)`; a threshold suits
rewards that say right or wrong.
"""

import flowrl as fl


@fl.workflow
def raft(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward, at_least: float = 1.0):
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    good, _ = fl.select.threshold(rollout, scores, at_least=at_least)
    actor.update(good, loss=fl.loss.cross_entropy())


if __name__ == "__main__":
    fl.run(raft, "configs/quickstart.yaml")
