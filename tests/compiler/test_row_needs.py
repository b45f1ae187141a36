"""What must be in a data row is what the stages, rewards and environments of the run read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.compiler.reward_terms import row_needs
from flowrl.data import RowNeeds, Split
from tests.compiler.programs import config, grpo, imitate, judge_learns, model, play

NOTHING = RowNeeds(answer=False, solution=False)
ANSWER = RowNeeds(answer=True, solution=False)
NUMBER = RowNeeds(answer=True, number=True, solution=False)


def needs(workflow: fl.Workflow, split: Split = "train", **changes: Any) -> RowNeeds:
    compiled = fl.compile(workflow, config(**changes))
    return row_needs(compiled.config, [stage.graph for stage in compiled.stages], split)


def terms(*kinds: dict[str, Any]) -> dict[str, Any]:
    return {"terms": list(kinds)}


FORMAT = {"kind": "format", "pattern": "[0-9]+"}


def test_rewards_that_compare_need_the_answer():
    for kind, expected in {"exact_match": ANSWER, "numeric_match": NUMBER, "gsm8k": NUMBER}.items():
        assert needs(grpo, rewards=terms(FORMAT, {"kind": kind})) == expected


@fl.map(reads=("score", "row.meta.topic", "row.level", "text"), per_sample=True)
def by_topic(batch):
    return batch["score"]


@fl.workflow
def of_rows(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
    rollout = actor.generate(prompts)
    actor.update(rollout, by_topic(judge.score(rollout), rollout))


def test_training_rows_need_the_fields_that_maps_read():
    rewards = terms(FORMAT)
    expected = RowNeeds(answer=False, solution=False, fields=("meta.topic", "level"))
    assert needs(of_rows, rewards=rewards) == expected
    assert needs(of_rows, "eval", rewards=rewards) == NOTHING


def test_rewards_that_do_not_compare_need_nothing_but_the_prompt():
    length = {"kind": "overlong", "max_tokens": 4, "buffer": 2}
    repeated = {"kind": "repetition"}
    for split in ("train", "eval"):
        rewards = terms(FORMAT, length, repeated)
        assert needs(grpo, split, rewards=rewards) == NOTHING  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(response): return 1", NOTHING),
        ("def f(response, row): return 1", NOTHING),
        ("def f(response, answer): return 1", ANSWER),
        ("def f(response, **rest): return 1", ANSWER),
        ("from elsewhere import f", ANSWER),
    ],
)
def test_a_function_needs_the_answer_where_it_asks_for_it(tmp_path: Path, text, expected):
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert needs(grpo, rewards=terms({"kind": "python", "function": f"{path}:f"})) == expected


def test_a_role_with_terms_of_its_own_needs_what_these_read():
    judge = {"backend": "verify", "terms": [{"kind": "exact_match"}]}
    roles = {"actor": model(), "judge": judge}
    assert needs(grpo, roles=roles, rewards=terms()) == ANSWER
    judge["terms"] = [FORMAT]
    assert needs(grpo, roles=roles, rewards=terms()) == NOTHING


def test_supervised_stages_need_solutions_and_held_out_rows_the_answers():
    roles = {"actor": model()}
    assert needs(imitate, roles=roles) == RowNeeds(answer=False, solution=True)
    assert needs(imitate, "eval", roles=roles) == ANSWER


def test_pairs_need_both_responses():
    expected = RowNeeds(answer=False, solution=True, rejected=True)
    assert needs(judge_learns, roles={"judge": model()}) == expected


@pytest.mark.parametrize(
    ("reset", "expected"),
    [("row, seed", NOTHING), ("row, answer", ANSWER), ("**given", NOTHING)],
)
def test_an_environment_needs_the_answer_where_its_reset_asks_for_it(tmp_path, reset, expected):
    path = tmp_path / "game.py"
    path.write_text(
        f"class Game:\n    def reset(self, {reset}): ...\n    def step(self, text): ...\n"
    )
    roles = {
        "actor": model(max_length=64),
        "game": {"backend": "environment", "environment": f"{path}:Game"},
    }
    # Sums are scored by the environment alone, though the config has rewards.
    assert needs(play, roles=roles) == expected
