"""Advantages of scores: one number a sample.

Formulas, with paper and equation, are at their functions in `flowrl.algo.advantages`.
"""

from __future__ import annotations

from typing import Literal, get_args

from flowrl.program.advantage.node import add_advantage, choice, number
from flowrl.program.handles import Advantages, Rollout, Scores
from flowrl.program.operation import operation, refuse_argument
from flowrl.specs import (
    GPG,
    GroupRelative,
    LeaveOneOut,
    LengthWeighted,
    MaxRL,
    NormaliseThenSum,
    PassAtK,
)
from flowrl.specs.advantage import Centre, Scale, Singleton, StdAbout, ZeroStd
from flowrl.specs.base import format_list

__all__ = [
    "gpg",
    "group_relative",
    "leave_one_out",
    "length_weighted",
    "max_rl",
    "normalise_then_sum",
    "pass_at_k",
]


@operation
def group_relative(
    scores: Scores,
    *,
    std: Scale = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    mean: Centre = "group",
    std_about: StdAbout = "mean",
    zero_std: ZeroStd = "keep",
    variance_floor: float = 0.0,
) -> Advantages:
    """(score - mean of its group) / (std + eps): GRPO; with `std="none"`, Dr.GRPO.

    Args:
        scores: One a sample, as `reward.score` returned them.
        std: What centred scores are divided by: the standard deviation of the `group`, of the
            `batch`, of the group's other members (`group_others`), or `none`.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: Added to the standard deviation, outside the root.
        singleton: What a group of one gets: `zero`, or its `raw` score.
        mean: What is subtracted: the mean of the `group`, of its other members (`group_others`),
            of the `batch`, of the batch's other samples (`batch_others`), or `none`.
        std_about: Whether deviations are from the `mean` of the scores that they are over, or from
            the `centre` that was subtracted.
        zero_std: Where the standard deviation is 0: `keep` centred scores, or `divide` by eps.
        variance_floor: The least variance that is divided by.
    """
    name = "fl.advantage.group_relative"
    choice(name, "std", std, get_args(Scale))
    choice(name, "singleton", singleton, get_args(Singleton))
    choice(name, "ddof", ddof, (0, 1))
    choice(name, "mean", mean, get_args(Centre))
    choice(name, "std_about", std_about, get_args(StdAbout))
    choice(name, "zero_std", zero_std, get_args(ZeroStd))
    spec = GroupRelative(
        std=std,
        ddof=ddof,
        eps=number(name, "eps", eps),
        singleton=singleton,
        mean=mean,
        std_about=std_about,
        zero_std=zero_std,
        variance_floor=number(name, "variance_floor", variance_floor),
    )
    return add_advantage(name, spec, scores)


@operation
def leave_one_out(
    scores: Scores,
    *,
    singleton: Singleton = "zero",
    batch_std: bool = False,
    eps: float = 1e-4,
) -> Advantages:
    """score - mean of the group's other scores: RLOO.

    Args:
        scores: One a sample.
        singleton: What a group of one gets: `zero`, or its `raw` score.
        batch_std: Whether the result is standardised once more over the batch.
        eps: Added to the batch's standard deviation.
    """
    name = "fl.advantage.leave_one_out"
    choice(name, "singleton", singleton, get_args(Singleton))
    choice(name, "batch_std", batch_std, (True, False))
    spec = LeaveOneOut(singleton=singleton, batch_std=batch_std, eps=number(name, "eps", eps))
    return add_advantage(name, spec, scores)


@operation
def length_weighted(
    scores: Scores, rollout: Rollout, *, singleton: Singleton = "zero"
) -> Advantages:
    """score - mean of the group weighted by response length: OPO's optimal baseline.

    Args:
        scores: One a sample.
        rollout: The samples that were scored; their lengths are read.
        singleton: What a group of one gets: `zero`, or its `raw` score.
    """
    name = "fl.advantage.length_weighted"
    choice(name, "singleton", singleton, get_args(Singleton))
    return add_advantage(name, LengthWeighted(singleton=singleton), scores, rollout)


@operation
def gpg(scores: Scores, *, norm: float = 1.0, singleton: Singleton = "zero") -> Advantages:
    """Group-centred scores x (samples / samples whose score is not 0) / norm: GPG.

    Args:
        scores: One a sample.
        norm: F_norm of the paper, a constant above 0.
        singleton: What a group of one gets, before the factor.
    """
    name = "fl.advantage.gpg"
    choice(name, "singleton", singleton, get_args(Singleton))
    if number(name, "norm", norm) == 0:
        raise refuse_argument(name, "norm", norm, "a number above 0")
    return add_advantage(name, GPG(norm=float(norm), singleton=singleton), scores)


@operation
def max_rl(scores: Scores, *, eps: float = 1e-6, singleton: Singleton = "zero") -> Advantages:
    """(score - mean of its group) / (mean of its group + eps): MaxRL, for scores from 0 up.

    Args:
        scores: One a sample.
        eps: Added to the mean, so that a group without success gets 0.
        singleton: What a group of one gets: `zero`, or its `raw` score.
    """
    name = "fl.advantage.max_rl"
    choice(name, "singleton", singleton, get_args(Singleton))
    return add_advantage(name, MaxRL(eps=number(name, "eps", eps), singleton=singleton), scores)


@operation
def pass_at_k(
    scores: Scores,
    *,
    std: Literal["group", "none"] = "none",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> Advantages:
    """The best of a group gets its lead over the second best, all others 0: pass@k training.

    Args:
        scores: One a sample.
        std: `group` divides by the standard deviation of the group's scores, `none` does not.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: Added to it.
        singleton: What a group of one gets: `zero`, or its `raw` score.
    """
    name = "fl.advantage.pass_at_k"
    choice(name, "std", std, ("group", "none"))
    choice(name, "ddof", ddof, (0, 1))
    choice(name, "singleton", singleton, get_args(Singleton))
    spec = PassAtK(std=std, ddof=ddof, eps=number(name, "eps", eps), singleton=singleton)
    return add_advantage(name, spec, scores)


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
    name = "fl.advantage.normalise_then_sum"
    choice(name, "std", std, get_args(Scale))
    choice(name, "ddof", ddof, (0, 1))
    choice(name, "mean", mean, get_args(Centre))
    choice(name, "singleton", singleton, get_args(Singleton))
    choice(name, "zero_std", zero_std, get_args(ZeroStd))
    if len(scores) < 2 or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in scores):
        raise refuse_argument(
            name, "scores", scores, "two or more pairs of scores and weight", "write (scores, 1.0)"
        )
    weights = [number(name, "scores", pair[1]) for pair in scores]
    spec = NormaliseThenSum(
        reward_weights=format_list(weights),
        std=std,
        ddof=ddof,
        eps=number(name, "eps", eps),
        batch_eps=number(name, "batch_eps", batch_eps),
        mean=mean,
        singleton=singleton,
        zero_std=zero_std,
    )
    return add_advantage(name, spec, [pair[0] for pair in scores])
