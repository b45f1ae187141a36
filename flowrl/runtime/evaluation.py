"""What held-out samples say of a policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowrl.errors import RewardError
from flowrl.runtime.payloads import Payload
from flowrl.specs import FinishReason

__all__ = ["evaluation_metrics"]


def evaluation_metrics(payloads: Sequence[Payload]) -> dict[str, float]:
    """Means over scored samples: each term by name, `score`, `length` in response tokens, and
    `truncated`, the share that met max_tokens (of episodes: that ended before they were done).

    A term that an episode does not have counts as 0 there.

    Raises:
        RewardError: no sample has a score.
    """
    if not payloads:
        raise RewardError(
            "no held-out sample was scored: the reward failed for all of them",
            where="eval",
            hint="mend the reward function; with rewards.max_failures=0 the run stops at the first",
        )
    names = sorted({name for payload in payloads for name in payload.terms})
    # An environment counts what happens; what never happened in an episode is no term of it.
    metrics = {
        name: float(np.mean([payload.terms.get(name, 0.0) for payload in payloads]))
        for name in names
    }
    metrics["score"] = float(np.mean([payload.score for payload in payloads]))
    metrics["length"] = float(np.mean([payload.num_drawn for payload in payloads]))
    metrics["truncated"] = float(
        np.mean([payload.finish is FinishReason.LENGTH for payload in payloads])
    )
    return metrics
