"""A scoring process whose pool goes away."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from flowrl.backend.protocols import ScoreContext
from flowrl.ids import RoleName
from flowrl.runtime.local.processes import pack
from flowrl.runtime.scoring.messages import Status

REWARDS = Path(__file__).parent / "rewards.py"
DEADLINE_S = 60.0


@pytest.mark.parametrize("unread", ["ready", "scores"])
def test_a_pool_that_closes_without_reading_everything_ends_the_process_quietly(unread: str):
    term = {"kind": "python", "function": f"{REWARDS}:by_word", "name": "score", "weight": 1.0}
    context = ScoreContext(role=RoleName("verifier"), terms=(term,))
    ours, theirs = socket.socketpair()
    with TemporaryFile() as memory, ours:
        memory.truncate(Status.NBYTES)
        with theirs:
            descriptors = (theirs.fileno(), memory.fileno())
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "flowrl.runtime.scoring.worker"),
                    *(*map(str, descriptors), str(os.getpid())),
                ],
                pass_fds=descriptors,
                stderr=subprocess.PIPE,
                text=True,
            )
        ours.sendall(pack(("open", "flowrl_backends.verify:plugin", context, 30.0, 1 << 32)))
        assert select.select([ours], [], [], DEADLINE_S)[0]
        if unread == "scores":
            ours.recv(1 << 16)  # that it is ready
            sample = (0, "0/0/0", "p", "ok 1", "", {}, "stop", 3, ())
            ours.sendall(pack(("score", [sample])))
            assert select.select([ours], [], [], DEADLINE_S)[0]
        ours.close()
        _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")
