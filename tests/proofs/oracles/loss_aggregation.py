"""Aggregations under the names that other libraries give them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from flowrl.algo.losses import aggregate, sample_weights
from flowrl.specs.loss import Aggregation
from tests.proofs.oracles.case import Case, Json, Result, choose

__all__ = ["Denominators", "compute", "name_of", "reduced"]

_NAMES: dict[str, Aggregation] = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "sequence-mean-token-mean",
    "sequence-mean": "sequence-mean-token-mean",
    "seq-mean-token-sum": "sequence-mean-token-sum",
    "seq-mean-token-sum-norm": "constant",
    "prompt-mean": "prompt-mean-token-mean",
}


class Denominators(NamedTuple):
    """The choices of `sample_weights` that one library makes."""

    aggregation: Aggregation
    count_empty: bool = True
    max_tokens: float = 0
    num_tokens: float | None = None
    num_samples: float | None = None
    dp_size: int = 1
    groups: Json = None


def name_of(mode: str) -> Aggregation:
    """Our name of a library's aggregation."""
    return choose(_NAMES, mode.replace("_", "-"), "aggregation")


def reduced(values: torch.Tensor, mask: torch.Tensor, chosen: Denominators) -> torch.Tensor:
    """The aggregate of `[B, T]` per-token values under a mask; 0 without any token."""
    if not mask.any() and chosen.num_tokens is None:
        return (values * 0).sum()
    weights = sample_weights(
        mask.sum(1).numpy(),
        chosen.aggregation,
        max_tokens=chosen.max_tokens,
        groups=chosen.groups,
        count_empty=chosen.count_empty,
        num_tokens=chosen.num_tokens,
        num_samples=chosen.num_samples,
        dp_size=chosen.dp_size,
    )
    live = mask > 0
    spread = torch.from_numpy(weights)[:, None].expand_as(values)
    return aggregate(values[live], spread[live])


def compute(case: Case) -> Result:
    """`loss`: the aggregate of `loss_mat` under `response_mask`."""
    values, mask = torch.tensor(case.array("loss_mat")), torch.tensor(case.mask)
    mode = str(case.option("mode", case.option("agg", "token-mean")))
    if mode == "token_mean_legacy":
        return {"loss": _mean_of_micro_batches(values, mask, int(case.option("micro_batch_size")))}
    given_samples, given_tokens = case.option("global_batch_size"), case.option("batch_num_tokens")
    if "sample_mask" in case.inputs:
        valid = torch.tensor(case.array("sample_mask"))
        mask = mask * valid[:, None]
        given_samples = float(valid.sum()) if given_samples is None else given_samples
    width = values.shape[1]
    boundaries = case.option("prompt_boundaries")
    groups = None if boundaries is None else _groups(boundaries, len(values))
    aggregation = name_of(mode)
    chosen = Denominators(
        aggregation,
        count_empty=bool(case.option("count_empty", case.library in {"skyrl", "trl", "roll"})),
        num_tokens=given_tokens,
        num_samples=given_samples,
        dp_size=int(case.option("dp_size") or 1),
        groups=groups,
    )
    if aggregation == "constant" and case.library == "skyrl":
        chosen = chosen._replace(max_tokens=case.option("max_seq_len"))
    elif aggregation == "constant":
        # verl and ROLL divide by the constant alone, by default the padded width.
        scale = case.option("loss_scale_factor") or width
        chosen = chosen._replace(max_tokens=scale, num_samples=1, dp_size=1)
    return {"loss": float(reduced(values, mask, chosen))}


def _groups(boundaries: Json, count: int) -> list[int]:
    groups = [-1 - i for i in range(count)]
    for number, (begin, end) in enumerate(boundaries):
        groups[begin:end] = [number] * (end - begin)
    return groups


def _mean_of_micro_batches(values: torch.Tensor, mask: torch.Tensor, size: int) -> float:
    """SkyRL's former rule: it depends on the cut into micro-batches, so flowrl has no such name."""
    parts = zip(torch.split(values, size), torch.split(mask, size), strict=True)
    means = [float(reduced(v, m, Denominators("token-mean"))) for v, m in parts]
    return float(np.mean(means))
