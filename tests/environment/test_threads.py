"""Threads for plain functions end, whatever they were doing when they were given up."""

from __future__ import annotations

import asyncio
import threading

from flowrl_backends.environment.threads import Threads

DEADLINE_S = 60.0


def test_a_thread_that_was_busy_when_all_were_closed_ends_after_what_it_does():
    found: list[threading.Thread] = []
    release = threading.Event()

    async def main() -> None:
        threads, loop, begun = Threads("test"), asyncio.get_running_loop(), asyncio.Semaphore(0)

        def busy() -> None:
            found.append(threading.current_thread())
            loop.call_soon_threadsafe(begun.release)
            release.wait(DEADLINE_S)

        await threads.run(lambda: None)  # its thread has nothing to do when they are closed
        running = [asyncio.ensure_future(threads.run(busy)) for _ in range(2)]
        for _ in running:
            await begun.acquire()
        for one in running:
            one.cancel()
        await asyncio.wait(running)
        threads.close()
        release.set()

    asyncio.run(main())
    for thread in found:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
