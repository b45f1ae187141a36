"""Advantages by name, one number a token: rewards-to-go, baselines of a time step, critics, turns.

The formulas, with paper and equation, are in the docstrings of `flowrl.algo.advantages.token`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from flowrl.specs.advantage import AdvantageSpec, Centre, Scale, Singleton
from flowrl.specs.base import option
from flowrl.specs.kl import Estimator

__all__ = [
    "GAE",
    "Distill",
    "EpsPlace",
    "GroupInGroup",
    "KLCredit",
    "Masking",
    "OptimalTokenBaseline",
    "ReMax",
    "ReinforcePP",
]

Masking: TypeAlias = Literal["carry", "zero", "none", "reset"]
"""The treatment, in a recursion back through time, of a token that the policy did not produce.

- `carry` (default): it is skipped; the token before it sees the one after it as its successor.
- `zero`: reward and value count as 0, but time passes: gamma and lambda apply.
- `none`: the mask is ignored; arbitrary values at padding spread.
- `reset`: the recursion starts again, so tokens before a hole see nothing after it.

All four agree if masked tokens only trail, with zero rewards and values.
"""

EpsPlace: TypeAlias = Literal["inside", "outside", "floor"]
"""1 / sqrt(var + eps), 1 / (sqrt(var) + eps), or 1 / sqrt(max(var, eps))."""

KLCredit: TypeAlias = Literal["reward_to_go", "token"]
"""The KL penalties in a token's return: those of itself and all later tokens, or its own alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePP(AdvantageSpec):
    """Discounted rewards-to-go with a KL penalty in the reward, whitened over the batch's tokens.

    This is REINFORCE++; with `mean="group"` its baseline form, REINFORCE++-baseline.

    Attributes:
        mean: The number that is subtracted from a sample's score first.
        gamma: The discount.
        kl_coefficient: The coefficient of the KL penalty on each token's reward; 0 for none.
        kl_estimator: The estimator of that penalty.
        kl_credit: The penalties in a token's return.
        masking: The treatment of masked tokens in the recursion.
        whiten: True to standardise advantages over all response tokens of the batch.
        whiten_ddof: 1 or 0.
        whiten_eps: A number that prevents division by 0.
        whiten_eps_place: The place of eps in the formula.
        singleton: The centred score of a group of one, if the mean is a group's.
    """

    kind: ClassVar[str] = "reinforce_pp"
    _needs: ClassVar[tuple[str, ...]] = ("mask",)
    _per_token: ClassVar[bool] = True

    mean: Centre = "none"
    gamma: float = 1.0
    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k1"
    kl_credit: KLCredit = "reward_to_go"
    masking: Masking = "carry"
    whiten: bool = True
    whiten_ddof: int = 1
    whiten_eps: float = 1e-8
    whiten_eps_place: EpsPlace = option("inside")
    singleton: Singleton = option("zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReMax(AdvantageSpec):
    """Reward-to-go minus the score of the greedy answer to the same prompt."""

    kind: ClassVar[str] = "remax"
    _needs: ClassVar[tuple[str, ...]] = ("mask", "baselines")
    _per_token: ClassVar[bool] = True

    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k1"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimalTokenBaseline(AdvantageSpec):
    """Reward-to-go minus, at each time step, the group's mean weighted by path variance.

    Attributes:
        eps: A number that is added to the sum of weights.
        lone_tail: The baseline of the longest sample of a group at tokens that no other sample
            reaches: its own reward-to-go (`baseline`, advantage 0), or `zero`.
        singleton: The advantage of a group of one: 0, or its reward-to-go.
    """

    kind: ClassVar[str] = "optimal_token_baseline"
    _needs: ClassVar[tuple[str, ...]] = ("mask", "logprobs", "sum_pi_squared")
    _per_token: ClassVar[bool] = True

    eps: float = 1e-8
    lone_tail: Literal["baseline", "zero"] = "baseline"
    singleton: Singleton = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class GAE(AdvantageSpec):
    """Generalised advantage estimation with a critic: PPO; decoupled lambdas: VC-PPO and VAPO.

    Attributes:
        gamma: The discount.
        lam: The lambda of advantages.
        lam_value: The lambda of the critic's returns; None for the same as `lam`.
        length_alpha: Above 0, a sample of l tokens has lambda 1 - 1 / (length_alpha * l) instead.
        kl_coefficient: The coefficient of the KL penalty on each token's reward; 0 for none.
        kl_estimator: The estimator of that penalty.
        masking: The treatment of masked tokens in the recursion.
        whiten: True to standardise advantages over all response tokens of the batch.
        whiten_ddof: 1 or 0.
        whiten_eps: A number that prevents division by 0.
        whiten_eps_place: The place of eps in the formula.
    """

    kind: ClassVar[str] = "gae"
    _needs: ClassVar[tuple[str, ...]] = ("mask", "values")
    _per_token: ClassVar[bool] = True
    _gives_returns: ClassVar[bool] = True

    gamma: float = 1.0
    lam: float = 0.95
    lam_value: float | None = None
    length_alpha: float = 0.0
    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k1"
    masking: Masking = "carry"
    whiten: bool = True
    whiten_ddof: int = 1
    whiten_eps: float = 1e-8
    whiten_eps_place: EpsPlace = option("inside")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInGroup(AdvantageSpec):
    """Advantage of the episode in its group plus that of each turn among turns from the same state.

    This is GiGPO, for rollouts of several turns.

    Attributes:
        weight: The weight of the turn's advantage (omega).
        gamma: The discount of a turn's return, per turn.
        std: The divisor of both, as `GroupRelative.std` (`none` is the paper's F_norm = 1).
        ddof: 1 for sample standard deviations, 0 for the population's.
        eps: A number that is added to the standard deviations.
        singleton: The advantage of a group of one: an episode without siblings, a turn whose state
            no other turn has.
    """

    kind: ClassVar[str] = "group_in_group"
    _needs: ClassVar[tuple[str, ...]] = ("mask", "turns")
    _per_token: ClassVar[bool] = True

    weight: float = 1.0
    gamma: float = 0.95
    std: Scale = "group"
    ddof: int = 1
    eps: float = 1e-6
    singleton: Singleton = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill(AdvantageSpec):
    """Teacher logprob - behaviour logprob of each token: on-policy distillation by reverse KL.

    Attributes:
        coefficient: The factor of the difference.
        discount: The discount of the differences of later tokens; 0 for each token's own alone.
        score_weight: The weight of the centred score, which is added at every token; with 0, scores
            are not read.
        mean: The number that is subtracted from a score first.
        singleton: The centred score of a group of one, if the mean is a group's.
    """

    kind: ClassVar[str] = "distill"
    _needs: ClassVar[tuple[str, ...]] = ("mask", "logprobs", "reference_logprobs")
    _per_token: ClassVar[bool] = True

    coefficient: float = 1.0
    discount: float = 0.0
    score_weight: float = 0.0
    mean: Centre = option("group")
    singleton: Singleton = option("zero")

    @property
    def needs_scores(self) -> bool:
        """True if scores are added."""
        return self.score_weight != 0
