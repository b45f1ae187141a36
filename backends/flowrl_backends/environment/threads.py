"""Plain functions for an event loop, in daemon threads.

Not `asyncio.to_thread`: its threads are waited for when Python ends, so that one function that
never comes back would hold the whole process. Here such a thread is left behind, and another one
takes its place.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

__all__ = ["Threads"]

_Job: TypeAlias = "tuple[Callable[[], Any], asyncio.Future[_Result]]"
_Result: TypeAlias = tuple[Any, BaseException | None]


class Threads:
    """Threads that wait for work, as many as there was work at once; of one event loop.

    >>> async def main() -> int:
    ...     threads = Threads("example")
    ...     try:
    ...         return await threads.run(lambda: 6 * 7)
    ...     finally:
    ...         threads.close()
    >>> asyncio.run(main())
    42
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._closed = False

    async def run(self, function: Callable[[], Any]) -> Any:
        """What the function returns or raises (a StopIteration as a RuntimeError).

        Cancelled, it goes on unnoticed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()
        inbox = self._idle.pop() if self._idle else self._start(loop)
        inbox.put((function, future))
        value, error = await future
        if isinstance(error, StopIteration):
            # No coroutine can raise it; without this, whose line it was would be lost.
            raise RuntimeError("StopIteration").with_traceback(error.__traceback__)
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Ends threads that have nothing to do; the others end after what they do."""
        self._closed = True
        for inbox in self._idle:
            inbox.put(None)
        self._idle.clear()

    def _start(self, loop: asyncio.AbstractEventLoop) -> SimpleQueue[_Job | None]:
        inbox: SimpleQueue[_Job | None] = SimpleQueue()

        def work() -> None:
            while (job := inbox.get()) is not None:
                function, future = job
                result: _Result = (None, None)
                try:
                    result = function(), None
                # Whatever it raises belongs to whoever awaits it, SystemExit included.
                except BaseException as error:
                    result = None, error
                try:
                    loop.call_soon_threadsafe(done, future, result)
                except RuntimeError:
                    return  # the loop is closed, and nobody waits any more
                if self._closed:
                    return

        def done(future: asyncio.Future[_Result], result: _Result) -> None:
            if self._closed:
                inbox.put(None)  # it may wait for work already
            else:
                self._idle.append(inbox)
            if not future.done():
                future.set_result(result)

        threading.Thread(target=work, name=f"flowrl-{self._name}", daemon=True).start()
        return inbox
