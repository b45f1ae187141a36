"""Runs whose engines, scorers and environments are actors of a Ray cluster on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.backend.environment import Action, EnvironmentContext, EpisodeStart
from flowrl.backend.protocols import ScoreContext, ScoreRequest, ScoreResult
from flowrl.config.rewards import RewardsConfig
from flowrl.config.schema import RuntimeConfig
from flowrl.errors import BackendError, RewardError, WorkerDied
from flowrl.ids import RoleName, SampleId
from flowrl.observe import scale_requests
from flowrl.observe.rows import StepMetrics
from flowrl.runtime.environments.pool import EpisodeLost
from flowrl.runtime.local.engine_process import EngineProcess
from flowrl.runtime.ray.executor import RayExecutor
from flowrl.runtime.spans import SPANS
from flowrl.specs import FinishReason
from tests.runtime.many_programs import CONFIGS
from tests.runtime.test_local_plans import by_own_logprobs, config_of, rows_of
from tests.runtime.test_scaling import Asking, answer
from tests.runtime.tiny_runs import WatchedDisplay, outcome

pytestmark = [
    pytest.mark.skipif(
        find_spec("ray") is None,
        reason="the Ray executor needs Ray: pip install 'flowrl[ray]'",
    ),
    pytest.mark.usefixtures("cluster"),
]

DEADLINE_S = 60.0
GUESS = str(Path(__file__).parents[2] / "examples" / "guess.py:Guess")


def kill_actor(actor: Any) -> None:
    """Kills the process of an actor."""
    import ray

    pid = ray.get(actor.__ray_call__.remote(lambda actor: os.getpid()), timeout=DEADLINE_S)
    os.kill(pid, signal.SIGKILL)


def kill(channel: Any) -> None:
    """Kills the process of a worker's actor, and waits until its channel knows."""
    kill_actor(channel._actor)
    channel._over.wait(DEADLINE_S)


class Killer(WatchedDisplay):
    """Kills an engine after the second step."""

    def __init__(self, engines: list[EngineProcess]) -> None:
        super().__init__()
        self._engines = engines

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        super().step(metrics, eta_s)
        if metrics.step == 2:
            kill(self._engines[0]._channel)


class TrainerKiller(WatchedDisplay):
    """Kills the trainer after the second step."""

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        import ray

        super().step(metrics, eta_s)
        if metrics.step == 2:
            kill_actor(ray.get_actor("actor.train"))


def watched_engines(monkeypatch: pytest.MonkeyPatch, opened: list[EngineProcess]) -> list[str]:
    """Notes engines in actors of their own, and returns whose places are given back, in order."""
    from flowrl.runtime.ray.places import Places

    init, give_back = EngineProcess.__init__, Places.give_back
    returned: list[str] = []

    def watched(engine: EngineProcess, *arguments: Any, **options: Any) -> None:
        init(engine, *arguments, **options)
        if not options.get("shares_weights"):  # as that next to the trainer does
            opened.append(engine)

    def noted(places: Places, name: str) -> None:
        returned.append(name)
        give_back(places, name)

    monkeypatch.setattr(EngineProcess, "__init__", watched)
    monkeypatch.setattr(Places, "give_back", noted)
    return returned


def watched_batches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Notes of each batch that a trainer lays out whether the driver has laid it out, too."""
    from flowrl.runtime.ray.policies import ActorGroup

    found: list[bool] = []
    put = ActorGroup.put_samples

    def noted(group: Any, samples: Any, sampler: Any) -> Any:
        assert samples.stored(sampler) is not None
        made = put(group, samples, sampler)
        found.append("sequences" in samples.__dict__)
        return made

    monkeypatch.setattr(ActorGroup, "put_samples", noted)
    return found


def run(
    runs: Path,
    executor: str,
    num_engines: int = 1,
    display: WatchedDisplay | None = None,
    steps: int = 3,
) -> Path:
    config = {**config_of(runs, steps=steps), "args": {}, "executor": executor}
    config["roles"]["actor"]["num_engines"] = num_engines
    # The guard lays out a few samples in the driver: at the first step alone.
    config["train"] = {**config.get("train", {}), "mismatch_every": steps}
    return fl.run(by_own_logprobs, config, display=display or WatchedDisplay()).folder


def learned(folder: Path) -> tuple[list[str], bytes]:
    rows = [f"{row['step']} {row['sample']} {row['response']}" for row in rows_of(folder)]
    return sorted(rows), (folder / "model" / "model.safetensors").read_bytes()


def test_one_engine_and_two_of_which_one_is_killed_learn_what_a_local_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from flowrl.runtime.ray import cluster as cluster_module

    engines: list[EngineProcess] = []
    watched_engines(monkeypatch, engines)
    expected = learned(run(tmp_path / "local", "local"))
    assert engines == []
    assert learned(run(tmp_path / "one", "ray")) == expected
    assert len(engines) == 1
    engines.clear()
    monkeypatch.setattr(cluster_module, "_STORED_BYTES", 0)  # tokens of a tiny run stay there too
    assembled = watched_batches(monkeypatch)
    assert learned(run(tmp_path / "two", "ray", 2, Killer(engines))) == expected
    assert len(engines) == 3
    # A batch a step, none of which the driver laid out, and at the first what the guard compares.
    assert assembled == [False, True, False, False]


def test_an_engine_joins_on_a_place_of_its_own_and_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened: list[EngineProcess] = []
    returned = watched_engines(monkeypatch, opened)
    expected = learned(run(tmp_path / "local", "local", steps=7))
    monkeypatch.setattr(scale_requests, "_LOOK_S", 0.0)  # a quick step sees each request
    more, many, fewer = "actor.generate=+1", "actor.generate=1024", "actor.generate=1"
    asking = Asking(opened, {1: more, 4: many, 5: fewer}, tmp_path / "ray")
    assert learned(run(tmp_path / "ray", "ray", 1, asking, steps=7)) == expected
    (folder,) = (tmp_path / "ray").iterdir()
    assert answer(folder, more) == (True, "actor.generate[1] joined")
    assert opened[1].busy_s > 0
    done, text = answer(folder, many)
    assert not done
    assert "the Ray cluster has no place for actor.generate[2]" in text
    assert answer(folder, fewer) == (True, "actor.generate[1] left")
    assert returned == ["actor.generate[1]", "actor.generate[0]"]  # the other one's at the end


def test_a_trainer_that_is_killed_ends_the_run_by_name_and_the_resumed_run_learns_the_same(
    tmp_path: Path,
):
    config = {**config_of(tmp_path / "ray", steps=3), "args": {}, "executor": "ray"}
    config["runtime"] = {**config["runtime"], "checkpoint_every": 1}
    with pytest.raises(WorkerDied, match="the trainer's actor died") as caught:
        fl.run(by_own_logprobs, config, display=TrainerKiller())
    assert caught.value.where == "roles.actor"
    (folder,) = (tmp_path / "ray").iterdir()
    fl.resume(fl.compile(by_own_logprobs, config), folder, display=WatchedDisplay())
    assert learned(folder) == learned(run(tmp_path / "local", "local"))


def test_a_worker_that_does_not_answer_has_ended(monkeypatch: pytest.MonkeyPatch):
    from flowrl.runtime.ray import channel as channels
    from flowrl.runtime.ray.cluster import RayCluster

    monkeypatch.setattr(channels, "_SILENT_S", 0.5)  # below the time that `take` waits there
    cluster = RayCluster()
    channel = cluster.start("silent", "flowrl.runtime.ray.workers:run_policy")
    assert channel._over.wait(DEADLINE_S)
    assert channel.receive(0.0) == []
    assert channel.ended() == "its process gave no sign of life for 0.5 s"
    channel.close(0.0)
    cluster.close()


@pytest.mark.parametrize("program", ["guessing", "debate"])
def test_episodes_are_those_of_a_local_run(program: str, tmp_path: Path):
    made = CONFIGS[program]
    folders = [
        fl.run(None, made(tmp_path / name), executor=name, display=WatchedDisplay()).folder
        for name in ("local", "ray")
    ]
    assert outcome(folders[0]) == outcome(folders[1])


def request(sample: str) -> ScoreRequest:
    return ScoreRequest(
        sample=SampleId(sample),
        prompt="1+1=",
        response="2",
        answer="2",
        row={},
        finish=FinishReason.STOP,
        num_tokens=1,
        tokens=(1,),
    )


def test_breakpoints_of_the_users_code_stay_in_the_users_debugger():
    assert not os.environ.get("PYTHONBREAKPOINT", "").startswith("ray.")


def test_scorers_whose_actor_is_killed_are_replaced_score_everything_and_have_a_log(
    tmp_path: Path,
):
    (tmp_path / "loud.py").write_text("print('loaded')\ndef f(response): return 1.0\n")
    terms: tuple[dict[str, object], ...] = (
        {"kind": "python", "name": "loud", "function": f"{tmp_path / 'loud.py'}:f"},
    )
    executor = RayExecutor(RuntimeConfig())
    executor.begin(tmp_path)
    context = ScoreContext(role=RoleName("verifier"), terms=terms)
    scorers: Any = executor.open_scorers("verify", context, RewardsConfig(), workers=1)
    SPANS.take()
    with contextlib.closing(executor), contextlib.closing(scorers):
        kill(scorers._channel)
        scorers.submit([request("0/0/0"), request("0/0/1")])
        found: list[Any] = []
        while len(found) < 2:
            assert scorers.wait(DEADLINE_S)
            found += scorers.poll()
    assert {result.sample for result in found} == {"0/0/0", "0/0/1"}
    assert all(isinstance(result, ScoreResult) and result.score == 1.0 for result in found)
    assert "loaded" in (tmp_path / "logs" / "verifier.score#2.log").read_text()
    assert "verifier.score[0]" in {span.worker for span in SPANS.take()}


def test_an_error_of_a_reward_comes_with_the_user_s_line(tmp_path: Path):
    (tmp_path / "bad.py").write_text("import nothing_like_this\n")
    terms = ({"kind": "python", "name": "bad", "function": f"{tmp_path / 'bad.py'}:f"},)
    context = ScoreContext(role=RoleName("verifier"), terms=terms)
    with (
        contextlib.closing(RayExecutor(RuntimeConfig())) as executor,
        pytest.raises(RewardError, match=r"bad\.py:1"),
    ):
        executor.open_scorers("verify", context, RewardsConfig(), workers=1)


def test_an_environment_whose_actor_is_killed_loses_its_episodes_and_plays_new_ones():
    context = EnvironmentContext(
        role=RoleName("game"), environment=GUESS, options={"size": 4}, timeout_s=DEADLINE_S
    )

    def start(sample: str) -> EpisodeStart:
        row: dict[str, object] = {}
        return EpisodeStart(sample=SampleId(sample), seed=1, row=row, prompt="", answer="")

    with (
        contextlib.closing(RayExecutor(RuntimeConfig())) as executor,
        executor.open_environment("environment", context) as pool,
    ):

        def answered(ask: Callable[[], None]) -> object:
            ask()
            assert pool.wait(DEADLINE_S)
            (answer,) = pool.poll()
            return answer.answer

        first = answered(lambda: pool.start(start("0/0/0")))
        kill(pool._loop._channel)  # type: ignore[attr-defined]
        turn = Action(text="1", tokens=(), turn=0, finish=FinishReason.STOP)  # type: ignore[arg-type]
        lost = answered(lambda: pool.submit(SampleId("0/0/0"), turn))
        assert isinstance(lost, EpisodeLost)
        again = answered(lambda: pool.start(start("0/0/1")))
        assert type(again) is type(first)


def test_engines_for_which_the_cluster_has_no_place_are_refused_with_what_there_is(tmp_path: Path):
    import ray

    too_many = int(ray.cluster_resources()["CPU"]) + 1
    with pytest.raises(BackendError, match=r"no place for actor\.generate") as caught:
        run(tmp_path, "ray", too_many)
    assert "1 node with" in str(caught.value.found)
    assert caught.value.expected == f"{too_many} workers with 1 CPU each, on one node"
