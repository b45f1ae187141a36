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
"""What centred scores are divided by: the standard deviation of their group, of the batch, nothing,
or that of the *other* members of the group."""

Centre: TypeAlias = Literal["group", "group_others", "batch", "batch_others", "none"]
"""What is subtracted from a score: the mean of its group, of the group's other members, of the
batch, of the batch's other samples, or nothing."""

Singleton: TypeAlias = Literal["zero", "raw"]
"""What a group of one gets: advantage 0, or its score as it is (verl keeps the score)."""

StdAbout: TypeAlias = Literal["mean", "centre"]
"""What deviations are measured from: the mean of the scores that the deviation is over, or the
number that was subtracted from each score (AReaL)."""

ZeroStd: TypeAlias = Literal["keep", "divide"]
"""Where the standard deviation is 0: centred scores stay as they are, or are divided by eps. The
two differ only where a score may lie off the centre of equal scores: with `group_others`, and with
a centre that is not the mean of what the deviation is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSpec(Spec):
    """Base of advantages; by itself one number a sample from scores and groups alone."""

    family: ClassVar[str] = "advantage"
    _needs: ClassVar[tuple[str, ...]] = ()
    _per_token: ClassVar[bool] = False
    _gives_returns: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields of `flowrl.algo.advantages.AdvantageBatch` read beside scores and groups.

        A penalty with a `kl_coefficient` reads `logprobs` and `reference_logprobs` beside these.
        """
        return self._needs

    @property
    def per_token(self) -> bool:
        """Whether the result is one number a token, or one a sample."""
        return self._per_token

    @property
    def gives_returns(self) -> bool:
        """Whether a critic's targets come with it."""
        return self._gives_returns

    @property
    def needs_scores(self) -> bool:
        """Whether it reads scores."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative(AdvantageSpec):
    """(score - mean of its group) / (std + eps): GRPO; with `std="none"`, Dr.GRPO.

    With its options it is any normalisation of rewards: by the batch, by the group without the
    sample itself, about another centre.

    Attributes:
        std: What the centred scores are divided by.
        ddof: 1 for the sample standard deviation (what the field's libraries use), 0 for the
            population's.
        eps: Added to the standard deviation (outside the root).
        singleton: What a group of one gets.
        mean: What is subtracted.
        std_about: What deviations are measured from.
        zero_std: What happens where the standard deviation is 0.
        variance_floor: The least variance that is divided by, before the root and eps.
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
        singleton: What a group of one gets.
        batch_std: Whether the result is standardised once more over the batch, as TRL offers.
        eps: Added to the batch's standard deviation.
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
        ddof: Of the standard deviation.
        eps: Added to it.
        singleton: What a group of one gets.
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
        norm: F_norm of the paper, a constant.
        singleton: What a group of one gets, before the factor.
    """

    kind: ClassVar[str] = "gpg"

    norm: float = 1.0
    singleton: Singleton = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRL(AdvantageSpec):
    """(score - mean of its group) / (mean of its group + eps).

    Attributes:
        eps: Added to the mean, so that a group without success gets 0.
        singleton: What a group of one gets.
    """

    kind: ClassVar[str] = "max_rl"

    eps: float = 1e-6
    singleton: Singleton = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthWeighted(AdvantageSpec):
    """score - length-weighted mean of its group: OPO's optimal reward baseline.

    Attributes:
        singleton: What a group of one gets.
    """

    kind: ClassVar[str] = "length_weighted"
    _needs: ClassVar[tuple[str, ...]] = ("mask",)

    singleton: Singleton = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormaliseThenSum(AdvantageSpec):
    """Each reward normalised by its group, the weighted sum, then that by the batch: GDPO.

    A reward with few values cannot be drowned by one with a large spread, as it is when rewards are
    summed first.

    Attributes:
        reward_weights: Of the rewards, comma-separated; where it is empty, all weigh 1.
        std: Divisor of each reward's group-centred values.
        ddof: Of both standard deviations.
        eps: Added to the group's standard deviation.
        batch_eps: Added to the batch's standard deviation.
        mean: What is subtracted from each reward.
        singleton: What a group of one gets of each reward.
        zero_std: Where a reward's standard deviation is 0.
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
        """The weights of the rewards; empty where all weigh 1."""
        return tuple(float(weight) for weight in list_of(self.reward_weights))


Per: TypeAlias = Literal["sample", "token"]
"""What an advantage is one number for."""

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
"""What an own advantage may declare; `AdvantageBatch` says what each is. Scores and groups are
there without asking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAdvantage(AdvantageSpec):
    """An advantage that a function of the user's own computes.

    Attributes:
        function: Reference to it.
        reads: Fields of the batch that it reads, comma-separated.
        per: What it gives one number for.
        returns: Whether it gives a critic's targets too, as an `AdvantageResult`.
        options: Of the function, all of them.
    """

    kind: ClassVar[str] = "own"

    function: str
    reads: str = option("")
    per: Per = "sample"
    returns: bool = option(False)
    options: Options = field(default=(), metadata=USER_OPTIONS)

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields that it declares; one number a token needs the mask."""
        return list_of(self.reads)

    @property
    def per_token(self) -> bool:
        """Whether it is one number a token."""
        return self.per == "token"

    @property
    def gives_returns(self) -> bool:
        """Whether it says so."""
        return self.returns


class UserAdvantage(MarkedFunction[OwnAdvantage]):
    """A function marked as an advantage."""

    @classmethod
    def mark(
        cls, *, per: Per = "sample", needs: str | Iterable[str] = (), returns: bool = False
    ) -> Callable[[Callable[..., Any]], Self]:
        """Makes an advantage of a function `(batch, *, option=default, ...)`.

        The function is given an `AdvantageBatch` with scores, groups and the fields that it
        declares, and returns an array: `[N]`, or `[N, T]` with `per="token"`, where what stands off
        the mask is not read.

        Args:
            per: What it gives one number for.
            needs: Fields of the batch that it reads, of `FIELDS`.
            returns: Whether it returns an `AdvantageResult` with a critic's targets.

        Raises:
            TraceError: a function that no plan can name, or a field that there is not.
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
