"""A server in a process group of its own that ends with the process that started it.

The kernel kills the server when the thread that started it ends (Linux: prctl(2)), also where that
is killed; the processes that the server starts are to do the same. Its output goes to a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["ServerProcess", "free_port"]

# Seconds for what a killed server started to end with it, before that is killed too.
_END_S = 3.0
_TAIL_BYTES = 1500
_LAUNCH = """
import ctypes, os, sys
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL; it lasts across execve
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
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
                [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command],
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
        self._process.kill()
        self._process.wait()
        # What it started is left a moment to end with it: a tracker of shared memory cleans up.
        deadline = time.monotonic() + _END_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(0.02)
            os.killpg(self._process.pid, signal.SIGKILL)


def free_port() -> int:
    """Returns a port of the loopback interface that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
