"""What becomes of running samples when new weights are published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.specs.base import Spec

__all__ = ["AbortRunning", "FinishRunning", "KeepRunning", "PublicationPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationPolicy(Spec):
    """Base of publication policies.

    Attributes:
        empties: Whether an engine is emptied before it takes the new weights. It then gets no
            sample from the publication until the caller reports `EngineUpdated`, which
            `UpdateEngine` asks for once nothing runs there.
        aborts: Whether it is emptied by aborts.
    """

    family: ClassVar[str] = "publication"
    empties: ClassVar[bool]
    aborts: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRunning(PublicationPolicy):
    """They run on; the weights change under them, and their version spans say where.

    The caller updates the engines before it reports the publication.
    """

    kind: ClassVar[str] = "keep"
    empties: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRunning(PublicationPolicy):
    """They are aborted, and go on from their tokens on an engine that has the new weights."""

    kind: ClassVar[str] = "abort"
    empties: ClassVar[bool] = True
    aborts: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRunning(PublicationPolicy):
    """They finish on the weights they have; each engine takes the new ones when it is empty."""

    kind: ClassVar[str] = "finish"
    empties: ClassVar[bool] = True
