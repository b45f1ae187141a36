"""`fl.advantage`: how scores become the weights of the policy gradient.

Most read the scores alone. Those that look at tokens (`length_weighted`, `reinforce_pp`) read the
rollout too, the same one that was scored or what a filter left of both. Formulas, with paper and
equation, stand at their functions in `flowrl.algo.advantages`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

from flowrl.config.nearest import suggestion
from flowrl.graph.signatures import RESPONSE_MASK, ROLLOUT_LOGPROBS, advantage_outputs
from flowrl.graph.types import Op
from flowrl.program.handles import Advantages, Logprobs, Rollout, Scores
from flowrl.program.operation import (
    check_handle,
    current_tracer,
    is_number,
    operation,
    refuse_argument,
)
from flowrl.program.tracer import Read
from flowrl.specs import (
    GPG,
    AdvantageSpec,
    GroupRelative,
    LeaveOneOut,
    LengthWeighted,
    MaxRL,
    PassAtK,
    ReinforcePP,
)
from flowrl.specs.advantage import Centre, Scale, Singleton, StdAbout, ZeroStd
from flowrl.specs.kl import Estimator
from flowrl.specs.token_advantage import KLCredit

__all__ = [
    "gpg",
    "group_relative",
    "leave_one_out",
    "length_weighted",
    "max_rl",
    "pass_at_k",
    "reinforce_pp",
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
    _choice(name, "std", std, get_args(Scale))
    _choice(name, "singleton", singleton, get_args(Singleton))
    _choice(name, "ddof", ddof, (0, 1))
    _choice(name, "mean", mean, get_args(Centre))
    _choice(name, "std_about", std_about, get_args(StdAbout))
    _choice(name, "zero_std", zero_std, get_args(ZeroStd))
    spec = GroupRelative(
        std=std,
        ddof=ddof,
        eps=_number(name, "eps", eps),
        singleton=singleton,
        mean=mean,
        std_about=std_about,
        zero_std=zero_std,
        variance_floor=_number(name, "variance_floor", variance_floor),
    )
    return _advantages(name, spec, scores)


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
    _choice(name, "singleton", singleton, get_args(Singleton))
    _choice(name, "batch_std", batch_std, (True, False))
    spec = LeaveOneOut(singleton=singleton, batch_std=batch_std, eps=_number(name, "eps", eps))
    return _advantages(name, spec, scores)


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
    _choice(name, "mean", mean, get_args(Centre))
    _choice(name, "whiten", whiten, (True, False))
    _choice(name, "kl_estimator", kl_estimator, get_args(Estimator))
    _choice(name, "kl_credit", kl_credit, get_args(KLCredit))
    _choice(name, "singleton", singleton, get_args(Singleton))
    if not is_number(gamma) or gamma > 1:
        raise refuse_argument(name, "gamma", gamma, "a number from 0 to 1 (no discount)")
    spec = ReinforcePP(
        mean=mean,
        gamma=float(gamma),
        whiten=whiten,
        kl_coefficient=_number(name, "kl", kl),
        kl_estimator=kl_estimator,
        kl_credit=kl_credit,
        singleton=singleton,
    )
    return _advantages(name, spec, scores, rollout, reference)


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
    _choice(name, "singleton", singleton, get_args(Singleton))
    return _advantages(name, LengthWeighted(singleton=singleton), scores, rollout)


@operation
def gpg(scores: Scores, *, norm: float = 1.0, singleton: Singleton = "zero") -> Advantages:
    """Group-centred scores x (samples / samples whose score is not 0) / norm: GPG.

    Args:
        scores: One a sample.
        norm: F_norm of the paper, a constant above 0.
        singleton: What a group of one gets, before the factor.
    """
    name = "fl.advantage.gpg"
    _choice(name, "singleton", singleton, get_args(Singleton))
    if _number(name, "norm", norm) == 0:
        raise refuse_argument(name, "norm", norm, "a number above 0")
    return _advantages(name, GPG(norm=float(norm), singleton=singleton), scores)


@operation
def max_rl(scores: Scores, *, eps: float = 1e-6, singleton: Singleton = "zero") -> Advantages:
    """(score - mean of its group) / (mean of its group + eps): MaxRL, for scores from 0 up.

    Args:
        scores: One a sample.
        eps: Added to the mean, so that a group without success gets 0.
        singleton: What a group of one gets: `zero`, or its `raw` score.
    """
    name = "fl.advantage.max_rl"
    _choice(name, "singleton", singleton, get_args(Singleton))
    return _advantages(name, MaxRL(eps=_number(name, "eps", eps), singleton=singleton), scores)


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
    _choice(name, "std", std, ("group", "none"))
    _choice(name, "ddof", ddof, (0, 1))
    _choice(name, "singleton", singleton, get_args(Singleton))
    spec = PassAtK(std=std, ddof=ddof, eps=_number(name, "eps", eps), singleton=singleton)
    return _advantages(name, spec, scores)


def _advantages(
    name: str,
    spec: AdvantageSpec,
    scores: Scores,
    rollout: Rollout | None = None,
    reference: Logprobs | None = None,
) -> Advantages:
    """Adds the node; its edges carry the fields that the specification reads."""
    tracer = current_tracer(name)
    reads = {"scores": check_handle(scores, Scores, operation=name, argument="scores").read()}
    if "mask" in spec.needs:
        samples = check_handle(rollout, Rollout, operation=name, argument="rollout")
        wanted = [RESPONSE_MASK, *([ROLLOUT_LOGPROBS] if reference is not None else [])]
        fields = tuple(field for field in samples.fields if field in wanted)
        reads["rollout"] = Read(samples.node, fields)
    if reference is not None:
        logprobs = check_handle(reference, Logprobs, operation=name, argument="reference")
        reads["reference"] = logprobs.read()
    outputs = advantage_outputs(spec)
    node = tracer.add(
        Op.ADVANTAGE, name="advantage", reads=reads, outputs=outputs, attrs={"spec": spec}
    )
    return Advantages(tracer, node, outputs)


def _choice(name: str, argument: str, value: object, allowed: Collection[object]) -> None:
    # 1 is no yes, and True no 1.
    if any(value == choice and type(value) is type(choice) for choice in allowed):
        return
    choices = ", ".join(map(repr, allowed))
    hint = suggestion(str(value), [str(choice) for choice in allowed])
    raise refuse_argument(name, argument, value, f"one of {choices}", hint)


def _number(name: str, argument: str, value: float) -> float:
    if not is_number(value):
        raise refuse_argument(name, argument, value, "a number from 0 up")
    return float(value)
