"""What a plug-in is asked to open a policy with, for tests that call one directly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.backend.protocols import PolicyContext
from flowrl.ids import RoleName

__all__ = ["policy_context"]


def policy_context(model: Path = Path(), **changes: Any) -> PolicyContext:
    """The actor on a CPU, in float32, with one slot of one token; fields as `changes` say."""
    context = PolicyContext(
        role=RoleName("actor"),
        model=model,
        fresh=True,
        device="cpu",
        dtype="float32",
        seed=0,
        num_slots=1,
        max_length=1,
        trainable=False,
        stop_token_ids=(),
    )
    return replace(context, **changes)
