"""`verify`: rule rewards and the user's own functions, on the CPU, without any library."""

from flowrl_backends.verify.plugin import plugin

__all__ = ["plugin"]
