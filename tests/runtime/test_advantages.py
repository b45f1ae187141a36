"""Advantage nodes in the batch program: arrays by sample and by token, as the update gets them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import flowrl as fl
from flowrl.algo.advantages import AdvantageBatch
from flowrl.algo.resolve import resolve_advantage
from flowrl.ids import NodeId
from flowrl.runtime.driver.payloads import StepBatch
from flowrl.specs.advantage import LengthWeighted, ReinforcePP
from tests.runtime.node_world import MASK, Worker, lowered, program_of, samples
from tests.runtime.tiny_runs import WatchedDisplay, write_config

SCORES = np.array([1.0, 0.0, 0.5, 0.0], np.float32)
PADDED = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 1], [1, 1, 1]])


def advantages_of(make, *, penalised: bool = False) -> np.ndarray:
    """float32 `[14]`, what the update gets of `make(scores, rollout)`."""

    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        advantages = make(reward.score(rollout), rollout)
        actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip())

    @fl.workflow
    def compared(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward, ref: fl.Policy):
        rollout = actor.generate(prompts)
        advantages = make(reward.score(rollout), rollout, ref.logprobs(rollout))
        actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip())

    actor = Worker()
    graph = lowered(compared if penalised else mine)
    program = program_of(graph, {"actor": actor, "ref": Worker()})
    drawn = samples("actor.generate", {"reward": SCORES.tolist()})
    batch = StepBatch(sets={NodeId("actor.generate"): drawn})
    batch.values[NodeId("actor.generate"), "rollout_logprobs"] = -np.ones(14, np.float32)
    program.run(batch)
    ((given, _),) = actor.updates
    assert given.advantages is not None
    assert given.advantages.dtype == np.float32
    return given.advantages


def flat(padded: np.ndarray) -> np.ndarray:
    """The values of `PADDED`'s places, end to end, 0 elsewhere."""
    out = np.zeros(14)
    out[np.flatnonzero(MASK)] = padded[PADDED > 0]
    return out


def test_one_advantage_a_sample_is_repeated_over_its_response():
    found = advantages_of(lambda s, r: fl.advantage.leave_one_out(s))
    each = np.array([1.0, -1.0, 0.5, -0.5])[:, None] * PADDED
    np.testing.assert_allclose(found, flat(each))


def test_an_advantage_that_reads_lengths_counts_response_tokens_alone():
    found = advantages_of(lambda s, r: fl.advantage.length_weighted(s, r))
    # Group 0: (2 * 1 + 1 * 0) / 3; group 1: (2 * 0.5 + 3 * 0) / 5.
    each = np.array([1 / 3, -2 / 3, 0.3, -0.2])[:, None] * PADDED
    np.testing.assert_allclose(found, flat(each), rtol=1e-6)
    expected = resolve_advantage(LengthWeighted())(
        AdvantageBatch(scores=SCORES, groups=np.array([0, 0, 1, 1]), mask=PADDED)
    )
    np.testing.assert_allclose(found, flat(expected.advantages[:, None] * PADDED))


def test_one_advantage_a_token_keeps_its_place_also_around_holes():
    found = advantages_of(lambda s, r: fl.advantage.reinforce_pp(s, r, gamma=0.5, whiten=False))
    each = np.array([[0.5, 1, 0], [0, 0, 0], [0.25, 0, 0.5], [0, 0, 0]])
    np.testing.assert_allclose(found, flat(each))


@fl.advantage.own(needs="rewards")
def apart(batch):
    return 10 * batch.scores + batch.rewards[:, 1]


def test_several_rewards_are_given_one_by_one_and_their_plain_sum_as_scores():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward, style: fl.Reward):
        rollout = actor.generate(prompts)
        advantages = apart([reward.score(rollout), style.score(rollout)])
        actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip())

    actor = Worker()
    program = program_of(lowered(mine), {"actor": actor})
    style = [0.25, 3.0, -1.0, 2.0]
    drawn = samples("actor.generate", {"reward": SCORES.tolist(), "style": style})
    batch = StepBatch(sets={NodeId("actor.generate"): drawn})
    batch.values[NodeId("actor.generate"), "rollout_logprobs"] = -np.ones(14, np.float32)
    program.run(batch)
    ((given, _),) = actor.updates
    each = (10 * (SCORES + style) + style)[:, None] * PADDED
    assert given.advantages is not None
    np.testing.assert_allclose(given.advantages, flat(each), rtol=1e-6)


def test_whitened_advantages_have_mean_0_and_deviation_1_over_response_tokens():
    found = advantages_of(lambda s, r: fl.advantage.reinforce_pp(s, r))[np.array(MASK, bool)]
    assert abs(found.mean()) < 1e-6
    np.testing.assert_allclose(found.std(ddof=1), 1, rtol=1e-6)


def test_a_penalty_in_the_reward_reads_both_logprobs_at_the_right_tokens():
    found = advantages_of(
        lambda s, r, ref: fl.advantage.reinforce_pp(
            s, r, reference=ref, kl=0.1, kl_credit="token", whiten=False
        ),
        penalised=True,
    )
    positions = np.flatnonzero(MASK)
    kl = -1.0 - (-positions / 7)
    expected = np.zeros(14)
    expected[positions] = (SCORES[:, None] * PADDED)[PADDED > 0] - 0.1 * kl
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert ReinforcePP().kl_estimator == "k1"


@fl.workflow
def penalised_and_filtered(
    prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward, reference: fl.Policy, kl: float
):
    rollout = actor.generate(prompts)
    rollout, scores = fl.filter.zero_variance(rollout, verifier.score(rollout))
    advantages = fl.advantage.reinforce_pp(
        scores, rollout, mean="group", reference=reference.logprobs(rollout), kl=kl
    )
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2))


def test_a_whole_run_computes_token_advantages_behind_a_filter(tmp_path: Path) -> None:
    def trained(kl: float) -> bytes:
        config = write_config(tmp_path, args={"kl": kl})
        result = fl.run(penalised_and_filtered, config, display=WatchedDisplay())
        assert result.summary.samples["filtered"] > 0
        return (result.folder / "model" / "model.safetensors").read_bytes()

    assert trained(0.05) == trained(0.05)
    assert trained(0.05) != trained(0.5)
