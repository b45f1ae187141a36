"""The example environments, played by hand and by the best player there is."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from flowrl.backend.environment import (
    Action,
    EnvironmentContext,
    EpisodeStart,
    Outcome,
)
from flowrl.ids import RoleName, SampleId
from flowrl.specs import FinishReason
from flowrl_backends.environment import ToolEnvironment, plugin

SAMPLE = SampleId("0/0/0")


def play(
    target: str, row: dict[str, object], turns: Sequence[str], **options: object
) -> list[Outcome]:
    """The outcomes of an episode until it is done."""

    async def run() -> list[Outcome]:
        game = plugin.open_environment(
            EnvironmentContext(role=RoleName("game"), environment=target, options=options)
        )
        await game.reset(EpisodeStart(sample=SAMPLE, seed=0, row=row, prompt="", answer=""))
        outcomes: list[Outcome] = []
        for number, text in enumerate(turns):
            action = Action(text=text, tokens=np.array([1]), turn=number, finish=FinishReason.STOP)
            outcomes.append(await game.step(SAMPLE, action))
            if outcomes[-1].done:
                break
        await game.close()
        return outcomes

    return asyncio.run(run())


@pytest.fixture
def guess(repository: Path) -> str:
    return f"{repository / 'examples' / 'guess.py'}:Guess"


@pytest.fixture
def calculator(repository: Path) -> str:
    return f"{repository / 'examples' / 'calculator.py'}:Calculator"


def test_the_game_says_which_way_to_go(guess: str):
    outcomes = play(guess, {"number": 5}, "83?5")
    assert [o.observation for o in outcomes] == ["<", ">", "?", "="]
    assert [o.reward for o in outcomes] == [0.0, 0.0, -0.1, 1.0]
    assert [o.done for o in outcomes] == [False, False, False, True]
    assert [o.state for o in outcomes] == ["0-7", "4-7", "4-7", "4-7"]
    assert [o.metrics["solved"] for o in outcomes] == [0.0, 0.0, 0.0, 1.0]


def test_smaller_games_take_the_same_rows(guess: str):
    assert [o.observation for o in play(guess, {"number": 13}, "431", size=4)] == ["?", "<", "="]


@pytest.mark.parametrize("text", ["", "g", "10", " 5", "-"])
def test_what_is_no_number_of_the_game_is_told_apart(guess: str, text: str):
    (outcome,) = play(guess, {"number": 5}, [text])
    assert (outcome.observation, outcome.metrics["strange"]) == ("?", 1.0)


def test_halving_finds_15_of_16_numbers_in_4_turns(guess: str):
    found = 0
    for hidden in range(16):
        low, high, said = 0, 15, ""
        turns: list[str] = []
        while said != "=" and len(turns) < 4:
            turns.append(f"{(low + high) // 2:x}")
            said = str(play(guess, {"number": hidden}, turns)[-1].observation)
            low, high = (
                (low, int(turns[-1], 16) - 1) if said == "<" else (int(turns[-1], 16) + 1, high)
            )
        found += said == "="
    assert found == 15


def test_the_rows_of_the_game_are_those_that_it_writes(repository: Path):
    script = repository / "examples" / "guess.py"
    done = subprocess.run(
        [sys.executable, script, "16"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == script.with_suffix(".jsonl").read_text()
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 256
    assert {row["number"] for row in rows} == set(range(16))
    assert all(int(row["answer"], 16) == row["number"] for row in rows)


def test_a_call_is_answered_with_its_result_and_an_answer_is_graded(calculator: str):
    turns = ["<calc>47*38</calc>", "1786"]
    outcomes = play(calculator, {"answer": 1786}, turns, reply="[{}]")
    assert [o.observation for o in outcomes] == ["[1786]", ""]
    assert [(o.reward, o.done) for o in outcomes] == [(0.0, False), (1.0, True)]
    assert [o.metrics["calls"] for o in outcomes] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ("so: <calc>1+1</calc> and <calc>2+2</calc>", "2"),
        ("<calc>1/0</calc>", "error: division by zero at column 3"),
        ("<calc>six</calc>", "error: 's' at column 1"),
        ("<calc>\n1 +\n1</calc>", "2"),
    ],
)
def test_the_first_call_of_a_turn_counts_and_mistakes_are_told(
    calculator: str, turn: str, said: str
):
    (outcome,) = play(calculator, {"answer": 2}, [turn])
    assert (outcome.observation, outcome.done) == (said, False)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("2", 1.0),
        ("2.0", 1.0),
        ("3", 0.0),
        ("two", 0.0),
        ("", 0.0),
        ("<calc>1+1", 0.0),
        ("<python>2</python>", 0.0),
    ],
)
def test_a_turn_without_a_whole_call_is_the_answer(calculator: str, answer: str, reward: float):
    (outcome,) = play(calculator, {"answer": 2}, [answer])
    assert (outcome.reward, outcome.done) == (reward, True)


def test_calls_may_cost_something(calculator: str):
    turns = ["<calc>1</calc>", "<calc>2</calc>", "2"]
    assert play(calculator, {"answer": 2}, turns, call_costs=0.25)[-1].reward == 0.5


def test_tools_need_names_that_can_stand_in_a_call():
    for names in ({}, {"a b": str}, {"<": str}):
        with pytest.raises(ValueError, match="tools need names"):
            ToolEnvironment(names)
    with pytest.raises(NotImplementedError, match="does not define grade"):
        ToolEnvironment({"a": str}).step("no call")
