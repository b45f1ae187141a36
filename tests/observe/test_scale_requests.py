"""`flowrl scale`: requests in a run folder, and the answers of the run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.observe.run_folder import RunFolder
from flowrl.observe.run_status import RunStatus, write_status
from flowrl.observe.scale_requests import (
    RequestBox,
    ScaleAnswer,
    ScaleRequest,
    ask_to_scale,
    read_target,
)

MORE = ScaleRequest(role="actor", number=1, relative=True)


class Clock:
    """Each look at it and each sleep is a second; `meanwhile` happens in each sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile = lambda: None

    def __call__(self) -> float:
        self.now += 1.0
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 1.0
        self.meanwhile()


@contextmanager
def running(parent: Path) -> Iterator[tuple[RunFolder, RequestBox, Clock]]:
    with RunFolder.create(parent, "run") as folder:
        folder.write_config("seed: 0\n")
        write_status(folder.path, RunStatus(pid=os.getpid()))
        clock = Clock()
        yield folder, RequestBox(folder.path, clock=clock), clock


@pytest.mark.parametrize(
    ("text", "present", "wanted"),
    [
        ("actor.generate=+1", 2, 3),
        ("actor.generate=-2", 3, 1),
        ("actor.generate=4", 2, 4),
    ],
)
def test_a_target_is_a_difference_or_a_number(text: str, present: int, wanted: int):
    assert read_target(text).target(present) == wanted


@pytest.mark.parametrize("text", ["actor=+1", "actor.generate", "actor.generate=+x", "a.score=1"])
def test_another_target_is_refused_with_an_example(text: str):
    with pytest.raises(ConfigError, match=r"actor\.generate=\+1"):
        read_target(text)


def test_a_request_is_taken_once_and_its_answer_comes_back(tmp_path: Path):
    with running(tmp_path) as (folder, box, clock):

        def answer() -> None:
            taken = box.take()
            if taken is not None:
                assert taken[1] == MORE
                box.answer(taken[0], ScaleAnswer(done=True, text="it joined", engines=("a", "b")))

        clock.meanwhile = answer
        found = ask_to_scale(folder.path, MORE, 30.0, clock=clock, sleep=clock.sleep)
        assert found == ScaleAnswer(done=True, text="it joined", engines=("a", "b"))
        assert box.take() is None
        assert (folder.path / "requests").stat().st_mode & 0o077 == 0


def test_a_request_that_is_not_taken_in_time_is_withdrawn(tmp_path: Path):
    with running(tmp_path) as (folder, box, clock):
        with pytest.raises(ConfigError, match="withdrawn"):
            ask_to_scale(folder.path, MORE, 5.0, clock=clock, sleep=clock.sleep)
        assert box.take() is None
        clock.meanwhile = lambda: box.take() and None
        with pytest.raises(ConfigError, match="still at it"):
            ask_to_scale(folder.path, MORE, 5.0, clock=clock, sleep=clock.sleep)


def test_a_run_that_has_ended_or_ends_meanwhile_is_not_scaled(tmp_path: Path):
    with running(tmp_path) as (folder, _, clock):
        clock.meanwhile = folder.close
        with pytest.raises(ConfigError, match="killed; process"):
            ask_to_scale(folder.path, MORE, 30.0, clock=clock, sleep=clock.sleep)
        assert list((folder.path / "requests").iterdir()) == []
    with pytest.raises(ConfigError, match="only a run that goes on"):
        ask_to_scale(folder.path, MORE, 30.0)


def test_a_box_ignores_what_is_no_request_and_what_came_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with running(tmp_path) as (folder, box, clock):
        requests = folder.path / "requests"
        (requests / "1.json").write_text('{"role": "actor"}')
        (requests / "2.json").symlink_to(tmp_path / "elsewhere")
        (requests / "3.json").write_text("{" + " " * 5000)
        (requests / "0.json").mkdir()
        assert box.take() is None
        assert caplog.text.count("is no request") == 3
        (requests / "4.json").write_text(
            json.dumps({"role": "actor", "number": 1, "relative": True, "schema": 1})
        )
        RequestBox(folder.path, clock=clock)
        assert box.take() is None


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with running(tmp_path) as (folder, _, _):
        pass
    with pytest.raises(SystemExit) as ended:
        main(["scale", str(folder.path), "actor.generate=+1"])
    assert ended.value.code == 2
    assert "only a run that goes on can be scaled" in capsys.readouterr().err
