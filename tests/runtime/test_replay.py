"""The samples that a run holds to replay them: which are chosen, forgotten and written down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flowrl.errors import CheckpointError
from flowrl.ids import GroupId, SampleId
from flowrl.runtime.driver.payloads import Payload
from flowrl.runtime.driver.replay import HeldGroup, ReplayBuffer
from flowrl.specs import Replay
from tests.runtime.test_unused_samples import item_of


def group(number: int, version: int = 0) -> HeldGroup:
    name = GroupId(f"0/{number}")
    members = tuple(
        (
            SampleId(f"{name}/{member}"),
            Payload(
                item=item_of(name),
                tokens=np.array([number, member]),
                logprobs=np.array([-0.1, -number / 3], np.float32),
                versions=((version, 2),),
                text=f"{number}",
            ),
        )
        for member in range(2)
    )
    return HeldGroup(group=name, members=members, scores=(0.1, 1 / 3), version=version)


def buffer(**options) -> ReplayBuffer:
    return ReplayBuffer(Replay(**options), seed_of=lambda step: step)


def drawn(made: ReplayBuffer, step: int, version: int, *fresh: HeldGroup) -> list[str]:
    chosen = made.draw(step, version, fresh)
    made.commit()
    return [each.group for each in chosen]


def test_groups_are_returned_from_the_step_after_their_own_on():
    made = buffer(n=2)
    assert drawn(made, 1, 0, group(1), group(2), group(3)) == []
    assert len(drawn(made, 2, 1)) == 2
    assert [held.group for held in made.held] == ["0/1", "0/2", "0/3"]


def test_a_choice_follows_from_the_seed_and_the_step_alone():
    one, other = buffer(n=3), buffer(n=3)
    for made in (one, other):
        drawn(made, 1, 0, *(group(i) for i in range(20)))
    choices = [drawn(one, step, 1) for step in range(2, 12)]
    assert choices == [drawn(other, step, 1) for step in range(2, 12)]
    assert len({tuple(choice) for choice in choices}) > 5
    assert all(len(set(choice)) == 3 for choice in choices)


def test_the_newest_are_those_that_were_held_last():
    made = buffer(n=2, choose="newest")
    drawn(made, 1, 0, *(group(i) for i in range(5)))
    assert drawn(made, 2, 1) == ["0/3", "0/4"]


def test_beyond_the_capacity_the_oldest_go_and_what_is_too_old_is_forgotten():
    made = buffer(n=4, capacity=4, max_age=2, choose="newest")
    drawn(made, 1, 0, group(1, 0), group(2, 0))
    drawn(made, 2, 1, group(3, 1), group(4, 1), group(5, 1))
    assert [held.group for held in made.held] == ["0/2", "0/3", "0/4", "0/5"]
    assert drawn(made, 3, 2) == ["0/2", "0/3", "0/4", "0/5"]
    assert drawn(made, 4, 3) == ["0/3", "0/4", "0/5"]  # three publications after the second one


def test_a_step_that_is_given_up_has_changed_nothing():
    made = buffer(n=1)
    drawn(made, 1, 0, group(1))
    made.draw(2, 1, [group(2)])
    assert [held.group for held in made.held] == ["0/1"]
    assert drawn(made, 2, 1, group(2)) == ["0/1"]
    assert [held.group for held in made.held] == ["0/1", "0/2"]


def test_what_is_held_comes_back_from_a_checkpoint_bit_for_bit(tmp_path: Path):
    made, read = buffer(n=2), buffer(n=2)
    drawn(made, 1, 0, group(1), group(2, 3))
    made.save(tmp_path / "held")
    read.restore(made.state(), tmp_path / "held", item_of)
    assert read.state() == made.state()
    for before, after in zip(made.held, read.held, strict=True):
        for (_, old), (_, new) in zip(before.members, after.members, strict=True):
            assert new.tokens.tobytes() == old.tokens.tobytes()
            assert new.logprobs.tobytes() == old.logprobs.tobytes()
            assert (new.item, new.versions, new.text) == (old.item, old.versions, old.text)
    assert drawn(read, 2, 4) == drawn(made, 2, 4)


def test_a_checkpoint_that_lacks_a_sample_is_refused(tmp_path: Path):
    made, read = buffer(n=2), buffer(n=2)
    drawn(made, 1, 0, group(1))
    made.save(tmp_path / "held")
    drawn(made, 2, 0, group(2))
    with pytest.raises(CheckpointError, match="replayed samples of this checkpoint"):
        read.restore(made.state(), tmp_path / "held", item_of)
