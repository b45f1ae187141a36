"""A client for the HTTP servers of engines: one connection a request, answers whole or as lines.

A connection is used once (`Connection: close`), so that a server never resets one that was idle.
What goes wrong with a connection raises an `OSError`: the server is gone then, or hangs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from flowrl.errors import BackendError

__all__ = ["HttpClient"]

_MAX_TEXT = 500


class HttpClient:
    """Sends requests to one server.

    Args:
        url: `http://HOST:PORT`.
        key: Sent as a bearer token; none if empty.
    """

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        self.url = url
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._base = parts.path.rstrip("/")
        lines = [f"Host: {parts.netloc}", "Connection: close", "Content-Type: application/json"]
        if key:
            lines.append(f"Authorization: Bearer {key}")
        self._headers = "\r\n".join(lines)

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """Returns the JSON that a path answers; None for an empty answer."""
        return await self._whole("GET", path, b"", timeout_s)

    async def post(self, path: str, body: Mapping[str, object], *, timeout_s: float) -> Any:
        """Returns the JSON that is answered to a JSON object; None for an empty answer.

        Raises:
            BackendError: Another status than 200.
            OSError: No connection, a broken one, or no answer in time.
        """
        return await self._whole("POST", path, json.dumps(body).encode(), timeout_s)

    async def status(self, path: str, *, timeout_s: float) -> int:
        """Returns the status of a path, whatever it is."""
        async with asyncio.timeout(timeout_s), self._answer("GET", path, b"") as (status, _):
            return status

    async def lines(self, path: str, body: Mapping[str, object]) -> AsyncIterator[bytes]:
        """Yields the lines of a streamed answer as they come, without empty ones.

        Raises:
            BackendError: Another status than 200.
            OSError: No connection, or a broken one.
        """
        async with self._answer("POST", path, json.dumps(body).encode()) as (status, parts):
            rest = b""
            async for part in parts:
                rest += part
                if status == 200:
                    *whole, rest = rest.split(b"\n")
                    for line in whole:
                        if stripped := line.strip():
                            yield stripped
            self._require_success(path, status, rest)

    async def _whole(self, method: str, path: str, body: bytes, timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s), self._answer(method, path, body) as (status, parts):
            text = b"".join([part async for part in parts])
        self._require_success(path, status, text)
        return json.loads(text) if text.strip() else None

    def _require_success(self, path: str, status: int, text: bytes) -> None:
        if status != 200:
            raise BackendError(
                f"{path} was answered with status {status}",
                where=self.url,
                found=text.decode(errors="replace")[:_MAX_TEXT] or "no text",
            )

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: bytes
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Sends a request; gives the status and the parts of the answer as they come."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._headers}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            status, headers = await _head(reader)
            yield status, _parts(reader, headers)
        except EOFError as reason:
            raise ConnectionResetError(f"{self.url} ended its answer to {path}") from reason
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines if line)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in fields}


async def _parts(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yields the parts of a body: chunks, or all of it."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        length = headers.get("content-length")
        yield await (reader.read() if length is None else reader.readexactly(int(length)))
        return
    while size := int((await reader.readuntil(b"\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
