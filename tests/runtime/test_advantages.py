"""Advantage nodes in the batch program: arrays by sample and by token, as the update gets them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np

import flowrl as fl
from flowrl.algo import resolve_batch_advantage
from flowrl.algo.advantages import AdvantageBatch
from flowrl.backend.batch import SequenceBatch
from flowrl.graph import Op
from flowrl.ids import SampleId
from flowrl.passes import Context, run_passes
from flowrl.runtime.batch_program import BatchProgram, StepBatch
from flowrl.specs import LengthWeighted, ReinforcePP, Sampling
from tests.runtime.tiny_runs import WatchedDisplay, write_config

SCORES = np.array([1.0, 0.0, 0.5, 0.0], np.float32)
MASK = [0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 1]
"""Prompts of different lengths; the third sample has a hole where another than the policy wrote."""
OFFSETS = [0, 3, 5, 10, 14]
PADDED = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 1], [1, 1, 1]])


def step() -> StepBatch:
    return StepBatch(
        sequences=SequenceBatch(
            samples=tuple(SampleId(f"0/{i // 2}/{i % 2}") for i in range(4)),
            tokens=np.arange(14),
            offsets=np.array(OFFSETS),
            response_mask=np.array(MASK, bool),
            groups=np.array([0, 0, 1, 1]),
        )
    )


class Worker:
    """Keeps the batch that an update gets; its logprobs are those of a reference."""

    def __init__(self) -> None:
        self.train = self
        self.stale = False
        self.batch = None

    def update(self, batch, spec):
        self.batch = batch
        return []

    def logprobs(self, sequences, temperature):
        return -np.arange(14, dtype=np.float32) / 7


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

    graph = run_passes((compared if penalised else mine).trace(), Context())
    worker, ref = Worker(), Worker()
    plan = SimpleNamespace(
        sizes=SimpleNamespace(mini_batches=1),
        operation=lambda node: SimpleNamespace(micro_batch=4),
    )
    program = BatchProgram(
        graph,
        plan,
        {"actor": worker, "ref": ref},
        Sampling(max_tokens=4),
        publish=lambda role: None,
        before=lambda node: None,
        beat=lambda: None,
    )
    batch = step()
    (generate,), (score,) = graph.of_op(Op.GENERATE), graph.of_op(Op.SCORE)
    batch.values[score.id, "score"] = SCORES
    batch.values[generate.id, "rollout_logprobs"] = -np.ones(14, np.float32)
    program.run(batch)
    found = worker.batch.advantages
    assert found.dtype == np.float32
    return found


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
    expected = resolve_batch_advantage(LengthWeighted())(
        AdvantageBatch(scores=SCORES, groups=np.array([0, 0, 1, 1]), mask=PADDED)
    )
    np.testing.assert_allclose(found, flat(expected.advantages[:, None] * PADDED))


def test_one_advantage_a_token_keeps_its_place_also_around_holes():
    found = advantages_of(lambda s, r: fl.advantage.reinforce_pp(s, r, gamma=0.5, whiten=False))
    each = np.array([[0.5, 1, 0], [0, 0, 0], [0.25, 0, 0.5], [0, 0, 0]])
    np.testing.assert_allclose(found, flat(each))


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
