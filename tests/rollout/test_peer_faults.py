"""Faults that were observed by running other systems' schedulers; each is a test here.

They are the `known_faults_in_peers` of the reference data, in its order.
"""

from __future__ import annotations

import pytest
import yaml

from flowrl.rollout.actions import Deliver
from flowrl.rollout.events import (
    BatchAsked,
    EngineLost,
    RewardFailed,
    SampleFailed,
    WeightsPublished,
)
from flowrl.rollout.policies.limits import Retries
from flowrl.rollout.policies.prompts import AgeBudget, OverSampling


def delivered(actions):
    return [group.group for a in actions if isinstance(a, Deliver) for group in a.groups]


def ask(p, groups, batch=0):
    return p(BatchAsked, batch=batch, groups=groups)


def test_a_bound_on_age_holds_for_each_sample_and_not_on_a_count(play):
    """Elsewhere: under a bound of 1, one sample was 60 versions old."""
    p = play(group_size=1, max_staleness=1, refill=True)
    p.join(capacity=200)
    p.offer("0/0")  # it never ends, while fresh ones keep every average low
    oldest = []
    for version in range(1, 61):
        p(WeightsPublished, version=version)
        p.offer(f"0/{version}")
        actions = p.finish_and_score(f"0/{version}/0", version=version)
        actions = [*actions, *ask(p, 1, version)]
        # Taking the fresh one would leave the old one too old for every batch to come; so the
        # batch of version 1 waits, until new weights end the wait.
        assert delivered(actions) == ([] if version == 1 else [f"0/{version}"])
        live = p.scheduler.state.machine.samples.values()
        oldest += [version - s.first_version for s in live if s.first_version is not None]
    assert max(oldest) == 1
    assert p.drops() == {"0/0/0": "aged"}


def test_one_dead_environment_blocks_its_own_group_only(play):
    """Elsewhere: it blocked its group, and every later ready group, for ever."""
    p = play(group_size=2, max_staleness=4)
    p.join()
    p.offer("0/0", "0/1", "0/2", "0/3")
    p.finish_and_score("0/0/0")  # 0/0/1 hangs
    ask(p, 1, 0)
    assert delivered(p.finish_and_score("0/1/0", "0/1/1")) == ["0/1"]
    ask(p, 1, 1)
    assert delivered(p.finish_and_score("0/2/0", "0/2/1")) == ["0/2"]
    ask(p, 1, 2)
    assert delivered(p.finish_and_score("0/3/0", "0/3/1")) == ["0/3"]


@pytest.mark.parametrize("end", ["fails", "ages", "reward fails", "engine dies"])
def test_the_end_of_a_stuck_head_delivers_the_batch_that_waited_behind_it(play, end):
    """Elsewhere: expiring it did not wake the waiter, so a ready group was not delivered."""
    p = play(
        group_size=1, retries=Retries(attempts=1), refill=True, max_staleness=int(end == "ages")
    )
    p.join("e0", 1)
    p.join("e1", 4)
    p.offer("0/0", "0/1")
    head, other = ("0/0/0", "0/1/0") if p.attempts["0/0/0"][0] == "e0" else ("0/1/0", "0/0/0")
    assert head == "0/0/0"
    if end == "ages":
        p(WeightsPublished, version=1)
        p.offer("0/2")
        other = "0/2/0"
    if end == "reward fails":
        p.finish(head)
    assert ask(p, 1) == []
    assert delivered(p.finish_and_score(other, version=p.scheduler.version)) == []
    match end:
        case "fails":
            actions = p(SampleFailed, engine="e0", sample=head, attempt=0, error="?")
        case "ages":
            actions = p(WeightsPublished, version=2)
        case "reward fails":
            actions = p(RewardFailed, sample=head, error="?")
        case _:
            actions = p(EngineLost, engine="e0", reason="killed")
    assert delivered(actions) == [other.rpartition("/")[0]]


def test_a_failed_sample_never_counts_towards_its_group(play):
    """Elsewhere: a group of 4 was delivered with 2."""
    p = play(group_size=4, retries=Retries(attempts=1))
    p.join()
    p.offer("0/0", "0/1")
    ask(p, 2)
    p.finish_and_score("0/1/0", "0/1/1", "0/1/2", "0/1/3")
    p.finish_and_score("0/0/0", "0/0/1")
    actions = p(SampleFailed, engine="e0", sample="0/0/2", attempt=0, error="?")
    assert delivered(actions) == ["0/1"]
    assert p.scheduler.counts.consumed == 4
    assert set(p.drops()) == {"0/0/0", "0/0/1", "0/0/2", "0/0/3"}


def test_a_batch_takes_the_fresh_groups_that_are_there(play):
    """Elsewhere: enough fresh prompts were finished, yet the batch waited for the oldest."""
    p = play(group_size=1, max_staleness=2)
    p.join()
    p.offer("0/0", "0/1", "0/2", "0/3")
    ask(p, 3)
    assert delivered(p.finish_and_score("0/1/0", "0/2/0", "0/3/0")) == ["0/1", "0/2", "0/3"]


def test_over_sampled_prompts_that_finished_are_used_by_the_next_step(play):
    """Elsewhere: over-sampling threw them away."""
    p = play(
        group_size=1,
        max_staleness=1,
        refill=True,
        admission=AgeBudget(groups=2),
        over_sampling=OverSampling(prompts=2),
    )
    p.join()
    p.offer("0/0", "0/1", "0/2", "0/3", "0/4", "0/5")
    p.finish_and_score("0/0/0", "0/1/0", "0/2/0", "0/3/0")
    assert delivered(ask(p, 2, 0)) == ["0/0", "0/1"]
    p(WeightsPublished, version=1)
    assert delivered(ask(p, 2, 1)) == ["0/2", "0/3"]


FAULTS = {
    test_a_bound_on_age_holds_for_each_sample_and_not_on_a_count: "a staleness rule that bounds a "
    "count and not each sample's age",
    test_one_dead_environment_blocks_its_own_group_only: "one dead environment blocked its group",
    test_the_end_of_a_stuck_head_delivers_the_batch_that_waited_behind_it: "expiring a stuck head "
    "did not wake the waiter",
    test_a_failed_sample_never_counts_towards_its_group: "a failed sample counted towards its "
    "group",
    test_a_batch_takes_the_fresh_groups_that_are_there: "enough fresh prompts were finished, yet "
    "the batch waited for the oldest",
    test_over_sampled_prompts_that_finished_are_used_by_the_next_step: "over-sampling threw away "
    "finished prompts",
}
"""Each test, and how the reference data begins to tell of its fault."""


def test_every_known_fault_of_others_has_its_test_here(reference_data):
    known = yaml.safe_load((reference_data / "anchors" / "rollout_bounds.yaml").read_text())
    told = known["known_faults_in_peers"]
    assert len(told) == len(FAULTS)
    for fault, begins in zip(told, FAULTS.values(), strict=True):
        assert fault.startswith(begins)
