"""Engines' processes that begin with their libraries loaded, for tests that open many of them.

    test -> (arguments, descriptors) -> a process that has loaded torch -> fork -> fork -> worker

Loading torch takes a process some seconds, and a fork of one that has loaded it none. The worker is
a process of its own as ever, with a group of its own, and can be killed like any other. Its parent
ends at once, so it becomes a child of this process, which takes in orphans (Linux: prctl(2)).
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flowrl.runtime.local.processes import Output

__all__ = ["WarmProcesses"]

_PR_SET_CHILD_SUBREAPER = 36
_DEADLINE_S = 60.0


class WarmProcess:
    """What is used of `subprocess.Popen`, of a process that this one took in."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("warm process", timeout or 0.0)
            else:
                time.sleep(0.005)
        return self.returncode


class WarmProcesses:
    """The process that is forked; `start` takes the place of `child_process.start_module`.

    Args:
        modules: That it loads.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        _take_in_orphans(True)
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(_DEADLINE_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                cwd=Path(__file__).parents[2],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    def start(self, module: str, descriptors: Sequence[int], output: Output) -> WarmProcess:
        """Starts `module.main([DESCRIPTOR, PARENT])` in a process of its own."""
        assert len(descriptors) == 1
        assert output == 2
        socket.send_fds(self._sock, [f"{module} {os.getpid()}".encode()], list(descriptors))
        return WarmProcess(int(self._sock.recv(64)))

    def close(self) -> None:
        """Ends it; idempotent."""
        _take_in_orphans(False)
        self._sock.close()
        self._process.wait(_DEADLINE_S)


def _take_in_orphans(does: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(does))


def _serve(sock: socket.socket) -> None:
    while True:
        data, descriptors, _, _ = socket.recv_fds(sock, 1024, 1)
        if not data:
            return
        module, parent = data.decode().split()
        told, tell = os.pipe()
        middle = os.fork()
        if not middle:
            _fork_worker(sock, module, descriptors[0], int(parent), tell)
        os.waitpid(middle, 0)  # from now on the worker is a child of whoever asked for it
        sock.sendall(os.read(told, 64))
        for descriptor in (descriptors[0], told, tell):
            os.close(descriptor)


def _fork_worker(sock: socket.socket, module: str, descriptor: int, parent: int, tell: int) -> None:
    """Ends this process, and goes on as another one."""
    worker = os.fork()
    if worker:
        os.write(tell, str(worker).encode())
        os._exit(0)
    os.close(tell)
    sock.close()
    os.setsid()
    while os.getppid() != parent:  # the one in between is on its way out
        time.sleep(0.001)
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.modules[module].main([str(descriptor), str(parent)])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in sys.argv[2:]:
        __import__(name)
    _serve(socket.socket(fileno=int(sys.argv[1])))
