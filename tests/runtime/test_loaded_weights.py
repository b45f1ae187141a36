"""Weights that an engine reports as loaded are those that were written, once for all engines."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl.backend.protocols import Loaded
from flowrl.errors import BackendError
from flowrl.ids import EngineId
from flowrl.runtime.local.engine_fleet import EngineFleet
from flowrl.runtime.local.engine_in_place import EngineInPlace
from flowrl.runtime.local.engine_restarts import RestartableEngine
from flowrl.runtime.ray.policies import _EngineBesideTrainer
from flowrl.runtime.transfer.weight_folders import WeightFolders
from tests.policy_contexts import weights_of
from tests.runtime.scripted_engine import PLUGIN, ScriptedEngine, context, plugin, weights


@pytest.fixture
def folders(tmp_path: Path) -> WeightFolders:
    return WeightFolders(tmp_path / "run", shared_memory=tmp_path)


def engine_of(folders: WeightFolders, tmp_path: Path) -> RestartableEngine:
    name = EngineId("actor.generate[1]")
    return RestartableEngine(name, lambda: ScriptedEngine(context(tmp_path)), folders=folders)


def test_other_bytes_than_were_written_are_an_error_that_names_all(
    folders: WeightFolders, tmp_path: Path
):
    engine = engine_of(folders, tmp_path)
    written = folders.written(7, lambda folder: weights(folder, 7) and None)
    (file,) = (folders.root / "7").iterdir()
    file.write_text("8")
    engine.load(written)
    with pytest.raises(BackendError) as caught:
        engine.poll(0.0)
    error = caught.value
    assert "version 7" in error.what
    assert error.where == "actor.generate[1]"
    assert str(error.found) == f"checksum {weights_of(7, folders.root / '7').checksum}"
    assert str(error.expected) == f"checksum {written.checksum}, by shared memory"


def test_a_version_goes_when_it_was_reported_and_a_new_engine_loads_the_newest(
    folders: WeightFolders, tmp_path: Path
):
    engine = engine_of(folders, tmp_path)
    for version in (1, 2):
        folders.add(folders.written(version, lambda folder: weights(folder, 5) and None))
        engine.load_newest()
        assert (folders.root / "1").exists()
    engine.poll(0.0)
    assert sorted(path.name for path in folders.root.iterdir()) == ["2"]
    first = engine.engine
    engine.restart()
    assert engine.engine is not first
    assert [(r.version, r.checksum) for r in engine.poll(0.0)] == [  # type: ignore[union-attr]
        (2, folders.latest.checksum)  # type: ignore[union-attr]
    ]


def test_a_publication_is_exported_once_for_all_engines(tmp_path: Path):
    exported: list[Path] = []

    def export(folder: Path) -> None:
        exported.append(weights(folder, 3))

    fleet = EngineFleet(
        [EngineId("actor.generate[0]"), EngineId("actor[1]")],
        PLUGIN,
        context(tmp_path),
        export=export,
        fallback=tmp_path,
        silence_s=60.0,
    )
    with closing(fleet):
        fleet.publish(fleet.written(1))
    assert len(exported) == 1


def test_an_engine_next_to_its_trainer_loads_copies_where_it_cannot_share(tmp_path: Path):
    class Trainer:
        number = 4

        def export(self, folder: Path) -> None:
            weights(folder, self.number)

    engine = EngineInPlace(plugin, context(tmp_path), Trainer())  # type: ignore[arg-type]
    engine.load(weights_of(1))
    engine.poll(0.0)
    assert isinstance(engine.engine, ScriptedEngine)
    assert (engine.engine._number, engine.engine._version) == (4, 1)
    Trainer.number = 5  # trained since, and not published
    engine.restart()
    assert (engine.engine._number, engine.engine._version) == (4, 1)
    assert engine._copies is not None
    engine.close()
    assert not engine._copies.root.exists()


def test_an_engine_that_cannot_share_begins_with_the_weights_of_a_fresh_trainer(tmp_path: Path):
    class Trainer:
        def export(self, folder: Path) -> None:
            weights(folder, 6)

    fresh = replace(context(tmp_path), fresh=True)
    engine = EngineInPlace(plugin, fresh, Trainer())  # type: ignore[arg-type]
    with closing(engine):
        assert isinstance(engine.engine, ScriptedEngine)
        assert (engine.engine._number, engine.engine._version) == (6, 0)
        engine.restart()
        assert (engine.engine._number, engine.engine._version) == (6, 0)


def test_copies_that_nobody_asks_for_do_not_pile_up(tmp_path: Path):
    """Where other engines generate, the one next to the trainer is polled by evaluations alone."""

    class Trainer:
        def export(self, folder: Path) -> None:
            weights(folder, 5)

    engine = EngineInPlace(plugin, context(tmp_path), Trainer())  # type: ignore[arg-type]
    with closing(engine):
        assert engine._copies is not None
        for version in range(1, 5):
            engine.load(weights_of(version))
            assert [path.name for path in engine._copies.root.iterdir()] == [str(version)]
        reports = engine.poll(0.0)
    assert [report.version for report in reports if isinstance(report, Loaded)] == [1, 2, 3, 4]


def test_an_engine_of_a_trainer_s_actor_loads_its_weights_once_when_it_is_restarted(tmp_path: Path):
    """The actor has a restarted engine load them; its client takes the report, and sends none."""
    opened: list[ScriptedEngine] = []

    def process() -> Any:
        opened.append(ScriptedEngine(context(tmp_path)))
        return opened[-1]

    engine = _EngineBesideTrainer(EngineId("actor.generate[0]"), process, folders=None)
    engine.load(weights_of(3))
    engine.poll(0.0)
    engine.restart()
    assert opened[1]._loaded == []
    opened[1].load(weights_of(3))  # what the actor does
    assert [output.version for output in engine.poll(0.0) if isinstance(output, Loaded)] == [3]
    engine.load(weights_of(4))
    assert [output.version for output in engine.poll(0.0) if isinstance(output, Loaded)] == [4]


def test_weights_that_are_moved_leave_no_folder(tmp_path: Path):
    moved: list[bytes] = []

    def share(weights):
        moved.extend(bucket.tobytes() for bucket in weights.handle)
        return replace(weights, handle=())

    folders = WeightFolders(tmp_path, share=share, shared_memory=tmp_path)
    folders.add(folders.written(1, lambda folder: weights(folder, 6) and None))
    assert moved == [b"6"]
    assert list(folders.root.iterdir()) == []
    folders.close()
