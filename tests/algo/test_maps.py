"""Maps from fields to fields: sums, shaping, and the user's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import flowrl as fl
from flowrl.algo.maps import MapBatch
from flowrl.algo.resolve import resolve_map, resolve_select
from flowrl.errors import DataError, RewardError, TraceError
from flowrl.graph.ir import format_attr
from flowrl.graph.serialization import parse_attr
from flowrl.graph.signatures import map_outputs
from flowrl.specs import MapSpec, spec_from_json
from flowrl.specs.advantage import OwnAdvantage
from flowrl.specs.filters import Parsed
from flowrl.specs.maps import (
    CosineLength,
    FirstWins,
    ImplicitReward,
    Parse,
    Repetition,
    ShapingSpec,
    SoftOverlong,
    StopProperly,
    WeightedSum,
    WinRate,
    split_key,
)
from tests.algo import own_functions as own


def batch_of(truncated: Any = (False, False, False), **fields: npt.ArrayLike) -> MapBatch:
    """Three samples of 3, 1 and 4 tokens, the first of each its prompt."""
    given = {
        "score": [1.0, 0.0, 0.25],
        "tokens": [9, 5, 5, 9, 9, 5, 6, 5],
        "response_mask": [False, True, True, False, False, True, True, True],
        **fields,
    }
    return MapBatch(
        fields={name: np.asarray(values) for name, values in given.items()},
        groups=np.array([0, 0, 1]),
        offsets=np.array([0, 3, 4, 8]),
        lengths=np.array([2, 0, 3]),
        truncated=np.asarray(truncated),
    )


def scores(spec: MapSpec, batch: MapBatch) -> list[float]:
    found = resolve_map(spec)(batch)
    assert list(found) == ["score"]
    assert found["score"].dtype == np.float32
    values: list[float] = found["score"].tolist()
    return values


@pytest.mark.parametrize(
    "spec",
    [
        WeightedSum.of((0.7, -0.3, 1)),
        SoftOverlong(max_tokens=3, buffer=2),
        StopProperly(),
        CosineLength(max_tokens=3, correct_above=0.1),
        Repetition(ngram=1),
        Parse(regex='("\\d",\n)', otherwise=0),
        Parse(regex="x"),
        FirstWins(),
        WinRate.of([1, 3]),
        own.brief.spec(scale=0.5),
        own.compared.spec(),
    ],
)
def test_a_map_reads_back_from_its_text_and_its_json(spec: MapSpec) -> None:
    assert isinstance(spec, MapSpec)
    assert parse_attr(format_attr(spec)) == spec
    assert spec_from_json("map", spec.to_json()) == spec


def test_maps_and_advantages_of_a_users_own_are_told_apart() -> None:
    spec = own.doubled.spec()
    assert isinstance(parse_attr(format_attr(spec)), OwnAdvantage)
    assert parse_attr(format_attr(own.brief.spec())) == own.brief.spec()


def test_what_a_map_reads_and_gives_can_be_asked() -> None:
    summed = WeightedSum.of((0.7, -0.3, 1))
    assert summed.factors == (0.7, -0.3, 1.0)
    assert summed.reads == ("score", "score_2", "score_3")
    assert summed.per_sample
    assert own.brief.spec().reads == ("score", "response_mask")
    assert own.brief.spec().per_sample
    assert own.compared.spec().gives == (
        ("gap", "float32", "samples"),
        ("near", "bool", "tokens"),
    )
    assert not own.compared.spec().per_sample
    assert [str(field) for field in map_outputs(own.compared.spec())] == [
        "gap: float32/samples",
        "near: bool/tokens",
    ]
    assert Repetition().reads == ("score", "tokens", "response_mask")
    assert isinstance(StopProperly(), ShapingSpec)


def test_keys_name_a_field_and_which_argument_it_is_of() -> None:
    assert split_key("score") == ("score", 0)
    assert split_key("score_2") == ("score", 1)
    assert split_key("response_mask") == ("response_mask", 0)
    assert split_key("score_1") == ("score_1", 0)
    assert split_key("_2") == ("_2", 0)


def test_scores_are_added_up_by_their_weights() -> None:
    batch = batch_of(score_2=[2.0, 4.0, -1.0])
    assert scores(WeightedSum.of((1.0, -0.5)), batch) == [0.0, -2.0, 0.75]


def test_shaping_adds_to_scores_or_replaces_them() -> None:
    batch = batch_of(truncated=[False, False, True])
    # Lengths 2, 0, 3 with a penalty that grows from 1 to 3.
    assert scores(SoftOverlong(max_tokens=3, buffer=2), batch) == [0.5, 0.0, -0.75]
    assert scores(StopProperly(coefficient=0.5), batch) == [1.0, 0.0, 0.125]
    # 5 5 repeats one of two, 5 6 5 one of three.
    got = scores(Repetition(ngram=1), batch)
    assert got == pytest.approx([0.5, 0.0, 0.25 - 1 / 3])
    got = scores(CosineLength(max_tokens=4), batch)
    assert got[:2] == pytest.approx([0.75, -1.0])
    low = scores(CosineLength(max_tokens=4, correct_above=0.2), batch)
    assert low[2] > 0.5 > got[2]


def test_an_implicit_reward_is_a_scaled_log_ratio_at_each_token() -> None:
    logprobs, reference = np.zeros(8), np.linspace(-1.0, -0.3, 8)
    batch = batch_of(logprobs=logprobs, logprobs_2=reference)
    got = resolve_map(ImplicitReward(beta=0.5))(batch)["token_reward"]
    np.testing.assert_allclose(got, -0.5 * reference, rtol=1e-6)
    assert (got.dtype, ImplicitReward().per_sample) == (np.float32, True)


def test_a_sum_that_is_not_finite_is_no_score() -> None:
    with pytest.raises(RewardError, match="not finite") as caught:
        resolve_map(WeightedSum.of((1.0,)))(batch_of(score=[1.0, np.nan, 0.0]))
    assert caught.value.where == "sample 1"


def test_an_own_map_by_hand() -> None:
    assert scores(own.brief.spec(scale=0.25), batch_of()) == [0.5, 0.0, -0.5]
    found = resolve_map(own.compared.spec())(batch_of(score_2=[1.25, 2.0, 0.0]))
    assert found["gap"].tolist() == [-0.25, -2.0, 0.25]
    assert found["gap"].dtype == np.float32
    assert found["near"].tolist() == [True] * 3 + [False] + [True] * 4
    assert found["near"].dtype == np.bool_


def test_sums_over_samples_and_numbers_spread_over_tokens() -> None:
    batch = batch_of()
    assert batch.sums(np.arange(8)).tolist() == [3, 3, 4 + 5 + 6 + 7]
    # What is no number in one sample is no matter of the others.
    np.testing.assert_array_equal(batch.sums([0, np.nan, 1, 3, 4, 5, 6, 7]), [np.nan, 3, 22])
    assert batch.spread([1, 2, 3]).tolist() == [1, 1, 1, 2, 3, 3, 3, 3]


def test_a_field_that_was_not_named_is_not_there() -> None:
    with pytest.raises(DataError, match="add it to reads="):
        batch_of()["values"]


def test_no_samples_are_mapped_to_none() -> None:
    none = MapBatch(
        fields={"score": np.zeros(0), "tokens": np.zeros(0), "response_mask": np.zeros(0)},
        groups=np.zeros(0, np.int64),
        offsets=np.zeros(1, np.int64),
        lengths=np.zeros(0, np.int64),
        truncated=np.zeros(0, np.bool_),
    )
    for spec in (own.brief.spec(), Repetition(), SoftOverlong(max_tokens=3, buffer=2)):
        assert scores(spec, none) == []


@pytest.mark.parametrize(
    ("mapped", "message", "more"),
    [
        (own.forgetful, "does not give the fields", "found: first; expected: first, second"),
        (own.fractional, "gives 'rank' of another type", "found: float64; expected: int64 [3]"),
    ],
)
def test_a_map_of_no_use_is_told_with_the_functions_line(
    mapped: Any, message: str, more: str
) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        resolve_map(mapped.spec())(batch_of())
    assert "own_functions.py:" in str(caught.value.where)
    assert more in str(caught.value)


def short(batch: MapBatch) -> npt.ArrayLike:
    return batch["score"][:1]


def infinite(batch: MapBatch) -> npt.ArrayLike:
    return np.full(3, np.inf)


def text(batch: MapBatch) -> npt.ArrayLike:
    return ["a", "b", "c"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (short, "gives 'score' of the wrong shape"),
        (infinite, "gives 'score' that is not finite"),
        (text, "gives 'score' of another type"),
    ],
)
def test_numbers_of_the_wrong_kind_are_refused(function: Any, message: str) -> None:
    spec = fl.map(reads="score")(function).spec()
    with pytest.raises(TraceError, match=message):
        resolve_map(spec)(batch_of())


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"reads": "score", "gives": "bonus"}, "'bonus' has no unit"),
        ({"reads": "score", "gives": "bonus/sample"}, "did you mean 'samples'"),
        ({"reads": "score", "gives": "bonus: float/tokens"}, "did you mean 'float32'"),
        ({"reads": ()}, "needs at least one field"),
        ({"reads": "a b"}, "is not the key of a field"),
    ],
)
def test_a_declaration_of_a_map_that_makes_no_sense_is_refused(
    declared: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        fl.map(**declared)


def said(*texts: str) -> MapBatch:
    """Samples with these responses, of a token each."""
    return MapBatch(
        fields={"text": np.array(texts, np.object_)},
        groups=np.zeros(len(texts), np.int64),
        offsets=np.arange(len(texts) + 1),
        lengths=np.ones(len(texts), np.int64),
        truncated=np.zeros(len(texts), np.bool_),
    )


@pytest.mark.parametrize(
    ("regex", "text", "number"),
    [
        (r"SCORE: (\d+)", "SCORE: 3, no: SCORE: 7", 7.0),
        (r"-?\d+\.\d+", "between 0.5 and -1.25", -1.25),
        (r"(\d+)/(\d+)", "8/10", 8.0),
        (r"SCORE: (\w+)", "SCORE: 3, SCORE: high", -1.0),
        (r"SCORE: (\w+)", "SCORE: nan", -1.0),
        (r"SCORE: (\w+)", "SCORE: 1e39", -1.0),
        (r"(\d)|none", "none", -1.0),
        (r"SCORE: (\d+)", "", -1.0),
    ],
)
def test_the_number_of_a_response_is_the_first_group_of_the_last_match(
    regex: str, text: str, number: float
) -> None:
    found = resolve_map(Parse(regex=regex, otherwise=-1.0))(said(text))
    assert found["score"].dtype == np.float32
    assert found["score"].tolist() == [np.float32(number)]
    assert found["parsed"].tolist() == [number != -1.0]


def test_a_response_without_a_number_has_no_score_where_it_is_to_be_left_out() -> None:
    found = resolve_map(Parse(regex=r"\d"))(said("1", "one", "2"))
    assert np.isnan(found["score"]).tolist() == [False, True, False]
    assert resolve_select(Parsed())(found["score"], [0, 0, 1], ["a", "b", "c"]).tolist() == [0, 2]


def test_a_search_that_would_not_end_is_given_up_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flowrl.algo.maps.PARSE_LIMIT_S", 0.05)
    found = resolve_map(Parse(regex=r"\s+(\d)", otherwise=0.5))(said(" " * 100_000, " 4"))
    assert found["score"].tolist() == [0.5, 4.0]
    assert found["parsed"].tolist() == [False, True]
    assert "1 of 2 responses" in caplog.text


def test_a_verdict_is_1_or_2_and_every_other_number_is_a_tie() -> None:
    assert scores(FirstWins(), batch_of(score=[1.0, 2.0, 1.5])) == [1.0, 0.0, 0.5]


def test_a_win_rate_counts_each_comparison_for_both_samples() -> None:
    # Two groups: of a, b and c in a ring a beats b, b and c tie, c loses to a; and of two samples.
    batch = MapBatch(
        fields={
            "score": np.array([1.0, 0.5, 0.0, 1.0, 1.0]),
            "score_2": np.array([1.0, 0.0, 0.5, 0.5, 0.5]),
        },
        groups=np.array([0, 0, 0, 1, 1]),
        offsets=np.arange(6),
        lengths=np.ones(5, np.int64),
        truncated=np.zeros(5, np.bool_),
    )
    ring = resolve_map(WinRate.of([1]))(batch)["score"]
    # The judge of the second group prefers whoever comes first, which shifts no score.
    assert ring.tolist() == [1.0, 0.25, 0.25, 0.5, 0.5]
    both = resolve_map(WinRate.of([1, 2]))(batch)["score"]
    # The second set: a beats c, b loses to a, c and b tie.
    assert both.tolist() == [1.0, 0.25, 0.25, 0.5, 0.5]
