"""GRPO on what a language model says of the answers: scores, or verdicts on pairs.

The judge answers a prompt that is made of each answer, several times if asked, and states a number
(Zheng et al., "Judging LLM-as-a-judge with MT-Bench and chatbot arena", 2023, arXiv:2306.05685).
With `opponents=0` the number is a score, and the score of an answer is the mean over its verdicts.
With `opponents=k` the judge compares each answer with k others of its group, and the score is the
share of comparisons that the answer wins (`fl.win_rate` has the formula). Each answer is the first
of a pair as often as the second, so a judge that prefers a position shifts no score.

The advantage and the loss are those of `flowrl_graphs.grpo`.
"""

from __future__ import annotations

import flowrl as fl

SCORE = "{prompt}{response}\nHow good is this answer, from 0 to 9?\nSCORE: "
DUEL = "{prompt}{response}\nAnother answer:\n{opponent}\nWhich one is better, 1 or 2?\nWINNER: "


@fl.workflow
def generative_judge(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    judge: fl.Policy,
    template: str | None = None,
    regex: str = r"(\d)",
    otherwise: float = 0.0,
    opponents: int = 0,
    verdicts: int = 1,
    group_size: int | None = None,
    clip: float = 0.2,
) -> None:
    """The policy learns what the judge prefers; the judge does not learn.

    `group_size=None` takes `train.group_size`. Of each prompt to the judge there are `verdicts`;
    one without a number counts as `otherwise`, which on pairs is a tie unless it is 1 or 2.
    """
    rollout = actor.generate(prompts, n=group_size)

    def stated(template: str, opponent: int | None = None) -> fl.Scores:
        asked = fl.prompts_of(rollout, template=template, opponent=opponent)
        return fl.parse(judge.generate(asked, n=verdicts), regex=regex, otherwise=otherwise)

    if opponents:
        won = [stated(template or DUEL, place) for place in range(1, opponents + 1)]
        scores = fl.win_rate(*won)
    else:
        scores = fl.mean_of_children(stated(template or SCORE))
    fl.log("judged", scores)
    advantages = fl.advantage.group_relative(scores)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(clip))
