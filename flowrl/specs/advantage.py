"""Advantages by name: how scores become weights of the policy gradient.

Those with one number a sample are here, those with one number a token in
`flowrl.specs.token_advantage`; the formulas, with paper and equation, are in the docstrings of
`flowrl.algo.advantages`. A function of the user's own can also compute an advantage:

    @fl.advantage.own(needs=("mask",))
    def by_length(batch, *, power=0.5):
        return batch.scores / np.maximum(batch.mask.sum(1), 1) ** power
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeAlias

from flowrl.errors import TraceError
from flowrl.specs.base import USER_OPTIONS, Spec, format_list, list_of, option
from flowrl.specs.function import caller
from flowrl.specs.user_options import MarkedFunction, Options, names_among

__all__ = [
    "FIELDS",
    "GPG",
    "AdvantageSpec",
    "Centre",
    "GroupRelative",
    "LeaveOneOut",
    "LengthWeighted",
    "MaxRL",
    "NormaliseThenSum",
    "OwnAdvantage",
    "PassAtK",
    "Per",
    "Scale",
    "Singleton",
    "StdAbout",
    "UserAdvantage",
    "ZeroStd",
]


Scale: TypeAlias = Literal["group", "batch", "none", "group_others"]
"""The divisor of centred scores: the standard deviation of their group, of the batch, none, or that
of the *other* members of the group."""

Centre: TypeAlias = Literal["group", "group_others", "batch", "batch_others", "none"]
"""The number that is subtracted from a score: the mean of its group, of the group's other members,
of the batch, of the batch's other samples, or nothing."""

Singleton: TypeAlias = Literal["zero", "raw"]
"""The advantage of a group of one: 0, or its score unchanged (verl keeps the score)."""

StdAbout: TypeAlias = Literal["mean", "centre"]
"""The reference point of deviations: the mean of the scores that the deviation is over, or the
number that was subtracted from each score (AReaL)."""

ZeroStd: TypeAlias = Literal["keep", "divide"]
"""The treatment of a standard deviation of 0: centred scores are kept, or divided by eps. The two
differ only where a score can differ from the centre of equal scores: with `group_others`, and with
a centre that is not the mean of the scores that the deviation is over."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative(AdvantageSpec):
    """(score - mean of its group) / (std + eps): GRPO; with `std="none"`, Dr.GRPO.

    Its options give every other normalisation of rewards: by the batch, by the group without the
    sample itself, about another centre.

    Attributes:
        std: The divisor of the centred scores.
        ddof: 1 for the sample standard deviation (as in other libraries), 0 for the population's.
        eps: A number that is added to the standard deviation (outside the root).
        singleton: The advantage of a group of one.
        mean: The number that is subtracted from scores.
        std_about: The reference point of deviations.
        zero_std: The treatment of a standard deviation of 0.
        variance_floor: The lower bound of the variance, before the root and eps.
    """

    kind: ClassVar[str] = "group_relative"

    std: Scale = "group"
    ddof: int = 1
    eps: float = 1e-6
    singleton: Singleton = "zero"
    mean: Centre = option("group")
    std_about: StdAbout = option("mean")
    zero_std: ZeroStd = option("keep")
    variance_floor: float = option(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOneOut(AdvantageSpec):
    """score - mean of the group's other scores: RLOO.

    Attributes:
        singleton: The advantage of a group of one.
        batch_std: True to standardise the result over the batch as well, an option of TRL.
        eps: A number that is added to the batch's standard deviation.
    """

    kind: ClassVar[str] = "leave_one_out"

    singleton: Singleton = "zero"
    batch_std: bool = option(False)
    eps: float = option(1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK(AdvantageSpec):
    """The best sample of a group gets its lead over the second best; all others get 0.

    Attributes:
        std: `group` divides by the standard deviation of the group's scores; `none` does not.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: A number that is added to the standard deviation.
        singleton: The advantage of a group of one.
    """

    kind: ClassVar[str] = "pass_at_k"

    std: Literal["group", "none"] = "none"
    ddof: int = 1
    eps: float = 1e-6
    singleton: Singleton = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class GPG(AdvantageSpec):
    """Group-centred scores times (samples / samples whose score is not 0) / `norm`.

    Attributes:
        norm: The constant F_norm of the paper.
        singleton: The advantage of a group of one, before the factor.
    """

    kind: ClassVar[str] = "gpg"

    norm: float = 1.0
    singleton: Singleton = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRL(AdvantageSpec):
    """(score - mean of its group) / (mean of its group + eps).

    Attributes:
        eps: A number that is added to the mean, so that a group without success gets 0.
        singleton: The advantage of a group of one.
    """

    kind: ClassVar[str] = "max_rl"

    eps: float = 1e-6
    singleton: Singleton = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthWeighted(AdvantageSpec):
    """score - length-weighted mean of its group: OPO's optimal reward baseline.

    Attributes:
        singleton: The advantage of a group of one.
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
        std: The divisor of each reward's group-centred values.
        ddof: 1 for sample standard deviations, 0 for the population's.
        eps: A number that is added to the group's standard deviation.
        batch_eps: A number that is added to the batch's standard deviation.
        mean: The number that is subtracted from each reward.
        singleton: The value of each reward in a group of one.
        zero_std: The treatment of a reward whose standard deviation is 0.
    """

    kind: ClassVar[str] = "normalise_then_sum"
    _needs: ClassVar[tuple[str, ...]] = ("rewards",)

    reward_weights: str = option("")
    std: Scale = "group"
    ddof: int = 1
    eps: float = 1e-6
    batch_eps: float = 1e-6
    mean: Centre = option("group")
    singleton: Singleton = option("zero")
    zero_std: ZeroStd = option("keep")

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the rewards; empty if each weight is 1."""
        return tuple(float(weight) for weight in list_of(self.reward_weights))


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
)
"""The fields of `AdvantageBatch` that an own advantage may declare. It always gets scores and
groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAdvantage(AdvantageSpec):
    """An advantage that a function of the user's own computes.

    Attributes:
        function: The reference to the function.
        reads: The fields of the batch that it reads, comma-separated.
        per: The unit of the result.
        returns: True if the function also computes a critic's targets, in an `AdvantageResult`.
        options: All options of the function.
    """

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


class UserAdvantage(MarkedFunction[OwnAdvantage]):
    """A function marked as an advantage."""

    @classmethod
    def mark(
        cls, *, per: Per = "sample", needs: str | Iterable[str] = (), returns: bool = False
    ) -> Callable[[Callable[..., Any]], Self]:
        """Makes an advantage of a function `(batch, *, option=default, ...)`.

        The function gets an `AdvantageBatch` with scores, groups and the fields that it declares,
        and returns an array: `[N]`, or `[N, T]` with `per="token"`, where values off the mask are
        not read.

        Args:
            per: The unit of the result.
            needs: The fields of the batch that it reads, of `FIELDS`.
            returns: True if it returns an `AdvantageResult` with a critic's targets.

        Raises:
            TraceError: No plan can name the function, or a field does not exist.
        """
        if per not in ("sample", "token"):
            raise TraceError(
                "fl.advantage.own: no such per",
                where=caller(),
                found=repr(per),
                expected="sample, token",
            )
        fields = names_among(needs, FIELDS, what="field of an advantage")
        if (per == "token" or returns) and "mask" not in fields:
            fields = ("mask", *fields)
        return lambda function: cls(
            function,
            kind="advantage",
            make=OwnAdvantage,
            reads=format_list(fields),
            per=per,
            returns=returns,
        )
