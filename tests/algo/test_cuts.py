"""Where responses are cut, by hand."""

from __future__ import annotations

import numpy as np
import pytest

import flowrl as fl
from flowrl.algo.cuts import prefix_length
from flowrl.specs.cut import CutSpec

LOGPROBS = np.array([-0.5, -2.0, -0.1, -3.0, -2.0], np.float32)


@pytest.mark.parametrize(
    ("cut", "length"),
    [
        (fl.cut.at(2), 2),
        (fl.cut.at(5), 4),
        (fl.cut.at(9), 4),
        (fl.cut.share(0.1), 0),
        (fl.cut.share(0.5), 2),
        (fl.cut.share(1.0), 4),
        (fl.cut.least_likely(), 3),
        (fl.cut.least_likely(rank=2), 1),
        (fl.cut.least_likely(rank=3), 4),
        (fl.cut.least_likely(rank=9), 2),
    ],
)
def test_at_least_the_last_token_is_cut_off(cut: CutSpec, length: int) -> None:
    assert prefix_length(cut, LOGPROBS) == length


def test_a_response_of_one_token_is_cut_before_it() -> None:
    for cut in (fl.cut.at(1), fl.cut.share(1.0), fl.cut.least_likely()):
        assert prefix_length(cut, LOGPROBS[:1]) == 0
        assert prefix_length(cut, LOGPROBS[:0]) == 0
