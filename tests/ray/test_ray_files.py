"""Files of rewards and environments reach workers by Ray's runtime environment."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from flowrl.backend.environment import EnvironmentContext, EpisodeStart, Observation
from flowrl.backend.protocols import ScoreContext
from flowrl.config.rewards import RewardsConfig
from flowrl.config.schema import RuntimeConfig
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.ray.executor import RayExecutor
from tests.ray.test_ray_runs import DEADLINE_S, GUESS, request

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None,
    reason="the Ray executor needs Ray: pip install 'flowrl[ray]'",
)

REWARD = """
import beside

def score(response, answer):
    return beside.SCORE

def fail(response, answer):
    raise ValueError(beside.__file__)
"""


def test_workers_run_the_files_of_the_session_and_not_those_of_the_user(tmp_path: Path):
    folder = tmp_path / "the user's"
    folder.mkdir()
    (folder / "mine.py").write_text(REWARD)
    (folder / "beside.py").write_text("SCORE = 0.25\n")
    (folder / "game.py").write_text(Path(GUESS.rpartition(":")[0]).read_text())
    executor = RayExecutor(RuntimeConfig())
    executor._files = sorted(folder.iterdir())
    terms = [
        {"kind": "python", "name": name, "function": f"{folder / 'mine.py'}:{name}"}
        for name in ("score", "fail")
    ]
    context = EnvironmentContext(
        role=RoleName("game"),
        environment=f"{folder / 'game.py'}:Guess",
        options={"size": 4},
        timeout_s=DEADLINE_S,
    )
    with contextlib.closing(executor):
        assert executor._cluster is not None
        folder.rename(tmp_path / "gone")

        def scored(term: dict[str, str]) -> Any:
            context = ScoreContext(role=RoleName("verifier"), terms=(term,))
            scorers: Any = executor.open_scorers("verify", context, RewardsConfig(), workers=1)
            with contextlib.closing(scorers):
                scorers.submit([request("0/0/0")])
                assert scorers.wait(DEADLINE_S)
                (found,) = scorers.poll()
                return found

        assert scored(terms[0]).score == 0.25
        failure = str(scored(terms[1]))
        # What it imports is the session's, and its own lines are those that the user wrote.
        assert "working_dir_files" in failure
        assert f"{folder}/mine.py:8" in failure
        with executor.open_environment("environment", context) as pool:
            pool.start(
                EpisodeStart(
                    sample=SampleId("0/0/0"), seed=1, row={"number": 1}, prompt="", answer=""
                )
            )
            assert pool.wait(DEADLINE_S)
            (reply,) = pool.poll()
            assert isinstance(reply.answer, Observation)
