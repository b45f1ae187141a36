"""One Ray cluster for all tests of the folder, as a run starts it on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster that runs in this process find open, and leave open."""
    from flowrl.runtime.ray.cluster import RayCluster

    opened = RayCluster()
    yield
    opened.close()
