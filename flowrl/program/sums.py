"""`fl.sum` and `fl.term`: one optimizer update of several losses, each on samples of its own.

    actor.update(
        fl.sum(
            fl.term(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2)),
            0.1 * fl.term(examples),
        )
    )

A term takes the arguments of an update. The graph has a node of the operation `update` for each
term, with the name of their sum and the term's weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NoReturn, TypedDict, Unpack

from flowrl.program.handles import Advantages, Logprobs, Mapped, Samples, Scores
from flowrl.program.operation import Call
from flowrl.specs import KL, LossSpec
from flowrl.specs.names import operation
from flowrl.user_lines import SourceRef, trace_error, user_line

_WRITTEN = "fl.sum(fl.term(rollout, advantages=..., loss=...), 0.1 * fl.term(examples))"


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A term of a sum: what `fl.term` returns, perhaps times a number.

    Attributes:
        samples: What it learns from.
        arguments: Those arguments of an update that were given.
        weight: The factor of its loss and of its penalty.
        source: The user's line.
    """

    samples: Samples
    arguments: Mapping[str, object]
    source: SourceRef
    weight: float = 1.0

    described: ClassVar[str] = "a term"
    instead: ClassVar[str] = "terms are summed: actor.update(fl.sum(fl.term(...), fl.term(...)))"

    def __mul__(self, factor: object) -> Term:
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if is_number and 0 < float(factor) < math.inf:  # type: ignore[arg-type]
            return replace(self, weight=self.weight * float(factor))  # type: ignore[arg-type]
        hint = "leave the term out, inside `if weight:` where a setting decides"
        raise trace_error(
            "a term cannot be multiplied by this",
            found=repr(factor),
            expected="a finite number above 0",
            hint=hint if is_number and factor == 0 else None,
        )

    __rmul__ = __mul__

    def __neg__(self) -> Term:
        return self * -1

    def __add__(self, other: object) -> NoReturn:
        raise trace_error(
            "terms are not added with + or with Python's sum",
            expected="fl.sum, which makes one optimizer update of several terms",
            hint=f"write {_WRITTEN}, or fl.sum(*terms) for a list of them",
        )

    __radd__ = __sub__ = __add__


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """What `fl.sum` returns."""

    terms: tuple[Term, ...]

    described: ClassVar[str] = "a sum of terms"
    instead: ClassVar[str] = "a policy takes a sum; here, make one update after the other"

    def __mul__(self, factor: object) -> NoReturn:
        raise trace_error("a sum of terms has no factor", hint="multiply each of its terms")

    __rmul__ = __mul__


class UpdateArguments(TypedDict, total=False):
    """What an update learns with, next to samples and rewards; `Policy.update` documents it."""

    advantages: Advantages | None
    reference: Logprobs | None
    old: Logprobs | None
    loss: LossSpec | None
    kl: KL | None
    extra: Mapped | Sequence[Mapped] | None


def given_arguments(rewards: Scores | None, arguments: UpdateArguments) -> dict[str, object]:
    """Returns the arguments that are neither None nor an empty sequence."""
    given: dict[str, object] = {"rewards": rewards, **arguments}
    return {
        name: value
        for name, value in given.items()
        if value is not None and not (isinstance(value, tuple | list) and not value)
    }


@operation
def term(
    samples: Samples, rewards: Scores | None = None, **arguments: Unpack[UpdateArguments]
) -> Term:
    """A term of `fl.sum`: samples, and how an update learns from them.

    Args:
        samples: A rollout, examples or pairs.
        rewards: As of `Policy.update`, like the other arguments.

    Returns:
        The term; `0.1 * fl.term(...)` multiplies its loss and its penalty.
    """
    Call("fl.term").trace()
    Call("fl.term").handle("samples", samples, Samples)
    return Term(samples, given_arguments(rewards, arguments), user_line())


def sum_of(*terms: Term) -> Sum:
    """The sum of losses on different samples, for one optimizer update of all of them.

    Args:
        terms: What `fl.term` returned, each perhaps times a number.

    Raises:
        TraceError: One is no term, or there are none.
    """
    Call("fl.sum").trace()
    given: tuple[object, ...] = terms
    for each in given:
        if isinstance(each, Term):
            continue
        hint = f"write {_WRITTEN}"
        parts = each if isinstance(each, list | tuple) else (each,)
        if any(isinstance(part, Scores) for part in parts):
            hint = "add scores with fl.weighted_sum((accuracy, 1.0), (style, 0.2))"
        elif parts and all(isinstance(part, Term) for part in parts):
            hint = "write fl.sum(*terms)"
        elif any(isinstance(part, Samples) for part in parts):
            hint = f"a term names its advantages and its loss, and its factor: {_WRITTEN}"
        raise Call("fl.sum").refuse("terms", each, "terms: fl.term(samples, ...)", hint)
    if not terms:
        raise trace_error("fl.sum has no terms", hint=f"write {_WRITTEN}")
    return Sum(terms)
