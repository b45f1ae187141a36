"""A fleet of engines: weights reach those that live, and nothing is kept for those that do not."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from flowrl.backend.weights import FileBuckets
from flowrl.errors import WorkerDied
from flowrl.ids import EngineId
from flowrl.runtime.local.engine_fleet import EngineFleet
from flowrl.runtime.local.engine_restarts import MAX_FAILURES, EngineFailures
from tests.runtime.scripted_engine import PLUGIN, context, weights

NAMES = [EngineId("actor.generate[0]"), EngineId("actor.generate[1]")]
DEADLINE_S = 60.0


def publish(fleet: EngineFleet, version: int) -> Path:
    weights = fleet.written(version)
    fleet.publish(weights)
    assert isinstance(weights.handle, FileBuckets)
    return weights.handle.folder


def export(folder: Path) -> None:
    weights(folder, int(folder.name))


def wait(fleet: EngineFleet, folder: Path, *names: EngineId) -> None:
    """Until a version that is not the newest any more is gone."""
    end = time.monotonic() + DEADLINE_S
    while folder.exists():
        assert time.monotonic() < end
        for name in names:
            fleet.engines[name].poll(0.1)


def wait_for_death(fleet: EngineFleet, name: EngineId) -> None:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        fleet.engines[name].poll(0.1)


def test_weights_wait_for_no_engine_that_is_dead_until_it_is_opened_anew(tmp_path: Path):
    fleet = EngineFleet(
        NAMES,
        PLUGIN,
        context(tmp_path / "model"),
        export=export,
        fallback=tmp_path,
        silence_s=DEADLINE_S,
    )
    with closing(fleet):
        fleet.load(NAMES[1])  # there is nothing to load yet
        first = publish(fleet, 1)
        fleet.wait_ready()
        dead = fleet._members[NAMES[0]]
        os.kill(dead.process._channel.process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            wait_for_death(fleet, NAMES[0])
        second = publish(fleet, 2)
        wait(fleet, first, NAMES[1])
        dead.restart()
        fleet.wait_ready()
        third = publish(fleet, 3)
        # Opened anew, it has loaded the newest weights, and then these.
        wait(fleet, second, *NAMES)
        assert third.exists()


def test_an_engine_that_is_given_up_ends_and_keeps_no_weights(tmp_path: Path):
    fleet = EngineFleet(
        NAMES,
        PLUGIN,
        context(tmp_path / "model"),
        export=export,
        fallback=tmp_path,
        silence_s=DEADLINE_S,
    )
    with closing(fleet):
        fleet.wait_ready()
        failures = EngineFailures(fleet.engines)
        member = fleet._members[NAMES[0]]
        for _ in range(MAX_FAILURES):
            failures.give_up(NAMES[0], "it does not answer")
            goes_on = failures.restart(NAMES[0])
        assert not goes_on
        assert member.process.is_dead
        first = publish(fleet, 1)
        publish(fleet, 2)
        wait(fleet, first, NAMES[1])  # the other one alone is waited for
        with pytest.raises(WorkerDied):
            member.submit([])  # so that another driver opens it again
