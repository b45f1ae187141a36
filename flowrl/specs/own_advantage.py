"""Advantages of the user's own: a function of scores, groups and whatever else it declares.

@fl.advantage.own(needs=("mask",))
def by_length(batch, *, power=0.5):
    return batch.scores / np.maximum(batch.mask.sum(1), 1) ** power
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeAlias

from flowrl.errors import TraceError
from flowrl.specs.advantage import AdvantageSpec
from flowrl.specs.base import USER_OPTIONS, format_list, list_of, option
from flowrl.specs.function import caller
from flowrl.specs.marked import MarkedFunction
from flowrl.specs.user_options import Options, names_among

__all__ = ["FIELDS", "OwnAdvantage", "Per", "UserAdvantage"]

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
