"""What a sampler kept, place by place: a ragged array that is cut and joined like any other."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.backend.batch import KeptTokens, SequenceBatch
from flowrl.ids import SampleId
from flowrl.specs import Sampling

places = st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True).map(sorted), max_size=6)


def kept(sets: list[list[int]]) -> KeptTokens:
    return KeptTokens.of_places([np.array(ids, np.int32) for ids in sets])


def sets(of: KeptTokens) -> list[list[int]]:
    return [of.ids[b:e].tolist() for b, e in pairwise(of.offsets.tolist())]


@given(places)
def test_sets_are_held_place_by_place(lists: list[list[int]]):
    of = kept(lists)
    assert sets(of) == lists
    assert len(of) == len(lists)
    assert (of.ids.dtype, of.counts.dtype) == (np.int32, np.int32)


@given(places, st.data())
def test_places_are_selected_with_their_sets(lists: list[list[int]], data: st.DataObject):
    indices = st.integers(0, len(lists) - 1) if lists else st.nothing()
    chosen = data.draw(st.lists(indices))
    found = kept(lists).select(np.array(chosen, np.int64))
    assert sets(found) == [lists[i] for i in chosen]


@given(st.lists(places, max_size=4))
def test_parts_are_joined_in_their_order(parts: list[list[list[int]]]):
    joined = KeptTokens.joined([kept(lists) for lists in parts])
    assert sets(joined) == [ids for lists in parts for ids in lists]


def test_nothing_is_cut_off_where_everything_is_kept():
    assert sets(KeptTokens.everything(3)) == [[], [], []]


def test_drawn_tokens_that_were_not_kept_are_found():
    of = kept([[1, 4], [], [2], [3, 5, 7]])
    assert of.lacking(np.array([4, 9, 2, 3])).tolist() == []
    assert of.lacking(np.array([2, 9, 1, 7])).tolist() == [0, 2]


def test_a_batch_selects_what_was_kept_with_its_samples():
    batch = SequenceBatch(
        samples=(SampleId("0/0/0"), SampleId("0/1/0"), SampleId("0/2/0")),
        tokens=np.arange(7),
        offsets=np.array([0, 2, 5, 7]),
        response_mask=np.array([0, 1, 0, 1, 1, 0, 1], bool),
        groups=np.arange(3),
        kept=kept([[], [1], [], [3, 5], [4], [], [6, 8, 9]]),
    )
    chosen = batch.select([2, 1])
    assert chosen.kept is not None
    assert sets(chosen.kept) == [[], [6, 8, 9], [], [3, 5], [4]]


def test_a_batch_with_sets_at_other_places_is_refused():
    with pytest.raises(ValueError, match="2 tokens, but 1 values of kept"):
        SequenceBatch(
            samples=(SampleId("0/0/0"),),
            tokens=np.arange(2),
            offsets=np.array([0, 2]),
            response_mask=np.array([False, True]),
            groups=np.zeros(1, np.int64),
            kept=KeptTokens.everything(1),
        )


@pytest.mark.parametrize(
    ("changes", "reports"),
    [
        ({}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_p": 0.1}, True),
        ({"repetition_penalty": 1.1, "min_tokens": 3}, False),
    ],
)
def test_kept_sets_are_reported_where_logprobs_need_them(changes, reports):
    assert Sampling(logprobs="sampler", **changes).reports_kept == reports
    assert not Sampling(**changes).reports_kept


def test_the_text_of_sampling_names_the_sampler_only_where_logprobs_are_its():
    assert "logprobs" not in str(Sampling(top_p=0.9))
    assert str(Sampling(logprobs="sampler")).endswith('logprobs="sampler")')
