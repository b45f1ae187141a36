"""Sums of metrics over the micro-batches of an update, kept on the device until the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from flowrl.backend.batch import Ints


class Metrics:
    """The loss, means, maxima and predictions of an update, accumulated on the device."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), device=device)
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}
        self._maxima: dict[str, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        self._sources: list[Ints] = []
        self._samples: list[Ints] = []
        self._positions = 0

    def add(
        self,
        loss: torch.Tensor,
        means: Mapping[str, torch.Tensor],
        maxima: Mapping[str, torch.Tensor],
        positions: int,
    ) -> None:
        """Adds one micro-batch.

        Args:
            loss: The micro-batch's part of the loss.
            means: Metrics of its tokens, samples or pairs; each is averaged over all its numbers.
            maxima: Metrics whose largest number is reported.
            positions: The number of positions that the model computed.
        """
        self._loss = self._loss + loss
        self._positions += positions
        # Metrics of one length are summed in one operation: there are many, and they are small.
        for length in sorted({len(values) for values in means.values()}):
            names = [name for name, values in means.items() if len(values) == length]
            sums = torch.stack([means[name] for name in names]).sum(1)
            for name, value in zip(names, sums, strict=True):
                self._sums[name] = self._sums[name] + value if name in self._sums else value
                self._counts[name] = self._counts.get(name, 0) + length
        for name, value in maxima.items():
            if not len(value):
                continue
            top = value.max()
            self._maxima[name] = (
                torch.maximum(self._maxima[name], top) if name in self._maxima else top
            )

    def state(self) -> dict[str, Any]:
        """Returns everything, with tensors on the host, for `joined`."""
        return {
            "loss": self._loss.cpu(),
            "sums": {name: value.cpu() for name, value in self._sums.items()},
            "counts": self._counts,
            "maxima": {name: value.cpu() for name, value in self._maxima.items()},
            "kept": self.kept(),
            "positions": self._positions,
        }

    @classmethod
    def joined(cls, states: Sequence[Mapping[str, Any]], device: torch.device) -> Metrics:
        """Returns the metrics of an update of which ranks computed parts, in their order."""
        whole = cls(device)
        for state in states:
            whole._loss = whole._loss + state["loss"].to(device)
            whole._positions += state["positions"]
            for name, value in state["sums"].items():
                whole._sums[name] = whole._sums.get(name, 0) + value
                whole._counts[name] = whole._counts.get(name, 0) + state["counts"][name]
            for name, value in state["maxima"].items():
                whole._maxima[name] = torch.maximum(whole._maxima.get(name, value), value)
            if len(state["kept"][0]):
                whole.keep(*state["kept"])
        return whole

    def keep(self, predicted: torch.Tensor, source: Ints, sample: Ints) -> None:
        """Keeps the predictions of one micro-batch, `[R]`, with the places of their tokens."""
        self._kept.append(predicted)
        self._sources.append(source)
        self._samples.append(sample)

    def kept(self) -> tuple[torch.Tensor, Ints, Ints]:
        """Returns all kept predictions on the CPU, with the places and rows of their tokens."""
        if not self._kept:
            none = np.zeros(0, np.int64)
            return torch.zeros(0), none, none
        values = torch.cat(self._kept).float().cpu()
        return values, np.concatenate(self._sources), np.concatenate(self._samples)

    def loss(self) -> float:
        """The mini-batch's loss."""
        return float(self._loss)

    def result(self) -> dict[str, float]:
        """Returns means and maxima by name, with `tokens_computed` and `positions`.

        A metric without any number is omitted.
        """
        counted = {name: value for name, value in self._sums.items() if self._counts[name]}
        metrics = {name: float(value) / self._counts[name] for name, value in counted.items()}
        metrics |= {name: float(value) for name, value in self._maxima.items()}
        metrics["tokens_computed"] = float(sum(map(len, self._sources)))
        metrics["positions"] = float(self._positions)
        return metrics
