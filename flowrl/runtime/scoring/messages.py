"""The messages between a scoring pool and its workers.

Messages are framed by `flowrl.runtime.local.processes`. Requests and scores cross as plain tuples,
because dataclasses cost several times as much to pickle and hundreds of samples cross at once.

    pool -> worker    ("open", plugin, context, timeout_s, memory_nbytes), once
                      ("score", [RequestTuple, ...])
    worker -> pool    ("ready",) or ("broken", FlowError), once
                      ("scores", [(ticket, score, terms)], [(ticket, kind, message, frames, term)],
                       begin, end), with the times of a "score" after its last sample, or else 0

A worker also writes into shared memory which sample it scores, which term of the reward, and since
when, by the monotonic clock that the processes of a machine share.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from mmap import mmap
from typing import TypeAlias

from flowrl.backend.protocols import ScoreContext, ScoreRequest

BATCH = -1
"""The ticket that represents several samples which are scored in one call."""

RequestTuple: TypeAlias = tuple[int, str, str, str, str, object, str, int, Sequence[int]]
"""Ticket, then the fields of a `ScoreRequest` in their order."""


def request_tuple(ticket: int, request: ScoreRequest) -> RequestTuple:
    """Returns a request as the tuple that is sent."""
    return (
        ticket,
        request.sample,
        request.prompt,
        request.response,
        request.answer,
        request.row,
        request.finish.value,
        request.num_tokens,
        request.tokens,
    )


def term_limits(context: ScoreContext) -> dict[str, float]:
    """Returns the time limits in seconds of terms that have their own, by name."""
    return {
        str(term.get("name") or term.get("kind")): float(limit)
        for term in context.terms
        if isinstance(limit := term.get("timeout_s"), int | float)
    }


class Status:
    """The shared memory of one worker: a ticket (int64), when it began (float64), a term (text).

    The worker writes and the pool reads without a lock. The order of the writes makes every
    mixture harmless: between two samples the time is 0, which means that none has begun.
    """

    NBYTES = 16 + 240

    def __init__(self, memory: mmap) -> None:
        self._memory = memory

    def begin(self, ticket: int, now: float) -> None:
        """Notes, in the worker, that scoring of `ticket` begins."""
        self.enter("")
        struct.pack_into("=q", self._memory, 0, ticket)
        struct.pack_into("=d", self._memory, 8, now)

    def enter(self, term: str) -> None:
        """Notes, in the worker, the term that is computed; a long name is cut."""
        self._memory[16 : self.NBYTES] = term.encode()[: self.NBYTES - 16].ljust(240, b"\0")

    @property
    def term(self) -> str:
        """The term that was entered last; empty where none was, or all are computed."""
        return self._memory[16 : self.NBYTES].rstrip(b"\0").decode(errors="ignore")

    def restart(self, now: float) -> None:
        """Notes, in the worker, that the time of another term begins."""
        struct.pack_into("=d", self._memory, 8, now)

    def end(self) -> None:
        """Notes, in the worker, that nothing is being scored."""
        struct.pack_into("=d", self._memory, 8, 0.0)

    def read(self) -> tuple[int, float] | None:
        """Returns, in the pool, `(ticket, began)`, or None if nothing is being scored."""
        ticket, began = struct.unpack_from("=qd", self._memory, 0)
        return (ticket, began) if began else None
