"""From samples to the arrays of an update, by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from flowrl.backend.protocols import Finished
from flowrl.data import PromptItem
from flowrl.data.rows import Row
from flowrl.errors import SchedulerError
from flowrl.ids import GroupId, RoleName, SampleId, group_id, sample_id
from flowrl.runtime.driver.batch_nodes import split_groups
from flowrl.runtime.driver.payloads import Payload, PayloadStore, behaviour_logprobs, sequence_batch
from flowrl.runtime.environments.transcript import EpisodeFailure, FinishedEpisode
from flowrl.runtime.scoring.pool import FailureKind
from flowrl.runtime.setup.policies import derive_seed
from flowrl.specs import FinishReason

A, B = group_id(0, 3), group_id(1, 5)


def item(group: GroupId, *prompt: int) -> PromptItem:
    row = Row(index=0, prompt="", answer="", solution="", fields={}, where="rows:1")
    return PromptItem(epoch=0, index=0, group=group, row=row, prompt_ids=np.array(prompt, np.int64))


def payload(of: PromptItem, tokens: list[int], logprobs: list[float]) -> Payload:
    return Payload(
        item=of, tokens=np.array(tokens, np.int64), logprobs=np.array(logprobs, np.float32)
    )


def three() -> tuple[list[tuple[SampleId, Payload]], list[GroupId]]:
    long, short = item(A, 1, 2, 3), item(B, 7)
    rows = [
        (sample_id(A, 0), payload(long, [4, 5], [-0.1, -0.2])),
        (sample_id(A, 1), payload(long, [6], [-0.3])),
        (sample_id(B, 0), payload(short, [8, 9, 10], [-0.4, -0.5, -0.6])),
    ]
    return rows, [A, A, B]


def test_a_batch_lays_prompts_and_responses_end_to_end():
    rows, groups = three()
    batch = sequence_batch(rows, groups)
    assert batch.samples == ("0/3/0", "0/3/1", "1/5/0")
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 9, 10]
    assert batch.offsets.tolist() == [0, 5, 9, 13]
    mask = [0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1]
    assert batch.response_mask.astype(int).tolist() == mask
    assert batch.groups.tolist() == [0, 0, 1]
    assert batch.response_lengths.tolist() == [2, 1, 3]
    assert (batch.tokens.dtype, batch.offsets.dtype, batch.groups.dtype) == (np.int64,) * 3


def test_versions_of_an_episode_are_told_of_drawn_tokens_alone():
    one = payload(item(A, 1), [4, 5, 6, 7, 8, 9], [0.0] * 6)
    one.versions = ((3, 3), (4, 1), (5, 2))
    assert one.sampled_versions == ((3, 3), (4, 1), (5, 2))
    # An opening, two drawn tokens, two of the environment, one drawn under the last weights.
    one.mask = np.array([0, 1, 1, 0, 0, 1], bool)
    assert one.sampled_versions == ((3, 2), (5, 1))
    assert sum(count for _, count in one.sampled_versions) == one.num_sampled
    one.versions = ((3, 2), (4, 2), (3, 2))
    assert one.sampled_versions == ((3, 1), (4, 1), (3, 1))
    one.versions, one.mask = ((3, 4), (4, 0), (3, 2)), np.ones(6, bool)
    assert one.sampled_versions == ((3, 6),)


def test_behaviour_logprobs_stand_at_response_tokens_and_nowhere_else():
    rows, groups = three()
    flat = behaviour_logprobs(sequence_batch(rows, groups), rows)
    expected = [0, 0, 0, -0.1, -0.2, 0, 0, 0, -0.3, 0, -0.4, -0.5, -0.6]
    assert flat.dtype == np.float32
    np.testing.assert_array_equal(flat, np.array(expected, np.float32))


def test_a_sample_without_a_response_has_a_prompt_alone():
    rows = [(sample_id(A, 0), payload(item(A, 1, 2), [], []))]
    batch = sequence_batch(rows, [A])
    assert batch.offsets.tolist() == [0, 2]
    assert not batch.response_mask.any()
    assert behaviour_logprobs(batch, rows).tolist() == [0.0, 0.0]


def test_no_samples_make_an_empty_batch():
    batch = sequence_batch([], [])
    assert (len(batch), batch.offsets.tolist(), len(batch.tokens)) == (0, [0], 0)
    assert behaviour_logprobs(batch, []).tolist() == []


def finished(tokens: list[int], version: int, reason: FinishReason) -> Finished:
    return Finished(
        sample=sample_id(A, 0),
        attempt=0,
        reason=reason,
        tokens=np.array(tokens, np.int64),
        logprobs=np.full(len(tokens), -float(version), np.float32),
        versions=((version, len(tokens)),),
    )


def test_attempts_join_exactly():
    store = PayloadStore()
    store.add(sample_id(A, 0), item(A, 1))
    kept = store[sample_id(A, 0)]
    kept.extend(finished([4, 5], 1, FinishReason.ABORT))
    assert kept.finish is FinishReason.ABORT
    kept.extend(finished([6], 2, FinishReason.STOP))
    assert kept.tokens.tolist() == [4, 5, 6]
    assert kept.logprobs.tolist() == [-1.0, -1.0, -2.0]
    assert kept.versions == ((1, 2), (2, 1))
    assert kept.finish is FinishReason.STOP


def test_a_store_gives_each_payload_once():
    store = PayloadStore()
    names = [sample_id(A, member) for member in range(3)]
    for name in names:
        store.add(name, item(A, 1))
    assert [sample for sample, _ in store.take([names[2], names[0]])] == [names[2], names[0]]
    assert store.get(names[0]) is None
    with pytest.raises(SchedulerError, match="no payload is stored for sample 0/3/0"):
        store[names[0]]
    store.discard([names[0], names[1]])
    assert len(store) == 0


@pytest.mark.parametrize(
    ("groups", "parts", "sizes"),
    [
        ([0, 0, 1, 1, 2, 2], 1, [6]),
        ([0, 0, 1, 1, 2, 2], 2, [4, 2]),
        ([0, 0, 1, 1, 2, 2], 3, [2, 2, 2]),
        ([0, 0, 1, 1, 2, 2], 7, [2, 2, 2]),
        ([5, 5, 5, 2, 9, 9], 2, [4, 2]),
        ([0, 0, 0, 1, 2, 2, 2, 2], 2, [4, 4]),
        ([0, 0, 0, 1, 2, 2, 2, 2], 3, [3, 1, 4]),
        ([3, 1, 1, 1, 1, 1, 2], 2, [6, 1]),
        ([0], 4, [1]),
        ([], 4, []),
    ],
)
def test_mini_batches_hold_whole_groups(groups: list[int], parts: int, sizes: list[int]):
    cut = split_groups(groups, parts)
    assert [len(rows) for rows in cut] == sizes
    assert [row for rows in cut for row in rows] == list(range(len(groups)))
    for before, after in pairwise(cut):
        assert groups[before[-1]] != groups[after[0]]


def test_seeds_depend_on_the_seed_and_on_every_name():
    known = derive_seed(0, "rollout", "grpo", "0/17/3")
    assert known == derive_seed(0, "rollout", "grpo", "0/17/3")
    others = {
        derive_seed(1, "rollout", "grpo", "0/17/3"),
        derive_seed(0, "eval", "grpo", "0/17/3"),
        derive_seed(0, "rollout", "grpo", "0/17/4"),
        derive_seed(0, "rollout", "grpo0/17/3"),
        derive_seed(0, "rolloutgrpo", "0/17/3"),
    }
    assert len(others | {known}) == 6
    assert all(0 <= seed < 2**63 for seed in others)


def test_seeds_are_the_same_in_every_version():
    # Frozen, since they decide what a resumed run draws: the first 63 bits of BLAKE2b.
    assert derive_seed(0, "rollout", "grpo", "0/17/3") == 8695035604805839804


def episode(sample: SampleId, failure: EpisodeFailure | None = None) -> FinishedEpisode:
    """`o a a o a`: an opening, a turn of two tokens, an answer, a turn of one."""
    turns = [-1, 0, 0, -1, 1]
    return FinishedEpisode(
        sample=sample,
        attempt=0,
        reason=FinishReason.STOP,
        tokens=np.array([20, 4, 5, 21, 6], np.int64),
        logprobs=np.array([0.0, -0.1, -0.2, 0.0, -0.3], np.float32),
        versions=((3, 5),),
        role=RoleName("game"),
        mask=np.array(turns) >= 0,
        turn=np.array(turns, np.int64),
        token_reward=np.array([0.0, 0.0, 0.5, 0.0, 1.0], np.float32),
        state=np.array([-1, 70, 70, -1, 80], np.int64),
        text="<ab>c",
        last_words="",
        score=1.5,
        terms={"turns": 2.0},
        failure=failure,
    )


def test_an_episode_ends_with_its_score_and_its_text():
    sample = sample_id(A, 0)
    of = payload(item(A, 1, 2), [], [])
    assert not of.is_episode
    of.extend(episode(sample))
    assert of.is_episode
    assert (of.score, of.scores, of.terms) == (1.5, {"game": 1.5}, {"turns": 2.0})
    assert (of.text, of.num_sampled, len(of.tokens)) == ("<ab>c", 3, 5)
    assert of.versions == ((3, 5),)
    assert payload(item(A, 1), [4, 5], [0.0, 0.0]).num_sampled == 2


def test_a_batch_of_episodes_has_holes_turns_rewards_and_states():
    rows = [(sample_id(A, i), payload(item(A, 1, 2), [], [])) for i in range(2)]
    for sample, of in rows:
        of.extend(episode(sample))
    batch = sequence_batch(rows, [A, A])
    assert batch.tokens.tolist() == [1, 2, 20, 4, 5, 21, 6] * 2
    assert batch.response_mask.astype(int).tolist() == [0, 0, 0, 1, 1, 0, 1] * 2
    assert batch.response_lengths.tolist() == [3, 3]
    assert batch.turn is not None
    assert batch.state is not None
    assert batch.token_reward is not None
    assert batch.turn.tolist() == [-1, -1, -1, 0, 0, -1, 1] * 2
    assert batch.state.tolist() == [-1, -1, -1, 70, 70, -1, 80] * 2
    assert batch.token_reward.tolist() == [0, 0, 0, 0, 0.5, 0, 1.0] * 2
    flat = behaviour_logprobs(batch, rows)
    expected = np.array([0, 0, 0, -0.1, -0.2, 0, -0.3] * 2, np.float32)
    np.testing.assert_array_equal(flat, expected)


def test_a_batch_of_plain_responses_has_no_turns():
    rows, groups = three()
    batch = sequence_batch(rows, groups)
    assert (batch.turn, batch.token_reward, batch.state) == (None, None, None)


def test_episodes_and_plain_responses_do_not_mix():
    rows, groups = three()
    rows[0][1].tokens, rows[0][1].logprobs = np.zeros(0, np.int64), np.zeros(0, np.float32)
    rows[0][1].extend(episode(rows[0][0]))
    with pytest.raises(SchedulerError, match="episodes and plain responses in one batch"):
        sequence_batch(rows, groups)


def test_an_episode_that_broke_off_has_no_score():
    sample = sample_id(A, 0)
    failure = EpisodeFailure(
        sample=sample, turn=1, kind=FailureKind.RAISED, message="raised KeyError in turn 1"
    )
    of = payload(item(A, 1, 2), [], [])
    of.extend(episode(sample, failure))
    assert (of.score, of.scores) == (None, {})
    assert (of.broken, of.failure) == (failure, "raised KeyError in turn 1")
    assert of.text == "<ab>c"  # what people look at


def test_an_episode_takes_nothing_up_in_the_middle():
    of = payload(item(A, 1, 2), [4], [-0.1])
    with pytest.raises(SchedulerError, match="has tokens already"):
        of.extend(episode(sample_id(A, 0)))
