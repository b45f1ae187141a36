"""The plug-in `sglang`: its capabilities and options. It imports neither SGLang nor torch."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, model_validator

from flowrl.backend.plugin import (
    NO_OPTIONS,
    BackendStatus,
    BasePlugin,
    Capabilities,
    Service,
)
from flowrl.errors import BackendError

if TYPE_CHECKING:
    from flowrl.backend.protocols import GenerateBackend, PolicyContext, TrainBackend

__all__ = ["SglangOptions", "SglangPlugin", "plugin"]


class SglangOptions(BaseModel, frozen=True, extra="forbid"):
    """Options of a role whose engine is `sglang`.

    Attributes:
        python: The interpreter of the environment that has SGLang; by default flowrl's own.
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
    def _require_one_server(self) -> SglangOptions:
        if self.url and (self.python or self.flags or self.env):
            raise ValueError(
                "python, flags and env are of a server that is started, url of another"
            )
        if self.api_key_env and not self.url:
            raise ValueError("api_key_env is for a server at url; one that is started has its own")
        return self


class SglangPlugin(BasePlugin):
    """Generation by SGLang; see docs/engines.md.

    >>> from flowrl_backends.sglang import plugin
    >>> plugin.capabilities.seeds
    False
    """

    name = "sglang"
    options = SglangOptions
    capabilities = Capabilities(
        services=frozenset({Service.GENERATE}),
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        abort=True,
        resume=True,
        seeds=False,
        sampling=frozenset({"top_p", "top_k", "min_p", "stop"}),
    )

    def check(self, options: Mapping[str, object] = NO_OPTIONS) -> BackendStatus:
        """Returns the version of SGLang here, if any; options may name another environment."""
        python = options.get("python") or sys.executable
        if shutil.which(str(python)) is None:
            return BackendStatus(
                usable=False,
                problem=f"there is no interpreter {python}",
                hint="set the option python to that of an environment that has SGLang",
            )
        try:
            installed = version("sglang")
        except PackageNotFoundError:
            installed = ""
        return BackendStatus(usable=True, version=installed)

    def open_generate(self, context: PolicyContext, shared: TrainBackend | None) -> GenerateBackend:
        """Starts a server, or connects to one.

        Raises:
            BackendError: SGLang is nowhere, the server did not start, or it is of another version.
        """
        from flowrl_backends.servers.engine import ServerEngine
        from flowrl_backends.sglang.server import SglangServer

        options = SglangOptions.model_validate(dict(context.options))
        if not (options.python or options.url or self.check().version):
            raise BackendError(
                "SGLang is not installed here, and no environment of its own is named",
                where=f"roles.{context.role}",
                hint="set the option python to the interpreter of an environment that has it",
            )
        server = SglangServer(context, options)
        return ServerEngine(context, server, silence_s=options.silence_s)


plugin = SglangPlugin()
