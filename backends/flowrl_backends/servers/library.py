"""A server of a library: how it starts, is waited for, and ends; its requests are the library's."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from flowrl.backend.protocols import GenerateRequest, PolicyContext
from flowrl.errors import BackendError
from flowrl_backends.servers.engine import Piece
from flowrl_backends.servers.http import HttpClient
from flowrl_backends.servers.plugin import ServerOptions
from flowrl_backends.servers.process import ServerProcess, free_port

__all__ = ["LibraryServer"]

_PROBE_S = 0.2


class LibraryServer(ABC):
    """A `Server` (engine.py) that is started in an environment of its own, or connected to.

    Attributes:
        library: The library's name, for messages.
        module: The module that runs as a server.
        ready_path: Answers with status 200 where the server can be used.
        series: The versions that the plug-in is written for begin so.
    """

    library: str
    module: str
    ready_path: str
    series: str

    def __init__(self, context: PolicyContext, options: ServerOptions) -> None:
        self.context, self.options = context, options
        self._process: ServerProcess | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        key = os.environ.get(options.api_key_env, "") if options.url else secrets.token_hex(16)
        self._key = key
        self.http = HttpClient(options.url or f"http://127.0.0.1:{free_port()}", key)

    @property
    def port(self) -> str:
        """The port of a server that is started."""
        return self.http.url.rpartition(":")[2]

    @abstractmethod
    def flags(self, model: Path) -> list[str]:
        """Returns the flags of a server of a model folder, as the role's plan has them."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Returns the environment variables of a server that is started."""

    @abstractmethod
    async def version(self) -> str:
        """Returns the version of a server that is ready.

        Raises:
            BackendError: It was started in a way that cannot be used.
        """

    @abstractmethod
    def generate(self, request: GenerateRequest, name: str) -> AsyncIterator[Piece]:
        """See `Server`."""

    @abstractmethod
    async def abort(self, name: str) -> None:
        """See `Server`."""

    @abstractmethod
    async def load(self, folder: Path, version: int) -> None:
        """See `Server`."""

    async def start(self, model: Path) -> None:
        """Starts a server of a model folder, or connects to one, and waits until it is ready.

        Raises:
            BackendError: It ended, was not ready in time, or cannot be used.
        """
        if not self.options.url:
            self._scratch = tempfile.TemporaryDirectory(prefix="flowrl-server-")
            folder = Path(self._scratch.name)  # of mode 700
            # The key is in no command line, which other users can see.
            (folder / "server.yaml").write_text(f"api-key: {self._key}\n")
            self._process = ServerProcess(
                [
                    *(self.options.python or sys.executable, "-m", self.module),
                    *("--config", str(folder / "server.yaml")),
                    *self.flags(model),
                    *self.options.flags,
                ],
                {"HF_HUB_OFFLINE": "1", **self.environment(), **self.options.env},
                folder / "server.log",
            )
        await self._wait_until_ready()
        found = await self.version()
        if not found.startswith(self.series):
            raise BackendError(
                f"the plug-in is written for another version of {self.library}",
                where=self.http.url,
                found=f"version {found}",
                expected=f"{self.series}x",
            )
        if self.options.url and not self.context.fresh:
            await self.load(self.context.model, 0)

    async def _wait_until_ready(self) -> None:
        limit_s = self.options.start_timeout_s
        deadline = time.monotonic() + limit_s
        found = ""
        while time.monotonic() < deadline:
            try:
                status = await self.http.status(self.ready_path, timeout_s=limit_s)
            except OSError as reason:
                found = f"{type(reason).__name__}: {reason}"
            else:
                if status == 200:
                    return
                found = f"{self.ready_path} was answered with status {status}"
            if self._process is not None and self._process.has_ended:
                raise BackendError(
                    f"the {self.library} server ended while it started",
                    where=f"roles.{self.context.role}",
                    found=self._process.last_words(),
                    hint="the server's own message says why; docs/engines.md has the known limits",
                )
            await asyncio.sleep(_PROBE_S)
        raise BackendError(
            f"the {self.library} server was not ready after {limit_s:g} s",
            where=f"roles.{self.context.role}",
            found=self.last_words() or found,
            hint="raise start_timeout_s in the engine's options",
        )

    async def control(self, path: str, body: dict[str, object]) -> Any:
        """Posts a control call; returns the JSON that is answered."""
        return await self.http.post(path, body, timeout_s=self.options.start_timeout_s)

    def last_words(self) -> str:
        """Returns the end of the output of a server that was started."""
        return "" if self._process is None else self._process.last_words()

    async def stop(self) -> None:
        """Ends a server that was started."""
        if self._process is not None:
            await self._process.stop()
        if self._scratch is not None:
            self._scratch.cleanup()
