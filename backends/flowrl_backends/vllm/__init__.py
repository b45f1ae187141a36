"""Generation by a vLLM server that the plug-in starts, or connects to."""

from flowrl_backends.vllm.plugin import plugin

__all__ = ["plugin"]
