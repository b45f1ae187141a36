"""A sampler's transformation of logits, repeated with the tokens that it kept held constant."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["SamplerTransform"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplerTransform:
    """What a sampler did to the temperature-scaled logits x of R tokens, before it drew them.

    In its order, for each token u and each v of the vocabulary::

        x[v] <- x[v] / penalty    where v stands before u, and x[v] > 0
        x[v] <- x[v] * penalty    where v stands before u, and x[v] <= 0
        x[v] <- -inf              where v is a stop token, and u comes too early for one
        x[v] <- -inf              where v is not among the kept tokens of u

    The kept tokens are given: they are constants, not a function of x. So the transformation is
    differentiable (but at x = 0 under a penalty), and equal for every x on both sides of an
    importance ratio.

    Attributes:
        penalty: 1 changes nothing.
        first: int `[S, V]`, with a penalty: where each token first stands in each of S samples; a
            large number where it does not.
        sample: int64 `[R]`, which of the S samples a token belongs to.
        place: int `[R]`, where it stands in the sample.
        stops: int64 `[n]`, stop tokens; None where none was forbidden.
        early: bool `[R]`, true at tokens that had to be something else.
        kept_ids: int64 `[K]`, the kept tokens of each of the R, one after the other; None where no
            token was cut off.
        kept_counts: int64 `[R]`; 0 where all were kept.
        kept_offsets: R + 1 numbers, where the kept tokens of each begin.
    """

    penalty: float = 1.0
    first: torch.Tensor | None = None
    sample: torch.Tensor | None = None
    place: torch.Tensor | None = None
    stops: torch.Tensor | None = None
    early: torch.Tensor | None = None
    kept_ids: torch.Tensor | None = None
    kept_counts: torch.Tensor | None = None
    kept_offsets: tuple[int, ...] = ()

    def seen(self, part: slice) -> torch.Tensor:
        """bool `[n, V]`: what stands before each token of `part`."""
        assert self.first is not None
        assert self.sample is not None
        assert self.place is not None
        return self.first[self.sample[part]] < self.place[part, None]

    def apply(self, x: torch.Tensor, part: slice) -> torch.Tensor:
        """The transformed logits `[n, V]` of the tokens `part`; differentiable.

        Args:
            x: float `[n, V]`, their logits at the rollout's temperature.
        """
        if self.penalty != 1.0:
            x = torch.where(self.seen(part), x * self._factor(x), x)
        if self.stops is not None:
            assert self.early is not None
            forbidden = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)
            forbidden[self.stops] = True
            x = x.masked_fill(self.early[part, None] & forbidden, -torch.inf)
        return x if self.kept_ids is None else x.masked_fill(~self._kept(x, part), -torch.inf)

    def slope(self, x: torch.Tensor, part: slice) -> torch.Tensor | None:
        """`[n, V]`, the derivative of each transformed logit that is finite; None where it is 1."""
        if self.penalty == 1.0:
            return None
        return torch.where(self.seen(part), self._factor(x), 1.0)

    def _factor(self, x: torch.Tensor) -> torch.Tensor:
        inverse = torch.tensor(1.0 / self.penalty, dtype=x.dtype, device=x.device)
        return torch.where(x > 0, inverse, self.penalty)

    def _kept(self, x: torch.Tensor, part: slice) -> torch.Tensor:
        assert self.kept_ids is not None
        assert self.kept_counts is not None
        counts = self.kept_counts[part]
        kept = (counts == 0)[:, None].expand(x.shape).clone()
        begin, end = self.kept_offsets[part.start], self.kept_offsets[part.start + len(x)]
        row = torch.repeat_interleave(counts)
        kept[row, self.kept_ids[begin:end]] = True
        return kept
