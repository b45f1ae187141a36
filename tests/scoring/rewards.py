"""Reward functions that misbehave in every way that a user's can."""

import ctypes
import os
import re
import signal
import sys
from pathlib import Path


def by_word(response, answer):
    """Does what the response says."""
    action, _, rest = response.partition(" ")
    return _ACTIONS[action](rest)


def _loop(rest):
    while True:
        pass


def _stubborn(rest):
    try:
        while True:
            pass
    except BaseException:
        return 0.0


def _immortal(rest):
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass


def _regex(rest):
    return re.match(r"(a+)+$", "a" * 64 + "b") is not None


def _deaf(rest):
    """Blocks in C with every signal that can be blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.CDLL(None).pause()


def _own_alarm(rest):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return 1.0


def _nested(rest):
    return {}[rest]


def _print(rest):
    print("printed by the reward " * 20000)
    sys.stdout.flush()
    return 1.0


def _raise_unprintable(rest):
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError

    raise Unprintable


def _lines(rest):
    raise ValueError("one\n  two\n")


def _fork(rest):
    """Forks a child that ends as `rest` says, and waits for it."""
    child = os.fork()
    if child == 0:
        if rest == "raise":
            raise ValueError(rest)
        if rest == "exit":
            sys.exit(3)
        return 5.0
    os.waitpid(child, 0)
    return 1.0


def _segfault(rest):
    ctypes.string_at(0)


def _breakpoint(rest):
    breakpoint()
    return 1.0


def in_lists(responses, answers):
    """Does what each response says, for all of them in one call."""
    if len(responses) > 1:
        _CALLS.append(len(responses))
    if rest := [text for text in responses if text == "largest batch"]:
        return [float(max(_CALLS, default=1)) for _ in rest]
    return [by_word(response, "") for response in responses]


_CALLS: list[int] = []


def _large(rest):
    return float(len(bytearray(10**10)))


def _sympy(rest):
    """A number of 10^9 digits, in one call of C."""
    return float(10**10**9 > 1)


def _once(rest):
    """Is killed where it is called first."""
    marker = Path(rest)
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


_ACTIONS = {
    "once": _once,
    "large": _large,
    "digits": _sympy,
    "breakpoint": _breakpoint,
    "ok": lambda rest: float(rest),
    "loop": _loop,
    "lines": _lines,
    "fork": _fork,
    "stubborn": _stubborn,
    "immortal": _immortal,
    "regex": _regex,
    "deaf": _deaf,
    "alarm": _own_alarm,
    "key": _nested,
    "nan": lambda rest: float("nan"),
    "none": lambda rest: None,
    "text": lambda rest: "1.0",
    "print": _print,
    "exit": lambda rest: os._exit(7),
    "sysexit": lambda rest: sys.exit(3),
    "kill": lambda rest: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": _segfault,
    "unprintable": _raise_unprintable,
    "torch": lambda rest: float("torch" in sys.modules),
    "pid": lambda rest: float(os.getpid()),
    "huge": lambda rest: "x" * 50_000_000,
}
