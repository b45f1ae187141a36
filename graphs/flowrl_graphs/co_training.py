"""Generator and verifier learn together: the verifier says whether answers are right.

Zha et al., "RL Tango: reinforcing generator and verifier together for language reasoning", 2025
(arXiv:2505.15034): the verifier is a language model, too, and is rewarded for verdicts that agree
with the outcome; the generator is rewarded by the outcome and by the verifier. With the outcome r_i
of an answer, 0 or 1, and the verdicts v_ij on it,

    agreement_ij = 1 - |v_ij - r_i|              scores of the verifier, compared within answer i
    score_i      = r_i + weight mean_j v_ij      scores of the generator, compared within a prompt

Both use the advantage and the loss of `flowrl_graphs.grpo`. Tango's verifier judges each step of
an answer; this one judges the answer.
"""

from __future__ import annotations

import numpy as np

import flowrl as fl
from flowrl.algo.maps import Array, MapBatch

QUESTION = "{prompt}{response}\nIs this right, 1 (yes) or 0 (no)?\n"


@fl.map(reads=("score", "score_2"), gives="score", per_sample=True)
def agreement(batch: MapBatch) -> Array:
    """1 where both scores are the same, less as they differ; float32 `[N]`."""
    difference: Array = np.abs(batch["score"] - batch["score_2"])
    return 1.0 - difference


@fl.workflow
def co_training(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    judge: fl.Policy,
    verifier: fl.Reward,
    template: str = QUESTION,
    verdicts: int = 4,
    weight: float = 0.2,
    group_size: int | None = None,
    clip: float = 0.2,
) -> None:
    """The actor learns to answer, the judge to tell right answers from wrong ones.

    `group_size=None` takes `train.group_size`. A verdict without 0 or 1 counts as 1/2.
    """
    answers = actor.generate(prompts, n=group_size)
    right = verifier.score(answers)
    said = judge.generate(fl.prompts_of(answers, template=template), n=verdicts)
    stated = fl.parse(said, regex="[01]", otherwise=0.5)
    agreed = agreement(stated, fl.parent(right, of=said))
    assert isinstance(agreed, fl.Scores)
    fl.log("agreement", agreed)
    loss = fl.loss.policy_clip(clip)
    judge.update(said, advantages=fl.advantage.group_relative(agreed), loss=loss)
    scores = fl.weighted_sum((right, 1.0), (fl.mean_of_children(stated), weight))
    actor.update(answers, advantages=fl.advantage.group_relative(scores), loss=loss)
