"""Batches that travel between workers: what belongs together is selected together."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.ids import SampleId

LENGTHS = (3, 1, 4)
OTHERS = ("sequences", "sampled", "preferred", "extra", "reference_distributions")
PER_TOKEN = tuple(f.name for f in fields(TrainBatch) if f.name not in OTHERS)


def batch() -> TrainBatch:
    """Three samples; every per-token array holds numbers that tell which token they are of."""
    count = sum(LENGTHS)
    place = np.arange(count)
    rows = SequenceBatch(
        samples=tuple(SampleId(f"0/{i}/0") for i in range(3)),
        tokens=place + 100,
        offsets=np.concatenate([[0], np.cumsum(LENGTHS)]),
        response_mask=place % 2 == 1,
        groups=np.array([5, 6, 7]),
        turn=place + 200,
        token_reward=(place + 300).astype(np.float32),
        state=place + 400,
    )
    arrays = {
        name: (place + 1000 * number).astype(np.float32) for number, name in enumerate(PER_TOKEN, 1)
    }
    return TrainBatch(
        sequences=rows,
        sampled=np.array([True, True, False]),
        preferred=np.array([True, False, True]),
        reference_distributions=np.eye(4, 3, dtype=np.float32),  # tokens 1, 3, 5 and 7
        extra={"mine": (place + 0.5).astype(np.float32)},
        **arrays,
    )


def test_selected_samples_take_all_their_fields_along() -> None:
    whole = batch()
    chosen = whole.select([2, 0])
    places = [4, 5, 6, 7, 0, 1, 2]
    rows = chosen.sequences
    assert rows.samples == ("0/2/0", "0/0/0")
    assert rows.offsets.tolist() == [0, 4, 7]
    assert rows.groups.tolist() == [7, 5]
    for name in ("tokens", "response_mask", "turn", "token_reward", "state"):
        want = getattr(whole.sequences, name)[places]
        np.testing.assert_array_equal(getattr(rows, name), want, err_msg=name)
    for name in PER_TOKEN:
        want = getattr(whole, name)[places]
        np.testing.assert_array_equal(getattr(chosen, name), want, err_msg=name)
    assert chosen.reference_distributions is not None
    np.testing.assert_array_equal(chosen.reference_distributions, np.eye(4, 3)[[2, 3, 0]])
    assert chosen.sampled is not None
    assert chosen.sampled.tolist() == [False, True]
    assert chosen.preferred is not None
    assert chosen.preferred.tolist() == [True, True]
    assert chosen.extra["mine"].tolist() == [p + 0.5 for p in places]


def test_fields_that_are_not_there_stay_away() -> None:
    rows = replace(batch().sequences, turn=None, token_reward=None, state=None)
    chosen = TrainBatch(sequences=rows).select([1])
    assert chosen.sequences.tokens.tolist() == [103]
    assert chosen.preferred is None
    assert chosen.returns is None
    assert chosen.sequences.turn is None
    assert len(TrainBatch(sequences=rows).select([])) == 0


@pytest.mark.parametrize("name", ["turn", "token_reward", "state"])
def test_an_array_of_another_length_is_refused(name: str) -> None:
    rows = batch().sequences
    with pytest.raises(ValueError, match=f"8 tokens, but 7 values of {name}"):
        replace(rows, **{name: getattr(rows, name)[:-1]})
