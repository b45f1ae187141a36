"""Engines' processes that begin with torch loaded, for tests that open many of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowrl.runtime.local import engine_process
from tests.runtime.warm_processes import WarmProcesses

__all__ = ["warm_engines"]


@contextmanager
def warm_engines() -> Iterator[None]:
    """All that are opened meanwhile."""
    warm = WarmProcesses(["flowrl.runtime.local.engine_worker", "flowrl_backends.torch.engine"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "start_module", warm.start)
        yield
    warm.close()
