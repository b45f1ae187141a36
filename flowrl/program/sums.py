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
from typing import ClassVar

from flowrl.program.handles import Advantages, Logprobs, Mapped, Samples, Scores
from flowrl.program.operation import (
    check_handle,
    current_tracer,
    refuse_argument,
)
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


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """What `fl.sum` returns."""

    terms: tuple[Term, ...]

    described: ClassVar[str] = "a sum of terms"
    instead: ClassVar[str] = "a policy takes a sum; here, make one update after the other"


@operation
def term(
    samples: Samples,
    rewards: Scores | None = None,
    *,
    advantages: Advantages | None = None,
    reference: Logprobs | None = None,
    old: Logprobs | None = None,
    loss: LossSpec | None = None,
    kl: KL | None = None,
    extra: Mapped | Sequence[Mapped] | None = None,
) -> Term:
    """A term of `fl.sum`: samples, and how an update learns from them.

    Args:
        samples: A rollout, examples or pairs.
        rewards: As of `Policy.update`, like the other arguments.

    Returns:
        The term; `0.1 * fl.term(...)` multiplies its loss and its penalty.
    """
    current_tracer("fl.term")
    check_handle(samples, Samples, operation="fl.term", argument="samples")
    given = {
        "rewards": rewards,
        "advantages": advantages,
        "reference": reference,
        "old": old,
        "loss": loss,
        "kl": kl,
        "extra": extra,
    }
    arguments = {name: value for name, value in given.items() if value is not None}
    return Term(samples, arguments, user_line())


def sum_of(*terms: Term) -> Sum:
    """The sum of losses on different samples, for one optimizer update of all of them.

    Args:
        terms: What `fl.term` returned, each perhaps times a number.

    Raises:
        TraceError: One is no term, or there are none.
    """
    current_tracer("fl.sum")
    given: tuple[object, ...] = terms
    for each in given:
        if isinstance(each, Term):
            continue
        hint = f"write {_WRITTEN}"
        if isinstance(each, Scores):
            hint = "add scores with fl.weighted_sum((accuracy, 1.0), (style, 0.2))"
        elif isinstance(each, list | tuple) and all(isinstance(one, Term) for one in each):
            hint = "write fl.sum(*terms)"
        raise refuse_argument("fl.sum", "terms", each, "terms: fl.term(samples, ...)", hint)
    if not terms:
        raise trace_error("fl.sum has no terms", hint=f"write {_WRITTEN}")
    return Sum(terms)
