"""Advantages by name, one number a token: rewards-to-go, baselines of a time step, critics, turns.

Formulas, with paper and equation, stand at their functions in `flowrl.algo.advantages`.
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
"""What a recursion back through time does at a token that the policy did not produce.

- `carry` (default): it is skipped; the token before it sees the one after it as its successor.
- `zero`: reward and value count as 0, but time passes: gamma and lambda apply.
- `none`: the mask is not looked at; garbage at padding spreads.
- `reset`: what lies behind it is forgotten, so tokens before a hole see nothing after it.

All agree where masked tokens only trail, with zero rewards and values.
"""

EpsPlace: TypeAlias = Literal["inside", "outside", "floor"]
"""1 / sqrt(var + eps), 1 / (sqrt(var) + eps), or 1 / sqrt(max(var, eps))."""

KLCredit: TypeAlias = Literal["reward_to_go", "token"]
"""Whether a token answers for the KL penalties of itself and all later tokens, or for its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePP(AdvantageSpec):
    """Discounted rewards-to-go with a KL penalty in the reward, whitened over the batch's tokens.

    REINFORCE++; with `mean="group"` its baseline form, REINFORCE++-baseline.

    Attributes:
        mean: What is subtracted from a sample's score first.
        gamma: Discount.
        kl_coefficient: Of the KL penalty that is taken off each token's reward; 0: none.
        kl_estimator: Of that penalty.
        kl_credit: Which penalties a token answers for.
        masking: Of the recursion.
        whiten: Whether advantages are standardised over all response tokens of the batch.
        whiten_ddof: 1 or 0.
        whiten_eps: Against division by 0.
        whiten_eps_place: Where eps enters.
        singleton: What a group of one has left of its score, where the mean is a group's.
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
        eps: Added to the sum of weights.
        lone_tail: What the one longest sample of a group gets where no other reaches: its own
            reward-to-go as `baseline` (advantage 0), or `zero` baseline.
        singleton: What a group of one gets: advantage 0, or its reward-to-go.
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
        gamma: Discount.
        lam: Lambda of advantages.
        lam_value: Lambda of the critic's returns; None: the same.
        length_alpha: Above 0, a sample of l tokens has lambda 1 - 1 / (length_alpha * l) instead.
        kl_coefficient: Of the KL penalty that is taken off each token's reward; 0: none.
        kl_estimator: Of that penalty.
        masking: Of the recursion.
        whiten: Whether advantages are standardised over all response tokens of the batch.
        whiten_ddof: 1 or 0.
        whiten_eps: Against division by 0.
        whiten_eps_place: Where eps enters.
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

    GiGPO, for rollouts of several turns.

    Attributes:
        weight: Of the turn's advantage (omega).
        gamma: Discount of a turn's return, per turn.
        std: Divisor of both, as `GroupRelative.std` (`none` is the paper's F_norm = 1).
        ddof: Of the standard deviations.
        eps: Added to them.
        singleton: What a group of one gets: an episode without siblings, a turn whose state no
            other turn has.
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
        coefficient: Of the difference.
        discount: Of the differences of later tokens; 0: a token answers for its own alone.
        score_weight: Of the centred score that is added at every token; 0: scores are not read.
        mean: What is subtracted from a score first.
        singleton: What a group of one has left of its score, where the mean is a group's.
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
        """Whether scores are added."""
        return self.score_weight != 0
