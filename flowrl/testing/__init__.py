"""What proves that something is as it should be: of losses, backends, schedulers, and of numbers.

from flowrl.testing import check_loss
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.testing.loss_check import check_loss

__all__ = ["check_loss"]


def __getattr__(name: str) -> object:
    if name == "check_loss":  # it imports torch, which not everything here needs
        from flowrl.testing.loss_check import check_loss

        return check_loss
    raise AttributeError(f"module 'flowrl.testing' has no attribute '{name}'")
