"""The plug-in `environment`: the user's class, loaded, called by names, one object an episode."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.backend.environment import (
    Action,
    Environment,
    EnvironmentContext,
    EpisodeStart,
    Observation,
    Outcome,
)
from flowrl.backend.plugin import Plugin
from flowrl.backend.protocols import ScoreContext, Service
from flowrl.backend.registry import find
from flowrl.errors import BackendError
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.environments.pool import EnvironmentPool
from flowrl.runtime.environments.transcript import EpisodeFailure
from flowrl.specs import FinishReason
from flowrl_backends.environment import plugin
from tests.policy_contexts import policy_context
from tests.runtime.shifted_clock import ShiftedClock

DEADLINE_S = 60.0
SAMPLE = SampleId("0/4/2")
HEAD = "from flowrl_backends.environment import Observation, Step\n"


def context(target: str, **options: object) -> EnvironmentContext:
    return EnvironmentContext(role=RoleName("game"), environment=target, options=options)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    """Writes a file with a class `Game` and names it."""

    def write(source: str) -> str:
        path = tmp_path / "games.py"
        path.write_text(HEAD + source)
        return f"{path}:Game"

    return write


def start(sample: SampleId = SAMPLE) -> EpisodeStart:
    return EpisodeStart(sample=sample, seed=5, row={"n": 3}, prompt="the prompt", answer="3")


def action(text: str = "a", turn: int = 0) -> Action:
    return Action(text=text, tokens=np.array([7, 9]), turn=turn, finish=FinishReason.STOP)


def played(target: str, *turns: str, **options: object) -> list[Any]:
    """Observation and outcomes of one episode."""

    async def play() -> list[Any]:
        game = plugin.open_environment(context(target, **options))
        said: list[Any] = [await game.reset(start())]
        for number, text in enumerate(turns):
            said.append(await game.step(SAMPLE, action(text, number)))
        await game.close_episode(SAMPLE)
        await game.close()
        return said

    return asyncio.run(play())


def test_the_plugin_is_found_by_name_and_serves_environments_alone():
    assert find("environment") is plugin
    assert isinstance(plugin, Plugin)
    assert plugin.capabilities.services == {Service.ENVIRONMENT}
    assert plugin.check().usable
    policy = policy_context()
    for opening in (
        lambda: plugin.open_train(policy),
        lambda: plugin.open_generate(policy, None),
        lambda: plugin.open_score(ScoreContext(role=RoleName("actor"), terms=())),
    ):
        with pytest.raises(BackendError, match="backend 'environment' cannot"):
            opening()


def test_methods_get_what_their_parameters_name(written: Callable[[str], str]):
    target = written("""
class Game:
    def __init__(self, size, *, name="x"):
        self.size, self.name = size, name
    async def reset(self, answer, row, seed, prompt, sample):
        return f"{self.size}{self.name} {answer} {row['n']} {seed} {prompt} {sample}"
    async def step(self, turn, text, tokens, finish, more=1):
        return Step(f"{turn}{text}{list(map(int, tokens))}{finish}{more}", reward=0.5)
""")
    said = played(target, "hi", size=8, name="y")
    assert said == [
        Observation(content="8y 3 3 5 the prompt 0/4/2"),
        Outcome(observation="0hi[7, 9]stop1", reward=0.5),
    ]


def test_plain_functions_run_in_threads_and_coroutines_on_the_loop(
    written: Callable[[str], str],
):
    target = written("""
import threading
class Game:
    def __init__(self):
        self.made = threading.current_thread().name
    def reset(self):
        return self.made
    async def step(self, text):
        return Step(threading.current_thread().name)
""")
    observation, outcome = played(target, "a")
    assert observation.content.startswith("flowrl-game-call")
    assert outcome.observation == threading.main_thread().name


def test_plain_functions_around_coroutines_are_awaited(written: Callable[[str], str]):
    target = written("""
def logged(function):
    def wrapper(self, text):
        return function(self, text)
    return wrapper
class Game:
    def reset(self):
        return ""
    @logged
    async def step(self, text):
        return Step(text * 2)
""")
    _, outcome = played(target, "ab")
    assert outcome.observation == "abab"


def test_methods_may_do_without_an_object(written: Callable[[str], str]):
    target = written("""
class Game:
    @classmethod
    def reset(cls, row):
        return f"{cls.__name__} {row['n']}"
    @staticmethod
    def step(text):
        return Step(text)
""")
    opening, outcome = played(target, "a")
    assert (opening.content, outcome.observation) == ("Game 3", "a")


def test_a_file_is_run_once_for_each_time_it_is_written(written: Callable[[str], str]):
    """Whoever edits it in a notebook plays what stands there now."""
    source = """
class Game:
    runs = 0
    def reset(self):
        Game.runs += 1
        return "%s" + str(Game.runs)
    def step(self): ...
"""
    target = written(source % "a")
    assert [played(target)[0].content for _ in range(2)] == ["a1", "a2"]
    path = Path(target.rpartition(":")[0])
    before = path.stat().st_mtime_ns
    written(source % "b")
    os.utime(path, ns=(before + 1, before + 1))  # within the second, and of the same size
    assert played(target)[0].content == "b1"


def test_every_episode_has_an_object_of_its_own(written: Callable[[str], str]):
    target = written("""
class Game:
    closed = []
    def reset(self, sample):
        self.sample = sample
        return ""
    async def step(self, text):
        return Step(self.sample)
    def close(self):
        self.closed.append(self.sample)
""")

    async def play() -> list[object]:
        game = plugin.open_environment(context(target))
        names = [SampleId("0/0/0"), SampleId("0/0/1")]
        for name in names:
            await game.reset(start(name))
        said = [(await game.step(name, action())).observation for name in reversed(names)]
        await game.close_episode(names[0])
        await game.close_episode(names[0])
        closed = list(game._factory.closed)  # type: ignore[attr-defined]
        await game.close()
        return [said, closed, game._factory.closed]  # type: ignore[attr-defined]

    said, closed, closed_in_the_end = asyncio.run(play())
    assert said == ["0/0/1", "0/0/0"]
    assert closed == ["0/0/0"]
    assert closed_in_the_end == ["0/0/0", "0/0/1"]


def test_a_step_has_state_metrics_and_an_end(written: Callable[[str], str]):
    target = written("""
class Game:
    async def reset(self):
        return Observation(content="go", state="first")
    async def step(self, **offered):
        return Step("", reward=1, done=True, state=sorted(offered)[0], metrics={"won": 1})
""")
    assert played(target, "a") == [
        Observation(content="go", state="first"),
        Outcome(observation="", reward=1, done=True, state="finish", metrics={"won": 1}),
    ]


def test_a_function_may_make_the_episodes(written: Callable[[str], str], tmp_path: Path):
    written("""
class _Game:
    def __init__(self, size):
        self.size = size
    async def reset(self):
        return str(self.size)
    async def step(self, text):
        return Step(text)
def make(size=4):
    return _Game(size)
""")
    said = played(f"{tmp_path / 'games.py'}:make", "a", size=6)
    assert [said[0].content, said[1].observation] == ["6", "a"]


def test_a_class_of_a_module_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "games_of_a_module.py").write_text(HEAD + WHOLE)
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(plugin.open_environment(context("games_of_a_module:Game")), Environment)


WHOLE = """
class Game:
    def __init__(self, size=4):
        ...
    def reset(self, row):
        return ""
    def step(self, text):
        return Step(text)
"""


@pytest.mark.parametrize(
    ("source", "name", "options", "message"),
    [
        (WHOLE, "Gane", {}, "has no class 'Gane'(.|\n)*did you mean 'Game'"),
        (WHOLE, "Game", {"sise": 3}, "does not take these options(.|\n)*did you mean 'size'"),
        (WHOLE.replace("row", "rows"), "Game", {}, "reset asks for 'rows', which is not offered"),
        (WHOLE.replace("row", "rows"), "Game", {}, "did you mean 'row'"),
        (WHOLE.replace("text", "turns"), "Game", {}, "step asks for 'turns'(.|\n)*'turn'"),
        (WHOLE.replace("step(", "stop("), "Game", {}, r"has no step\(\)"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_when_it_is_opened(
    written: Callable[[str], str],
    source: str,
    name: str,
    options: dict[str, object],
    message: str,
):
    target = written(source).replace(":Game", f":{name}")
    with pytest.raises(BackendError, match=message) as caught:
        plugin.open_environment(context(target, **options))
    assert str(caught.value.where).startswith("roles.game.")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", "this is not a reference to an environment"),
        ("games.py", "this is not a reference to an environment"),
        ("nowhere/games.py:Game", "no such environment file"),
    ],
)
def test_what_names_no_class_is_refused(target: str, message: str):
    with pytest.raises(BackendError, match=message):
        plugin.open_environment(context(target))


def test_a_file_that_raises_is_told_with_its_line(written: Callable[[str], str]):
    target = written("\n\n1 / 0\n")
    with pytest.raises(BackendError, match="the environment cannot be loaded") as caught:
        EnvironmentPool(plugin.open_environment, context(target))
    assert "ZeroDivisionError: division by zero" in str(caught.value)
    assert "games.py:4 in <module>" in str(caught.value)


def failure(target: str) -> EpisodeFailure:
    """What the first step of an episode fails with."""
    with EnvironmentPool(plugin.open_environment, context(target)) as pool:
        pool.start(start())
        assert pool.wait(DEADLINE_S)
        assert [type(answered.answer) for answered in pool.poll()] == [Observation]
        pool.submit(SAMPLE, action())
        assert pool.wait(DEADLINE_S)
        (answered,) = pool.poll()
    assert isinstance(answered.answer, EpisodeFailure)
    return answered.answer


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_the_users_code_raises_is_told_with_the_users_lines_alone(
    written: Callable[[str], str], kind: str
):
    target = written(f"""
class Game:
    async def reset(self):
        return ""
    {kind} step(self, text):
        return self.deeper()
    def deeper(self):
        return {{}}["gone"]
""")
    failed = failure(target)
    assert failed.message.startswith("raised KeyError: 'gone' in turn 0 (")
    assert [frame.rpartition("/")[2] for frame in failed.frames] == [
        "games.py:7 in step",
        "games.py:9 in deeper",
    ]


def test_ids_as_the_beginning_of_an_episode_are_answered_with_their_form(
    written: Callable[[str], str],
):
    target = written("""
class Game:
    def reset(self):
        return [1, 2]
    def step(self, text):
        return None
""")
    with EnvironmentPool(plugin.open_environment, context(target)) as pool:
        pool.start(start())
        assert pool.wait(DEADLINE_S)
        (answered,) = pool.poll()
    assert "ids are Observation(content=np.array([...]))" in answered.answer.message


@pytest.mark.parametrize("value", ["'<'", "('<', 0.0, False)", "None"])
def test_a_step_that_returns_something_else_is_told_with_the_users_line(
    written: Callable[[str], str], value: str
):
    target = written(f"""
class Game:
    async def reset(self):
        return ""
    async def step(self, text):
        return {value}
""")
    failed = failure(target)
    assert f".step returned {value}, not a Step: write `return Step(observation, " in failed.message
    assert [frame.rpartition("/")[2] for frame in failed.frames] == ["games.py:6 in step"]
    assert failed.message.endswith(f"in turn 0 ({failed.frames[-1]})")


def test_an_answer_with_a_part_that_is_of_no_use_is_told_with_the_users_line(
    written: Callable[[str], str],
):
    target = written("""
from flowrl_backends.environment import Step
class Game:
    def reset(self):
        return ""
    def step(self, text):
        return Step("<", reward="much")
""")
    failed = failure(target)
    assert failed.message.startswith("gave reward='much', which is no number")
    assert [frame.rpartition("/")[2] for frame in failed.frames] == ["games.py:7 in step"]


def test_an_object_that_cannot_be_shown_is_told_by_its_type(written: Callable[[str], str]):
    target = written("""
class Odd:
    def __repr__(self):
        raise ValueError("no name")
class Game:
    def reset(self):
        return ""
    def step(self, text):
        return Odd()
""")
    assert "Game.step returned an object of Odd, not a Step" in failure(target).message


def test_an_iterator_that_ends_in_a_plain_function_is_told_with_its_line(
    written: Callable[[str], str],
):
    target = written("""
class Game:
    def reset(self):
        return ""
    def step(self, text):
        return next(iter(()))
""")
    found = failure(target)
    assert found.message.startswith("raised RuntimeError: StopIteration in turn 0")
    assert found.frames[-1].endswith("games.py:7 in step")


def test_a_plain_function_that_never_returns_holds_nobody(
    written: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
):
    """Its thread is left behind, and another takes its place."""
    target = written("""
import threading
inside, release = threading.Event(), threading.Event()
class Game:
    def reset(self, sample):
        self.sample = sample
        return ""
    def step(self, text):
        if self.sample == "0/4/2":
            inside.set()
            release.wait()
        return Step(done=True)
""")
    clock = ShiftedClock(monkeypatch)
    fast = SampleId("0/4/3")
    limited = EnvironmentContext(role=RoleName("game"), environment=target, timeout_s=DEADLINE_S)
    with EnvironmentPool(plugin.open_environment, limited, grace_s=DEADLINE_S) as pool:
        clock.rules(pool)
        names = pool._loop._environment._factory.reset.__globals__  # type: ignore[attr-defined]
        for sample in (SAMPLE, fast):
            pool.start(start(sample))
        assert pool.settle(DEADLINE_S)
        pool.poll()
        pool.submit(SAMPLE, action())
        pool.flush()
        assert names["inside"].wait(DEADLINE_S)
        clock.ahead_s = DEADLINE_S
        pool.submit(fast, action())
        assert pool.settle(DEADLINE_S)
        found = {answered.sample: answered.answer for answered in pool.poll()}
        pool.end(SAMPLE)
        names["release"].set()
    assert found[fast] == Outcome(done=True)
    failed = found[SAMPLE]
    assert isinstance(failed, EpisodeFailure)
    assert failed.message == "took longer than 60 s in turn 0"
