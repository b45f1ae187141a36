"""A server that ends with the process that started it, and what the server started with it.

A watcher between the two, in a session of its own, starts the server in another session. The kernel
terminates the watcher when the thread that started it ends, also where that is killed (Linux:
prctl(2)); `stop` does the same. The watcher then ends the server and its whole process group, also
the processes that would outlive their server. The server's output goes to a file.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["ServerProcess", "free_port"]

_TAIL_BYTES = 1500
_WATCH = """
import ctypes, os, signal, subprocess, sys, time

def end_with_parent(number):
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG; it lasts across execve

def prepare():
    end_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)

awaited = [signal.SIGTERM, signal.SIGCHLD]
signal.signal(signal.SIGCHLD, lambda *_: None)  # one that is ignored may never be delivered
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
end_with_parent(signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit()
server = subprocess.Popen(sys.argv[2:], start_new_session=True, preexec_fn=prepare)
signal.sigwait(awaited)
server.kill()
server.wait()
# What it started is left a moment to end with it: a tracker of shared memory cleans up.
deadline = time.monotonic() + 3
try:
    while time.monotonic() < deadline:
        os.killpg(server.pid, 0)
        time.sleep(0.02)
    os.killpg(server.pid, signal.SIGKILL)
except ProcessLookupError:
    pass
"""


class ServerProcess:
    """A started server.

    Args:
        command: The program and its arguments.
        environment: The environment variables to add.
        log: The file for its output.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        # Modules of this process's environment are not for a server with one of its own.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WATCH, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=inherited | dict(environment),
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        """True if it has ended by itself."""
        return self._process.poll() is not None

    def last_words(self) -> str:
        """Returns the end of its output."""
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").strip()

    async def stop(self) -> None:
        """Ends it and what it started; idempotent."""
        if self._process.returncode is None:
            await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait()


def free_port() -> int:
    """Returns a port of the loopback interface that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
