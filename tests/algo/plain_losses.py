"""Policy losses written once more as plain numbers, token by token, from their formulas."""

from __future__ import annotations

from math import exp, fsum, inf

import torch

from flowrl.algo.losses import TokenBatch
from flowrl.specs.loss import (
    CISPO,
    DPPO,
    GMPO,
    SAPO,
    TOPR,
    VESPO,
    Kimi,
    KLCov,
    PolicyClip,
    PolicyLoss,
)

__all__ = ["PlainLoss"]


def clip(x: float, low: float | None, high: float | None) -> float:
    return min(max(x, -inf if low is None else low), inf if high is None else high)


def mean(values: list[float]) -> float:
    return fsum(values) / len(values)


class PlainLoss:
    """One loss on one mini-batch; `values` are those of its tokens.

    Args:
        spec: The loss.
        at: Logprobs of the policy.
        batch: The whole mini-batch.
    """

    def __init__(self, spec: PolicyLoss, at: torch.Tensor, batch: TokenBatch) -> None:
        self.spec = spec
        self.logprob: list[float] = at.tolist()
        fields = ("advantages", "old_logprobs", "behaviour_logprobs", "entropy", "samples")
        self.a, self.old, self.behaviour, self.entropy, sample = (
            getattr(batch, name).tolist() for name in fields
        )
        self.members = [[u for u, s in enumerate(sample) if s == each] for each in sample]
        anchor = self.old if spec.anchor == "old" else self.behaviour
        self.anchor: list[float] = anchor
        self.gap = [x - y for x, y in zip(self.logprob, anchor, strict=True)]
        low, high = spec.min_log_ratio, spec.max_log_ratio
        self.near = [clip(gap, low, high) for gap in self.gap]
        self.surrogates = [self._surrogate(t) for t in range(len(sample))]

    @property
    def values(self) -> list[float]:
        """The losses of all tokens, corrected and with the entropy bonus."""
        raw = [self._weight(t) for t in range(len(self.gap))]
        scale = mean(raw) if self.spec.weights_normalise else 1.0
        return [
            (raw[t] / scale * self.surrogates[t] if self.kept(t) else 0.0)
            - self.spec.entropy * self.entropy[t]
            for t in range(len(self.gap))
        ]

    def ratio(self, t: int, level: str) -> float:
        """The ratio to the anchor, within the bounds of its logarithm."""
        gap = self.gap[t] if level == "token" else mean([self.gap[u] for u in self.members[t]])
        return exp(clip(gap, self.spec.min_log_ratio, self.spec.max_log_ratio))

    def total(self, t: int, level: str) -> float:
        """The log-ratio of a token, or the sum over its sample."""
        return self.near[t] if level == "token" else fsum(self.near[u] for u in self.members[t])

    def _surrogate(self, t: int) -> float:
        spec, a, logprob = self.spec, self.a[t], self.logprob[t]
        match spec:
            case PolicyClip():
                return self._clipped(t)
            case CISPO():
                ratio = self.ratio(t, spec.ratio)
                inside = spec.ratio_low <= ratio <= (spec.ratio_high or inf)
                bounded = clip(ratio, spec.ratio_low, spec.ratio_high)
                return -(ratio * inside if spec.outside == "zero" else bounded) * a * logprob
            case TOPR():
                ratio = exp(self.total(t, spec.level))
                if a >= 0:
                    return -clip(ratio, spec.positive_low, spec.positive_high) * a * logprob
                return -clip(ratio, spec.negative_low, spec.negative_high) * a * logprob
            case VESPO():
                w = exp(self.total(t, "sequence"))
                k, rate = (spec.k_positive, spec.lambda_positive)
                if a < 0:
                    k, rate = (spec.k_negative, spec.lambda_negative)
                return -(w**k) * exp(rate * (1 - w)) * a * logprob
            case GMPO():
                bounded = [self._bounded(u) for u in self.members[t]]
                return -mean([self.a[u] for u in self.members[t]]) * exp(mean(bounded))
            case SAPO():
                tau = spec.tau_positive if a > 0 else spec.tau_negative
                return -a * 4 / tau / (1 + exp(-tau * (self.ratio(t, spec.ratio) - 1)))
            case DPPO():
                moved = exp(logprob) - exp(self.anchor[t])
                far = moved > spec.limit if a > 0 else -moved > spec.limit
                return 0.0 if far else -a * exp(self.near[t])
            case KLCov():
                gain = [(x - mean(self.a)) * (y - mean(self.logprob)) for x, y in self._pairs()]
                most = sorted(gain)[-max(1, int(spec.fraction * len(gain))) :]
                return -a * exp(self.near[t]) + (
                    spec.coefficient * abs(self.near[t]) if gain[t] in most else 0.0
                )
            case Kimi():
                count = 1 if spec.level == "token" else len(self.members[t])
                return -a * logprob + spec.tau / 2 * self.total(t, spec.level) ** 2 / count
        return -a * logprob

    def _pairs(self) -> list[tuple[float, float]]:
        return list(zip(self.a, self.logprob, strict=True))

    def _clipped(self, t: int) -> float:
        spec = self.spec
        assert isinstance(spec, PolicyClip)
        ratio = self.ratio(t, spec.ratio)
        a = mean([self.a[u] for u in self.members[t]]) if spec.average_advantages else self.a[t]
        value = max(
            -a * clip(ratio, None, spec.ratio_cap),
            -a * clip(ratio, 1 - spec.clip_low, 1 + spec.clip_high),
        )
        return min(value, -a * spec.dual_clip) if spec.dual_clip and a < 0 else value

    def _bounded(self, u: int) -> float:
        spec = self.spec
        assert isinstance(spec, GMPO)
        bounded = clip(self.near[u], -spec.clip_low, spec.clip_high)
        return min(self.near[u], bounded) if self.a[u] > 0 else max(self.near[u], bounded)

    def _weight(self, t: int) -> float:
        spec = self.spec
        gaps = [self.old[u] - self.behaviour[u] for u in self.members[t]]
        match spec.weights:
            case "none":
                return 1.0
            case "token":
                weight = exp(self.old[t] - self.behaviour[t])
            case "sequence":
                weight = exp(fsum(gaps))
            case "geometric":
                weight = exp(mean(gaps))
        bounded = clip(weight, spec.weights_low, spec.weights_high)
        return bounded if spec.weights_outside == "truncate" or bounded == weight else 0.0

    def kept(self, t: int) -> bool:
        """Whether neither rejection nor sequence mask removes the token."""
        spec = self.spec
        away = mean([-self.gap[u] for u in self.members[t]])
        if spec.sequence_mask is not None and self.a[t] < 0 and away > spec.sequence_mask:
            return False
        if spec.rejection == "none":
            return True
        all_of = [self._divergence(u) for u in self.members[t]]
        statistic = {
            "token": self._divergence(t),
            "sequence-mean": mean(all_of),
            "sequence-sum": fsum(all_of),
            "sequence-max": max(all_of),
        }[spec.rejection]
        return statistic == clip(statistic, spec.rejection_low, spec.rejection_high)

    def _divergence(self, u: int) -> float:
        first, second = self.behaviour[u], self.old[u]
        if self.spec.rejection_divergence == "old-behaviour":
            first, second = second, first
        d = first - second
        return {"k1": d, "k2": d * d / 2, "k3": exp(-d) - 1 + d}[self.spec.rejection_estimator]
