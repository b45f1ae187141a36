"""`fl.replay`: earlier samples, in addition to those of the step.

    hard, hard_scores = fl.filter.difficulty(rollout, scores)
    old, old_scores = fl.replay(hard, hard_scores, n=8)
    actor.update(old, advantages=fl.advantage.group_relative(old_scores))

The filters and selections before it are the rule by which samples are held. The buffer is a part of
the run's state: checkpoints hold it, and a resumed run replays what the stopped one would have.
"""

from __future__ import annotations

from typing import Literal

from flowrl.graph.ir import Op
from flowrl.program.formulas import add_subset
from flowrl.program.handles import Rollout, Scores
from flowrl.specs.names import operation
from flowrl.specs.replay import Replay


@operation
def replay(
    rollout: Rollout,
    scores: Scores,
    *,
    n: int,
    capacity: int = 512,
    max_age: int = 8,
    choose: Literal["random", "newest"] = "random",
) -> tuple[Rollout, Scores]:
    """Groups of earlier steps, with the scores and the rollout logprobs that they had then.

    The groups of this step are held from the next step on. In the first step, or where all are too
    old, nothing is returned, and what works on the replayed samples is skipped.

    Samples come from older policies, so that an update on them needs a loss that corrects for the
    policy that sampled them; others are refused. RePO (Li et al., arXiv 2506.09340) updates on
    fresh and on replayed samples with the clipped ratio to that policy, with advantages of their
    own for each; ExGRPO (Zhan et al., arXiv 2510.02245) replays prompts that are neither always nor
    never solved. RePO chooses among earlier samples of the step's own prompts; here they are those
    of any prompt.

    Args:
        rollout: The samples to hold; filters and selections before choose them.
        scores: One for each of them.
        n: Groups that a step gets.
        capacity: Groups that are held; the oldest go first.
        max_age: Weight publications that a group may be behind when it is returned.
        choose: `random` or `newest` of those that are held.
    """
    spec = Replay(n=n, capacity=capacity, max_age=max_age, choose=choose)
    return add_subset(Op.REPLAY, spec, rollout, scores)
