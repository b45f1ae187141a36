"""The pure functions of the specifications in `flowrl.specs`.

Advantages, filters, selections and maps work on numpy arrays, because the driver calls them and
does not import torch; losses and KL estimators work on torch tensors. `resolve` finds the function
of a specification and imports only the module that contains it.
"""

from __future__ import annotations

from flowrl.algo.resolve import (
    AdvantageFunction,
    BatchAdvantageFunction,
    FilterFunction,
    KLFunction,
    LossFunction,
    MapFunction,
    SelectFunction,
    resolve_advantage,
    resolve_batch_advantage,
    resolve_filter,
    resolve_kl,
    resolve_loss,
    resolve_map,
    resolve_select,
)

__all__ = [
    "AdvantageFunction",
    "BatchAdvantageFunction",
    "FilterFunction",
    "KLFunction",
    "LossFunction",
    "MapFunction",
    "SelectFunction",
    "resolve_advantage",
    "resolve_batch_advantage",
    "resolve_filter",
    "resolve_kl",
    "resolve_loss",
    "resolve_map",
    "resolve_select",
]
