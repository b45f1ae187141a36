"""Whether a model's parameters are still those that were read before.

Compared are storage addresses and version counters, so in-place updates by a trainer are seen even
when nobody announces them. Assignments through `.data` bypass the counters; `forget` covers them.
"""

from __future__ import annotations

from torch import nn

__all__ = ["SeenParameters"]


class SeenParameters:
    """Watches a model.

    Attributes:
        count: How often the parameters were found to be others; a name for those of now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters: list[nn.Parameter] = []
        self._seen: list[tuple[int, int]] = []
        self.count = 0

    def forget(self) -> None:
        """Takes the parameters for others the next time."""
        self._parameters, self._seen = [], []

    def changed(self) -> bool:
        """Whether they are others than at the last call."""
        # Walking the module tree takes longer than a decode step, so the list is kept.
        self._parameters = self._parameters or list(self._model.parameters())
        now = [(p.data_ptr(), p._version) for p in self._parameters]
        if now == self._seen:
            return False
        self._seen = now
        self.count += 1
        return True
