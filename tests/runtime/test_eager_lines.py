"""What a person sees of a program that runs line by line: values, breakpoints, errors, sessions."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import flowrl as fl
from flowrl.errors import DataError
from flowrl.observe.display import PlainDisplay
from flowrl.program.values import SamplesValue
from flowrl.runtime.driver.collected_batch import Seconds
from flowrl.runtime.driver.rollout_driver import RolloutDriver
from flowrl.runtime.eager.rollout import TwoPhaseDriver
from flowrl_backends.torch.trainer import TorchTrainer
from tests.runtime import eager_programs
from tests.runtime.eager_programs import (
    SEEN,
    TROUBLE,
    hasty,
    left_out,
    rewarded,
    session_of,
    troubled,
    wayward,
)
from tests.runtime.many_programs import CONFIGS, games_of
from tests.runtime.tiny_runs import WatchedDisplay, outcome, tiny_config


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    SEEN.clear()
    TROUBLE.clear()
    yield
    TROUBLE.clear()


# Values


def test_a_line_is_carried_out_when_it_is_reached(tmp_path: Path):
    with session_of("looking", tmp_path, "told") as session:
        assert SEEN == []
        made = session.step()
    names = [name for name, _ in SEEN]
    assert names == ["drawn", *["reward"] * 16, "scored"]
    prompts, rollout, scores = made.returned
    assert [text for name, text in SEEN if name == "reward"] == list(rollout.value.texts)
    assert SEEN[0][1] == rollout.value.texts
    assert SEEN[-1][1] == scores.value.tolist()
    assert [item.prompt for item in prompts.value] == list(dict.fromkeys(rollout.value.prompts))


def test_the_value_of_a_rollout_has_its_samples_as_tokens_and_as_texts(tmp_path: Path):
    with session_of("looking", tmp_path) as session:
        _, rollout, scores = session.step().returned
    value = rollout.value
    assert isinstance(value, SamplesValue)
    assert len(value) == len(value.texts) == len(scores.value) == 16
    assert value.lengths.tolist() == [len(drawn) for drawn in value.split(value.tokens)]
    assert (value.rollout_logprobs[~value.response_mask] == 0).all()
    for sample, drawn in zip(value, value.split(value.rollout_logprobs), strict=True):
        assert len(sample.tokens) == len(sample.response_mask) == len(sample.rollout_logprobs)
        assert (drawn < 0).all()
    assert value[-1].sample == value.samples[15]
    with pytest.raises(IndexError):
        value[16]
    with pytest.raises(ValueError, match="there are 3 values"):
        value.split(np.zeros(3))


def test_values_cannot_be_written_into(tmp_path: Path):
    with session_of("looking", tmp_path) as session:
        _, rollout, scores = session.step().returned
    for values in (scores.value, rollout.value.tokens):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1


def test_a_handle_says_what_its_values_are(tmp_path: Path):
    with session_of("looking", tmp_path) as session:
        prompts, rollout, scores = session.step().returned
    first, value = rollout.value[0], scores.value
    assert repr(prompts) == f"<Prompts of prompts: 4 prompts: {first.prompt!r}, ...>"
    total = int(rollout.value.lengths.sum())
    assert repr(rollout).startswith(
        f"<Rollout of actor.generate: 16 samples of 4 prompts, {total} response tokens (mean "
    )
    assert repr(rollout).endswith(f": {first.prompt!r} -> {first.text!r}, ...>")
    shown = ", ".join(f"{score:.4g}" for score in value[:8].tolist())
    assert repr(scores) == (
        f"<Scores of verifier.score: score float32[16], mean {value.mean():.4g}: {shown}, ...>"
    )


def test_every_node_of_the_lowered_graph_can_be_asked_for(tmp_path: Path):
    with fl.eager(None, CONFIGS["actor_critic"](tmp_path), display=WatchedDisplay()) as session:
        made = session.step()
        assert "advantage" in made.nodes
        assert len(made["critic.values"]) == len(made["actor.generate"].tokens)
        assert set(made["advantage"]) == {"advantage", "returns"}
        assert [update.loss for update in made["actor.update"]]
        assert "verifier.score" in repr(made)
        with pytest.raises(KeyError, match="no node 'actor"):
            made["actor.generated"]


def test_the_values_of_a_step_stay_when_another_is_made(tmp_path: Path):
    with session_of("looking", tmp_path) as session:
        first, second = session.step(), session.step()
    texts = first["actor.generate"].texts
    assert texts != second["actor.generate"].texts
    assert [row.response for row in first.samples] == list(texts)


def test_examples_pairs_and_episodes_have_values_of_their_own(tmp_path: Path):
    with fl.eager(None, CONFIGS["preferences"](tmp_path), display=WatchedDisplay()) as session:
        pairs = session.step()["pairs"]
    assert pairs.preferred.tolist() == [True, False] * 4
    assert pairs.rollout_logprobs is None
    rows = [sum(int(part) for part in prompt[:-1].split("+")) for prompt in pairs.prompts]
    assert [int(text) == total for text, total in zip(pairs.texts, rows, strict=True)] == [
        True,
        False,
    ] * 4
    with fl.eager(None, games_of(tmp_path), display=WatchedDisplay()) as session:
        episodes = session.step()["game.interact"]
    assert (episodes.turn[episodes.response_mask] >= 0).all()
    assert len(set(episodes.turn.tolist())) > 1


def test_a_merged_handle_has_the_values_of_the_one_it_was_merged_into(tmp_path: Path):
    with fl.eager(left_out, rewarded("left_out", tmp_path), display=WatchedDisplay()) as session:
        _, first, second = session.step().returned
    assert second.value.tolist() == first.value.tolist()
    assert "logprobs float32" in repr(second)


def test_a_handle_that_a_pass_left_out_says_so(tmp_path: Path):
    with fl.eager(left_out, rewarded("left_out", tmp_path), display=WatchedDisplay()) as session:
        unread, _, _ = session.step().returned
    with pytest.raises(fl.TraceError) as caught:
        print(unread.value)
    assert "actor.logprobs has no value: the pass drop_dead_nodes left it out" in str(caught.value)
    assert "eager_programs.py:" in str(caught.value.where)
    assert repr(unread) == "<Logprobs of actor.logprobs: left out by drop_dead_nodes>"


def test_handles_behind_a_filter_that_keeps_nothing_are_empty(tmp_path: Path):
    with session_of("nothing_left", tmp_path) as session:
        made = session.step()
    kept, scores, best = made.returned
    assert (len(kept.value), len(best.value), scores.value.shape) == (0, 0, (0,))
    assert repr(kept) == "<Rollout of filter.2: no samples>"
    assert repr(scores) == "<Scores of filter.2: score float32[0]>"
    assert made["actor.update"] == ()


def test_a_map_is_called_once_at_its_own_line_also_before_a_filter(tmp_path: Path):
    with session_of("own_functions", tmp_path) as session:
        session.step()
    calls = [name for name, _ in SEEN]
    assert calls[:1] == ["halved"]
    assert SEEN[0][1] == 16
    assert calls.count("ranked") <= 1


# What is refused


def test_a_value_is_refused_while_the_program_is_traced(tmp_path: Path):
    with pytest.raises(fl.TraceError) as caught:
        hasty.trace()
    text = str(caught.value)
    assert "eager_programs.py:" in text
    assert "what 'verifier.score' gives has no value while the workflow is traced" in text
    assert "executor=eager" in text
    assert "if fl.is_eager():" in text
    with pytest.raises(fl.TraceError, match="has no value while"):
        fl.eager(hasty, rewarded("hasty", tmp_path))


@pytest.mark.parametrize(
    "use",
    [bool, float, len, list, lambda s: s + 1, lambda s: s > 0, lambda s: s[0], lambda s: f"{s}"],
)
def test_what_tracing_refuses_is_refused_with_values_too(use: Any, tmp_path: Path):
    with session_of("looking", tmp_path) as session:
        _, _, scores = session.step().returned
    with pytest.raises(fl.TraceError, match="cannot be used") as caught:
        use(scores)
    assert "there are no values" not in str(caught.value)
    assert caught.value.hint.startswith(
        "the data itself is .value, to look at and compute with; in the program, "
    )


@pytest.mark.parametrize(
    ("way", "found", "expected"),
    [
        ("attribute", "actor.generate with temperature=0.5", "temperature=0.75 ("),
        ("operation", "filter with spec=ZeroVariance(", "spec=Difficulty("),
        ("edge", "actor.update with rollout=actor.generate{", "rollout=filter{"),
        ("end", "the end of the program", "log.scores ("),
        ("more", "log.more", "the end of the program"),
    ],
)
def test_a_program_that_takes_another_way_is_stopped_at_its_line(
    way: str, found: str, expected: str, tmp_path: Path
):
    config = rewarded("wayward", tmp_path, args={"way": way})
    with (
        fl.eager(wayward, config, display=WatchedDisplay()) as session,
        pytest.raises(fl.TraceError) as caught,
    ):
        session.step()
    error = caught.value
    assert error.what == "the program goes another way than it was compiled with"
    assert error.where is not None
    assert "eager_programs.py:" in error.where
    assert error.found is not None
    assert found in error.found
    assert error.expected is not None
    assert expected in error.expected
    assert "fl.filter" in str(error.hint)


def test_an_unknown_executor_is_refused(tmp_path: Path):
    config = rewarded("looking", tmp_path)
    with pytest.raises(fl.ConfigError, match="no such executor"):
        fl.run(None, config, executor="spark")


@pytest.mark.parametrize("executor", ["eager", "local"])
def test_a_map_that_looks_at_other_samples_and_says_that_it_does_not_is_stopped(
    executor: str, tmp_path: Path
):
    with pytest.raises(
        fl.TraceError, match="says per_sample=True, but what it gives for"
    ) as caught:
        fl.run(
            None,
            rewarded("looking_aside", tmp_path),
            overrides=[f"executor={executor}"],
            display=WatchedDisplay(),
        )
    assert "eager_programs.py:" in str(caught.value.where)


def test_what_a_program_logs_is_shown_with_its_steps(tmp_path: Path):
    stream = io.StringIO()
    made = fl.run(
        None, rewarded("own_functions", tmp_path), display=PlainDisplay(stream, every_s=0.0)
    )
    rows = map(json.loads, (made.folder / "metrics.jsonl").read_text().splitlines())
    shown = [line for line in stream.getvalue().splitlines() if "  reward " in line]
    means = [row["extra"]["halved"] for row in rows]
    assert means
    for line, mean in zip(shown, means, strict=True):
        assert f"  halved {mean:.4g}" in line


def test_a_baseline_of_least_variance_is_of_the_policys_own_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[np.ndarray] = []
    squares = TorchTrainer.squares

    def watched(self: TorchTrainer, batch: Any, temperature: float) -> Any:
        # From the whole distributions, which another pass computes.
        whole = np.exp(self.distributions(batch, temperature))
        found = squares(self, batch, temperature)
        np.testing.assert_allclose(found[batch.response_mask], (whole**2).sum(1), rtol=1e-5)
        asked.append(found)
        return found

    monkeypatch.setattr(TorchTrainer, "squares", watched)
    with session_of("least_variance", tmp_path) as session:
        rollout, scores, policy, advantages = session.step().returned
    (found,) = asked
    value = rollout.value
    expected = np.zeros(len(value.tokens))
    begins = value.offsets[:-1] + np.array([int(m.argmax()) for m in _masks(value)])
    for group in dict.fromkeys(value.groups):
        members = [i for i, name in enumerate(value.groups) if name == group]
        for step in range(int(value.lengths.max())):
            here = [i for i in members if value.lengths[i] > step]
            weight = {}
            for i in here:
                path = slice(begins[i], begins[i] + step + 1)
                weight[i] = (1 - 2 * np.exp(policy.value[path]) + found[path]).sum()
            total = sum(weight.values())
            baseline = (
                sum(weight[i] * scores.value[i] for i in here) / (total + 1e-8) if here else 0
            )
            for i in here:
                expected[begins[i] + step] = scores.value[i] - baseline
    np.testing.assert_allclose(advantages.value, expected, atol=1e-5)
    assert np.abs(expected).max() > 0.1


def _masks(value: SamplesValue) -> list[np.ndarray]:
    ends = zip(value.offsets[:-1], value.offsets[1:], strict=True)
    return [value.response_mask[start:end] for start, end in ends]


# What goes wrong


def test_an_error_of_the_program_comes_out_as_it_is_and_the_step_can_be_made_anew(tmp_path: Path):
    whole = fl.run(troubled, rewarded("troubled", tmp_path), display=WatchedDisplay())
    with session_of("troubled", tmp_path) as session:
        session.step()
        TROUBLE.append(ZeroDivisionError("mine"))
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            session.step()
        frames = [entry.name for entry in caught.traceback]
        assert frames[-1] == "troubled"
        assert "before step 2 of troubled" in repr(session)
        session.finish()
    assert outcome(session.folder) == outcome(whole.folder)


def test_a_step_that_failed_behind_its_update_is_the_session_s_last(tmp_path: Path):
    with session_of("troubled", tmp_path) as session:
        TROUBLE.append(KeyError("late"))
        with pytest.raises(KeyError, match="late"):
            session.step()
        with pytest.raises(fl.ConfigError, match="step 1 failed when it had changed weights"):
            session.step()
        assert "step 1 failed" in repr(session)


def test_an_error_of_the_program_in_a_run_is_told_with_its_line(tmp_path: Path):
    TROUBLE.append(ZeroDivisionError("mine"))
    with pytest.raises(fl.TraceError) as caught:
        fl.run(troubled, rewarded("troubled", tmp_path), display=WatchedDisplay(), executor="eager")
    assert "workflow 'troubled' raised ZeroDivisionError: mine" in str(caught.value)
    assert "eager_programs.py:" in str(caught.value.where)
    assert "raise TROUBLE.pop(0)" in caught.value.user_frames


def test_a_reward_that_raises_stops_at_its_line_with_its_own_error(tmp_path: Path):
    with (
        session_of("looking", tmp_path, "picky") as session,
        pytest.raises(ValueError, match="no nines: 9") as caught,
    ):
        session.finish()
    assert caught.traceback[-1].name == "picky"
    (note,) = caught.value.__notes__
    assert "flowrl: sample 0/" in note
    assert "at most 0 failed rewards (rewards.max_failures)" in note
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert SEEN[-1][0] == "drawn"


def test_a_reward_that_raises_in_a_run_is_told_with_its_sample(tmp_path: Path):
    with pytest.raises(fl.RewardError) as caught:
        fl.run(
            None,
            rewarded("looking", tmp_path, "picky"),
            display=WatchedDisplay(),
            executor="eager",
        )
    assert "raised ValueError: no nines: 9" in str(caught.value)
    assert "eager_rewards.py:" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_reward_that_cannot_be_loaded_is_told_before_the_first_step(tmp_path: Path):
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module\n\n\ndef f(response):\n    return 1.0\n")
    config = rewarded("looking", tmp_path)
    config["rewards"]["terms"][0]["function"] = f"{broken}:f"
    with pytest.raises(fl.RewardError, match="the reward cannot be loaded") as caught:
        fl.eager(None, config, display=WatchedDisplay())
    assert "broken.py:1" in str(caught.value.where)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


# Sessions


def test_a_session_goes_through_all_stages_as_a_run_does(tmp_path: Path):
    whole = fl.run(None, tiny_config(tmp_path), display=WatchedDisplay())
    display = WatchedDisplay()
    with fl.eager(None, tiny_config(tmp_path), display=display) as session:
        stages = []
        while session.stage is not None:
            stages.append(session.stage)
            assert session.step().metrics.stage == stages[-1]
        assert session.summary is not None
        with pytest.raises(fl.ConfigError, match="all of them are made"):
            session.step()
    assert stages == ["sft"] * 4 + ["grpo"] * 4
    assert display.summary == session.summary
    assert outcome(session.folder) == outcome(whole.folder)


def test_two_sessions_can_be_open_at_once_and_are_closed_for_good(tmp_path: Path):
    first, second = session_of("looking", tmp_path), session_of("looking", tmp_path)
    made = [session.step() for session in (first, second)]
    assert made[0]["actor.generate"].texts == made[1]["actor.generate"].texts
    for session in (first, second, first):
        session.close()
    with pytest.raises(fl.ConfigError, match="it is closed"):
        first.step()
    assert made[0].returned[2].value.shape == (16,)  # what was made can still be read
    # Nobody holds the folder any more.
    (first.folder / "config.yaml").write_text(yaml.safe_dump({"any": "thing"}))
    with session_of("looking", tmp_path) as third:
        third.step()


def test_a_session_steps_inside_a_running_event_loop_as_notebooks_have_it(tmp_path: Path):
    config = games_of(tmp_path)

    async def cell() -> list[float]:
        with fl.eager(None, config, display=WatchedDisplay()) as session:
            return [float(session.step()["game.interact"].lengths.mean()) for _ in range(2)]

    assert all(1 <= length <= 3 for length in asyncio.run(cell()))


def test_a_reward_file_that_was_changed_is_read_anew_by_the_next_session(tmp_path: Path):
    rewards = tmp_path / "rewards.py"
    config = rewarded("looking", tmp_path)
    config["rewards"]["terms"][0]["function"] = f"{rewards}:f"
    seen = []
    for score in (1.0, 2.0):
        rewards.write_text(f"def f(response):\n    return {score}  # {'x' * int(score)}\n")
        with fl.eager(None, config, display=WatchedDisplay()) as session:
            seen.append(float(session.step().returned[2].value.mean()))
    assert seen == [1.0, 2.0]


def test_a_workflow_of_a_function_s_own_runs_line_by_line(tmp_path: Path):
    """As a notebook's cells define them: no file names it."""
    lines = []

    @fl.workflow
    def here(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward):
        rollout = actor.generate(prompts)
        scores = verifier.score(rollout)
        if fl.is_eager():
            lines.append(scores.value.mean())
        actor.update(rollout, scores)

    config = rewarded("looking", tmp_path)
    config["workflow"] = None
    config["stages"] = ["here"]
    with fl.eager(here, config, display=WatchedDisplay()) as session:
        session.finish()
    assert len(lines) == 3


@pytest.mark.parametrize("program", ["looking", "guessing"])
def test_an_interrupt_while_engines_draw_leaves_them_empty_for_the_next_try(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if program == "guessing":
        flow, config = None, games_of(tmp_path, eval={"num": 4, "metric": "solved"})
    else:
        flow, config = eager_programs.looking, rewarded(program, tmp_path)
    whole = fl.run(flow, config, display=WatchedDisplay())
    draws = iter([False, False, True])

    def polled(driver: TwoPhaseDriver, seconds: Seconds) -> int:
        if next(draws, False):
            raise KeyboardInterrupt
        return RolloutDriver._poll_engines(driver, seconds)

    monkeypatch.setattr(TwoPhaseDriver, "_poll_engines", polled)
    monkeypatch.setattr("flowrl_backends.torch.engine._STEPS_PER_POLL", 1)
    with fl.eager(flow, config, display=WatchedDisplay()) as session:
        with pytest.raises(KeyboardInterrupt):
            session.step()
        session.finish()
    assert outcome(session.folder) == outcome(whole.folder)


@fl.map(reads=("score", "row.topic"), gives="score", per_sample=True)
def by_topic(batch):
    return batch["score"] * (batch["row.topic"] == "maths")


@fl.workflow
def of_topics(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    actor.update(rollout, by_topic(verifier.score(rollout), rollout))


def test_a_map_of_a_field_that_rows_lack_is_named_with_the_line_of_its_call(tmp_path: Path):
    config = rewarded("of_topics", tmp_path)
    says = r"which by_topic \(.*test_eager_lines.py:\d+\) reads"
    with (
        fl.eager(of_topics, config, display=WatchedDisplay()) as session,
        pytest.raises(DataError, match=says),
    ):
        session.step()
