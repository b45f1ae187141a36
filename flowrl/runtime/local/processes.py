"""Processes that a run starts for itself, and the messages between them.

A child inherits one end of a socket pair and its parent's process id. It leads a session and a
process group of its own, so that Ctrl-C at the terminal reaches the driver alone, and so that
processes that the child has started can be killed with it.

A message is a 4-byte big-endian length, then a pickled tuple. Both ends are one program in one run;
nothing here reads a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import IO

from flowrl.backend.plugin import Plugin
from flowrl.backend.registry import find
from flowrl.errors import BackendError
from flowrl.runtime.channels import Message

Output = IO[bytes] | IO[str] | int
"""The output of a child: a file, a descriptor, or a constant of `subprocess`."""

# Seconds for a killed process to be gone.
_REAP_S = 10.0
_PR_SET_PDEATHSIG = 1


def start_module(
    module: str, descriptors: Sequence[int], output: Output
) -> subprocess.Popen[bytes]:
    """Starts `python -m MODULE DESCRIPTOR... PARENT` with the descriptors open in it."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, descriptors), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=tuple(descriptors),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(_search_path(sys.path))},
        # Ctrl-C at the terminal is for the driver, which ends its children in its own time.
        start_new_session=True,
    )


def _search_path(path: Iterable[str]) -> list[str]:
    """Returns the folders where this process finds modules; "" is the working folder."""
    return [entry or os.getcwd() for entry in path]  # noqa: PTH109


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a child and what it started, and waits for its end; idempotent.

    A child leads its own process group, whose number is certain to be its own only until the child
    has been waited for.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Longer only where the kernel holds it (a dead network disk); init reaps it then.
            process.wait(_REAP_S)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """True if a child has ended; its exit code stays to be read."""
    if process.returncode is not None:
        return True
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def ending(returncode: int | None) -> str:
    """Returns in words how a child ended."""
    if returncode is not None and returncode < 0:
        return f"signal {signal.Signals(-returncode).name}"
    return f"exit code {returncode}"


def standard_error() -> int:
    """Returns this process's standard error, or nothing if it is closed."""
    return subprocess.DEVNULL if sys.__stderr__ is None else 2


def core_id(number: int) -> int | None:
    """Returns the kernel's number of a core, counted among those that this process may use.

    None where there is no such core, or where the platform binds no process to one.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    return cores[number] if number < len(cores) else None


# In the child


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies (Linux: prctl(2)).

    The kernel watches the thread that started the child, so that one must outlive it. On other
    systems the closed socket ends the child, at the latest after its current work.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It may have died before the kernel was asked.
        if os.getppid() != parent:
            os._exit(0)


def bind_to(core: int) -> None:
    """Binds this process, and the threads that it starts from now on, to one core (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        # A container may have taken it away since; then the process runs where it can.
        os.sched_setaffinity(0, {core})


def received(sock: socket.socket, nbytes: int) -> bytes:
    """Returns received bytes, or nothing at the end of the stream.

    A parent that closes without having read everything ends the stream with a reset.
    """
    try:
        return sock.recv(nbytes)
    except ConnectionResetError:
        return b""


def named_plugin(name: str) -> Plugin:
    """Returns a plug-in by its name, or by `module:attribute`."""
    module, colon, attribute = name.partition(":")
    plugin = getattr(importlib.import_module(module), attribute) if colon else find(name)
    if not isinstance(plugin, Plugin):
        raise BackendError(f"{name} is no plug-in", found=type(plugin).__name__)
    return plugin


_LENGTH = struct.Struct(">I")


def pack(message: Message) -> bytes:
    """Packs a message into a frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Returns the messages that `data` completes."""
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
    """Sends what a non-blocking socket accepts now, and removes it from `outgoing`.

    If the other end is dead, everything is removed: the next receive notices it.
    """
    try:
        while outgoing:
            del outgoing[: sock.send(outgoing)]
    except BlockingIOError:
        pass
    except OSError:
        outgoing.clear()
