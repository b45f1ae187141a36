"""Sums of metrics over the micro-batches of an update, kept on the device until the end."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["Metrics"]


class Metrics:
    """Accumulates an update's loss, token means and maxima; reads the device once, in `result`."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), device=device)
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}
        self._tokens = 0
        self._positions = 0

    def add(
        self,
        loss: torch.Tensor,
        means: Mapping[str, torch.Tensor],
        maxima: Mapping[str, torch.Tensor],
        positions: int,
    ) -> None:
        """Adds one micro-batch: its part of the loss, and metrics of `[R]` tokens."""
        self._loss = self._loss + loss
        self._positions += positions
        self._tokens += len(next(iter(means.values())))
        for name, sums in zip(means, torch.stack(list(means.values())).sum(1), strict=True):
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums
        for name, value in maxima.items():
            top = value.max()
            self._maxima[name] = (
                torch.maximum(self._maxima[name], top) if name in self._maxima else top
            )

    def loss(self) -> float:
        """The mini-batch's loss."""
        return float(self._loss)

    def result(self) -> dict[str, float]:
        """Means and maxima by name, with `tokens_computed` and `positions`."""
        found = {name: float(value) / self._tokens for name, value in self._sums.items()}
        found |= {name: float(value) for name, value in self._maxima.items()}
        found["tokens_computed"] = float(self._tokens)
        found["positions"] = float(self._positions)
        return found
