"""Whole runs whose responses are held to a grammar."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.errors import GraphError
from flowrl.observe.rows import SampleRow
from flowrl.observe.run_folder import RunFolder
from tests.runtime.many_programs import config_of, games_of
from tests.runtime.tiny_runs import WatchedDisplay


@fl.workflow
def formed(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    rollout = actor.generate(prompts, grammar=fl.grammar.regex("[0-9]{1,2}=[0-4]{0,2}"))
    advantages = fl.advantage.group_relative(verifier.score(rollout))
    actor.update(rollout, advantages=advantages)


@fl.workflow
def formed_turns(prompts: fl.Prompts, *, actor: fl.Policy, game: fl.Environment) -> None:
    grammar = fl.grammar.regex("[0-3]")
    rollout, scores = fl.interact(actor, game, prompts, n=4, max_turns=4, grammar=grammar)
    actor.update(rollout, advantages=fl.advantage.group_relative(scores))


def samples_of(program: Any, config: dict[str, Any]) -> list[SampleRow]:
    config["workflow"] = f"{__file__}:{program.__name__}"
    config["stages"] = [program.__name__]
    config["train"]["truncated"] = "ignore"
    result = fl.run(None, config, display=WatchedDisplay())
    return list(RunFolder.open(result.folder).samples())


def test_every_response_of_a_run_matches_the_grammar(tmp_path: Path):
    rows = samples_of(formed, config_of("formed", tmp_path))
    finished = [row for row in rows if row.finish == "stop"]
    assert len(finished) > len(rows) / 2
    for row in finished:
        assert re.fullmatch("[0-9]{1,2}=[0-4]{0,2}", row.response), row.response
    # A response that meets its greatest length is the beginning of one.
    assert all(re.match("[0-9]{1,2}(=|$)", row.response) for row in rows)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_every_turn_of_an_episode_is_held_to_the_grammar_by_itself(tmp_path: Path, max_tokens: int):
    config = games_of(tmp_path)
    config["train"]["sampling"] = {"max_tokens": max_tokens}
    rows = samples_of(formed_turns, config)
    assert max(row.terms["turns"] for row in rows) > 1
    for row in rows:
        assert re.fullmatch("([0-3][<>=])+", row.response), row.response
        assert row.terms.get("strange", 0.0) == 0.0


def test_a_grammar_is_refused_where_a_gradient_would_be_biased(tmp_path: Path):
    config = config_of("formed", tmp_path)
    with pytest.raises(GraphError, match=r"samples with a grammar \(regex\)"):
        fl.compile(formed, config)
    config["train"]["truncated"] = "repeat"
    with pytest.raises(GraphError, match="cannot include in logprobs"):
        fl.compile(formed, config)
