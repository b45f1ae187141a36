"""Plain functions for an event loop, in daemon threads.

`asyncio.to_thread` is not used: Python waits for its threads at exit, so that one function that
never returns would block the whole process. Here such a thread is abandoned and replaced.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

_Job: TypeAlias = "tuple[Callable[[], Any], asyncio.Future[_Result]]"
_Result: TypeAlias = tuple[Any, BaseException | None]


class Threads:
    """A pool of threads for one event loop, as large as the largest number of concurrent calls.

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
        """Returns the function's result or raises its error (a StopIteration as a RuntimeError).

        If this call is cancelled, the function continues and its result is dropped.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()
        inbox = self._idle.pop() if self._idle else self._start(loop)
        inbox.put((function, future))
        value, error = await future
        if isinstance(error, StopIteration):
            # No coroutine can raise it; this keeps its traceback.
            raise RuntimeError("StopIteration").with_traceback(error.__traceback__)
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Ends idle threads; the others end after their current call."""
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
                # Every error goes to the awaiting caller, SystemExit included.
                except BaseException as error:
                    result = None, error
                try:
                    loop.call_soon_threadsafe(done, future, result)
                except RuntimeError:
                    return  # the loop is closed, and nothing waits for the result
                if self._closed:
                    return

        def done(future: asyncio.Future[_Result], result: _Result) -> None:
            if self._closed:
                inbox.put(None)  # the thread may already wait for work
            else:
                self._idle.append(inbox)
            if not future.done():
                future.set_result(result)

        threading.Thread(target=work, name=f"flowrl-{self._name}", daemon=True).start()
        return inbox
