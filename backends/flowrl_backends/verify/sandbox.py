"""Runs a program without network and without writing outside its folder: `sandbox.py FOLDER ...`.

It is a script of the standard library alone, started as `python -I sandbox.py FOLDER PROGRAM CPU_S
NBYTES MARK` for each program. It limits itself, runs the program in this process, and writes MARK
to standard error if the program came to its end:

- a network namespace without interfaces, and process and IPC namespaces of its own (`unshare`), so
  that no other process can be reached or signalled;
- Landlock: no file outside of FOLDER and `/dev/null` is opened for writing, created or removed;
- seconds of processor time, bytes of memory, bytes of a file, and open files (`setrlimit`).

The caller kills it at the end of its time. It exits with 97 where the system lacks one of these.

It does not stop reading: the program sees every file that the user may read, secrets among them. It
does not stop connections to Unix sockets with a path, many processes, nor use of every core, until
its time is over. A program that means to can pretend to have come to its end.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import signal
import struct
import sys

UNAVAILABLE = 97
"""The exit code if the sandbox cannot be made."""

_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION, _PATH_BENEATH = 1, 1
# Landlock's rights of version 1 that change files: 1 is to write to one, 4 to 12 are to remove and
# to make entries of a folder. Version 2 adds 13, to move files; version 3 adds 14, to truncate.
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGES = {1: sum(1 << bit for bit in (1, *range(4, 13))), 2: 1 << 13, 3: _TRUNCATE}
_MAX_FILE, _MAX_FILES = 1 << 24, 64


def _checked(result: int, what: str) -> int:
    if result < 0:
        reason = os.strerror(ctypes.get_errno())
        print(f"the sandbox cannot {what}: {reason}", file=sys.stderr)
        os._exit(UNAVAILABLE)
    return result


def _without_other_processes(libc: ctypes.CDLL) -> None:
    flags = _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWIPC
    _checked(libc.unshare(flags), "leave the network")
    child = os.fork()  # the first process of the new namespace, which ends with it
    if not child:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _without_writing(libc: ctypes.CDLL, folder: str) -> None:
    version = _checked(libc.syscall(_CREATE_RULESET, None, 0, _GET_VERSION), "use Landlock")
    rights = sum(bits for first, bits in _CHANGES.items() if first <= version)
    handled = struct.pack("=Q", rights)
    rules = _checked(libc.syscall(_CREATE_RULESET, handled, len(handled), 0), "use Landlock")
    for path, allowed in ((folder, rights), ("/dev/null", rights & (_WRITE_FILE | _TRUNCATE))):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed, place)
        _checked(libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0), "use Landlock")
        os.close(place)
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "give up privileges")
    _checked(libc.syscall(_RESTRICT_SELF, rules, 0), "use Landlock")
    os.close(rules)


def main(arguments: list[str]) -> None:
    """Limits this process and runs a program in it."""
    folder, program, cpu_s, nbytes, mark = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    os.chdir(folder)
    _without_other_processes(libc)
    _without_writing(libc, folder)
    for limit, most in (
        (resource.RLIMIT_CPU, int(cpu_s)),
        (resource.RLIMIT_DATA, int(nbytes)),
        (resource.RLIMIT_FSIZE, _MAX_FILE),
        (resource.RLIMIT_NOFILE, _MAX_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    sys.argv = [program]
    sys.path.insert(0, folder)
    runpy.run_path(program, run_name="__main__")
    sys.stdout.flush()
    os.write(2, mark.encode())


if __name__ == "__main__":
    main(sys.argv[1:])
