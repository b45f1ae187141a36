"""Messages between processes of a run: a 4-byte big-endian length, then a pickled tuple.

Both ends are one program in one run; nothing here reads a file.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import TypeAlias

__all__ = ["FrameReader", "Message", "pack", "send_some"]

Message: TypeAlias = tuple[object, ...]

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


def send_some(sock: socket.socket, outgoing: bytearray) -> None:
    """Sends what a socket that does not block takes now, and cuts it off `outgoing`.

    Where the other end is dead all is cut off: whoever reads finds out.
    """
    try:
        while outgoing:
            del outgoing[: sock.send(outgoing)]
    except BlockingIOError:
        pass
    except OSError:
        outgoing.clear()
