"""One Ray cluster for all tests of the folder, as a run starts it on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Read when Ray is first imported, which another test of this process may do before.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster that runs in this process find open, and leave open."""
    from flowrl.runtime.ray.cluster import RayCluster

    opened = RayCluster()
    yield
    opened.close()
