"""Rewards and environments are checked by the text of their files, which is never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.config.user_functions import (
    environment_parameters,
    environment_problems,
    reward_problems,
    reward_reads_answer,
)

NEVER_RUN = "raise SystemExit('the file was run')\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def reward(text: str, name: str = "score") -> list[str]:
    Path("mine.py").write_text(f"{NEVER_RUN}{text}\n")
    return [str(problem) for problem in reward_problems(f"mine.py:{name}", "here")]


def environment(text: str, name: str = "Game") -> list[str]:
    Path("mine.py").write_text(f"{NEVER_RUN}{text}\n")
    return [str(problem) for problem in environment_problems(f"mine.py:{name}", "here")]


@pytest.mark.parametrize(
    "text",
    [
        "def score(response, answer): return 1",
        "def score(response, *, strict=True, **more): return 1",
        "def score(prompt, /, row): return 1",
        "async def score(response): return 1",
        "def score(responses, answers): return [1]",
        "def score(data_source, solution_str, ground_truth, extra_info=None): return 1",
        "def score(prompts, completions, completion_ids, solution, **kwargs): return [1]",
        "score = lambda response: 1",
        "from elsewhere import score",
        "from elsewhere import *",
        "import functools\n@functools.cache\ndef score(anything): return 1",
        "try:\n    import fast\nexcept ImportError:\n    def score(response): return 1",
        "for score in [len]: pass",
        "if True:\n    def score(response): return 1\nelse:\n    score = None",
    ],
)
def test_what_may_be_right_passes(text):
    assert reward(text) == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("def score(response:\n  return 1", ["mine.py:2)", "is no Python"]),
        ("def scores(response): return 1", ["no function 'score'", "did you mean 'scores'?"]),
        ("x = 1", ["no function 'score'", "a file that defines none"]),
        ("def outer():\n    def score(response): return 1", ["no function 'score'"]),
        ("def score(response, truth): return 1", ["asks for 'truth'", "prompt, response, answer"]),
        ("def score(respnse): return 1", ["did you mean 'response'?"]),
        ("def score(*, weight): return 1", ["asks for 'weight'"]),
        ("def score(solution_str, truth): return 1", ["'truth'", "f(data_source, solution_str,"]),
    ],
)
def test_what_is_wrong_is_told(text, parts):
    (problem,) = reward(text)
    assert problem.startswith("here: ")
    assert all(part in problem for part in parts), problem


RESET = "    def reset(self, row, seed): return ''\n"
STEP = "    async def step(self, text): ...\n"


@pytest.mark.parametrize(
    "text",
    [
        f"class Game:\n{RESET}{STEP}",
        f"class Game(Base):\n{RESET}",
        "def Game(size): ...",
        "from games import Game",
        f"class Game:\n    def __getattr__(self, name): ...\n{RESET}",
        f"class Game:\n{STEP}    def reset(self, row, size=3, **more): return ''\n",
    ],
)
def test_environments_that_may_be_right_pass(text):
    assert environment(text) == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("class Gam:\n    pass", "did you mean 'Gam'?"),
        (f"class Game:\n{RESET}", "mine.py:Game has no step()"),
        (f"class Game(Base):\n{STEP}    def reset(self, rows): ...\n", "asks for 'rows'"),
        (f"class Game:\n{RESET}    def step(self, text, 1): ...", "is no Python"),
    ],
)
def test_environments_that_are_wrong_are_told(text, part):
    (problem,) = environment(text)
    assert part in problem


def test_parameters_are_told_where_the_text_has_them():
    reward("def score(response, answer=''): return 1\nother = print")
    assert reward_reads_answer("mine.py:score")
    assert reward_reads_answer("mine.py:other")  # its text does not show it
    reward("def score(solution_str, extra_info): return 1\ndef trl(completions, **kwargs): ...")
    assert not reward_reads_answer("mine.py:score")
    assert not reward_reads_answer("mine.py:trl")
    environment(f"class Game:\n{STEP}    def reset(self, row, answer): ...\n")
    of_reset = environment_parameters("mine.py:Game", "reset")
    assert of_reset is not None
    assert of_reset.required == ("row", "answer")
    assert environment_parameters("mine.py:Game", "close") is None
