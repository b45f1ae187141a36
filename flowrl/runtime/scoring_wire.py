"""What a scoring pool and its workers say to each other.

Frames: a 4-byte big-endian length, then a pickled message. Requests and scores cross as plain
tuples, because dataclasses cost several times as much to pickle and hundreds of samples cross at
once. Both ends are one program in one run; nothing here reads a file.

    pool -> worker    ("open", plugin, context, timeout_s), once
                      ("score", [RequestTuple, ...])
    worker -> pool    ("ready",) or ("broken", FlowError), once
                      ("scores", [(ticket, score, terms)], [(ticket, kind, message, frames)])
                      ("idle",), after the last sample of a "score"

A worker also writes into 16 bytes of shared memory which sample it scores and since when, by the
monotonic clock that the processes of a machine share.
"""

from __future__ import annotations

import pickle
import struct
from mmap import mmap
from typing import TypeAlias

from flowrl.backend.protocols import ScoreRequest

__all__ = ["FrameReader", "Message", "RequestTuple", "Status", "pack", "request_tuple"]

Message: TypeAlias = tuple[object, ...]

RequestTuple: TypeAlias = tuple[int, str, str, str, str, object, str, int]
"""Ticket, then the fields of a `ScoreRequest` in their order."""

_LENGTH = struct.Struct(">I")


def pack(message: Message) -> bytes:
    """A frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes."""
        self._buffer += data
        messages: list[Message] = []
        position = 0
        while len(self._buffer) - position >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, position)
            begin = position + _LENGTH.size
            if len(self._buffer) < begin + size:
                break
            # The other end is a process of this run; see the module.
            messages.append(pickle.loads(self._buffer[begin : begin + size]))  # noqa: S301
            position = begin + size
        if position:
            del self._buffer[:position]
        return messages


def request_tuple(ticket: int, request: ScoreRequest) -> RequestTuple:
    """A request as it crosses."""
    return (
        ticket,
        request.sample,
        request.prompt,
        request.response,
        request.answer,
        request.row,
        request.finish.value,
        request.num_tokens,
    )


class Status:
    """The shared memory of one worker: a ticket (int64) and when it began (float64).

    The worker writes and the pool reads without a lock. The order of the writes makes every
    mixture harmless: between two samples the time is 0, which means that none has begun.
    """

    NBYTES = 16

    def __init__(self, memory: mmap) -> None:
        self._memory = memory

    def begin(self, ticket: int, now: float) -> None:
        """Worker: scoring of `ticket` begins."""
        struct.pack_into("=q", self._memory, 0, ticket)
        struct.pack_into("=d", self._memory, 8, now)

    def end(self) -> None:
        """Worker: nothing is being scored."""
        struct.pack_into("=d", self._memory, 8, 0.0)

    def read(self) -> tuple[int, float] | None:
        """Pool: `(ticket, began)`, or None where nothing is being scored."""
        ticket, began = struct.unpack_from("=qd", self._memory, 0)
        return (ticket, began) if began else None
