"""Truncated rollouts that trainers repeat: from the engine through a run to the update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowrl as fl
from flowrl.backend.batch import KeptTokens, Sampler
from flowrl.backend.protocols import Finished
from flowrl.data import PromptItem
from flowrl.data.rows import Row
from flowrl.errors import SchedulerError
from flowrl.ids import GroupId, RoleName, SampleId, group_id, sample_id
from flowrl.observe.run_folder import RunFolder
from flowrl.runtime.driver.payloads import Payload, behaviour_logprobs, sequence_batch
from flowrl.runtime.environments.transcript import FinishedEpisode, Transcript
from flowrl.specs import FinishReason, Sampling
from flowrl_backends.environment import plugin as environments
from tests.runtime import test_episodes_torch as episodes
from tests.runtime.test_episodes_torch import TEMPERATURE, Model, guess, model  # noqa: F401
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config

GROUP = group_id(0, 3)

EVERYTHING: dict[str, Any] = {
    "top_p": 0.8,
    "top_k": 6,
    "min_p": 0.02,
    "repetition_penalty": 1.2,
    "min_tokens": 2,
}


def payload(*prompt: int) -> Payload:
    row = Row(index=0, prompt="", answer="", solution="", fields={}, where="rows:1")
    ids = np.array(prompt, np.int64)
    return Payload(item=PromptItem(epoch=0, index=0, group=GROUP, row=row, prompt_ids=ids))


def finished(tokens: list[int], kept: list[list[int]] | None) -> Finished:
    return Finished(
        sample=sample_id(GROUP, 0),
        attempt=0,
        reason=FinishReason.STOP,
        tokens=np.array(tokens, np.int64),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=((1, len(tokens)),),
        kept=None if kept is None else of_sets(kept),
    )


def of_sets(sets: list[list[int]]) -> KeptTokens:
    return KeptTokens.of_places([np.array(ids, np.int32) for ids in sets])


def sets(kept: KeptTokens | None) -> list[list[int]]:
    assert kept is not None
    return [kept.select(np.array([t])).ids.tolist() for t in range(len(kept))]


def batch_of(*payloads: Payload) -> Any:
    rows = [(sample_id(GROUP, i), each) for i, each in enumerate(payloads)]
    return sequence_batch(rows, [GROUP] * len(rows))


def test_kept_tokens_of_attempts_join_and_lie_at_response_tokens():
    one, other = payload(1, 2), payload(1, 2)
    one.extend(finished([4, 5], [[4, 6], []]))
    one.extend(finished([6], [[6]]))
    other.extend(finished([], []))
    other.extend(finished([7], [[3, 7]]))
    batch = batch_of(one, other)
    assert sets(batch.kept) == [[], [], [4, 6], [], [6], [], [], [3, 7]]


def test_a_batch_of_samples_that_report_nothing_has_no_kept_tokens():
    of = payload(1)
    of.extend(finished([4], None))
    assert batch_of(of).kept is None


def test_a_sample_that_does_not_say_what_its_sampler_kept_is_refused_beside_those_that_do():
    one, other = payload(1), payload(1)
    one.extend(finished([4], [[4]]))
    other.extend(finished([5, 6], None))
    with pytest.raises(SchedulerError, match="does not report what its sampler kept") as caught:
        batch_of(one, other)
    assert caught.value.found == f"2 tokens for prompt {GROUP}"


def ended(transcript: Transcript) -> FinishedEpisode:
    return transcript.end(SampleId("0/3/0"), 0, RoleName("game"), FinishReason.STOP)


def test_an_episode_keeps_the_sets_of_its_turns_and_none_at_observations():
    transcript = Transcript()
    transcript.open(np.array([20, 21]))
    transcript.act(finished([4, 5], [[4, 6], [5]]), state=0, text="a")
    transcript.observe(np.array([22]))
    transcript.act(finished([6], [[1, 6]]), state=1, text="b")
    of = payload(1)
    of.extend(ended(transcript))
    assert sets(batch_of(of).kept) == [[], [], [], [4, 6], [5], [], [1, 6]]


def test_an_episode_whose_turns_report_nothing_reports_nothing():
    transcript = Transcript()
    transcript.open(np.array([20]))
    transcript.act(finished([4], None), state=0, text="a")
    assert ended(transcript).kept is None


@pytest.mark.parametrize("options", [EVERYTHING, {"min_tokens": 2}, {"top_p": 0.8}], ids=str)
def test_the_trainer_repeats_the_draws_of_every_turn_of_an_episode(
    model: Model,  # noqa: F811
    guess: str,  # noqa: F811
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    sampling = Sampling(temperature=TEMPERATURE, max_tokens=3, logprobs="sampler", **options)
    monkeypatch.setattr(episodes, "Sampling", lambda **_: sampling)
    rows = episodes.rolled_out(
        model, environments.open_environment, environment=guess, max_tokens=3
    )
    groups: list[GroupId] = [each.item.group for _, each in rows]
    batch = sequence_batch(rows, groups)
    assert batch.turn is not None
    assert batch.turn.max() >= 1
    sampler = Sampler(sampling=sampling, stop_token_ids=tuple(model.tokenizer.stop_ids))
    trained = model.trainer.logprobs(replace(batch, sampler=sampler), TEMPERATURE)
    behaviour = behaviour_logprobs(batch, rows)
    np.testing.assert_allclose(trained, behaviour, atol=5e-5)
    plain = model.trainer.logprobs(batch, TEMPERATURE)
    assert float(np.abs(plain - behaviour).max()) > 1e-2


def run_of(runs: Path, **train: Any) -> list[dict[str, float]]:
    """What each GRPO step measured; two mini-batches a step, and a penalty to a reference."""
    config = tiny_config(runs)
    config["train"] |= train
    config["train"]["sampling"] = {"max_tokens": 6, **EVERYTHING}
    result = fl.run(None, config, display=WatchedDisplay())
    rows = [row for row in RunFolder.open(result.folder).steps() if row.stage == "grpo"]
    return [{**row.extra, "kl": row.kl or 0.0} for row in rows]


def test_a_run_that_repeats_its_truncation_finds_trainer_and_engine_at_one(tmp_path: Path):
    steps = run_of(tmp_path, truncated="repeat")
    assert len(steps) == 4
    for step in steps:
        assert step["mismatch/abs_max"] < 1e-4
    # The entropy is that of at most six tokens, not of the thirteen of the vocabulary.
    assert all(step["entropy"] < np.log(6) + 1e-6 for step in steps)


def test_a_reference_that_is_truncated_alike_begins_at_no_distance(tmp_path: Path):
    # One update a step, so that the first step's divergence is that of the copy.
    first, *_, last = run_of(tmp_path, truncated="repeat", mini_batches=1)
    assert first["kl"] == pytest.approx(0.0, abs=1e-9)
    assert last["kl"] > 1e-4


def test_a_run_that_accepts_the_bias_measures_the_model_before_truncation(tmp_path: Path):
    steps = run_of(tmp_path, truncated="ignore")
    assert steps[0]["mismatch/abs_max"] < 1e-4  # both sides leave the truncation out
    assert steps[0]["entropy"] > np.log(6) + 1e-6
