"""Checks for losses and maps that users write, and for plug-ins.

from flowrl.testing import check_backend, check_loss, check_map
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.testing.backend_check import check_backend
    from flowrl.testing.loss_check import check_loss
    from flowrl.testing.map_check import check_map

__all__ = ["check_backend", "check_loss", "check_map"]


_MODULES = {"check_backend": "backend_check", "check_loss": "loss_check", "check_map": "map_check"}

if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'flowrl.testing' has no attribute '{name}'")
        # Not before it is asked for, as some of them import torch.
        return getattr(import_module(f"flowrl.testing.{_MODULES[name]}"), name)
