"""The prompt cursor: order, epochs, resume."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.config.data import CurriculumConfig
from flowrl.data import Prompt, PromptCursor, PromptSet, Row
from flowrl.data.row_order import permutation
from flowrl.errors import CheckpointError


def prompts(num: int, answer: str = "1") -> PromptSet:
    def row(i: int) -> Row:
        return Row(
            index=i,
            prompt=f"p{i}",
            answer=answer,
            solution="1",
            fields={},
            where=f"d.jsonl:{i + 1}",
        )

    return PromptSet(
        prompts=tuple(Prompt.of(row(i), np.array([i, i + 1], np.int64)) for i in range(num)),
        source="d.jsonl",
    )


def test_every_epoch_gives_every_prompt_once_in_a_new_order():
    cursor = PromptCursor(prompts(7), seed=3)
    items = cursor.take(21)
    orders = [[item.index for item in items[start : start + 7]] for start in (0, 7, 14)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert [item.group for item in items[:2]] == [f"0/{items[0].index}", f"0/{items[1].index}"]
    assert items[7].group == f"1/{items[7].index}"
    assert items[0].prompt == items[0].row.prompt


@given(
    num=st.integers(1, 9),
    sizes=st.lists(st.integers(0, 12), max_size=6),
    cut=st.integers(0, 6),
    seed=st.integers(0, 5),
)
def test_a_resumed_cursor_gives_what_the_first_would_have_given(num, sizes, cut, seed):
    data = prompts(num)
    whole = PromptCursor(data, seed)
    expected = [item.group for size in sizes for item in whole.take(size)]
    first = PromptCursor(data, seed)
    got = [item.group for size in sizes[:cut] for item in first.take(size)]
    second = PromptCursor.from_json(json.loads(json.dumps(first.to_json())), data)
    got += [item.group for size in sizes[cut:] for item in second.take(size)]
    assert got == expected
    assert len(set(got)) == len(got)


def test_another_seed_is_another_order():
    first, second = (PromptCursor(prompts(50), seed).take(50) for seed in (0, 1))
    assert [i.index for i in first] != [i.index for i in second]


@pytest.mark.parametrize("changed", [prompts(6), prompts(5, answer="2")])
def test_resuming_on_changed_data_is_refused(changed):
    cursor = PromptCursor(prompts(5), seed=0)
    cursor.take(3)
    with pytest.raises(CheckpointError, match="the training data changed"):
        PromptCursor.from_json(cursor.to_json(), changed)


def test_rejected_responses_are_part_of_the_data_that_a_run_goes_on_with():
    def pairs(rejected: str) -> PromptSet:
        data = prompts(3)
        return replace(
            data,
            prompts=tuple(
                Prompt.of(replace(p.row, rejected=rejected), p.prompt_ids) for p in data.prompts
            ),
        )

    state = PromptCursor(pairs("2"), seed=0).to_json()
    assert PromptCursor.from_json(state, pairs("2")).to_json() == state
    for other in (pairs("3"), prompts(3)):
        with pytest.raises(CheckpointError, match="the training data changed"):
            PromptCursor.from_json(state, other)


def test_a_broken_cursor_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="broken"):
        PromptCursor.from_json({"seed": 0}, prompts(2))


def test_permutations_never_change_between_versions_of_anything():
    assert permutation(8, 0, 0).tolist() == PERMUTATION
    assert sorted(permutation(1000, "x", 1).tolist()) == list(range(1000))


PERMUTATION = [4, 0, 3, 5, 7, 6, 2, 1]


def without_fingerprint(cursor: PromptCursor) -> dict[str, object]:
    return {key: value for key, value in cursor.to_json().items() if key != "fingerprint"}


def test_where_other_data_is_accepted_as_many_prompts_go_on_at_their_place():
    cursor = PromptCursor(prompts(5), seed=0)
    cursor.take(8)
    other = PromptCursor.from_json(without_fingerprint(cursor), prompts(5, answer="2"))
    assert (other.to_json()["epoch"], other.to_json()["position"]) == (1, 3)
    assert [item.group for item in other.take(4)] == [item.group for item in cursor.take(4)]
    assert other.take(1)[0].row.answer == "2"


@pytest.mark.parametrize("number", [2, 9])
def test_where_other_data_is_accepted_another_number_of_prompts_begins_the_next_epoch(number):
    cursor = PromptCursor(prompts(5), seed=0)
    before = {item.group for item in cursor.take(8)}
    other = PromptCursor.from_json(without_fingerprint(cursor), prompts(number))
    items = other.take(number)
    assert sorted(item.group for item in items) == [f"2/{index}" for index in range(number)]
    assert not before & {item.group for item in items}


def test_a_curriculum_does_not_go_on_with_another_number_of_prompts():
    curriculum = CurriculumConfig(kind="solve_rate")
    cursor = PromptCursor(prompts(5), 0, curriculum=curriculum)
    cursor.observe(3, 1.0)
    cursor.take(8)
    state = without_fingerprint(cursor)
    again = PromptCursor.from_json(state, prompts(5, answer="2"), curriculum)
    assert again.to_json()["curriculum"] == cursor.to_json()["curriculum"]
    with pytest.raises(CheckpointError, match="cannot go on with another number of prompts"):
        PromptCursor.from_json(state, prompts(6), curriculum)
