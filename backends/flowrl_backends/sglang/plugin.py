"""The plug-in `sglang`: its capabilities. It imports neither SGLang nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.backend.plugin import Capabilities, Service
from flowrl_backends.servers.plugin import ServerOptions, ServerPlugin

if TYPE_CHECKING:
    from flowrl.backend.protocols import PolicyContext
    from flowrl_backends.servers.engine import Server

__all__ = ["SglangPlugin", "plugin"]


class SglangPlugin(ServerPlugin):
    """Generation by SGLang; see docs/engines.md.

    >>> from flowrl_backends.sglang import plugin
    >>> plugin.capabilities.seeds
    False
    """

    name = "sglang"
    library = "SGLang"
    distributions = ("sglang",)
    capabilities = Capabilities(
        services=frozenset({Service.GENERATE}),
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        abort=True,
        resume=True,
        seeds=False,
        sampling=frozenset({"top_p", "top_k", "min_p", "stop"}),
    )

    def server(self, context: PolicyContext, options: ServerOptions) -> Server:
        """See `ServerPlugin`."""
        from flowrl_backends.sglang.server import SglangServer

        return SglangServer(context, options)


plugin = SglangPlugin()
