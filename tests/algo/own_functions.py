"""Functions of a user's own, at the top level of a module as they must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import flowrl as fl
from flowrl.algo.advantages import AdvantageBatch, AdvantageResult, rewards_to_go, token_rewards
from flowrl.algo.corrections import Segments
from flowrl.algo.losses import TokenBatch, TokenLoss
from flowrl.algo.maps import MapBatch
from flowrl.specs import loss


@loss.own(needs=("advantages", "behaviour_logprobs"), corrects_behaviour=True, proportional=True)
def clipped(
    logprobs: torch.Tensor, batch: TokenBatch, *, low: float = 0.2, high: float = 0.2
) -> torch.Tensor:
    """PPO's objective once more."""
    assert batch.advantages is not None
    assert batch.behaviour_logprobs is not None
    ratio = (logprobs - batch.behaviour_logprobs).exp()
    kept = ratio.clamp(1 - low, 1 + high)
    return torch.maximum(-batch.advantages * ratio, -batch.advantages * kept)


@loss.own(needs="advantages", extra="bonus", aggregation="constant")
def with_bonus(
    logprobs: torch.Tensor, batch: TokenBatch, *, scale: float = 1.0, mode: str = "add"
) -> TokenLoss:
    """An advantage with a field of a map added."""
    assert batch.advantages is not None
    weight = batch.advantages + (scale * batch.extra["bonus"] if mode == "add" else 0.0)
    return TokenLoss(values=-weight * logprobs, means={"weight": weight})


@loss.own()
def measured(
    logprobs: torch.Tensor, batch: TokenBatch, *, what: str = "unlikely", below: float = -1.0
) -> TokenLoss:
    """Metrics of some tokens, in one form or another."""
    chosen = logprobs[logprobs < below]
    found: dict[str, Any] = {"unlikely": chosen, "mean": chosen.mean(), "number": 1.0}
    return TokenLoss(
        values=-logprobs, means={what: found[what]}, maxima={f"{what}_max": found[what]}
    )


@loss.own(needs="preferred", corrects_behaviour=True)
def likelier(logprobs: torch.Tensor, batch: TokenBatch, *, beta: float = 1.0) -> torch.Tensor:
    """The preferred sample of a pair becomes the likelier one."""
    assert batch.pairs is not None
    assert batch.preferred is not None
    sign = torch.where(batch.preferred, 1.0, -1.0).to(logprobs.dtype)
    margin = Segments.of(batch.pairs).sums(sign * logprobs)
    return -torch.nn.functional.logsigmoid(beta * margin)


@loss.own(needs="returns", predicts="values")
def absolute(values: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """The absolute error of a critic."""
    assert batch.returns is not None
    return (values - batch.returns).abs()


@loss.own(needs="preferred", predicts="scores")
def hinge(scores: torch.Tensor, batch: TokenBatch, *, margin: float = 0.1) -> torch.Tensor:
    """A hinge on the difference of a pair's scores."""
    assert batch.pairs is not None
    assert batch.preferred is not None
    sign = torch.where(batch.preferred, 1.0, -1.0).to(scores.dtype)
    return torch.relu(margin - Segments.of(batch.pairs).sums(sign * scores))


@loss.own()
def summed(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """One number, where one a token is wanted."""
    return -logprobs.sum()


@loss.own()
def undefined(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """No number at large logprobs."""
    return (-1 - logprobs).log()


@loss.own()
def detached(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Without a gradient."""
    return logprobs.detach()


@loss.own()
def counted(logprobs: torch.Tensor, batch: TokenBatch) -> int:
    """No tensor at all."""
    return len(logprobs)


@loss.own()
def undeclared(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Reads what it does not declare."""
    return -batch.advantages * logprobs  # type: ignore[operator]


@fl.advantage.own()
def doubled(batch: AdvantageBatch, *, factor: float = 2.0) -> npt.NDArray[np.floating]:
    """Scores times a factor."""
    return factor * batch.scores


@fl.advantage.own(per="token", needs=("values", "token_rewards"), returns=True)
def to_go(batch: AdvantageBatch, *, gamma: float = 1.0) -> AdvantageResult:
    """Rewards-to-go minus values."""
    assert batch.mask is not None
    assert batch.values is not None
    rewards = token_rewards(batch.scores, batch.mask, given=batch.token_rewards)
    returns = rewards_to_go(rewards, batch.mask, gamma)
    return AdvantageResult(
        advantages=(returns - batch.values).astype(np.float32),
        returns=returns.astype(np.float32),
    )


@fl.advantage.own(per="token")
def per_sample_by_mistake(batch: AdvantageBatch) -> npt.NDArray[np.floating]:
    """`[N]`, where `[N, T]` was declared."""
    return batch.scores


@fl.advantage.own()
def infinite(batch: AdvantageBatch) -> npt.NDArray[np.floating]:
    """Not finite."""
    return np.where(batch.scores > 0, np.inf, 0.0)


@fl.map(reads=("score", "response_mask"), gives="score", per_sample=True)
def brief(batch: MapBatch, *, scale: float = 0.1) -> npt.NDArray[np.floating]:
    """The score less a price of each response token."""
    return np.asarray(batch["score"], np.float64) - scale * batch.lengths


@fl.map(reads=("score", "score_2"), gives=("gap/samples", "near: bool/tokens"))
def compared(batch: MapBatch) -> Mapping[str, npt.ArrayLike]:
    """How two scores differ, and whether they are near, at every token."""
    gap = np.asarray(batch["score"], np.float64) - np.asarray(batch["score_2"], np.float64)
    return {"gap": gap, "near": batch.spread(np.abs(gap) < 0.5)}


@fl.map(reads="score", gives=("first/samples", "second/samples"))
def forgetful(batch: MapBatch) -> npt.ArrayLike:
    """Gives one of two fields."""
    return batch["score"]


@fl.map(reads="score", gives="rank: int64/samples")
def fractional(batch: MapBatch) -> npt.ArrayLike:
    """Floats, where whole numbers were declared."""
    return np.asarray(batch["score"], np.float64) / 2


@loss.own(needs="advantages", extra="surprise")
def near_miss(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    return -batch.advantage * logprobs  # type: ignore[attr-defined, no-any-return]


@loss.own(needs="advantages", extra="surprise")
def beside(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    return -batch.surprise * logprobs  # type: ignore[attr-defined, no-any-return]


@loss.own(needs="advantages", extra="surprise")
def other_key(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    return -batch.extra["surprises"] * logprobs


def plain(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Not marked."""
    return -logprobs


@fl.advantage.own(needs="mask")
def close(batch: AdvantageBatch) -> Any:
    return batch.masks.sum(1)  # type: ignore[attr-defined]
