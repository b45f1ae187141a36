"""An HTTP server in a thread that answers what a test scripts, and notes what it was asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Attributes:
    chunks: Sent one by one; `None` waits until `FakeServer.go` is called.
    whole: With a content length instead of chunks.
    cut: Chunks end without the last one, as where a server dies.
    """

    status: int = 200
    chunks: Sequence[bytes | None] = ()
    whole: bool = False
    cut: bool = False


def json_answer(value: object, status: int = 200) -> Answer:
    return Answer(status=status, chunks=[json.dumps(value).encode()], whole=True)


def stream(*answers: object, cut: bool = False) -> Answer:
    """Server-sent events as SGLang sends them; an answer `None` waits for `go`."""
    lines = [None if one is None else b"data: " + json.dumps(one).encode() for one in answers]
    done = [] if cut else [b"data: [DONE]"]
    return Answer(chunks=[line and line + b"\n\n" for line in (*lines, *done)], cut=cut)


@dataclass(slots=True)
class FakeServer:
    """See the module.

    Attributes:
        script: Answers the body of a request to a path.
        asked: Paths and bodies, in order.
        headers: Those of the last request.
    """

    script: dict[str, Callable[[Any], Answer]] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    headers: str = ""
    url: str = ""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _gate: asyncio.Event = field(default_factory=asyncio.Event)

    def go(self) -> None:
        self._loop.call_soon_threadsafe(self._gate.set)

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers = head
        path = head.split()[1]
        length = next(
            int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Le")
        )
        text = await reader.readexactly(length)
        body = json.loads(text) if text else None
        self.asked.append((path, body))
        answer = self.script[path](body) if path in self.script else Answer(status=404, whole=True)
        writer.write(f"HTTP/1.1 {answer.status} Text\r\n".encode())
        if answer.whole:
            whole = b"".join(chunk or b"" for chunk in answer.chunks)
            writer.write(f"Content-Length: {len(whole)}\r\n\r\n".encode() + whole)
        else:
            writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
            for chunk in answer.chunks:
                if chunk is None:
                    await self._gate.wait()
                    continue
                writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                await writer.drain()
            if not answer.cut:
                writer.write(b"0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async def _serve(self, ready: threading.Event, end: asyncio.Event) -> None:
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await end.wait()
        server.close()
        await server.wait_closed()


@contextmanager
def fake_server(**script: Callable[[Any], Answer]) -> Iterator[FakeServer]:
    """Runs a server; a name `a_b` of the script is the path `/a_b`."""
    fake = FakeServer(script={f"/{name}": answer for name, answer in script.items()})
    ready, end = threading.Event(), asyncio.Event()
    loop = fake._loop
    thread = threading.Thread(target=loop.run_until_complete, args=[fake._serve(ready, end)])
    thread.start()
    ready.wait()
    try:
        yield fake
    finally:
        fake.go()
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()
