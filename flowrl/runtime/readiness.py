"""Waiting for the first of several workers that has something to say."""

from __future__ import annotations

import select
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

__all__ = ["Waitable", "wait_for_any"]


@runtime_checkable
class Waitable(Protocol):
    """A worker in another process, whose `poll` returns at once."""

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something to do."""
        ...

    def seconds_to_limit(self) -> float:
        """Seconds after which `poll` must be called to enforce a time limit."""
        ...


def wait_for_any(workers: Iterable[Waitable], timeout_s: float, *extra: int) -> None:
    """Waits until a worker has something to say, or `timeout_s` is over.

    Args:
        extra: Further descriptors that end the wait when they are readable.
    """
    waited = list(workers)
    limits = [worker.seconds_to_limit() for worker in waited]
    # A little late rather than a little early, which would spin.
    timeout_s = max(0.0, min([timeout_s, *(limit + 0.001 for limit in limits)]))
    # poll, because select ends at descriptor 1023.
    poller = select.poll()
    for descriptor in (*(worker.fileno() for worker in waited), *extra):
        poller.register(descriptor, select.POLLIN)
    poller.poll(1000.0 * timeout_s)
