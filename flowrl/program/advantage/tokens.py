"""Advantages of tokens: rewards-to-go, critics, greedy baselines, turns, teachers.

All of them read the rollout in addition to the scores, the same one that was scored or what a
filter left of both. Formulas, with paper and equation, are at their functions in
`flowrl.algo.advantages`.
"""

from __future__ import annotations

from typing import Literal, get_args

from flowrl.program.advantage.node import add_advantage, choice, number, returns_of
from flowrl.program.handles import Advantages, Logprobs, Returns, Rollout, Scores, Values
from flowrl.program.operation import operation, refuse_argument
from flowrl.specs import GAE, GroupInGroup, OptimalTokenBaseline, ReinforcePP, ReMax
from flowrl.specs.advantage import Centre, Scale, Singleton
from flowrl.specs.kl import Estimator
from flowrl.specs.token_advantage import Distill, KLCredit, Masking

__all__ = ["distill", "gae", "group_in_group", "optimal_token_baseline", "reinforce_pp", "remax"]


@operation
def reinforce_pp(
    scores: Scores,
    rollout: Rollout,
    *,
    mean: Centre = "none",
    gamma: float = 1.0,
    whiten: bool = True,
    reference: Logprobs | None = None,
    kl: float = 0.0,
    kl_estimator: Estimator = "k1",
    kl_credit: KLCredit = "reward_to_go",
    singleton: Singleton = "zero",
) -> Advantages:
    """Rewards-to-go, standardised over all response tokens of the batch: REINFORCE++.

    With `mean="group"` its baseline form, REINFORCE++-baseline. One advantage a token.

    Args:
        scores: One a sample; it is the reward of the sample's last token.
        rollout: The samples that were scored.
        mean: What is subtracted from a score first; see `group_relative`.
        gamma: Discount, a token.
        whiten: Whether advantages are standardised over all response tokens of the batch.
        reference: Logprobs of the reference policy, for a KL penalty in the reward.
        kl: Its coefficient; 0 is none.
        kl_estimator: Of the penalty at each token.
        kl_credit: Whether a token answers for its own penalty and all later ones
            (`reward_to_go`), or for its own alone (`token`).
        singleton: What a group of one has left of its score, where the mean is a group's.
    """
    name = "fl.advantage.reinforce_pp"
    choice(name, "mean", mean, get_args(Centre))
    choice(name, "whiten", whiten, (True, False))
    choice(name, "kl_estimator", kl_estimator, get_args(Estimator))
    choice(name, "kl_credit", kl_credit, get_args(KLCredit))
    choice(name, "singleton", singleton, get_args(Singleton))
    spec = ReinforcePP(
        mean=mean,
        gamma=number(name, "gamma", gamma, most=1),
        whiten=whiten,
        kl_coefficient=number(name, "kl", kl),
        kl_estimator=kl_estimator,
        kl_credit=kl_credit,
        singleton=singleton,
    )
    return add_advantage(name, spec, scores, rollout, reference)


@operation
def gae(
    scores: Scores,
    values: Values,
    rollout: Rollout,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_value: float | None = None,
    length_alpha: float = 0.0,
    whiten: bool = True,
    reference: Logprobs | None = None,
    kl: float = 0.0,
    kl_estimator: Estimator = "k1",
    masking: Masking = "carry",
) -> tuple[Advantages, Returns]:
    """Generalised advantage estimation with a critic: PPO; decoupled lambdas: VC-PPO, VAPO.

    Args:
        scores: One a sample; it is the reward of the sample's last token. Of a rollout that
            `fl.interact` returned, the rewards of its turns take its place.
        values: The critic's, of the same rollout.
        rollout: The samples that were scored.
        gamma: Discount, a token.
        lam: Lambda of the advantages.
        lam_value: Lambda of the critic's targets; None: the same.
        length_alpha: Above 0, a sample of l tokens has lambda 1 - 1 / (length_alpha l) instead.
        whiten: Whether advantages are standardised over all response tokens of the batch.
        reference: Logprobs of the reference policy, for a KL penalty in the reward.
        kl: Its coefficient; 0 is none.
        kl_estimator: Of the penalty at each token.
        masking: What the recursion does at tokens that the policy did not produce.

    Returns:
        Advantages, one a token, and the critic's targets, for `critic.update(returns=...)`.
    """
    name = "fl.advantage.gae"
    choice(name, "whiten", whiten, (True, False))
    choice(name, "kl_estimator", kl_estimator, get_args(Estimator))
    choice(name, "masking", masking, get_args(Masking))
    spec = GAE(
        gamma=number(name, "gamma", gamma, most=1),
        lam=number(name, "lam", lam, most=1),
        lam_value=None if lam_value is None else number(name, "lam_value", lam_value, most=1),
        length_alpha=number(name, "length_alpha", length_alpha),
        whiten=whiten,
        kl_coefficient=number(name, "kl", kl),
        kl_estimator=kl_estimator,
        masking=masking,
    )
    advantages = add_advantage(name, spec, scores, rollout, reference, values)
    return advantages, returns_of(advantages, spec)


@operation
def remax(
    scores: Scores,
    rollout: Rollout,
    *,
    baseline: Scores,
    reference: Logprobs | None = None,
    kl: float = 0.0,
    kl_estimator: Estimator = "k1",
) -> Advantages:
    """Score minus the score of the greedy answer to the same prompt: ReMax.

    Args:
        scores: One a sample.
        rollout: The samples that were scored.
        baseline: The score of one answer to each prompt, of a rollout of its own:
            `verifier.score(actor.generate(prompts, n=1, temperature=0))`.
        reference: Logprobs of the reference policy, for a KL penalty in the reward.
        kl: Its coefficient; 0 is none.
        kl_estimator: Of the penalty at each token.
    """
    name = "fl.advantage.remax"
    choice(name, "kl_estimator", kl_estimator, get_args(Estimator))
    spec = ReMax(kl_coefficient=number(name, "kl", kl), kl_estimator=kl_estimator)
    return add_advantage(name, spec, scores, rollout, reference, baseline=baseline)


@operation
def group_in_group(
    scores: Scores,
    rollout: Rollout,
    *,
    weight: float = 1.0,
    gamma: float = 0.95,
    std: Scale = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> Advantages:
    """An episode's advantage in its group, plus that of each turn among turns of one state: GiGPO.

    Args:
        scores: One an episode.
        rollout: The rollout that `fl.interact` returned with them; it has turns, rewards and
            states.
        weight: Of the turn's advantage.
        gamma: Discount of a turn's return, a turn.
        std: What centred numbers are divided by; see `group_relative`.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: Added to it.
        singleton: What a group of one gets.
    """
    name = "fl.advantage.group_in_group"
    choice(name, "std", std, get_args(Scale))
    choice(name, "ddof", ddof, (0, 1))
    choice(name, "singleton", singleton, get_args(Singleton))
    spec = GroupInGroup(
        weight=number(name, "weight", weight),
        gamma=number(name, "gamma", gamma, most=1),
        std=std,
        ddof=ddof,
        eps=number(name, "eps", eps),
        singleton=singleton,
    )
    return add_advantage(name, spec, scores, rollout)


@operation
def optimal_token_baseline(
    scores: Scores,
    rollout: Rollout,
    *,
    policy: Logprobs,
    lone_tail: Literal["baseline", "zero"] = "baseline",
    singleton: Singleton = "zero",
    eps: float = 1e-8,
) -> Advantages:
    """Reward-to-go minus the group's baseline of least variance at each time step. One a token.

    Args:
        scores: One a sample; it is the reward of the sample's last token.
        rollout: The samples that were scored.
        policy: Logprobs of the policy that generated them: `actor.logprobs(rollout)`, before its
            update. A second forward pass of the same weights gives the sums of squared
            probabilities.
        lone_tail: What the one longest sample of a group gets where no other reaches: its own
            reward-to-go as `baseline` (advantage 0), or `zero` baseline.
        singleton: What a group of one gets: advantage `zero`, or its `raw` reward-to-go.
        eps: Added to the sum of weights.
    """
    name = "fl.advantage.optimal_token_baseline"
    choice(name, "lone_tail", lone_tail, ("baseline", "zero"))
    choice(name, "singleton", singleton, get_args(Singleton))
    spec = OptimalTokenBaseline(
        eps=number(name, "eps", eps), lone_tail=lone_tail, singleton=singleton
    )
    return add_advantage(name, spec, scores, rollout, policy=policy)


@operation
def distill(
    rollout: Rollout,
    *,
    teacher: Logprobs,
    coefficient: float = 1.0,
    discount: float = 0.0,
    scores: Scores | None = None,
    score_weight: float = 0.0,
    mean: Centre = "group",
    singleton: Singleton = "zero",
) -> Advantages:
    """On-policy distillation: the teacher's logprob of each token minus the sampler's.

    Args:
        rollout: The student's samples.
        teacher: The teacher's logprobs of them: `teacher.logprobs(rollout)`.
        coefficient: Of the difference of logprobs.
        discount: Of the differences of later tokens; 0: a token answers for its own alone.
        scores: One score per sample, learnt from in addition to the teacher.
        score_weight: Of the centred score at every token.
        mean: What is subtracted from a score first; see `group_relative`.
        singleton: What a group of one has left of its score, where the mean is a group's.
    """
    name = "fl.advantage.distill"
    choice(name, "mean", mean, get_args(Centre))
    choice(name, "singleton", singleton, get_args(Singleton))
    if (scores is None) != (number(name, "score_weight", score_weight) == 0):
        raise refuse_argument(
            name,
            "score_weight",
            score_weight,
            "a weight above 0 with scores, and 0 without",
        )
    spec = Distill(
        coefficient=number(name, "coefficient", coefficient),
        discount=number(name, "discount", discount, most=1),
        score_weight=float(score_weight),
        mean=mean,
        singleton=singleton,
    )
    return add_advantage(name, spec, scores, rollout, teacher)
