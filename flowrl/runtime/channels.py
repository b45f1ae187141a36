"""The two ends of what passes between a run and one of its workers, wherever the worker is.

A message is a tuple. Messages of one direction arrive in the order of sending, each once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

Message: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Bulk:
    """The arrays of a message, as an element of it; a store may keep them for other workers.

    Attributes:
        value: An array, or anything that has `nbytes`; what a store keeps is mapped, and not
            copied.
        handle: What `flowrl.runtime.groups.resolved` finds them by; None if no store keeps them.
    """

    value: Any
    handle: object | None = None


class Channel(Protocol):
    """The run's end; used by one thread at a time."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `receive` has something to do."""
        ...

    def send(self, message: Message) -> None:
        """Sends a message; returns at once, also where the worker is dead."""
        ...

    def receive(self, timeout_s: float) -> list[Message]:
        """Returns new messages; waits up to `timeout_s` seconds for something to happen."""
        ...

    def share(self, folder: Path) -> object:
        """Returns what a message carries for a folder; the other end has `Mailbox.folder`."""
        ...

    def ended(self) -> str | None:
        """Returns how the worker ended, after its last message was received; None before."""
        ...

    def kill(self, grace_s: float = 0.0) -> None:
        """Ends the worker, which has `grace_s` seconds to end by itself; idempotent."""
        ...

    def close(self, grace_s: float) -> None:
        """Shows the worker that nothing more comes, so that it leaves, and ends it; idempotent."""
        ...


class Mailbox(Protocol):
    """The worker's end."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `receive` has something to do."""
        ...

    def receive(self) -> list[Message] | None:
        """Waits for messages and returns them; None where nothing more comes."""
        ...

    def send(self, message: Message) -> None:
        """Sends a message."""
        ...

    def folder(self, shared: object) -> AbstractContextManager[Path]:
        """Returns a shared folder as one that can be read in the block."""
        ...


OpenChannel: TypeAlias = Callable[[], Channel]
"""Starts a worker and returns the channel to it."""
