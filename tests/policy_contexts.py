"""What a policy is opened with, and weights that it loads, for tests that call a plug-in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.backend import weights
from flowrl.backend.protocols import GenerateBackend, Loaded, PolicyContext, Weights, WeightsKind
from flowrl.ids import RoleName

__all__ = ["load", "policy_context", "weights_of"]


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


def weights_of(version: int, folder: Path | None = None) -> Weights:
    """Weights of a folder, or else in place."""
    if folder is None:
        return Weights(version=version, kind=WeightsKind.IN_PLACE)
    return weights.weights_of(folder, version)


def load(engine: GenerateBackend, version: int, folder: Path | None = None) -> None:
    """Has an engine load weights that it reports at once, with their checksum."""
    sent = weights_of(version, folder)
    engine.load(sent)
    assert list(engine.poll(0.0)) == [Loaded(version=version, checksum=sent.checksum)]
