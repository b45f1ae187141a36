"""`@fl.advantage.own`: advantages that a function of the user's own computes.

@fl.advantage.own(needs=("mask",))
def by_length(batch, *, power=0.5):
    return batch.scores / np.maximum(batch.mask.sum(1), 1) ** power

advantages = by_length(scores, rollout, power=1.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast, overload

from flowrl.program.advantage.node import add_advantage, returns_of
from flowrl.program.handles import Advantages, Logprobs, Returns, Rollout, Scores, Values
from flowrl.program.operation import operation
from flowrl.specs import Scalar
from flowrl.specs.own_advantage import Per, UserAdvantage

__all__ = ["OwnAdvantage", "own"]


_Given = TypeVar("_Given", Advantages, tuple[Advantages, Returns])


class OwnAdvantage(UserAdvantage, Generic[_Given]):
    """An advantage of the user's own, to be called inside a workflow.

    Its type says whether it gives a critic's targets too.
    """

    reserved: ClassVar[frozenset[str]] = frozenset(
        {"scores", "rollout", "reference", "values", "baseline"}
    )

    @operation
    def __call__(
        self,
        scores: Scores | Sequence[Scores],
        rollout: Rollout | None = None,
        *,
        reference: Logprobs | None = None,
        values: Values | None = None,
        baseline: Scores | None = None,
        **options: Scalar,
    ) -> _Given:
        """Advantages of each step's batch.

        Args:
            scores: One a sample; where it reads `rewards` a sequence of them, whose plain sum it
                gets as scores.
            rollout: The samples that were scored, where it reads their tokens.
            reference: Logprobs of another policy, where it reads `reference_logprobs`.
            values: A critic's, where it reads them.
            baseline: One score a prompt, where it reads `baselines`.
            options: Of the function.

        Returns:
            Advantages, and a critic's targets where it gives those.
        """
        spec = self.spec(**options)
        name = self.__name__
        advantages = add_advantage(name, spec, scores, rollout, reference, values, baseline)
        given = (advantages, returns_of(advantages, spec)) if spec.gives_returns else advantages
        return cast(_Given, given)


@overload
def own(
    *, per: Per = "sample", needs: str | Iterable[str] = (), returns: Literal[False] = False
) -> Callable[[Callable[..., object]], OwnAdvantage[Advantages]]: ...


@overload
def own(
    *, per: Per = "sample", needs: str | Iterable[str] = (), returns: Literal[True]
) -> Callable[[Callable[..., object]], OwnAdvantage[tuple[Advantages, Returns]]]: ...


def own(
    *, per: Per = "sample", needs: str | Iterable[str] = (), returns: bool = False
) -> Callable[[Callable[..., object]], OwnAdvantage[Any]]:
    """Makes an advantage of a function `(batch, *, option=default, ...)`.

    The function is given an `AdvantageBatch` (`flowrl.algo.advantages`) with scores, groups and the
    fields that it declares, and returns an array: `[N]`, or `[N, T]` with `per="token"`.

    Args:
        per: What it gives one number for: `sample` or `token`.
        needs: Fields of the batch that it reads.
        returns: Whether it returns an `AdvantageResult` with a critic's targets.
    """
    return OwnAdvantage.mark(per=per, needs=needs, returns=returns)
