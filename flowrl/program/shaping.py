"""`fl.shaping`: scores that depend on length, on how a response ends, on repetition; log-ratios.

    scores = fl.shaping.soft_overlong(scores, rollout, max_tokens=256, buffer=64)

Each gives scores again, sample by sample, so that a filter may follow; `implicit_reward` gives
rewards of tokens. Formulas, with paper and equation, are at their functions in `flowrl.algo.maps`.
Those of scores are terms of `rewards.terms` too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from flowrl.program.formulas import add_map
from flowrl.program.handles import Logprobs, Rollout, Scores, TokenRewards
from flowrl.program.operation import Call, operation_of
from flowrl.specs.maps import (
    CosineLength,
    ImplicitReward,
    Repetition,
    ShapingSpec,
    SoftOverlong,
    StopProperly,
)
from flowrl.specs.names import operation, refusing_others

__all__ = ["cosine_length", "implicit_reward", "repetition", "soft_overlong", "stop_properly"]

if not TYPE_CHECKING:  # a type checker is to refuse names that are not there
    __getattr__ = refusing_others(__name__, __all__)


_P = ParamSpec("_P")


def _shaped(spec: ShapingSpec, scores: Scores, rollout: Rollout) -> Scores:
    call = Call(f"fl.shaping.{spec.kind}")
    call.reads({"scores": (scores, Scores), "rollout": (rollout, Rollout)})
    given = add_map(call, spec, (scores, rollout))
    assert isinstance(given, Scores)
    return given


def _shaping_of(
    kind: Callable[_P, ShapingSpec],
) -> Callable[Concatenate[Scores, Rollout, _P], Scores]:
    return operation_of(kind, _shaped, __name__, scores=Scores, rollout=Rollout)


soft_overlong = _shaping_of(SoftOverlong)
stop_properly = _shaping_of(StopProperly)
cosine_length = _shaping_of(CosineLength)
repetition = _shaping_of(Repetition)


@operation
def implicit_reward(logprobs: Logprobs, reference: Logprobs, *, beta: float = 0.05) -> TokenRewards:
    """`beta` times the log-ratio of a policy to a reference, as the reward of each token: PRIME.

    The policy has learned with `fl.loss.implicit_reward(beta)` that the sum predicts the outcome.

    Args:
        logprobs: Those of the policy that is the process reward model.
        reference: Those of the policy that it began with.
        beta: The factor, as of the loss.
    """
    call = Call("fl.shaping.implicit_reward")
    call.reads({"logprobs": (logprobs, Logprobs), "reference": (reference, Logprobs)})
    spec = call.spec(ImplicitReward(beta=beta))
    given = add_map(call, spec, (logprobs, reference))
    assert isinstance(given, TokenRewards)
    return given
