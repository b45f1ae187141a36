"""Advantages by name: how scores become weights of the policy gradient.

Operations of `fl.advantage` that read scores, or the rollout too, are made of these classes: each
field is an argument, and documented here. The others document their arguments. The formulas, with
paper and equation, are in the docstrings of `flowrl.algo.advantages`. A function of the user's own
can also compute an advantage:

    @fl.advantage.own(needs=("mask",))
    def by_length(batch, *, power=0.5):
        return batch.scores / np.maximum(batch.mask.sum(1), 1) ** power
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypeAlias

from flowrl.specs.base import (
    USER_OPTIONS,
    Finite,
    FiniteFromZero,
    Positive,
    Range,
    Share,
    Spec,
    list_of,
    option,
)
from flowrl.specs.kl import Estimator
from flowrl.specs.user_functions import Options

Scale: TypeAlias = Literal["group", "batch", "none", "group_others"]
Centre: TypeAlias = Literal["group", "group_others", "batch", "batch_others", "none"]
Singleton: TypeAlias = Literal["zero", "raw"]
StdAbout: TypeAlias = Literal["mean", "centre"]
ZeroStd: TypeAlias = Literal["keep", "divide"]

ProcessRewards: TypeAlias = Literal["none", "added", "alone"]
"""Rewards of tokens in a reward-to-go: none, in addition to the score, or without any score."""

_Ddof: TypeAlias = Annotated[int, Range(low=0.0, high=1.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSpec(Spec):
    """The base of advantages. By default, an advantage is one number a sample from its score."""

    family: ClassVar[str] = "advantage"
    _needs: ClassVar[tuple[str, ...]] = ()
    _per_token: ClassVar[bool] = False
    _gives_returns: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields of `flowrl.algo.advantages.AdvantageBatch` read besides scores and groups.

        A penalty with a `kl_coefficient` also reads `logprobs` and `reference_logprobs`.
        """
        return self._needs

    @property
    def per_token(self) -> bool:
        """True if the result is one number a token, False if it is one a sample."""
        return self._per_token

    @property
    def gives_returns(self) -> bool:
        """True if the result includes a critic's targets."""
        return self._gives_returns

    @property
    def needs_scores(self) -> bool:
        """True if the advantage reads scores."""
        return True


# Advantages of samples.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative(AdvantageSpec):
    """(score - mean of its group) / (std + eps): GRPO; with `std="none"`, Dr.GRPO.

    Its options give every other normalisation of rewards: by the batch, by the group without the
    sample itself, about another centre.

    Attributes:
        std: What centred scores are divided by: the standard deviation of the `group`, of the
            `batch`, of the group's other members (`group_others`), or `none`.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: Added to the standard deviation, outside the root.
        singleton: What a group of one gets: `zero`, or its `raw` score, as in verl.
        mean: What is subtracted: the mean of the `group`, of its other members (`group_others`),
            of the `batch`, of the batch's other samples (`batch_others`), or `none`.
        std_about: Whether deviations are from the `mean` of the scores that they are over, or from
            the `centre` that was subtracted (AReaL).
        zero_std: Where the standard deviation is 0: `keep` centred scores, or `divide` by eps. The
            two differ only where the centre is not the mean of the scores that the deviation is
            over.
        variance_floor: The least variance that is divided by.
    """

    kind: ClassVar[str] = "group_relative"

    std: Scale = "group"
    ddof: _Ddof = 1
    eps: FiniteFromZero = 1e-6
    singleton: Singleton = "zero"
    mean: Centre = option("group")
    std_about: StdAbout = option("mean")
    zero_std: ZeroStd = option("keep")
    variance_floor: FiniteFromZero = option(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOneOut(AdvantageSpec):
    """score - mean of the group's other scores: RLOO.

    Attributes:
        singleton: What a group of one gets: `zero`, or its `raw` score.
        batch_std: Whether the result is standardised once more over the batch.
        eps: Added to the batch's standard deviation.
    """

    kind: ClassVar[str] = "leave_one_out"

    singleton: Singleton = "zero"
    batch_std: bool = option(False)
    eps: FiniteFromZero = option(1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK(AdvantageSpec):
    """The best of a group gets its lead over the second best, all others 0: pass@k training.

    Attributes:
        std: `group` divides by the standard deviation of the group's scores, `none` does not.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: Added to it.
        singleton: What a group of one gets: `zero`, or its `raw` score.
    """

    kind: ClassVar[str] = "pass_at_k"

    std: Literal["group", "none"] = "none"
    ddof: _Ddof = 1
    eps: FiniteFromZero = 1e-6
    singleton: Singleton = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class GPG(AdvantageSpec):
    """Group-centred scores x (samples / samples whose score is not 0) / norm: GPG.

    Attributes:
        norm: F_norm of the paper, a constant above 0.
        singleton: What a group of one gets, before the factor.
    """

    kind: ClassVar[str] = "gpg"

    norm: Positive = 1.0
    singleton: Singleton = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRL(AdvantageSpec):
    """(score - mean of its group) / (mean of its group + eps): MaxRL, for scores from 0 up.

    Attributes:
        eps: Added to the mean, so that a group without success gets 0.
        singleton: What a group of one gets: `zero`, or its `raw` score.
    """

    kind: ClassVar[str] = "max_rl"

    eps: FiniteFromZero = 1e-6
    singleton: Singleton = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthWeighted(AdvantageSpec):
    """score - mean of the group weighted by response length: OPO's optimal baseline.

    Attributes:
        singleton: What a group of one gets: `zero`, or its `raw` score.
    """

    kind: ClassVar[str] = "length_weighted"
    _needs: ClassVar[tuple[str, ...]] = ("mask",)

    singleton: Singleton = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormaliseThenSum(AdvantageSpec):
    """Each reward normalised by its group, the weighted sum, then that by the batch: GDPO.

    A reward with few values does not lose its influence to one with a large spread, as it would if
    rewards were summed first.

    Attributes:
        reward_weights: The weights of the rewards, comma-separated; if empty, each weight is 1.
    """

    kind: ClassVar[str] = "normalise_then_sum"
    _needs: ClassVar[tuple[str, ...]] = ("rewards",)

    reward_weights: str = option("")
    std: Scale = "group"
    ddof: _Ddof = 1
    eps: FiniteFromZero = 1e-6
    batch_eps: FiniteFromZero = 1e-6
    mean: Centre = option("group")
    singleton: Singleton = option("zero")
    zero_std: ZeroStd = option("keep")

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the rewards; empty if each weight is 1."""
        return tuple(float(weight) for weight in list_of(self.reward_weights))


# Advantages of tokens: rewards-to-go, baselines of a time step, critics, turns.

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


class ProcessRewarded(AdvantageSpec):
    """The base of advantages that may be given rewards of tokens: `token_rewards` says which."""

    __slots__ = ()
    token_rewards: ProcessRewards

    @property
    def needs(self) -> tuple[str, ...]:
        """What the advantage always reads, and rewards of tokens where they are given."""
        return self._needs + (() if self.token_rewards == "none" else ("process_rewards",))

    @property
    def needs_scores(self) -> bool:
        """False if tokens have all of the reward."""
        return self.token_rewards != "alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePP(ProcessRewarded):
    """Discounted rewards-to-go with a KL penalty in the reward, whitened over the batch's tokens.

    This is REINFORCE++; with `mean="group"` its baseline form, REINFORCE++-baseline. Whitening has
    the options `ddof`, `eps` and its place of `flowrl.algo.advantages.whiten`.
    """

    kind: ClassVar[str] = "reinforce_pp"
    _needs: ClassVar[tuple[str, ...]] = ("mask",)
    _per_token: ClassVar[bool] = True

    mean: Centre = "none"
    gamma: Share = 1.0
    kl_coefficient: FiniteFromZero = 0.0
    kl_estimator: Estimator = "k1"
    kl_credit: KLCredit = "reward_to_go"
    masking: Masking = "carry"
    whiten: bool = True
    whiten_ddof: _Ddof = 1
    whiten_eps: FiniteFromZero = 1e-8
    whiten_eps_place: EpsPlace = option("inside")
    singleton: Singleton = option("zero")
    token_rewards: ProcessRewards = option("none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReMax(AdvantageSpec):
    """Reward-to-go minus the score of the greedy answer to the same prompt."""

    kind: ClassVar[str] = "remax"
    _needs: ClassVar[tuple[str, ...]] = ("mask", "baselines")
    _per_token: ClassVar[bool] = True

    kl_coefficient: FiniteFromZero = 0.0
    kl_estimator: Estimator = "k1"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimalTokenBaseline(AdvantageSpec):
    """Reward-to-go minus, at each time step, the group's mean weighted by path variance."""

    kind: ClassVar[str] = "optimal_token_baseline"
    _needs: ClassVar[tuple[str, ...]] = ("mask", "logprobs", "sum_pi_squared")
    _per_token: ClassVar[bool] = True

    eps: FiniteFromZero = 1e-8
    lone_tail: Literal["baseline", "zero"] = "baseline"
    singleton: Singleton = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class GAE(ProcessRewarded):
    """Generalised advantage estimation with a critic: PPO; decoupled lambdas: VC-PPO and VAPO."""

    kind: ClassVar[str] = "gae"
    _needs: ClassVar[tuple[str, ...]] = ("mask", "values")
    _per_token: ClassVar[bool] = True
    _gives_returns: ClassVar[bool] = True

    gamma: Share = 1.0
    lam: Share = 0.95
    lam_value: Share | None = None
    length_alpha: FiniteFromZero = 0.0
    kl_coefficient: FiniteFromZero = 0.0
    kl_estimator: Estimator = "k1"
    masking: Masking = "carry"
    whiten: bool = True
    whiten_ddof: _Ddof = 1
    whiten_eps: FiniteFromZero = 1e-8
    whiten_eps_place: EpsPlace = option("inside")
    token_rewards: ProcessRewards = option("none")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInGroup(AdvantageSpec):
    """An episode's advantage in its group, plus that of each turn among turns of one state: GiGPO.

    It is for what `fl.interact` returned, which has turns, rewards and states. `std="none"` is the
    paper's F_norm = 1.

    Attributes:
        weight: Of the turn's advantage.
        gamma: Discount of a turn's return, a turn.
        std: What centred numbers are divided by; see `GroupRelative`, like the further options.
    """

    kind: ClassVar[str] = "group_in_group"
    _needs: ClassVar[tuple[str, ...]] = ("mask", "turns")
    _per_token: ClassVar[bool] = True

    weight: Finite = 1.0
    gamma: Share = 0.95
    std: Scale = "group"
    ddof: _Ddof = 1
    eps: FiniteFromZero = 1e-6
    singleton: Singleton = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill(AdvantageSpec):
    """Teacher logprob - behaviour logprob of each token: on-policy distillation by reverse KL."""

    kind: ClassVar[str] = "distill"
    _needs: ClassVar[tuple[str, ...]] = ("mask", "logprobs", "reference_logprobs")
    _per_token: ClassVar[bool] = True

    coefficient: Finite = 1.0
    discount: Share = 0.0
    score_weight: Finite = 0.0
    mean: Centre = option("group")
    singleton: Singleton = option("zero")

    @property
    def needs_scores(self) -> bool:
        """True if scores are added."""
        return self.score_weight != 0


# Advantages that functions of the user's own compute.

Per: TypeAlias = Literal["sample", "token"]
"""The unit of an advantage: one number a sample, or one a token."""

FIELDS = (
    "mask",
    "rewards",
    "values",
    "baselines",
    "logprobs",
    "reference_logprobs",
    "turns",
    "token_rewards",
    "process_rewards",
    "source",
)
"""The fields of `AdvantageBatch` that an own advantage may declare. It always gets scores and
groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAdvantage(AdvantageSpec):
    """An advantage that a function of the user's own computes; commas join the names of fields."""

    kind: ClassVar[str] = "own"

    function: str
    reads: str = option("")
    per: Per = "sample"
    returns: bool = option(False)
    options: Options = field(default=(), metadata=USER_OPTIONS)

    @property
    def needs(self) -> tuple[str, ...]:
        """The declared fields; one number a token needs the mask."""
        return list_of(self.reads)

    @property
    def per_token(self) -> bool:
        """True if the result is one number a token."""
        return self.per == "token"

    @property
    def gives_returns(self) -> bool:
        """True if the function declares that it computes a critic's targets."""
        return self.returns
