"""`check_map` passes what is as it was declared, and names what is not; a run looks too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrl as fl
from flowrl.algo.maps import MapBatch
from flowrl.algo.resolve import resolve_map
from flowrl.algo.user_functions import check_per_sample
from flowrl.errors import DataError, TraceError
from flowrl.specs.maps import (
    CosineLength,
    Repetition,
    SoftOverlong,
    StopProperly,
    WeightedSum,
)
from flowrl.testing import check_map

mark = fl.map


@mark(reads=("score", "response_mask"), per_sample=True)
def brief(batch: MapBatch, *, scale: float = 0.01) -> Any:
    return batch["score"] - scale * batch.sums(batch["response_mask"])


@mark(reads="score")
def whitened(batch: MapBatch) -> Any:
    return (batch["score"] - batch["score"].mean()) / (batch["score"].std() + 1e-6)


@mark(reads=("score", "style"), gives=("kept: bool/samples", "place: int64/tokens"))
def judged(batch: MapBatch) -> Any:
    high = batch["score"] + batch["style"] > 0
    return {"kept": high, "place": batch.spread(high).astype(np.int64)}


@mark(reads="score", per_sample=True)
def centred(batch: MapBatch) -> Any:
    return batch["score"] - batch["score"].mean()


@mark(reads=("score", "tokens"), per_sample=True)
def negligent(batch: MapBatch) -> Any:
    return batch["score"]


@mark(reads="score")
def ranked(batch: MapBatch) -> Any:
    return np.arange(len(batch.groups), dtype=np.float32) + batch["score"]


@mark(reads="score")
def by_number(batch: MapBatch) -> Any:
    return batch["score"] + batch.groups


@mark(reads="score")
def dice(batch: MapBatch) -> Any:
    return batch["score"] + np.random.default_rng().random(len(batch.groups))


@mark(reads="score", per_sample=True)
def greedy(batch: MapBatch) -> Any:
    return batch["score"] + batch["style"]


@mark(reads="score", per_sample=True)
def per_response_token(batch: MapBatch) -> Any:
    return batch["score"] / batch.lengths


@mark(reads="score", per_sample=True)
def scalar(batch: MapBatch) -> Any:
    return batch["score"].sum()


@mark(reads="score", gives="kept: bool/samples")
def unrounded(batch: MapBatch) -> Any:
    return batch["score"]


@mark(reads="score")
def overwriting(batch: MapBatch) -> Any:
    scores = batch["score"]
    scores *= 2
    return scores


@mark(reads="score")
def misspelt(batch: Any) -> Any:
    return batch.score


GOOD = (
    brief,
    brief.spec(scale=0.5),
    whitened,
    WeightedSum.of((1.0, -0.5)),
    SoftOverlong(max_tokens=6, buffer=3),
    StopProperly(),
    Repetition(),
)


NAMES = ("brief", "brief_scaled", "whitened", *(str(spec) for spec in GOOD[3:]))


@pytest.mark.parametrize("checked", GOOD, ids=NAMES)
def test_a_map_that_is_what_it_declares_passes(checked: Any) -> None:
    check_map(checked)


def test_fields_of_other_maps_are_drawn_where_it_is_said_of_what_they_are() -> None:
    check_map(judged, fields={"style": "samples"})
    with pytest.raises(TraceError, match="'style' is a field of another map") as caught:
        check_map(judged)
    assert caught.value.hint == "check_map(..., fields={'style': 'samples'})"


@mark(reads=("score", "text", "row.meta.topic"), per_sample=True)
def in_maths(batch: MapBatch, *, bonus: float = 0.5) -> Any:
    said = np.array(["answer" in text for text in batch["text"]])
    return batch["score"] + bonus * (said & (batch["row.meta.topic"] == "maths"))


def test_texts_and_rows_are_drawn_for_maps_that_read_them() -> None:
    check_map(in_maths, rows=[{"meta": {"topic": "maths"}}, {"meta": {"topic": "code"}}])
    with pytest.raises(
        TraceError, match=r"reads 'row\.meta\.topic', and there is no data row"
    ) as no:
        check_map(in_maths)
    assert no.value.hint == "check_map(..., rows=[{'meta.topic': ...}, ...])"
    with pytest.raises(DataError, match=r"the row has no field 'meta\.topic', which the"):
        check_map(in_maths, rows=[{"meta": {}}])


@mark(reads=("score", "rollout_logprobs"), per_sample=True)
def punished(batch: MapBatch) -> Any:
    surprising = batch.sums(batch["rollout_logprobs"] < -100.0) > 0
    return np.where(surprising, -1.0, batch["score"])


@mark(reads=("score", "response_mask"), per_sample=True)
def cut(batch: MapBatch) -> Any:
    return np.where(batch.truncated, 0.0, batch["score"])


@pytest.mark.parametrize("checked", [punished, cut], ids=["threshold", "truncated"])
def test_a_field_counts_as_read_where_its_values_do_not_happen_to_matter(checked: Any) -> None:
    check_map(checked)


def test_a_batch_can_be_adjusted() -> None:
    seen: list[float] = []

    def positive(batch: MapBatch) -> MapBatch:
        seen.append(float(batch["score"].min()))
        batch.fields["score"][:] = 1.0  # type: ignore[index]
        return batch

    check_map(CosineLength(max_tokens=8), adjust=positive, seeds=(0, 1))
    assert len(seen) == 2
    assert min(seen) < 0


@pytest.mark.parametrize(
    ("checked", "what"),
    [
        (centred, "what it gives for a sample depends on the others of its batch"),
        (negligent, "it declares 'tokens', which it does not read"),
        (ranked, "its numbers depend on the order of samples"),
        (by_number, "its numbers depend on the numbers of groups"),
        (dice, "it must not draw random numbers"),
        (greedy, "the map reads no field 'style'"),
        (per_response_token, "divide by zero"),
        (scalar, "gives 'score' of the wrong shape"),
        (unrounded, "gives 'kept' of another type"),
        (overwriting, "it writes into the fields of its batch"),
        (misspelt, "reads batch.score, which does not exist"),
    ],
)
def test_a_map_that_is_not_what_it_declares_is_told_with_its_line(checked: Any, what: str) -> None:
    with pytest.raises(TraceError) as caught:
        check_map(checked)
    assert what in str(caught.value)
    assert "test_check_map.py:" in str(caught.value.where)


def batch_of(scores: list[float]) -> MapBatch:
    n = len(scores)
    return MapBatch(
        fields={"score": np.array(scores, np.float32)},
        groups=np.zeros(n, np.int64),
        offsets=np.arange(0, 2 * n + 1, 2, dtype=np.int64),
        lengths=np.ones(n, np.int64),
        truncated=np.zeros(n, np.bool_),
    )


@mark(reads="score", per_sample=True)
def aside(batch: MapBatch) -> Any:
    return batch["score"] - batch["score"].mean()


def test_a_half_of_a_batch_shows_a_map_that_looks_at_other_samples() -> None:
    def look(scores: list[float]) -> None:
        batch = batch_of(scores)
        check_per_sample(batch, aside.spec(), resolve_map(aside.spec())(batch))

    look([1.0, 1.0, 1.0, 1.0])  # a mean that is the same in every part does not show
    with pytest.raises(TraceError, match="says per_sample=True, but what it gives") as caught:
        look([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    # Of six samples the mean is 1/2, of the first three 1/3.
    assert caught.value.found == "'score' of sample 0 is 0.5 among 6 samples, 0.666667 among 3"
    assert "test_check_map.py:" in str(caught.value.where)


def test_a_part_of_a_batch_is_the_batch_of_its_samples() -> None:
    batch = MapBatch(
        fields={"score": np.array([1.0, 2.0, 3.0]), "tokens": np.arange(6)},
        groups=np.array([0, 0, 1]),
        offsets=np.array([0, 2, 3, 6]),
        lengths=np.array([1, 0, 2]),
        truncated=np.array([True, False, True]),
    )
    part = batch.part(np.array([2, 0]))
    assert part["score"].tolist() == [3.0, 1.0]
    assert part["tokens"].tolist() == [3, 4, 5, 0, 1]
    assert (part.groups.tolist(), part.offsets.tolist()) == ([1, 0], [0, 3, 5])
    assert part.lengths.tolist() == [2, 1]
    assert part.truncated.tolist() == [True, True]


def test_a_field_that_is_not_declared_is_told_with_the_functions_line() -> None:
    with pytest.raises(DataError) as caught:
        resolve_map(greedy.spec())(batch_of([1.0]))
    line = greedy.__wrapped__.__code__.co_firstlineno + 2
    assert caught.value.where == f"tests/testing/test_check_map.py:{line}"
    assert caught.value.expected == "score"


def test_a_field_taken_as_an_attribute_is_told_how_to_write_it() -> None:
    with pytest.raises(TraceError) as caught:
        resolve_map(misspelt.spec())(batch_of([1.0]))
    assert caught.value.hint == 'write batch["score"]'
    assert caught.value.found == "it declares score"
