"""Weights on their way: each version stays as long as an engine may still load it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowrl.backend.weights import WeightsKind
from flowrl.ids import EngineId
from flowrl.runtime.transfer.weight_folders import WeightFolders

ONE, TWO = EngineId("actor.generate[0]"), EngineId("actor.generate[1]")


def filled(folders: WeightFolders, version: int) -> Path:
    def export(folder: Path) -> None:
        (folder / "model.safetensors").write_text(str(version))

    folders.add(folders.written(version, export))
    return folders.root / str(version)


@pytest.fixture
def folders(tmp_path: Path) -> WeightFolders:
    return WeightFolders(tmp_path / "run", shared_memory=tmp_path)


def test_an_older_version_goes_once_every_engine_that_was_told_has_loaded_it(
    folders: WeightFolders,
):
    first = filled(folders, 1)
    for engine in (ONE, TWO):
        folders.sent(engine, 1)
    second = filled(folders, 2)
    for engine in (ONE, TWO):
        folders.sent(engine, 2)
    folders.loaded(ONE, 1)
    folders.loaded(ONE, 2)
    assert first.exists()
    folders.loaded(TWO, 1)
    assert not first.exists()
    assert second.exists()
    folders.loaded(TWO, 2)
    assert second.exists()  # the newest stays, for engines that are opened anew
    assert folders.latest is not None
    assert (folders.latest.version, folders.latest.kind) == (2, WeightsKind.SHARED_MEMORY)
    assert [bucket.tobytes() for bucket in folders.latest.handle] == [b"2"]


def test_what_a_dead_engine_was_told_is_forgotten(folders: WeightFolders):
    first = filled(folders, 1)
    folders.sent(ONE, 1)
    filled(folders, 2)
    assert first.exists()
    folders.forget(ONE)
    assert not first.exists()


def test_a_version_that_is_still_being_written_is_not_the_latest(folders: WeightFolders):
    filled(folders, 1)
    folders.new(2)
    assert folders.latest is not None
    assert folders.latest.version == 1


def test_closing_leaves_nothing(folders: WeightFolders, tmp_path: Path):
    filled(folders, 1)
    folders.close()
    folders.close()
    assert list(tmp_path.glob("flowrl-weights-*")) == []


def test_without_shared_memory_they_lie_beside_the_run(tmp_path: Path):
    folders = WeightFolders(tmp_path / "run" / "sync", shared_memory=tmp_path / "none")
    assert folders.root.parent == tmp_path / "run" / "sync"


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path):
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from flowrl.runtime.transfer.weight_folders import WeightFolders\n"
        "folders = WeightFolders(Path(sys.argv[1]), shared_memory=Path(sys.argv[1]))\n"
        "(folders.new(1) / 'model').write_text('1')\n"
        "print(folders.root, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    living = WeightFolders(tmp_path, shared_memory=tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    left, deadline = Path(ended.stdout.strip()), time.monotonic() + 60
    assert left.parent == tmp_path
    while left.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert living.root.is_dir()
    living.close()
