"""Samples end to end and padded: every token keeps its place."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowrl.algo.advantages import Padding


def test_columns_begin_at_the_first_token_of_the_response_and_holes_stay() -> None:
    # Prompt of one, response 1 and 3 around an environment token; no response; prompt and response.
    mask = [False, True, False, True, False, False, False, True]
    places = Padding.of([0, 5, 6, 8], mask)
    values = np.arange(8.0)
    assert places.pad(values).tolist() == [[1, 2, 3], [0, 0, 0], [7, 0, 0]]
    assert places.pad(mask).tolist() == [[1, 0, 1], [0, 0, 0], [1, 0, 0]]
    assert places.flat(places.pad(values)).tolist() == [0, 1, 2, 3, 0, 0, 0, 7]


def test_no_samples_and_no_responses() -> None:
    assert Padding.of([0], []).pad([]).shape == (0, 0)
    places = Padding.of([0, 2], [False, False])
    assert places.pad([1.0, 2.0]).shape == (1, 0)
    assert places.flat(np.zeros((1, 0))).tolist() == [0, 0]


@given(st.lists(st.lists(st.booleans(), max_size=6), max_size=5))
def test_masked_values_come_back(samples: list[list[bool]]) -> None:
    mask = np.array([bit for sample in samples for bit in sample], np.bool_)
    offsets = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])]).astype(int)
    places = Padding.of(offsets, mask)
    values = np.arange(1.0, len(mask) + 1) * mask
    padded = places.pad(values)
    np.testing.assert_array_equal(places.flat(padded), values)
    for row, sample in zip(places.pad(mask), samples, strict=True):
        assert row.sum() == sum(sample)
        assert row[:1].sum() == (sum(sample) > 0)
