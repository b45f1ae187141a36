"""Advantages of the user's own: a function of scores, groups and whatever else it declares.

@fl.advantage.own(needs=("mask",))
def by_length(batch, *, power=0.5):
    return batch.scores / np.maximum(batch.mask.sum(1), 1) ** power
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias

from flowrl.errors import TraceError
from flowrl.specs.advantage import AdvantageSpec
from flowrl.specs.base import USER_OPTIONS, Scalar, format_list, list_of, option
from flowrl.specs.function import caller, reference_of
from flowrl.specs.user_options import Options, change_options, declared_options, names_among

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


class UserAdvantage:
    """A function marked as an advantage: what stands under its name in the user's module.

    It knows the specification; what calling it in a program does is a subclass's business.
    """

    reserved: ClassVar[frozenset[str]] = frozenset()
    """Names of arguments of a call in a program, which no option may have."""

    def __init__(
        self, function: Callable[..., Any], *, needs: tuple[str, ...], per: Per, returns: bool
    ) -> None:
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        self.__wrapped__ = function
        reserved = {*OwnAdvantage.__dataclass_fields__, "kind", *self.reserved}
        self._spec = OwnAdvantage(
            function=reference_of(function, kind="advantage"),
            reads=format_list(needs),
            per=per,
            returns=returns,
            options=declared_options(function, takes=("batch",), reserved=reserved),
        )

    def spec(self, **options: Scalar) -> OwnAdvantage:
        """The specification with these options; the others keep their defaults.

        Raises:
            TraceError: an option that the function does not have.
        """
        changed = change_options(self.__name__, self._spec.options, options)
        return replace(self._spec, options=changed)

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
        return lambda function: cls(function, needs=fields, per=per, returns=returns)
