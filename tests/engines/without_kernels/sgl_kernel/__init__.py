"""Stands in for SGLang's compiled kernels, of which there are none for CPUs.

Their names can be imported, as SGLang does wherever it may use one; a call raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.4.10"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU version")

    return missing
