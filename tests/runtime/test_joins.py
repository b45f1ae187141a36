"""Sets of samples that nodes make of other sets: which rows they have, and with which values."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

import flowrl as fl
from flowrl.backend.batch import SequenceBatch
from flowrl.ids import GroupId, NodeId, sample_id
from flowrl.runtime.driver.graph_parts import GraphParts
from flowrl.runtime.driver.joins import make_pairs, make_whole
from flowrl.runtime.driver.payloads import Payload, SampleSet, StepBatch, sample_set
from tests.runtime.node_world import lowered


def answers(origin: str, groups: dict[str, list[list[int]]]) -> SampleSet:
    """The set of responses by group; the prompt of a group is its name, each number a token."""
    rows = []
    for name, responses in groups.items():
        ids = np.array(list(map(int, name.split("/"))))
        item = SimpleNamespace(prompt_ids=ids, group=GroupId(name), row=None)
        members = [
            (
                sample_id(GroupId(name), member),
                Payload(item=item, tokens=np.array(tokens)),  # type: ignore[arg-type]
            )
            for member, tokens in enumerate(responses)
        ]
        rows.append((GroupId(name), members))
    return sample_set(NodeId(origin), rows)


def texts(samples: SampleSet) -> list[list[int]]:
    sequences = samples.sequences
    bounds = zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True)
    return [sequences.tokens[a:b].tolist() for a, b in bounds]


@fl.workflow
def preferring(prompts: fl.Prompts, *, actor: fl.Policy, rival: fl.Policy):
    better, worse = rival.generate(prompts, n=1), actor.generate(prompts, n=3)
    pairs = fl.pair(preferred=better, other=worse)
    actor.update(pairs, reference=rival.logprobs(pairs), loss=fl.loss.dpo(0.1))


def paired(better: SampleSet, worse: SampleSet) -> tuple[SampleSet, StepBatch]:
    parts = GraphParts(lowered(preferring))
    step = StepBatch()
    for samples in (better, worse):
        step.sets[samples.origin] = samples
        logprobs = -samples.sequences.tokens.astype(np.float32)
        step.values[samples.origin, "rollout_logprobs"] = logprobs
    return make_pairs(parts, parts.graph.node("pair"), step), step


@fl.workflow
def refining(prompts: fl.Prompts, *, actor: fl.Policy, rival: fl.Policy):
    draft = actor.generate(prompts, n=2)
    revision = rival.generate(fl.prompts_of(draft, template="{prompt}{response}="), n=2)
    pairs = fl.pair(preferred=revision, other=draft)
    actor.update(pairs, reference=rival.logprobs(pairs), loss=fl.loss.dpo(0.1))


def test_a_revision_is_paired_with_its_draft_as_an_answer_to_the_prompt_of_that():
    draft = answers("actor.generate", {"1": [[10], [11, 12]], "2": [[20], [21]]})
    made = {"1/0": [[3], [4]], "1/1": [[5, 5]], "2/1": [[6]], "4/0": [[7]]}
    revision = answers("rival.generate", made)
    parts, step = GraphParts(lowered(refining)), StepBatch()
    for samples in (draft, revision):
        step.sets[samples.origin] = samples
    pairs = make_pairs(parts, parts.graph.node("pair"), step)
    rows = [[1, 3], [1, 10], [1, 4], [1, 10], [1, 5, 5], [1, 11, 12], [2, 6], [2, 21]]
    assert texts(pairs) == rows
    assert pairs.groups == tuple("1" * 6 + "2" * 2)
    assert step.values["pair", "preferred"].tolist() == [True, False] * 4
    assert pairs.payloads[0] is revision.payloads[0]  # so that it has one end


def test_one_preferred_sample_is_paired_with_each_of_the_other_set():
    better = answers("rival.generate", {"1": [[10, 11]], "2": [[20]], "3": [[30]]})
    worse = answers("actor.generate", {"2": [[5], [6, 6]], "1": [[7]]})
    pairs, step = paired(better, worse)
    # In the order of the preferred set; prompt 3 has no other sample, and makes no pair.
    assert texts(pairs) == [[1, 10, 11], [1, 7], [2, 20], [2, 5], [2, 20], [2, 6, 6]]
    assert pairs.groups == ("1", "1", "2", "2", "2", "2")
    assert pairs.sequences.groups.tolist() == [0, 0, 1, 1, 1, 1]
    assert step.values["pair", "preferred"].tolist() == [True, False] * 3
    assert step.values["pair", "rollout_logprobs"].tolist() == [
        -float(token) for text in texts(pairs) for token in text
    ]
    # The samples are those of the parts, for the logs to know them by.
    assert pairs.payloads[1] is worse.payloads[2]


def test_samples_of_equal_groups_are_paired_by_their_place():
    pairs, _ = paired(
        answers("rival.generate", {"1": [[10], [11], [12]]}),
        answers("actor.generate", {"1": [[5], [6]]}),
    )
    assert texts(pairs) == [[1, 10], [1, 5], [1, 11], [1, 6]]


def test_pairs_of_prompts_that_no_set_shares_are_no_samples():
    pairs, step = paired(
        answers("rival.generate", {"1": [[10]]}), answers("actor.generate", {"2": [[5]]})
    )
    assert len(pairs) == len(step.values["pair", "preferred"]) == 0


def test_turns_of_episodes_are_absent_at_samples_that_have_none():
    plain = answers("rival.generate", {"1": [[10]]}).sequences
    played = SequenceBatch(
        samples=plain.samples,
        tokens=np.array([1, 8, 9]),
        offsets=np.array([0, 3]),
        response_mask=np.array([False, True, True]),
        groups=np.array([0]),
        turn=np.array([-1, 0, 1]),
        token_reward=np.array([0, 0.5, 1], np.float32),
        state=np.array([-1, 3, 4]),
    )
    joined = SequenceBatch.joined([plain, played], [np.array([0]), np.array([0])])
    assert joined.offsets.tolist() == [0, 2, 5]
    assert joined.turn is not None
    assert joined.turn.tolist() == [-1, -1, -1, 0, 1]
    assert joined.state is not None
    assert joined.state.tolist() == [-1, -1, -1, 3, 4]
    assert joined.token_reward is not None
    assert joined.token_reward.tolist() == [0, 0, 0, 0.5, 1]


@fl.workflow
def mixing(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.RewardModel):
    rollout, solutions = actor.generate(prompts, n=2), fl.Examples.of(prompts)
    rollout, scores = fl.concat(
        (rollout, judge.score(rollout)),
        (solutions, judge.score(solutions)),
        missing_logprob=-0.5,
    )
    actor.update(rollout, scores)


def test_a_join_lays_the_samples_of_a_prompt_side_by_side_with_their_values():
    parts, step = GraphParts(lowered(mixing)), StepBatch()
    rollout = answers("actor.generate", {"1": [[10], [11, 12]], "2": [[20], [21]]})
    solutions = answers("examples", {"3": [[39]], "1": [[19]], "2": [[29]]})
    for samples, scorer in ((rollout, "judge.score"), (solutions, "judge.score.2")):
        step.sets[samples.origin] = samples
        scores = [float(row[-1]) for row in texts(samples)]
        step.values[NodeId(scorer), "score"] = np.array(scores, np.float32)
    logprobs = np.where(rollout.sequences.response_mask, -rollout.sequences.tokens, 0)
    step.values[NodeId("actor.generate"), "rollout_logprobs"] = logprobs.astype(np.float32)
    made = make_whole(parts, parts.graph.node("concat"), step)
    assert texts(made) == [[1, 10], [1, 11, 12], [1, 19], [2, 20], [2, 21], [2, 29], [3, 39]]
    assert made.sequences.groups.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert step.values["concat", "source"].tolist() == [0, 0, 1, 0, 0, 1, 1]
    assert step.values["concat", "score"].tolist() == [10, 12, 19, 20, 21, 29, 39]
    # The program says what replaces the logprobs of solutions; prompts have none.
    assert step.values["concat", "rollout_logprobs"].tolist() == [
        *(0, -10, 0, -11, -12, 0, -0.5),
        *(0, -20, 0, -21, 0, -0.5, 0, -0.5),
    ]


def test_a_join_of_a_part_without_samples_is_the_others():
    parts, step = GraphParts(lowered(mixing)), StepBatch()
    solutions = answers("examples", {"1": [[19]]})
    step.sets[solutions.origin] = solutions
    step.values[NodeId("judge.score.2"), "score"] = np.array([1], np.float32)
    made = make_whole(parts, parts.graph.node("concat"), step)
    assert texts(made) == [[1, 19]]
    assert step.values["concat", "source"].tolist() == [1]
    assert step.values["concat", "score"].tolist() == [1]


@fl.workflow
def of_one(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.RewardModel):
    rollout = actor.generate(prompts, n=2)
    rollout, scores = fl.concat((rollout, judge.score(rollout)))
    actor.update(rollout, scores)


def test_a_join_of_a_single_set_is_that_set():
    parts, step = GraphParts(lowered(of_one)), StepBatch()
    rollout = answers("actor.generate", {"1": [[10], [11, 12]], "2": [[20], [21]]})
    step.sets[rollout.origin] = rollout
    step.values[NodeId("judge.score"), "score"] = np.array([10, 12, 20, 21], np.float32)
    logprobs = np.zeros(len(rollout.sequences.tokens), np.float32)
    step.values[NodeId("actor.generate"), "rollout_logprobs"] = logprobs
    made = make_whole(parts, parts.graph.node("concat"), step)
    assert texts(made) == texts(rollout)
    assert step.values["concat", "source"].tolist() == [0, 0, 0, 0]
    assert step.values["concat", "score"].tolist() == [10, 12, 20, 21]
