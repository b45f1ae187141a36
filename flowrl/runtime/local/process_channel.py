"""The channel to a worker in a process of this machine: frames over a socket pair."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from flowrl.runtime.channels import Message
from flowrl.runtime.local.processes import (
    FrameReader,
    Output,
    die_with,
    ending,
    has_ended,
    kill,
    pack,
    received,
    send_some,
    standard_error,
    start_module,
)
from flowrl.runtime.spans import SPANS

# Seconds for a process whose socket is closed to have an exit code.
_EXIT_S = 1.0


class ProcessChannel:
    """A process that runs a module, and the messages to it; see `Channel`.

    The process dies with the thread that opened it (Linux kills children by thread), so that one
    must outlive it.

    Args:
        module: Its `main` takes a socket's descriptor, the others and this process's id.
        output: File to which it prints; by default this process's standard error.
        descriptors: Further descriptors that are open in it.
    """

    def __init__(
        self, module: str, output: Output | None = None, *, descriptors: Sequence[int] = ()
    ) -> None:
        self._incoming = FrameReader()
        self._outgoing = bytearray()
        self._selector = selectors.DefaultSelector()
        self._is_over = False
        self._closed = False
        ours, theirs = socket.socketpair()
        with theirs:
            self.process: subprocess.Popen[bytes] = start_module(
                module,
                (theirs.fileno(), *descriptors),
                standard_error() if output is None else output,
            )
        ours.setblocking(False)
        self._sock = ours
        self._selector.register(ours, selectors.EVENT_READ)

    def fileno(self) -> int:
        # select, poll and epoll take an epoll or kqueue descriptor like any other.
        return cast("selectors.EpollSelector", self._selector).fileno()

    def send(self, message: Message) -> None:
        if not self._is_over:
            self._outgoing += pack(message)
            self._send()

    def receive(self, timeout_s: float) -> list[Message]:
        messages: list[Message] = []
        for _, events in self._selector.select(timeout_s):
            if events & selectors.EVENT_WRITE:
                self._send()
            if events & selectors.EVENT_READ:
                self._receive(messages)
        # One that left children behind can end without closing its socket.
        if not self._is_over and has_ended(self.process):
            self._receive(messages)
            self._is_over = True
        return SPANS.without(messages)

    def share(self, folder: Path) -> str:
        """See `Channel`: the folder itself, which must stay."""
        return str(folder)

    def ended(self) -> str | None:
        if not self._is_over:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_EXIT_S)
        code = self.process.returncode
        return "mute" if code is None else ending(code)

    def kill(self, grace_s: float = 0.0) -> None:
        if grace_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=grace_s)
        kill(self.process)

    def close(self, grace_s: float) -> None:
        if not self._closed:
            self.hang_up()
            self.kill(grace_s)

    def hang_up(self) -> None:
        """Shows the worker that nothing more comes; `kill` then waits for its end."""
        self._closed = True
        self._selector.close()
        self._sock.close()

    def _send(self) -> None:
        send_some(self._sock, self._outgoing)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        with contextlib.suppress(KeyError):  # it has ended
            self._selector.modify(self._sock, wanted)

    def _receive(self, messages: list[Message]) -> None:
        while not self._is_over:
            try:
                data = self._sock.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._is_over = True
                self._selector.unregister(self._sock)
            messages += self._incoming.feed(data)


class SocketMailbox:
    """The worker's end of a `ProcessChannel`; see `Mailbox`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._incoming = FrameReader()

    @classmethod
    def inherited(cls, arguments: Sequence[str]) -> SocketMailbox:
        """Returns that of this process, which a run started with a descriptor and its own id."""
        sock_fd, parent = map(int, arguments)
        die_with(parent)
        # What libraries print must not mix with the command's own output.
        sys.stdout = sys.stderr
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return cls(socket.socket(fileno=sock_fd))

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive(self) -> list[Message] | None:
        while data := received(self._sock, 1 << 18):
            if messages := self._incoming.feed(data):
                return messages
        return None

    def send(self, message: Message) -> None:
        spans = SPANS.message()
        try:
            self._sock.sendall(pack(message) + (b"" if spans is None else pack(spans)))
        except OSError:
            # The run is gone.
            os._exit(0)

    @contextlib.contextmanager
    def folder(self, shared: object) -> Iterator[Path]:
        assert isinstance(shared, str)
        yield Path(shared)
