"""Checks for losses and maps that users write, and for plug-ins.

from flowrl.testing import check_backend, check_loss, check_map
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.testing.backend_check import check_backend
    from flowrl.testing.loss_check import check_loss
    from flowrl.testing.map_check import check_map

__all__ = ["check_backend", "check_loss", "check_map"]


if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

    def __getattr__(name: str) -> object:
        if name == "check_loss":  # it imports torch, which not everything here needs
            from flowrl.testing.loss_check import check_loss

            return check_loss
        if name == "check_backend":
            from flowrl.testing.backend_check import check_backend

            return check_backend
        if name == "check_map":
            from flowrl.testing.map_check import check_map

            return check_map
        raise AttributeError(f"module 'flowrl.testing' has no attribute '{name}'")
