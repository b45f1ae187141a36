"""Plug-ins whose engine is a server of a library: their options, and what they check.

This module imports neither the library nor torch.
"""

from __future__ import annotations

import shutil
import sys
from abc import abstractmethod
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, model_validator

from flowrl.backend.plugin import NO_OPTIONS, BackendStatus, BasePlugin
from flowrl.errors import BackendError

if TYPE_CHECKING:
    from flowrl.backend.protocols import GenerateBackend, PolicyContext, TrainBackend
    from flowrl_backends.servers.engine import Server

__all__ = ["ServerOptions", "ServerPlugin"]


class ServerOptions(BaseModel, frozen=True, extra="forbid"):
    """Options of a role whose engine is a server of a library.

    Attributes:
        python: The interpreter of the environment that has the library; by default flowrl's own.
        url: A running server to connect to, instead of starting one.
        api_key_env: The environment variable with the API key of the server at `url`.
        flags: Further flags of the server; a later one replaces the plug-in's own.
        env: Environment variables of the server.
        start_timeout_s: Seconds in which it must have started, or loaded new weights.
        silence_s: Seconds in which a server with requests must send something.
    """

    python: str = ""
    url: str = Field(default="", pattern=r"^(http://[^/]+)?$")
    api_key_env: str = ""
    flags: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    start_timeout_s: float = Field(default=600.0, gt=0)
    silence_s: float = Field(default=300.0, gt=0)

    @model_validator(mode="after")
    def _require_one_server(self) -> ServerOptions:
        if self.url and (self.python or self.flags or self.env):
            raise ValueError(
                "python, flags and env are of a server that is started, url of another"
            )
        if self.api_key_env and not self.url:
            raise ValueError("api_key_env is for a server at url; one that is started has its own")
        return self


class ServerPlugin(BasePlugin):
    """Generation by a server that the plug-in starts, or connects to; see docs/engines.md.

    Attributes:
        library: The library's name, for messages.
        distributions: The installed packages that have it.
    """

    library: str
    distributions: tuple[str, ...]
    options = ServerOptions

    @abstractmethod
    def server(self, context: PolicyContext, options: ServerOptions) -> Server:
        """Returns the server of a role's engine; it starts later."""

    def check(self, options: Mapping[str, object] = NO_OPTIONS) -> BackendStatus:
        """Returns the library's version here, if any; options may name another environment."""
        python = options.get("python") or sys.executable
        if shutil.which(str(python)) is None:
            return BackendStatus(
                usable=False,
                problem=f"there is no interpreter {python}",
                hint=f"set the option python to that of an environment that has {self.library}",
            )
        return BackendStatus(usable=True, version=self._installed())

    def open_generate(self, context: PolicyContext, shared: TrainBackend | None) -> GenerateBackend:
        """Starts a server, or connects to one.

        Raises:
            BackendError: The library is nowhere, the server did not start, or it is of another
                version.
        """
        from flowrl_backends.servers.engine import ServerEngine

        options = ServerOptions.model_validate(dict(context.options))
        if not (options.python or options.url or self._installed()):
            raise BackendError(
                f"{self.library} is not installed here, and no environment of its own is named",
                where=f"roles.{context.role}",
                hint="set the option python to the interpreter of an environment that has it",
            )
        server = self.server(context, options)
        return ServerEngine(context, server, silence_s=options.silence_s)

    def _installed(self) -> str:
        for name in self.distributions:
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return ""
