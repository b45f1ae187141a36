"""The `torch` plug-in: Transformers models, trained and decoded in PyTorch.

Importing this package imports no torch; `plugin` imports it when it opens a worker.
"""

from __future__ import annotations

from flowrl_backends.torch.plugin import TorchPlugin

__all__ = ["TorchPlugin", "plugin"]

plugin = TorchPlugin()
