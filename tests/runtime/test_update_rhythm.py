"""When updates are made: sums of terms, updates of every n-th step, penalties that adapt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import flowrl as fl
from flowrl.backend.batch import TrainBatch
from flowrl.backend.protocols import OptimizerStep, UpdateSpec
from flowrl.graph import Graph
from flowrl.ids import NodeId
from flowrl.runtime.driver.batch_program import BatchProgram
from flowrl.runtime.driver.payloads import StepBatch
from tests.runtime.node_world import Worker, lowered, program_of, samples, step_with

ROLLOUT = NodeId("actor.generate")
SCORES = {"verifier": [1.0, 0.0, 0.5, 0.5]}


@fl.workflow
def summed(prompts: fl.Prompts, examples: fl.Examples, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    rollout, scores = fl.filter.zero_variance(rollout, verifier.score(rollout))
    actor.update(fl.sum(fl.term(rollout, scores), 0.1 * fl.term(examples), 0.2 * fl.term(examples)))


def step_of(scores: dict[str, list[float]], *, rows: list[int]) -> StepBatch:
    """A step with examples, and a rollout that a filter has left these rows of."""
    drawn = samples(ROLLOUT, scores).select(np.array(rows, int))
    step = StepBatch(sets={NodeId("filter"): drawn, NodeId("examples"): samples("examples")})
    step.values[NodeId("filter"), "score"] = np.array(scores["verifier"], np.float32)[rows]
    step.values[NodeId("filter"), "rollout_logprobs"] = np.zeros(
        len(drawn.sequences.tokens), np.float32
    )
    return step


def test_the_terms_of_a_sum_are_cut_into_as_many_mini_batches_and_learned_together():
    actor = Worker()
    program = program_of(lowered(summed, mini_batches=2), {"actor": actor}, mini_batches=2)
    step = step_of(SCORES, rows=[0, 1, 2, 3])
    program.run(step)
    halves = (((0, 1),), ((2, 3),))
    assert [[s.mini_batches for s in specs] for specs in actor.sums] == [[h] * 3 for h in halves]
    assert [[s.weight for s in specs] for specs in actor.sums] == [[1.0, 0.1, 0.2]] * 2
    assert actor.stale
    assert set(step.updates) == {"actor.update.3"}
    (first, _) = step.updates[NodeId("actor.update.3")]
    assert first.loss == pytest.approx(1.0 + 0.1 + 0.2)
    assert first.num_tokens == 27
    assert [first.metrics[f"term.{k}/loss"] for k in (1, 2, 3)] == [1.0] * 3
    assert first.metrics["term.2/num_samples"] == first.metrics["num_samples"] == 2.0


def test_a_term_with_fewer_groups_decides_the_number_of_updates():
    actor = Worker()
    program = program_of(lowered(summed, mini_batches=2), {"actor": actor}, mini_batches=2)
    program.run(step_of(SCORES, rows=[0, 1]))
    assert [[s.mini_batches for s in specs] for specs in actor.sums] == [
        [((0, 1),), ((0, 1, 2, 3),), ((0, 1, 2, 3),)]
    ]


def test_a_term_without_samples_leaves_the_others():
    actor = Worker()
    program = program_of(lowered(summed), {"actor": actor})
    step = step_of(SCORES, rows=[])
    program.run(step)
    assert [[s.weight for s in specs] for specs in actor.sums] == [[0.1, 0.2]]
    assert step.skipped == ["advantage", "actor.update"]
    (made,) = step.updates[NodeId("actor.update.3")]
    assert "term.2/num_samples" in made.metrics
    assert "num_samples" not in made.metrics


@fl.workflow
def slower_actor(
    prompts: fl.Prompts,
    actor: fl.Policy,
    critic: fl.Critic,
    reference: fl.Policy,
    verifier: fl.Reward,
):
    rollout = actor.generate(prompts)
    values = critic.values(rollout)
    advantages, returns = fl.advantage.gae(verifier.score(rollout), values, rollout)
    critic.update(rollout, returns=returns, values=values)
    actor.update(
        rollout,
        advantages=advantages,
        reference=reference.logprobs(rollout),
        loss=fl.loss.policy_clip(0.2, anchor="old"),
        kl=fl.kl.k3(0.1),
        every=2,
    )


def test_an_update_every_second_step_is_made_then_and_what_it_alone_reads_is_computed_then():
    effects: list[str] = []
    workers = {name: Worker() for name in ("actor", "critic", "reference")}
    program = program_of(lowered(slower_actor, mini_batches=2), workers, effects=effects)
    made = []
    for number in (1, 2, 3, 4):
        step = step_with(samples(ROLLOUT, SCORES), number=number)
        program.run(step)
        assert step.skipped == []
        assert bool(effects) == (number > 1)  # nothing is published that was not trained
        made.append((list(step.updates), [node for node, _ in step.values if "logprobs" in node]))
    passes = ["reference.logprobs", "actor.logprobs"]
    critic, both = ["critic.update"], ["critic.update", "actor.update"]
    assert [updates for updates, _ in made] == [critic, both, critic, both]
    assert [sorted(set(passed)) for _, passed in made] == [[], sorted(passes), [], sorted(passes)]
    assert len(workers["critic"].updates) == 2 * len(workers["actor"].updates) == 4


def penalised(target: float) -> Graph:
    """A program whose penalty begins at 0.1 and follows its target over 40 samples."""

    @fl.workflow
    def program(prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy, verifier: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(
            rollout,
            verifier.score(rollout),
            reference=reference.logprobs(rollout),
            kl=fl.kl.k3(0.1, target=target, horizon=40),
        )

    return lowered(program)


def steered(kl: float) -> tuple[BatchProgram, Worker]:
    actor = Worker(kl)
    return program_of(penalised(0.01), {"actor": actor, "reference": Worker()}), actor


def test_an_adaptive_penalty_follows_what_each_step_measured():
    program, actor = steered(kl=0.05)
    steps = [step_with(samples(ROLLOUT, SCORES)) for _ in range(3)]
    for step in steps:
        program.run(step)
    # Far above the target the error is clipped at 0.2: 4 samples of a horizon of 40 make 2 %.
    expected = [0.1, 0.1 * 1.02, 0.1 * 1.02**2]
    assert [spec.kl.coefficient for _, spec in actor.updates] == pytest.approx(expected)
    assert [step.kl_coefficients["actor.update"] for step in steps] == pytest.approx(expected)


class Uneven(Worker):
    """Its mini-batches have one and three tokens, and measure 0.01 and 0.03."""

    def update(self, batch: TrainBatch, spec: UpdateSpec) -> list[OptimizerStep]:
        kl, tokens = ((0.01, 1), (0.03, 3))[len(self.updates) % 2]
        (step,) = super().update(batch, spec)
        return [replace(step, num_tokens=tokens, metrics={"kl": kl})]


def test_an_adaptive_penalty_follows_the_mean_over_tokens_not_over_mini_batches():
    workers = {"actor": Uneven(), "reference": Worker()}
    program = program_of(penalised(0.024), workers, mini_batches=2)
    program.run(step_with(samples(ROLLOUT, SCORES)))
    error = (0.01 * 1 + 0.03 * 3) / 4 / 0.024 - 1  # above the target, where 0.02 would be below
    assert program.kl_coefficients["actor.update"] == pytest.approx(0.1 * (1 + error * 4 / 40))


def test_an_adaptive_penalty_goes_on_where_a_checkpoint_says():
    first, _ = steered(kl=0.0)
    first.run(step_with(samples(ROLLOUT, SCORES)))
    second, actor = steered(kl=0.0)
    second.restore(first.kl_coefficients)
    second.run(step_with(samples(ROLLOUT, SCORES)))
    assert actor.updates[0][1].kl.coefficient == pytest.approx(0.1 * 0.98)
