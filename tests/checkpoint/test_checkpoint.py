"""Whatever happens while a checkpoint is made, a usable one is left."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import CheckpointError
from flowrl.runtime.checkpoint.store import (
    CheckpointStore,
    FileEntries,
    Position,
    describe_files,
)
from flowrl.runtime.groups import LocalGroup
from flowrl.runtime.trainers import Trainer
from tests.files.dying import die_at


def at(step: int, stage: str = "grpo", index: int = 1) -> Position:
    return Position(stage=stage, stage_index=index, step=step)


def weights(text: str) -> Callable[[Path], FileEntries]:
    def write(folder: Path) -> FileEntries:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights").write_text(text)
        (folder / "cursor").write_text(text)
        return {f"actor/{name}": file for name, file in describe_files(folder / "actor").items()}

    return write


def save(store: CheckpointStore, step: int) -> Path:
    return store.save(at(step), weights(f"w{step}"), {"step": step})


def check_latest(store: CheckpointStore, *, one_of: tuple[int, ...]) -> int:
    found = store.latest()
    assert found is not None
    step = found.position.step
    assert step in one_of
    assert found.state == {"step": step}
    assert (found.path / "actor" / "weights").read_text() == f"w{step}"
    return step


def test_what_is_saved_is_what_latest_gives(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.latest() is None
    path = save(store, 10)
    assert path.name == "0001-grpo-step10"
    found = store.latest()
    assert found is not None
    assert (found.path, found.position, found.state) == (path, at(10), {"step": 10})
    assert check_latest(CheckpointStore(tmp_path / "checkpoints", keep=2), one_of=(10,)) == 10


@pytest.mark.parametrize("keep", [1, 2, 5, 9])
def test_as_many_of_the_newest_checkpoints_stay_as_are_kept(tmp_path, keep):
    store = CheckpointStore(tmp_path, keep=keep)
    for step in range(1, 9):
        save(store, step)
        kept = sorted(int(path.name.rpartition("step")[2]) for path in tmp_path.iterdir())
        assert kept == list(range(max(1, step - keep + 1), step + 1))


def test_the_newest_keep_checkpoints_stay(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 5):
        save(store, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0003-grpo-step3", "0004-grpo-step4"]
    one = CheckpointStore(tmp_path, keep=1)
    save(one, 5)
    assert [p.name for p in tmp_path.iterdir()] == ["0005-grpo-step5"]


def test_numbers_past_four_digits_still_order_checkpoints(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 1).rename(tmp_path / "9999-grpo-step1")
    assert save(store, 2).name == "10000-grpo-step2"
    check_latest(store, one_of=(2,))


def test_a_kill_at_any_system_call_leaves_a_usable_latest(tmp_path):
    folder = tmp_path / "checkpoints"
    call, seen = 0, set()
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        store = CheckpointStore(folder, keep=1)
        save(store, 1)
        done = die_at(call, lambda store=store: save(store, 2))
        seen.add(check_latest(store, one_of=(1, 2)))
        save(store, 3)  # a run that goes on is not disturbed by what the dead one left
        check_latest(store, one_of=(3,))
        assert len(list(folder.iterdir())) == 1
        if done:
            break
        call += 1
    assert seen == {1, 2}
    assert call > 20


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_full_disk_is_a_checkpoint_error_and_earlier_ones_stay(tmp_path, monkeypatch, name):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, full)
        with pytest.raises(CheckpointError, match=r"cannot write a checkpoint\n  found: No space"):
            save(store, 2)
    check_latest(store, one_of=(1,))
    assert len(list(tmp_path.iterdir())) == 1


def test_an_error_of_a_worker_passes_through_and_earlier_checkpoints_stay(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)

    def fail(folder: Path) -> FileEntries:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(at(2), fail, {})
    assert [p.name for p in tmp_path.iterdir()] == ["0001-grpo-step1"]


def test_an_incomplete_checkpoint_is_named_in_a_warning_and_ignored(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 1)
    (save(store, 2) / "MANIFEST.json").unlink()
    with caplog.at_level(logging.WARNING):
        check_latest(store, one_of=(1,))
    assert "0002-grpo-step2: ignored, this checkpoint was never finished" in caplog.text


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["actor/weights", "cursor", "state.json"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_names_its_file(
    tmp_path, damage, name, caplog
):
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    damaged = save(store, 2)
    damage(damaged / name)
    with caplog.at_level(logging.WARNING):
        check_latest(store, one_of=(1,))
    (warning,) = caplog.messages
    assert str(damaged / name) in warning
    assert f"{tmp_path}/0001-grpo-step1 is used, as a newer one cannot be" in warning


def test_a_damaged_checkpoint_that_was_skipped_takes_no_place_of_a_whole_one(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    flip(save(store, 2) / "cursor")
    check_latest(store, one_of=(1,))
    check_latest(store, one_of=(1,))
    assert len(caplog.messages) == 1
    save(store, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0001-grpo-step1", "0003-grpo-step3"]


@pytest.mark.parametrize("name", ["cursor", "MANIFEST.json"])
def test_a_checkpoint_that_the_disk_does_not_give_back_is_skipped(
    tmp_path, monkeypatch, caplog, name
):
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    lost = save(store, 2) / name
    opened = io.open

    def broken(file: object, *arguments: object, **options: object) -> object:
        if file == lost:
            raise OSError(errno.EIO, "Input/output error", str(file))
        return opened(file, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", broken)
        check_latest(store, one_of=(1,))
    (warning,) = caplog.messages
    assert str(lost) in warning
    assert "Input/output error" in warning
    check_latest(store, one_of=(2,))  # the disk gives it back again


def test_where_every_checkpoint_is_damaged_the_newest_is_named(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        flip(save(store, step) / "cursor")
    with pytest.raises(CheckpointError, match="no older checkpoint is whole") as caught:
        store.latest()
    assert "0002-grpo-step2" in str(caught.value)
    assert not caplog.messages  # the error says it all


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', '{"format":1,"files":[]}'])
def test_a_damaged_manifest_is_an_error_that_names_it(tmp_path, text):
    store = CheckpointStore(tmp_path, keep=1)
    manifest = save(store, 1) / "MANIFEST.json"
    manifest.write_text(text)
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json: this checkpoint is damaged"):
        store.latest()


def test_a_checkpoint_of_another_format_is_refused_with_both_formats(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    manifest = save(store, 1) / "MANIFEST.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="found: format 99; expected: format 1"):
        store.latest()


def test_going_back_and_saving_the_same_position_again_overwrites_nothing(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 1)
    damaged = save(store, 2)
    shutil.rmtree(damaged)
    save(store, 2)
    save(store, 2)
    names = ["0001-grpo-step1", "0002-grpo-step2", "0003-grpo-step2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    check_latest(store, one_of=(2,))


def test_a_stage_name_never_leaves_the_folder(tmp_path):
    path = CheckpointStore(tmp_path, keep=1).save(at(1, stage="../my stage"), weights("x"), {})
    assert path.parent == tmp_path
    found = CheckpointStore(tmp_path, keep=1).latest()
    assert found is not None
    assert found.position.stage == "../my stage"


def test_keeping_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        CheckpointStore(tmp_path, keep=0)


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=4), inner, max_size=3)
            ),
            max_leaves=8,
        ),
        max_size=4,
    )
)
def test_any_finite_state_comes_back_bit_for_bit(tmp_path_factory, state):
    store = CheckpointStore(tmp_path_factory.mktemp("store"), keep=1)
    store.save(at(1), lambda folder: {}, state)
    found = store.latest()
    assert found is not None
    assert repr(found.state) == repr(state)


def test_positions_order_as_a_run_goes():
    places = [at(5, "grpo", 1), at(9, "sft", 0), at(1, "grpo", 1)]
    assert [str(p) for p in sorted(places)] == ["sft step 9", "grpo step 1", "grpo step 5"]


def test_a_manifest_without_the_drivers_state_is_damaged(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    path = save(store, 1)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    del manifest["files"]["state.json"]
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="does not list the driver's state"):
        store.latest()


def test_files_that_their_workers_describe_are_not_read_again(tmp_path, monkeypatch):
    read: list[str] = []

    def hashed(path: Path) -> str:
        read.append(path.name)
        return "0" * 64

    write = weights("w1")

    def described(folder: Path) -> FileEntries:
        entries = write(folder)
        monkeypatch.setattr("flowrl.runtime.checkpoint.store.sha256_file", hashed)
        return entries

    store = CheckpointStore(tmp_path, keep=1)
    files = json.loads((store.save(at(1), described, {}) / "MANIFEST.json").read_text())["files"]
    assert read == ["cursor", "state.json"]
    assert files["actor/weights"] == {
        "nbytes": 2,
        "sha256": hashlib.sha256(b"w1").hexdigest(),
    }


def test_a_trainer_says_what_it_has_written(tmp_path):
    class Worker:
        def save(self, folder: Path) -> None:
            (folder / "state").write_text("x")

    trainer = Trainer(LocalGroup("actor.train", Worker()))
    assert trainer.save(tmp_path).result() == describe_files(tmp_path)
