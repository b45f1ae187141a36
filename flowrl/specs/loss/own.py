"""Own losses: `@fl.loss.own` makes a loss of a function.

    @fl.loss.own(needs=("advantages", "behaviour_logprobs"), corrects_behaviour=True)
    def my_loss(logprobs, batch, *, beta=0.1):
        ratio = (logprobs - batch.behaviour_logprobs).exp()
        return -batch.advantages * ratio + beta * (ratio - 1) ** 2

    actor.update(rollout, advantages=adv, loss=my_loss)              # beta is 0.1
    actor.update(rollout, advantages=adv, loss=my_loss(beta=0.2))

`flowrl.algo.losses` describes the function's arguments and result, and `flowrl.testing.check_loss`
checks its declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, get_args

from flowrl.specs.base import USER_OPTIONS, Scalar, format_list, list_of, option
from flowrl.specs.loss.base import Aggregation, LossSpec, Prediction
from flowrl.specs.names import operation
from flowrl.specs.user_functions import Options, change_options, declared_options, names_among
from flowrl.user_files import reference_of
from flowrl.user_lines import trace_error

FIELDS = (
    "advantages",
    "behaviour_logprobs",
    "old_logprobs",
    "reference_logprobs",
    "returns",
    "old_values",
    "preferred",
)
"""The fields of `TokenBatch` that an own loss may declare. It always gets `samples` and
`entropy`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoss(LossSpec):
    """A loss that a function of the user's own computes; commas join the names of fields.

    Calling it returns the same loss with other options. The trainer may skip samples without
    advantages where the loss is `proportional`.
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
        """The declared fields, those of maps included."""
        return (*list_of(self.reads), *self.extra_fields)

    @property
    def extra_fields(self) -> tuple[str, ...]:
        """The declared fields of own maps."""
        return list_of(self.extra)

    @property
    def corrects_behaviour(self) -> bool:
        """True if the function declares that it corrects for samples of an older policy."""
        return self.corrects

    def __call__(self, **options: Scalar) -> OwnLoss:
        """Returns the loss with other options.

        Raises:
            TraceError: The function does not have an option.
        """
        return replace(self, options=change_options(self.function, self.options, options))


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPairLoss(OwnLoss):
    """An own loss on pairs of samples."""

    kind: ClassVar[str] = "own_pairs"
    pairs: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnValueLoss(OwnLoss):
    """An own loss of a critic: its function gets values in place of logprobs."""

    kind: ClassVar[str] = "own_values"
    predicts: ClassVar[Prediction] = "values"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnScoreLoss(OwnPairLoss):
    """An own loss of a reward model: its function gets one score a sample, of pairs."""

    kind: ClassVar[str] = "own_scores"
    predicts: ClassVar[Prediction] = "scores"


_KINDS: dict[tuple[Prediction, bool], type[OwnLoss]] = {
    ("logprobs", False): OwnLoss,
    ("logprobs", True): OwnPairLoss,
    ("values", False): OwnValueLoss,
    ("scores", True): OwnScoreLoss,
}
"""The class of an own loss, by its prediction and whether samples come in pairs."""


@operation
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
    keyword arguments are options. The batch has the fields that the function declares, `samples`
    and `entropy`. The loss of a sample must not depend on other samples, because a mini-batch is
    split into micro-batches between samples. A loss that reads `preferred` is a loss on pairs: its
    batch also has `pairs`, and a mini-batch is split between pairs.

    Args:
        needs: The fields of the batch that it reads, of `FIELDS`.
        extra: The fields of own maps that it reads, as `batch.extra["name"]`.
        corrects_behaviour: True if it corrects for samples of an older policy, for example by a
            ratio to `behaviour_logprobs`; an asynchronous workflow requires such a loss. A loss on
            pairs may declare it without these logprobs, if it accepts pairs of any policy.
        proportional: True if value and gradient are 0 at a sample whose advantages are all 0.
        aggregation: The reduction of token losses to one number.
        predicts: The first argument of the function: the policy's `logprobs`, a critic's `values`,
            or a reward model's `scores` `[S]`, one a sample of a pair.

    Raises:
        TraceError: No plan can name the function, or a declaration is invalid.
    """
    names_among(aggregation, get_args(Aggregation), what="aggregation")
    known = tuple(dict.fromkeys(prediction for prediction, _ in _KINDS))
    names_among(predicts, known, what="prediction (predicts=) of a loss")
    given = {"logprobs": "logprobs are the function's first argument: leave it out"}
    reads = names_among(needs, FIELDS, what="field of a loss", other=given)
    extra_names = (extra,) if isinstance(extra, str) else tuple(dict.fromkeys(extra))
    for name in extra_names:
        if not name.isidentifier() or name in FIELDS:
            raise trace_error(
                f"{name!r} cannot be the name of a field of a map",
                hint=f"{name} goes into needs=" if name in FIELDS else None,
            )
    pairs = "preferred" in reads
    if corrects_behaviour and not pairs and "behaviour_logprobs" not in reads:
        raise trace_error(
            "a loss cannot correct for the behaviour policy without its logprobs",
            hint='add "behaviour_logprobs" to needs=, or omit corrects_behaviour',
        )
    kind = _KINDS.get((predicts, pairs))
    if kind is None:
        raise trace_error(
            f"a loss on {predicts} {'cannot be' if pairs else 'must be'} a loss on pairs",
            hint=f'{"remove" if pairs else "add"} "preferred" {"from" if pairs else "to"} needs=',
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
