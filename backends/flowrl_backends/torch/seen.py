"""Detects changes of a model's parameters.

Storage addresses and version counters are compared, so in-place updates by a trainer are detected
without a notification. Assignments through `.data` bypass the counters; `forget` covers them.
"""

from __future__ import annotations

from torch import nn


class SeenParameters:
    """A watch on a model's parameters.

    Attributes:
        count: The number of detected changes, which identifies the current parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters: list[nn.Parameter] = []
        self._seen: list[tuple[int, int]] = []
        self.count = 0

    def forget(self) -> None:
        """Makes the next call of `changed` return True."""
        self._parameters, self._seen = [], []

    def changed(self) -> bool:
        """Returns True if the parameters changed since the last call."""
        # Traversing the module tree takes longer than a decode step, so the list is kept.
        self._parameters = self._parameters or list(self._model.parameters())
        now = [(p.data_ptr(), p._version) for p in self._parameters]
        if now == self._seen:
            return False
        self._seen = now
        self.count += 1
        return True
