"""However a run with a Ray cluster of its own ends, nothing of the cluster is left."""

from __future__ import annotations

import os
import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.runtime.watched_processes import ENDINGS, started

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None,
    reason="the Ray executor needs Ray: pip install 'flowrl[ray]'",
)
NODE = "death of its node"
ALL = [
    pytest.param(name, marks=() if name == "normal" else pytest.mark.slow)
    for name in (*ENDINGS, NODE)
]


@pytest.mark.parametrize("ending", ALL)
def test_no_process_of_the_cluster_and_nothing_in_shared_memory_is_left(
    tmp_path: Path, ending: str
):
    # Sockets below it have names that may not be long.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        command = started(tmp_path, "ray", ending, RAY_TMPDIR=folder)
        try:
            command.first_step()
            assert {"raylet", "gcs_server"} <= set(command.processes().values())
            command.shared()
            if ending == NODE:
                (raylet,) = [pid for pid, name in command.processes().items() if name == "raylet"]
                os.kill(raylet, signal.SIGKILL)
            number, codes = ENDINGS.get(ending, (None, {1}))
            assert command.end(number) in codes
            assert command.shared() == set()
        finally:
            command.kill()
    # Ray says so where a call after the end of the cluster starts another one.
    assert "Started a local Ray instance" not in (tmp_path / "errors").read_text()
