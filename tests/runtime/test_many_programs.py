"""Whole runs of programs of every kind, with real models: what they leave behind."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import flowrl as fl
from flowrl.api import RunResult
from flowrl.observe.run_folder import RunFolder
from flowrl.plan.local import engines_of
from tests.runtime.many_programs import CONFIGS
from tests.runtime.tiny_runs import WatchedDisplay

STEPS = 3


def run_of(program: str, runs: Path, **changes: Any) -> RunResult:
    return fl.run(None, CONFIGS[program](runs, **changes), display=WatchedDisplay())


def extras(result: RunResult) -> list[dict[str, float]]:
    return [dict(row.extra) for row in RunFolder.open(result.folder).steps()]


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "program",
    [name for name in CONFIGS if name not in ("preferences", "generation", "slow_actor")],
)
def test_every_step_is_logged_and_every_sample_has_one_end(tmp_path: Path, program: str):
    result = run_of(program, tmp_path)
    folder = RunFolder.open(result.folder)
    rows = list(folder.steps())
    assert [row.step for row in rows] == [1, 2, 3]
    assert all(row.loss is not None and np.isfinite(row.loss) for row in rows)
    drawn = Counter((row.step, row.rollout, row.sample) for row in folder.samples())
    assert set(drawn.values()) == {1}
    # Four prompts and four samples a prompt, in each rollout; one greedy one beside them.
    rollouts = {rollout for _, rollout, _ in drawn}
    each = {
        rollout: STEPS * 4 * (1 if (program, rollout[-2:]) == ("greedy_baseline", ".2") else 4)
        for rollout in rollouts
    }
    found = Counter(rollout for _, rollout, _ in drawn)
    if program == "split_and_joined":  # its two rollouts share the prompts of a step
        assert Counter(step for step, _, _ in drawn) == dict.fromkeys((1, 2, 3), 4 * 4)
        assert len(found) == 2
    else:
        assert found == each
    assert all(row.num_tokens > 0 and row.version >= row.step - 1 for row in rows)
    # Of every rollout that a step learned from it is told that its samples were of the newest
    # weights.
    learned = {(row.step, row.rollout) for row in folder.samples() if row.end == "consumed"}
    ages = [n for row in rows for name, n in row.extra.items() if name.endswith("staleness/max")]
    assert ages == [0.0] * len(learned)


def test_scores_that_responses_state_are_reported_and_those_without_one_are_counted(tmp_path: Path):
    folder = RunFolder.open(run_of("stated_numbers", tmp_path).folder)
    rows = list(folder.samples())
    ends = Counter(row.end for row in rows)
    assert ends["consumed"] > 10
    assert ends["filtered"] > 5
    for row in rows:
        number = re.search(r"(\d)$", row.response)
        if row.end == "consumed":
            assert number is not None
            assert row.score == float(number[1])
        elif row.reason == "parsed":
            assert number is None
    for step in folder.steps():
        of_step = [row for row in rows if row.step == step.step and row.reason != "zero_variance"]
        without = sum(row.reason == "parsed" for row in of_step)
        assert step.extra["unparsed"] == pytest.approx(without / len(of_step))


def test_a_critic_that_begins_as_a_copy_is_trained_and_exported_beside_the_policy(tmp_path: Path):
    result = run_of("actor_critic", tmp_path)
    steps = extras(result)
    assert steps[0]["critic/learning_rate"] == pytest.approx(1e-2)
    assert all("critic/value_explained_variance" in step for step in steps)
    critic, actor = weights(result.folder / "trained" / "critic"), weights(result.folder / "model")
    body = sorted(set(critic) & set(actor))
    assert len(body) > 5
    assert all(critic[name].shape == actor[name].shape for name in body)
    assert any((critic[name] != actor[name]).any() for name in body)
    # The actor's rate is the stage's, not the critic's.
    rates = [row.learning_rate for row in RunFolder.open(result.folder).steps()]
    assert rates[0] == pytest.approx(3e-3)


def test_an_actor_of_every_second_step_has_a_schedule_of_its_own_updates(tmp_path: Path):
    result = run_of("slow_actor", tmp_path, steps=4)
    folder = RunFolder.open(result.folder)
    rows = list(folder.steps())
    assert [row.loss is None for row in rows] == [True, False, True, False]
    assert ["critic/loss" in row.extra for row in rows] == [True] * 4
    # The fourth of four optimizer updates ends the cosine, at a tenth of the rate.
    assert rows[3].learning_rate == pytest.approx(3e-4)
    assert [row.version for row in rows] == [0, 0, 1, 1]
    ends = Counter((row.step, row.end) for row in folder.samples())
    assert ends == {(step, "consumed"): 16 for step in (1, 2, 3, 4)}


def test_a_refreshed_reference_is_the_policy_of_the_step_that_refreshed_it(tmp_path: Path):
    result = run_of("actor_critic", tmp_path, steps=4)
    kl = [row.kl or 0.0 for row in RunFolder.open(result.folder).steps()]
    # Before the first update of steps 1 and 3 the policy is the reference; its mean over the
    # step's two updates is that of one small update. By the end of step 2 there were four.
    assert kl[1] > kl[2] > 0
    coefficients = [step["kl_coefficient"] for step in extras(result)]
    assert coefficients[0] == 0.1
    assert coefficients[1] < 0.1  # far below the target, so it falls


def test_a_reward_model_s_scores_are_told_of_each_sample(tmp_path: Path):
    result = run_of("reward_modelling", tmp_path)
    folder = RunFolder.open(result.folder)
    rows = [row for row in folder.samples() if row.step == 1]
    scores = np.array([row.score for row in rows], float)
    assert len(set(scores.tolist())) > 4  # numbers of a model, not of a rule
    assert extras(result)[0]["model_score"] == pytest.approx(scores.mean(), abs=1e-6)
    first = next(iter(folder.steps()))
    assert first.reward_mean == pytest.approx(scores.mean(), abs=1e-6)
    assert not any(row.terms for row in rows)  # the config's rules score held-out samples alone
    assert "model/pair_accuracy" in extras(result)[0]
    assert (result.folder / "trained" / "model" / "model.safetensors").exists()


def test_samples_that_no_line_of_the_program_scores_have_no_score(tmp_path: Path):
    folder = RunFolder.open(run_of("distillation", tmp_path, steps=1).folder)
    assert {(row.score, len(row.terms)) for row in folder.samples()} == {(None, 0)}
    (step,) = folder.steps()
    assert step.reward_mean is None
    assert not [name for name in step.extra if name.startswith("terms/")]
    assert all("digit" in row.metrics for row in folder.evaluations())


def test_pairs_are_learned_from_without_any_rollout(tmp_path: Path):
    result = run_of("preferences", tmp_path)
    rows = list(RunFolder.open(result.folder).steps())
    assert [row.num_samples for row in rows] == [8, 8, 8]
    assert all("pair_accuracy" in step for step in extras(result))
    # At first policy and reference agree, so every margin is 0 and the loss is log 2.
    assert rows[0].reward_mean is None
    assert extras(result)[0]["reward_margin"] == pytest.approx(0, abs=0.05)
    before, after = RunFolder.open(result.folder).evaluations()
    assert (before.metrics["pair_accuracy"], before.metrics["reward_margin"]) == (0, 0)
    assert after.metrics["reward_margin"] != 0
    assert "digit" in after.metrics


def test_two_rewards_are_weighed_before_the_filter_and_their_terms_told_apart(tmp_path: Path):
    result = run_of("two_rewards", tmp_path)
    for row in RunFolder.open(result.folder).samples():
        assert set(row.terms) == {"verifier/digit", "judge/digit", "tail"}
        parts = row.terms["verifier/digit"] + 0.5 * (
            row.terms["tail"] + 0.5 * row.terms["judge/digit"]
        )
        over = max(0, row.num_tokens - 2) / 4
        assert row.score == pytest.approx(parts - over, abs=1e-6)


def test_a_program_may_log_what_its_filter_then_removes(tmp_path: Path):
    result = run_of("old_policy", tmp_path)
    folder = RunFolder.open(result.folder)
    by_step: dict[int, list[Any]] = {}
    for row in folder.samples():
        by_step.setdefault(row.step, []).append(row)
    for metrics in folder.steps():
        rows = by_step[metrics.step]
        every = [row.score for row in rows]
        assert metrics.extra["before"] == pytest.approx(np.mean(every))
        assert metrics.reward_mean == pytest.approx(np.mean(every))
        filtered = [row for row in rows if row.end == "filtered"]
        assert {row.reason for row in filtered} <= {"zero_variance"}
        assert metrics.filtered_groups == len(filtered) // 4
        assert metrics.num_samples == 16 - len(filtered)


def test_a_rival_that_is_a_copy_plays_and_is_brought_up_to_date(tmp_path: Path):
    result = run_of("self_play", tmp_path, steps=4)
    rows = list(RunFolder.open(result.folder).samples())
    versions = {
        step: {
            v
            for row in rows
            if (row.step, row.rollout) == (step, "rival.generate")
            for v, _ in row.versions
        }
        for step in range(1, 5)
    }
    assert versions == {1: {0}, 2: {0}, 3: {1}, 4: {1}}
    assert not (result.folder / "trained").exists()


def test_two_policies_learn_from_rollouts_of_their_own(tmp_path: Path):
    result = run_of("two_learners", tmp_path)
    rival, actor = weights(result.folder / "trained" / "rival"), weights(result.folder / "model")
    assert set(rival) == set(actor)
    assert any((rival[name] != actor[name]).any() for name in actor)
    first = extras(result)[0]
    assert {"rival/loss", "rival.generate/reward_mean"} <= set(first)
    # The rival began as the actor was, but draws streams of its own.
    texts: dict[str, list[str]] = {}
    for row in RunFolder.open(result.folder).samples():
        if row.step == 1:
            texts.setdefault(row.rollout, []).append(row.response)
    assert texts["actor.generate"] != texts["rival.generate"]


def test_the_best_answers_and_examples_are_imitated_in_one_step(tmp_path: Path):
    result = run_of("best_of_n", tmp_path)
    folder = RunFolder.open(result.folder)
    ends = Counter((row.end, row.reason) for row in folder.samples())
    assert ends == {("consumed", ""): 12, ("filtered", "top"): 36}
    # One answer to each of four prompts, and four examples.
    assert [row.num_samples for row in folder.steps()] == [8, 8, 8]


@fl.workflow
def scored_solutions(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """Solutions that rules score and no model reads, by themselves and joined with answers."""
    rollout, solutions = actor.generate(prompts), fl.Examples.of(prompts)
    scores = verifier.score(rollout)
    fl.log("solutions", verifier.score(solutions))
    fl.log("joined", verifier.score(fl.concat(rollout, solutions)))
    fl.log("answers", scores)
    actor.update(rollout, scores)


def test_rules_score_solutions_that_no_model_reads(tmp_path: Path):
    config = CONFIGS["greedy_baseline"](tmp_path, steps=1)
    result = fl.run(scored_solutions, config, display=WatchedDisplay())
    (extra,) = extras(result)
    assert extra["solutions"] == 1.0  # all begin with a digit
    assert extra["joined"] == pytest.approx((4 * extra["answers"] + extra["solutions"]) / 5)


def test_a_program_without_an_update_leaves_its_samples_and_numbers_and_no_model(tmp_path: Path):
    result = run_of("generation", tmp_path)
    folder = RunFolder.open(result.folder)
    rows = list(folder.samples())
    scored = [row for row in rows if row.rollout == "actor.generate"]
    greedy = [row for row in rows if row.rollout != "actor.generate"]
    assert (len(scored), len(greedy)) == (STEPS * 16, STEPS * 4)
    assert {row.reason for row in scored if row.end == "filtered"} == {"zero_variance"}
    assert {row.end for row in greedy} == {"consumed"}
    for row in greedy:  # the score is what the program makes of that of the rule
        assert row.score == pytest.approx(row.terms["digit"] - row.num_tokens / 6)
    assert {version for row in rows for version, _ in row.versions} == {0}
    for step in folder.steps():
        own = [row for row in rows if row.step == step.step]
        assert step.num_samples == sum(row.end == "consumed" for row in own)
        assert step.extra["before"] == step.reward_mean
        assert step.loss is None
    assert not (result.folder / "model").exists()
    assert not list(result.folder.glob("checkpoints/*/actor"))  # nothing is trained


def test_replayed_samples_are_counted_apart_and_are_consumed_once(tmp_path: Path):
    result = run_of("replaying", tmp_path)
    folder = RunFolder.open(result.folder)
    rows = list(folder.samples())
    assert {row.end for row in rows} == {"consumed"}
    assert len(rows) == STEPS * 16
    first, second, third = extras(result)
    assert (first["replay/samples"], first["skipped_nodes"]) == (0.0, 4.0)
    for numbers in (second, third):
        assert numbers["replay/samples"] == 8.0  # two groups of four
        assert 1.0 <= numbers["replay/age/mean"] <= numbers["replay/age/max"] <= 2.0
        # Scores are those of the step that sampled them, so multiples of a quarter of a group.
        assert numbers["replayed_score"] * 8 % 1 == 0
        assert numbers["staleness/max"] == 0.0  # of the fresh ones
    assert [step.num_samples for step in folder.steps()] == [16, 24, 24]


def test_episodes_are_evaluated_by_what_their_environment_measures(tmp_path: Path):
    result = run_of("guessing", tmp_path)
    (before, after) = RunFolder.open(result.folder).evaluations()
    for row in (before, after):
        assert {"score", "solved", "strange", "turns", "length"} <= set(row.metrics)
        assert 1 <= row.metrics["turns"] <= 3
    rows = list(RunFolder.open(result.folder).samples())
    assert {row.rollout for row in rows} == {"game.interact"}
    assert all(1 <= row.num_tokens <= 3 for row in rows)  # a turn is one token


@pytest.fixture(scope="module")
def debated(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run_of("debate", tmp_path_factory.mktemp("debate"))


def test_policies_that_take_turns_learn_each_from_its_own(debated: RunResult):
    result = debated
    rows = list(RunFolder.open(result.folder).samples())
    assert {(row.rollout, row.end) for row in rows} == {("court.interact", "consumed")}
    for row in rows:
        said = row.response.split("+")
        assert row.num_tokens == 4
        assert row.terms["pro_score"] == -row.terms["con_score"] == row.score
        assert len(said) >= 4  # a policy may say the court's own word
        if all(word.isdecimal() for word in said):
            assert row.score == np.sign(int(said[2]) - int(said[3]))
    for step in extras(result):
        # Each one's tokens are of its own weights, which differ from the second step on: before
        # its only update of a step they are those that sampled them.
        assert step["pro/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert step["pro/num_samples"] == 16.0
    (_, after) = RunFolder.open(result.folder).evaluations()
    assert after.metrics["con_score"] == -after.metrics["pro_score"]
    pro, con = weights(result.folder / "trained" / "pro"), weights(result.folder / "model")
    assert any((pro[name] != con[name]).any() for name in con)


@pytest.mark.parametrize(("pro", "con"), [(2, 2), (1, 2)])
def test_policies_that_take_turns_sample_the_same_with_engines_of_their_own(
    tmp_path: Path, debated: RunResult, pro: int, con: int
):
    config = CONFIGS["debate"](tmp_path)
    config["roles"]["pro"]["num_engines"] = pro
    config["roles"]["con"]["num_engines"] = con
    compiled = fl.compile(None, {**config, "name": "apart"})
    engines = {role: engines_of(compiled.stages[0].plan, role).processes for role in ("pro", "con")}
    assert engines == {"pro": pro if pro > 1 else 0, "con": con}
    apart = compiled.run(display=WatchedDisplay())
    left, right = ((run.folder / "samples.jsonl").read_text() for run in (apart, debated))
    assert left == right


def test_a_run_s_folder_says_what_each_stage_s_roles_are(tmp_path: Path):
    result = run_of("actor_critic", tmp_path)
    plan = json.loads((result.folder / "plan.actor_critic.json").read_text())
    assert {placement["role"] for placement in plan["placements"]} >= {"actor", "critic"}


def test_a_curriculum_is_told_how_every_prompt_did_filtered_ones_too(tmp_path: Path):
    config = CONFIGS["old_policy"](tmp_path)
    config["data"]["curriculum"] = {"kind": "solve_rate", "prior": 0.5, "smoothing": 0.5}
    result = fl.run(None, config, display=WatchedDisplay())
    last = max((result.folder / "checkpoints").iterdir(), key=lambda path: path.name)
    state = json.loads((last / "state.json").read_text())
    curriculum = state["stage"]["cursors"]["prompts"]["curriculum"]
    scores: dict[int, list[float]] = {}
    for row in RunFolder.open(result.folder).samples():
        scores.setdefault(int(row.sample.split("/")[1]), []).append(row.score or 0.0)
    assert curriculum["taken"] == 12
    rates = dict(zip(curriculum["places"], curriculum["rates"], strict=True))
    assert set(rates) == set(scores)
    once = {index: every for index, every in scores.items() if len(every) == 4}
    assert len(once) > 6
    for index, every in once.items():
        assert rates[index] == pytest.approx(0.5 + 0.5 * (np.mean(every) - 0.5))


@fl.workflow
def only_a_model(pairs: fl.Pairs, *, model: fl.RewardModel) -> None:
    fl.log("score", model.score(pairs))
    model.update(pairs, loss=fl.loss.bradley_terry())


def test_a_run_without_a_policy_exports_its_reward_model_and_measures_held_out_pairs(
    tmp_path: Path,
):
    config = {**CONFIGS["preferences"](tmp_path), "workflow": None}
    result = fl.run(only_a_model, config, display=WatchedDisplay())
    assert re.match(r"held-out pair_accuracy: before 0[.]\d\d after", result.summary.headline)
    first, last = RunFolder.open(result.folder).evaluations()
    assert first.metrics.keys() == {"pair_accuracy", "reward_margin"}
    assert first.num == 8
    assert last.metrics["reward_margin"] != first.metrics["reward_margin"]
    assert "score.weight" in weights(result.folder / "model")
    assert extras(result)[0]["score"] == pytest.approx(0, abs=1)
    assert not (result.folder / "trained").exists()


@fl.workflow
def a_part_of_the_pairs(prompts: fl.Prompts, *, model: fl.RewardModel) -> None:
    pairs = fl.Pairs.of(fl.where(prompts, row="a", one_of=range(50)))
    model.update(pairs, loss=fl.loss.bradley_terry())


def test_held_out_pairs_are_split_as_those_that_are_learned(tmp_path: Path):
    config = {**CONFIGS["preferences"](tmp_path, steps=1), "workflow": None}
    result = fl.run(a_part_of_the_pairs, config, display=WatchedDisplay())
    first, *_ = RunFolder.open(result.folder).evaluations()
    assert 0 < first.num < 8


FAILING = """
def reward(prompt, response, answer, row):
    if prompt.startswith("7") or len(response) == 5:
        raise ValueError("no")
    return float(response[:1].isdigit())
"""


def test_failed_rewards_take_their_prompt_out_of_both_rollouts(tmp_path: Path):
    (tmp_path / "failing.py").write_text(FAILING)
    term = {"kind": "python", "function": f"{tmp_path / 'failing.py'}:reward", "name": "digit"}
    rewards = {"terms": [term], "timeout_s": 60.0, "max_failures": 500}
    # Of this seed some prompts fail in the one rollout and some in the other.
    result = run_of("greedy_baseline", tmp_path / "runs", steps=6, rewards=rewards, seed=2)
    rows = list(RunFolder.open(result.folder).samples())
    for step in range(1, 7):
        consumed = {
            rollout: {row.sample.rpartition("/")[0] for row in rows if used(row, step, rollout)}
            for rollout in ("actor.generate", "actor.generate.2")
        }
        assert consumed["actor.generate"] == consumed["actor.generate.2"]
    reasons = {row.reason.partition(":")[0] for row in rows if row.end == "dropped"}
    assert reasons == {"reward_failed", "incomplete_group", "no_counterpart"}


def used(row: Any, step: int, rollout: str) -> bool:
    return (row.step, row.rollout, row.end) == (step, rollout, "consumed")
