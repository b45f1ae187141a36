"""Sums and means over the tokens of each sample, for tensors of response tokens end to end."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Segments"]


@dataclass(frozen=True, slots=True)
class Segments:
    """Which sample each token belongs to.

    Attributes:
        of_token: int64 `[R]`, 0 <= of_token < S.
        counts: `[S]`, tokens of each sample.
    """

    of_token: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, samples: torch.Tensor) -> Segments:
        """From any integers `[R]` that are equal where tokens share a sample."""
        _, of_token, counts = torch.unique(samples, return_inverse=True, return_counts=True)
        return cls(of_token, counts)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """`[R]`: at each token the sum over its sample."""
        return self.totals(values)[self.of_token]

    def totals(self, values: torch.Tensor) -> torch.Tensor:
        """`[S]`, the sum over each sample."""
        return values.new_zeros(len(self.counts)).index_add(0, self.of_token, values)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """`[R]`: at each token the mean over its sample."""
        return self.averages(values)[self.of_token]

    def averages(self, values: torch.Tensor) -> torch.Tensor:
        """`[S]`, the mean over each sample."""
        return self.totals(values) / self.counts.to(values.dtype)

    def maxima(self, values: torch.Tensor) -> torch.Tensor:
        """`[R]`: at each token the maximum over its sample."""
        lowest = values.new_full((len(self.counts),), -torch.inf)
        return lowest.scatter_reduce(0, self.of_token, values, "amax")[self.of_token]

    def lengths(self, like: torch.Tensor) -> torch.Tensor:
        """`[R]`: at each token the number of tokens of its sample, in the type of `like`."""
        return self.counts[self.of_token].to(like.dtype)
