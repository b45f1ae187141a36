"""Losses of the user's own: `@fl.loss.own` makes one of a function.

    @fl.loss.own(needs=("advantages", "behaviour_logprobs"), corrects_behaviour=True)
    def my_loss(logprobs, batch, *, beta=0.1):
        ratio = (logprobs - batch.behaviour_logprobs).exp()
        return -batch.advantages * ratio + beta * (ratio - 1) ** 2

    actor.update(rollout, advantages=adv, loss=my_loss)              # beta is 0.1
    actor.update(rollout, advantages=adv, loss=my_loss(beta=0.2))

`flowrl.algo.losses` describes what the function is given and may return, and
`flowrl.testing.check_loss` proves that what was declared is so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, get_args

from flowrl.errors import TraceError
from flowrl.specs.base import USER_OPTIONS, Scalar, format_list, list_of, option
from flowrl.specs.function import caller, nearest_hint, reference_of
from flowrl.specs.loss.base import Aggregation, LossSpec, Prediction
from flowrl.specs.user_options import Options, change_options, declared_options, names_among

__all__ = ["FIELDS", "OwnLoss", "OwnPairLoss", "OwnScoreLoss", "OwnValueLoss", "own"]

FIELDS = (
    "advantages",
    "behaviour_logprobs",
    "old_logprobs",
    "reference_logprobs",
    "returns",
    "old_values",
    "preferred",
)
"""What an own loss may declare; `TokenBatch` says what each is. It has `samples` and `entropy`
without asking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoss(LossSpec):
    """A loss that a function of the user's own computes.

    Calling it gives the same loss with other options.

    Attributes:
        function: Reference to it.
        reads: Fields of the batch that it reads, comma-separated.
        aggregation: Of its tokens.
        extra: Fields of the user's own maps that it reads, comma-separated.
        corrects: Whether it corrects for samples of an older policy.
        proportional: Whether value and gradient of a sample are 0 where all its advantages are, so
            that the trainer may leave such samples out.
        options: Of the function, all of them.
    """

    kind: ClassVar[str] = "own"

    function: str
    reads: str = option("")
    aggregation: Aggregation = "token-mean"
    extra: str = option("")
    corrects: bool = option(False)
    proportional: bool = option(False)
    options: Options = field(default=(), metadata=USER_OPTIONS)

    @property
    def needs(self) -> tuple[str, ...]:
        """What it declares, fields of maps too."""
        return (*list_of(self.reads), *self.extra_fields)

    @property
    def extra_fields(self) -> tuple[str, ...]:
        """Fields of the user's own maps that it declares."""
        return list_of(self.extra)

    @property
    def corrects_behaviour(self) -> bool:
        """Whether it says so."""
        return self.corrects

    def __call__(self, **options: Scalar) -> OwnLoss:
        """The loss with other options.

        Raises:
            TraceError: an option that its function does not have.
        """
        return replace(self, options=change_options(self.function, self.options, options))


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPairLoss(OwnLoss):
    """An own loss of pairs of samples."""

    kind: ClassVar[str] = "own_pairs"
    pairs: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnValueLoss(OwnLoss):
    """An own loss of a critic: its function is given values in place of logprobs."""

    kind: ClassVar[str] = "own_values"
    predicts: ClassVar[Prediction] = "values"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnScoreLoss(OwnPairLoss):
    """An own loss of a reward model: its function is given one score a sample, of pairs."""

    kind: ClassVar[str] = "own_scores"
    predicts: ClassVar[Prediction] = "scores"


_KINDS: dict[tuple[Prediction, bool], type[OwnLoss]] = {
    ("logprobs", False): OwnLoss,
    ("logprobs", True): OwnPairLoss,
    ("values", False): OwnValueLoss,
    ("scores", True): OwnScoreLoss,
}
"""By what is predicted, and whether samples come in pairs."""


def own(
    *,
    needs: str | Iterable[str] = (),
    extra: str | Iterable[str] = (),
    corrects_behaviour: bool = False,
    proportional: bool = False,
    aggregation: Aggregation = "token-mean",
    predicts: Prediction = "logprobs",
) -> Callable[[Callable[..., Any]], OwnLoss]:
    """Makes a loss of a function `(logprobs [R], batch, *, option=default, ...)`.

    The function returns a tensor `[R]`, the loss of each response token, or a `TokenLoss`. Further
    keyword arguments are options. It sees the fields of the batch that it declares, and `samples`
    and `entropy`. Its value at a sample must not depend on other samples, because a mini-batch is
    cut into micro-batches between samples. A loss that reads `preferred` is one of pairs: it sees
    `pairs` too, and a mini-batch is cut between those.

    Args:
        needs: Fields of the batch that it reads, of `FIELDS`.
        extra: Fields of own maps that it reads, as `batch.extra["name"]`.
        corrects_behaviour: Whether it corrects for samples that an older policy drew, for example
            by a ratio to `behaviour_logprobs`; an asynchronous workflow asks for one that does.
            A loss of pairs may say so without, if it takes pairs of any policy.
        proportional: Whether value and gradient are 0 at a sample whose advantages all are.
        aggregation: How values of tokens become one number.
        predicts: What the function is given first: the policy's `logprobs`, a critic's `values`, or
            a reward model's `scores` `[S]`, one a sample of a pair.

    Raises:
        TraceError: a function that no plan can name, or a declaration that makes no sense.
    """
    if aggregation not in get_args(Aggregation):
        raise _refused("aggregation", aggregation, get_args(Aggregation))
    if predicts not in get_args(Prediction):
        raise _refused("predicts", predicts, get_args(Prediction))
    reads = names_among(needs, FIELDS, what="field of a loss")
    extra_names = (extra,) if isinstance(extra, str) else tuple(dict.fromkeys(extra))
    for name in extra_names:
        if not name.isidentifier() or name in FIELDS:
            raise TraceError(
                f"{name!r} cannot be the name of a field of a map",
                where=caller(),
                hint=f"{name} goes into needs=" if name in FIELDS else None,
            )
    pairs = "preferred" in reads
    if corrects_behaviour and not pairs and "behaviour_logprobs" not in reads:
        raise TraceError(
            "a loss cannot correct for the behaviour policy without its logprobs",
            where=caller(),
            hint='add "behaviour_logprobs" to needs=, or leave corrects_behaviour out',
        )
    kind = _KINDS.get((predicts, pairs))
    if kind is None:
        raise TraceError(
            f"a loss of {predicts} {'cannot be' if pairs else 'is'} one of pairs",
            where=caller(),
            hint=f'{"leave" if pairs else "add"} "preferred" {"out of" if pairs else "to"} needs=',
        )

    def make(function: Callable[..., Any]) -> OwnLoss:
        reference = reference_of(function, kind="loss")
        reserved = {"kind", *OwnLoss.__dataclass_fields__}
        return kind(
            function=reference,
            reads=format_list(reads),
            aggregation=aggregation,
            extra=format_list(extra_names),
            corrects=corrects_behaviour,
            proportional=proportional,
            options=declared_options(function, takes=(predicts, "batch"), reserved=reserved),
        )

    return make


def _refused(argument: str, value: object, allowed: tuple[str, ...]) -> TraceError:
    return TraceError(
        f"fl.loss.own: no such {argument}",
        where=caller(),
        found=repr(value),
        expected=", ".join(allowed),
        hint=nearest_hint(str(value), allowed),
    )
