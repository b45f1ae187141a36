"""Losses of every kind with choices that act, and a mini-batch that they act on."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import torch

from flowrl.algo.losses import TokenBatch
from flowrl.specs import loss
from flowrl.specs.loss import CISPO, SAPO, TOPR, Kimi, LossSpec

LENGTHS = (5, 1, 4, 7, 0, 3)
"""Response tokens of each sample: one has none, one has a single one."""

LOSSES: dict[str, LossSpec] = {
    "ppo": loss.policy_clip(0.2),
    "clip-higher": loss.policy_clip(0.2, 0.28),
    "dual-clip": loss.policy_clip(0.2, dual_clip=1.3),
    "ratio-cap": loss.policy_clip(0.2, ratio_cap=1.1),
    "clamped-log-ratio": loss.policy_clip(0.2, min_log_ratio=-0.4, max_log_ratio=0.3),
    "gspo": loss.gspo(0.03, 0.04),
    "gspo-token": loss.gspo(0.03, 0.04, ratio="sequence-token"),
    "gspo-averaged": loss.gspo(0.03, 0.04, average_advantages=True, aggregation="token-mean"),
    "luspo": loss.luspo(0.03, 0.04),
    "reinforce": loss.reinforce(),
    "cispo": loss.cispo(0.3, 0.2),
    "cispo-cap": loss.cispo(cap=1.1),
    "cispo-masked": CISPO(ratio_low=0.8, ratio_high=1.25, outside="zero"),
    "cispo-sequence": CISPO(ratio_high=1.02, ratio="sequence"),
    "topr": loss.topr(),
    "topr-token": TOPR(positive_low=0.5, positive_high=1.5, negative_high=1.2, level="token"),
    "topr-bounds": TOPR(positive_low=0.9, positive_high=1.4, negative_low=0.3, negative_high=1.2),
    "vespo": loss.vespo(),
    "gmpo": loss.gmpo(0.2, 0.3),
    "gmpo-tighter-above": loss.gmpo(0.3, 0.1),
    "sapo": loss.sapo(2.0, 0.5),
    "sapo-sequence": SAPO(ratio="sequence"),
    "kl-cov": loss.kl_cov(0.3),
    "dppo": loss.dppo(0.05),
    "kimi": loss.kimi(),
    "kimi-token": Kimi(tau=0.3, level="token"),
    "tis": loss.policy_clip(correction=loss.truncate(1.2, low=0.8)),
    "tis-sequence": loss.policy_clip(correction=loss.truncate(1.5, level="sequence")),
    "tis-normalised": loss.policy_clip(correction=loss.truncate(1.1, normalise=True)),
    "icepop": loss.policy_clip(correction=loss.mask_outside(0.8, 1.25)),
    "geometric": loss.policy_clip(correction=loss.mask_outside(0.9, 1.1, level="geometric")),
    "rejected-tokens": loss.policy_clip(rejection=loss.reject(high=0.02)),
    "rejected-mean": loss.cispo(
        rejection=loss.reject(low=-0.1, high=0.1, level="sequence-mean", estimator="k1")
    ),
    "rejected-sum": loss.reinforce(
        rejection=loss.reject(low=-0.3, high=0.2, level="sequence-sum", estimator="k1")
    ),
    "rejected-max": loss.policy_clip(
        rejection=loss.reject(high=0.1, level="sequence-max", estimator="k2")
    ),
    "rejected-reverse": loss.reinforce(
        rejection=loss.reject(high=0.02, divergence="old-behaviour")
    ),
    "sequence-mask": loss.policy_clip(sequence_mask=0.05),
    "all-together": loss.policy_clip(
        0.1,
        0.2,
        dual_clip=1.3,
        correction=loss.truncate(1.2, low=0.9),
        rejection=loss.reject(high=0.05),
        sequence_mask=0.05,
        entropy=0.1,
    ),
    "entropy": loss.policy_clip(entropy=0.1),
    "cross-entropy": loss.cross_entropy(),
    "value": loss.value_clip(0.2),
    "value-huber": loss.value_clip(0.2, form="huber", delta=0.3),
    "value-unclipped": loss.value_clip(None),
}


def draw(seed: int = 0, *, spread: float = 0.3) -> tuple[torch.Tensor, TokenBatch]:
    """Logprobs (or values) `[R]` without gradient, and a whole mini-batch of `LENGTHS`."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    old = -1.2 + noise(0.4)
    batch = TokenBatch(
        advantages=noise(1.0),
        old_logprobs=old,
        behaviour_logprobs=old + noise(spread / 2),
        reference_logprobs=old + noise(spread),
        entropy=1 + noise(0.2),
        samples=torch.from_numpy(np.repeat(np.arange(len(LENGTHS)), LENGTHS)),
        old_values=old + noise(spread),
        returns=noise(1.0),
    )
    return old + noise(spread), batch


def part(batch: TokenBatch, chosen: torch.Tensor) -> TokenBatch:
    """The batch of the tokens where `chosen` is true; what is one number for all stays."""
    picked = {
        f.name: value[chosen]
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), torch.Tensor) and value.ndim
    }
    return replace(batch, **picked)
