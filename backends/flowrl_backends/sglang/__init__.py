"""Generation by an SGLang server that the plug-in starts, or connects to."""

from flowrl_backends.sglang.plugin import plugin

__all__ = ["plugin"]
