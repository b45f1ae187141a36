"""The executors that a configuration can name: what compiling must know of each, and its class.

An executor is a class that offers what `flowrl.runtime.executor.Executor` says, and an entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorKind:
    """An executor.

    Attributes:
        target: Its class as `module:class`, imported when something runs.
        engines: Where its policies generate: in its own process only, in workers only, or either.
    """

    target: str
    engines: Literal["in process", "in workers", "anywhere"]


EXECUTORS: Mapping[str, ExecutorKind] = {
    "local": ExecutorKind(target="flowrl.runtime.local.executor:LocalExecutor", engines="anywhere"),
    "eager": ExecutorKind(
        target="flowrl.runtime.eager.executor:EagerExecutor", engines="in process"
    ),
    "ray": ExecutorKind(target="flowrl.runtime.ray.executor:RayExecutor", engines="in workers"),
}
"""By the name that `executor` has in a configuration."""

if TYPE_CHECKING:
    ExecutorName: TypeAlias = str
else:
    ExecutorName = Literal[tuple(EXECUTORS)]
