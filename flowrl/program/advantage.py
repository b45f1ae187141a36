"""`fl.advantage`: how scores become the weights of the policy gradient.

The first ones give one number a sample, and most read the scores alone. The others give one number
a token and read the rollout too, the same one that was scored or what a filter left of both.
Formulas, with paper and equation, are at their functions in `flowrl.algo.advantages`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec

from flowrl.program.formulas import add_advantage, returns_of, weighted_scores
from flowrl.program.formulas import own_advantage as own
from flowrl.program.handles import (
    Advantages,
    Logprobs,
    Returns,
    Rollout,
    Scores,
    TokenRewards,
    Values,
)
from flowrl.program.operation import Call, operation_of
from flowrl.specs import AdvantageSpec, GroupRelative
from flowrl.specs.advantage import (
    GAE,
    GPG,
    Centre,
    Distill,
    GroupInGroup,
    KLCredit,
    LeaveOneOut,
    LengthWeighted,
    Masking,
    MaxRL,
    NormaliseThenSum,
    OptimalTokenBaseline,
    PassAtK,
    ProcessRewards,
    ReinforcePP,
    ReMax,
    Scale,
    Singleton,
    ZeroStd,
)
from flowrl.specs.base import format_list
from flowrl.specs.kl import Estimator
from flowrl.specs.names import operation, refusing_others

__all__ = [
    "distill",
    "gae",
    "gpg",
    "group_in_group",
    "group_relative",
    "leave_one_out",
    "length_weighted",
    "max_rl",
    "normalise_then_sum",
    "optimal_token_baseline",
    "own",
    "pass_at_k",
    "reinforce_pp",
    "remax",
]

if not TYPE_CHECKING:  # a type checker is to refuse names that are not there
    __getattr__ = refusing_others(__name__, __all__)


_P = ParamSpec("_P")


def _of_scores(kind: Callable[_P, AdvantageSpec]) -> Callable[Concatenate[Scores, _P], Advantages]:
    return operation_of(kind, add_advantage, __name__, scores=Scores)


def _of_samples(
    kind: Callable[_P, AdvantageSpec],
) -> Callable[Concatenate[Scores, Rollout, _P], Advantages]:
    return operation_of(kind, add_advantage, __name__, scores=Scores, rollout=Rollout)


group_relative = _of_scores(GroupRelative)
leave_one_out = _of_scores(LeaveOneOut)
gpg = _of_scores(GPG)
max_rl = _of_scores(MaxRL)
pass_at_k = _of_scores(PassAtK)
length_weighted = _of_samples(LengthWeighted)
group_in_group = _of_samples(GroupInGroup)


@operation
def normalise_then_sum(
    *scores: tuple[Scores, float],
    std: Scale = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    batch_eps: float = 1e-6,
    mean: Centre = "group",
    singleton: Singleton = "zero",
    zero_std: ZeroStd = "keep",
) -> Advantages:
    """Each reward normalised by its group, the weighted sum, then that by the batch: GDPO.

    Args:
        scores: Pairs of scores and weight: `(accuracy, 1.0), (style, 0.2)`.
        std: What each reward's centred values are divided by; see `group_relative`.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: Added to the group's standard deviation.
        batch_eps: Added to the batch's standard deviation.
        mean: What is subtracted from each reward.
        singleton: What a group of one gets of each reward.
        zero_std: Where a reward's standard deviation is 0.
    """
    rewards, weights = weighted_scores(Call("fl.advantage.normalise_then_sum"), scores, least=2)
    spec = NormaliseThenSum(
        reward_weights=format_list(weights),
        std=std,
        ddof=ddof,
        eps=eps,
        batch_eps=batch_eps,
        mean=mean,
        singleton=singleton,
        zero_std=zero_std,
    )
    return add_advantage(spec, rewards)


# One number a token.


@operation
def reinforce_pp(
    scores: Scores | None,
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
    token_rewards: TokenRewards | None = None,
) -> Advantages:
    """Rewards-to-go, standardised over all response tokens of the batch: REINFORCE++.

    With `mean="group"` its baseline form, REINFORCE++-baseline. One advantage a token.

    Args:
        scores: One a sample; it is the reward of the sample's last token. None where
            `token_rewards` are all of the reward.
        rollout: The samples that were scored.
        mean: What is subtracted from a score first, see `group_relative`; from token rewards, the
            mean over the same samples of their means.
        gamma: Discount, a token.
        whiten: Whether advantages are standardised over all response tokens of the batch.
        reference: Logprobs of the reference policy, for a KL penalty in the reward.
        kl: Its coefficient; 0 is none.
        kl_estimator: Of the penalty at each token.
        kl_credit: Whether a token answers for its own penalty and all later ones
            (`reward_to_go`), or for its own alone (`token`).
        singleton: What a group of one has left of its score, where the mean is a group's.
        token_rewards: Rewards of tokens in addition to the score, as a process reward model gives
            them; with `mean="group_others"` the advantage of PRIME.
    """
    spec = ReinforcePP(
        mean=mean,
        gamma=gamma,
        whiten=whiten,
        kl_coefficient=kl,
        kl_estimator=kl_estimator,
        kl_credit=kl_credit,
        singleton=singleton,
        token_rewards=_process_rewards("reinforce_pp", scores, token_rewards),
    )
    return add_advantage(spec, scores, rollout, reference, token_rewards=token_rewards)


def _process_rewards(
    name: str, scores: Scores | None, token_rewards: TokenRewards | None
) -> ProcessRewards:
    """Says which rewards an advantage has."""
    if token_rewards is None:
        if scores is None:
            raise Call(f"fl.advantage.{name}").refuse(
                "scores",
                scores,
                "scores, or token_rewards= as all of the reward",
            )
        return "none"
    return "alone" if scores is None else "added"


@operation
def gae(
    scores: Scores | None,
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
    token_rewards: TokenRewards | None = None,
) -> tuple[Advantages, Returns]:
    """Generalised advantage estimation with a critic: PPO; decoupled lambdas: VC-PPO, VAPO.

    Args:
        scores: One a sample; it is the reward of the sample's last token. Of a rollout that
            `fl.interact` returned, the rewards of its turns take its place. None where
            `token_rewards` are all of the reward.
        values: The critic's, of the same rollout.
        rollout: The samples that were scored.
        gamma: Discount, a token.
        lam: Lambda of the advantages.
        lam_value: Lambda of the critic's targets; None: the same.
        length_alpha: Above 0, a sample of l tokens has lambda 1 - 1 / (length_alpha l) instead.
        whiten, reference, kl, kl_estimator, token_rewards: As of `reinforce_pp`.
        masking: What the recursion does at tokens that the policy did not produce.

    Returns:
        Advantages, one a token, and the critic's targets, for `critic.update(returns=...)`.
    """
    spec = GAE(
        gamma=gamma,
        lam=lam,
        lam_value=lam_value,
        length_alpha=length_alpha,
        whiten=whiten,
        kl_coefficient=kl,
        kl_estimator=kl_estimator,
        masking=masking,
        token_rewards=_process_rewards("gae", scores, token_rewards),
    )
    advantages = add_advantage(
        spec, scores, rollout, reference, values, token_rewards=token_rewards
    )
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
    spec = ReMax(kl_coefficient=kl, kl_estimator=kl_estimator)
    return add_advantage(spec, scores, rollout, reference, baseline=baseline)


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
    spec = OptimalTokenBaseline(eps=eps, lone_tail=lone_tail, singleton=singleton)
    return add_advantage(spec, scores, rollout, policy=policy)


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
    call = Call("fl.advantage.distill")
    call.handle("teacher", teacher, Logprobs)
    if (scores is None) != (score_weight == 0):
        expected = "a weight above 0 with scores, and 0 without"
        raise call.refuse("score_weight", score_weight, expected)
    spec = Distill(
        coefficient=coefficient,
        discount=discount,
        score_weight=score_weight,
        mean=mean,
        singleton=singleton,
    )
    return add_advantage(spec, scores, rollout, teacher)
