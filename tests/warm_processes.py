"""Processes that begin with all libraries loaded: forks of this one as it was before the tests.

    tests -> (what to call, descriptors) -> the fork -> fork -> fork -> module.main(arguments)

Loading torch takes a process some seconds, and a fork of one that has loaded it none. The first
fork is made after collection, when no test has run and no run has started a thread. A process is
one of its own as ever, with a group of its own, and can be killed like any other. Its parent ends
at once, so it becomes a child of this process, which takes in orphans (Linux: prctl(2)).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NoReturn, TypeAlias

__all__ = ["WarmProcess", "WarmProcesses"]

Output: TypeAlias = IO[bytes] | IO[str] | int

_TORCH = ("flowrl_backends.torch.engine", "flowrl_backends.torch.trainer")
_LOADED = {"flowrl.runtime.scoring.worker": ("flowrl_backends.verify",)}
"""What a module needs that it does not import itself; others than these need torch."""
_PR_SET_CHILD_SUBREAPER = 36
_DEADLINE_S = 240.0


class WarmProcess:
    """What is used of `subprocess.Popen`, of a process that this one took in."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code of a process that has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("warm process", timeout or 0.0)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        """Kills it and what it started, unless it has ended."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait(_DEADLINE_S)


class WarmProcesses:
    """The process that is forked, itself a fork of the one that makes this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(_DEADLINE_S)
        self._pid = os.fork()
        if not self._pid:
            with contextlib.suppress(BaseException):
                _serve(theirs.detach())
            os._exit(0)
        theirs.close()

    def start_module(
        self, module: str, descriptors: Sequence[int], output: Output
    ) -> subprocess.Popen[bytes]:
        """Takes the place of `flowrl.runtime.local.processes.start_module`."""
        streams = (subprocess.DEVNULL, output, output)
        process: Any = self.start(module, (), descriptors, streams, parent=True)
        return process  # type: ignore[no-any-return]

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        descriptors: Sequence[int] = (),
        streams: tuple[Output, Output, Output] = (subprocess.DEVNULL, 1, 2),
        *,
        cwd: Path | None = None,
        parent: bool = False,
    ) -> WarmProcess:
        """Calls `module.main([*arguments, *descriptors])` in a process of its own.

        Args:
            streams: Standard input, output and error.
            parent: Adds the number of this process to the arguments.
        """
        call = {
            "module": module,
            "arguments": arguments,
            "cwd": str(cwd or Path.cwd()),
            "path": [entry or str(Path.cwd()) for entry in sys.path],
            "environment": dict(os.environ),
            "parent": os.getpid(),
            "append_parent": parent,
        }
        with TemporaryFile() as file, Path(os.devnull).open("r+b") as null, self._lock:
            file.write(json.dumps(call).encode())
            file.flush()
            opened = [_descriptor(stream, null.fileno()) for stream in streams]
            _take_in_orphans(True)
            try:
                socket.send_fds(self._sock, [b"call"], [file.fileno(), *opened, *descriptors])
                return WarmProcess(int(self._sock.recv(64)))
            finally:
                _take_in_orphans(False)

    def run(
        self, module: str, *arguments: str, text: str = "", cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Calls `module.main(arguments)` in a process of its own, as `subprocess.run` would.

        Args:
            text: Its standard input.
        """
        with TemporaryFile("w+") as put, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            put.write(text)
            put.seek(0)
            process = self.start(module, arguments, streams=(put, out, err), cwd=cwd)
            try:
                process.wait(_DEADLINE_S)
            finally:
                process.kill()
            for file in (out, err):
                file.seek(0)
            assert process.returncode is not None
            return subprocess.CompletedProcess(
                (module, *arguments), process.returncode, out.read(), err.read()
            )

    def close(self) -> None:
        """Ends the process that is forked."""
        self._sock.close()
        os.waitpid(self._pid, 0)


def _descriptor(output: Output, null: int) -> int:
    if output == subprocess.DEVNULL:
        return null
    return output if isinstance(output, int) else output.fileno()


def _take_in_orphans(does: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(does))


def _serve(number: int) -> None:
    faulthandler.disable()
    # Pytest has its own.
    logging.getLogger().handlers.clear()
    sys.modules.pop("pdb", None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.closerange(3, number)
    os.closerange(number + 1, 4096)
    sock = socket.socket(fileno=number)
    while True:
        data, descriptors, _, _ = socket.recv_fds(sock, 64, 16)
        if not data:
            return
        call: dict[str, Any] = json.loads(os.pread(descriptors[0], 1 << 20, 0))
        for name in (call["module"], *_LOADED.get(call["module"], _TORCH)):
            importlib.import_module(name)
        told, tell = os.pipe()
        middle = os.fork()
        if not middle:
            _fork_again(sock, call, descriptors[1:], tell)
        os.waitpid(middle, 0)  # from now on the process is a child of whoever asked for it
        sock.sendall(os.read(told, 64))
        for descriptor in (*descriptors, told, tell):
            os.close(descriptor)


def _fork_again(
    sock: socket.socket, call: Mapping[str, Any], descriptors: Sequence[int], tell: int
) -> NoReturn:
    """Ends this process, and goes on as another one."""
    pid = os.fork()
    if pid:
        os.write(tell, str(pid).encode())
        os._exit(0)
    os.close(tell)
    sock.close()
    os.setsid()
    code = 1
    try:
        code = _call(call, *descriptors)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _call(call: Mapping[str, Any], stdin: int, stdout: int, stderr: int, *descriptors: int) -> int:
    """Returns the exit code of a call."""
    while os.getppid() != call["parent"]:  # the one in between is on its way out
        time.sleep(0.001)
    for number, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(call["cwd"])
    os.environ.clear()
    os.environ.update(call["environment"])
    sys.path[:] = call["path"]
    importlib.invalidate_caches()
    arguments = [*call["arguments"], *map(str, descriptors)]
    if call["append_parent"]:
        arguments.append(str(call["parent"]))
    sys.argv[:] = [call["module"], *arguments]
    try:
        importlib.import_module(call["module"]).main(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
