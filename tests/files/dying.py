"""Children that die at a chosen system call, as by kill -9."""

from __future__ import annotations

import os
from collections.abc import Callable

CALLS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir", "ftruncate")


def die_at(call: int, action: Callable[[], object]) -> bool:
    """Runs `action` in a child that is gone, as by kill -9, right before its `call`-th system call.

    Returns whether the child came to the end of `action` instead.
    """
    child = os.fork()
    if child == 0:
        left = call

        def deadly(function: Callable[..., object]) -> Callable[..., object]:
            def counted(*args: object, **kwargs: object) -> object:
                nonlocal left
                if left == 0:
                    os._exit(9)
                left -= 1
                return function(*args, **kwargs)

            return counted

        for name in CALLS:
            setattr(os, name, deadly(getattr(os, name)))
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), f"the child failed with {code}"
    return code == 0
