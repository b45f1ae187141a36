"""Terms of length, ending and repetition equal the functions of `flowrl.algo.maps`."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from flowrl.algo.maps import cosine_length, repetition, soft_overlong, stop_properly, words
from flowrl.backend.protocols import ScoreBackend, ScoreContext, ScoreRequest, ScoreResult
from flowrl.config.rewards import RewardTerm
from flowrl.errors import ConfigError
from flowrl.ids import RoleName, SampleId
from flowrl.specs import FinishReason
from flowrl.specs.maps import CosineLength, Repetition, SoftOverlong, StopProperly
from flowrl_backends.verify import plugin

ACCURACY: dict[str, object] = {"kind": "exact_match", "name": "accuracy"}
WEIGHTS = st.floats(-3, 3)
LENGTHS = st.integers(0, 40)


def scorer(*terms: dict[str, object], key: str = "rewards.terms") -> ScoreBackend:
    """A scorer of what the config makes of `terms`, with every default written out."""
    # One by one: the config refuses terms that do not fit each other, and so does the scorer.
    configs = [TypeAdapter(RewardTerm).validate_python(term) for term in terms]
    dumped = tuple(config.model_dump(mode="json") for config in configs)
    return plugin.open_score(ScoreContext(role=RoleName("verifier"), terms=dumped, key=key))


def request(
    response: str = "right",
    *,
    num_tokens: int = 5,
    finish: FinishReason = FinishReason.STOP,
) -> ScoreRequest:
    return ScoreRequest(
        sample=SampleId("0/4/2"),
        prompt="the prompt",
        response=response,
        answer="right",
        row={},
        finish=finish,
        num_tokens=num_tokens,
    )


def score(*terms: dict[str, object], **sample: object) -> ScoreResult:
    return scorer(*terms).score(request(**sample))


@given(
    length=LENGTHS,
    limit=st.integers(1, 30),
    buffer=st.integers(0, 20),
    factor=st.floats(0, 4),
    cap=st.booleans(),
    weight=WEIGHTS,
)
def test_overlong_is_the_length_penalty_times_its_weight(
    length, limit, buffer, factor, cap, weight
):
    buffer = min(buffer, limit)
    options = {"max_tokens": limit, "buffer": buffer, "factor": factor, "cap": cap}
    [penalty] = soft_overlong([length], SoftOverlong(**options))
    result = score({"kind": "overlong", "weight": weight, **options}, num_tokens=length)
    assert result.terms == {"overlong": penalty}
    assert result.score == weight * penalty


def test_overlong_without_a_buffer_is_the_hard_one():
    term = {"kind": "overlong", "max_tokens": 8, "factor": 0.5}
    assert score(term, num_tokens=8).score == 0
    assert score(term, num_tokens=9).score == -0.5
    # DAPO's: no penalty up to 4, then one that grows to 8.
    soft = {"kind": "overlong", "max_tokens": 8, "buffer": 4}
    assert [score(soft, num_tokens=n).score for n in (4, 5, 8, 20)] == [0, -0.25, -1, -1]


@given(
    text=st.text(alphabet="aAb \n", max_size=30),
    n=st.integers(1, 4),
    most=st.floats(-2, 0),
    unit=st.sampled_from(["words", "characters"]),
)
def test_repetition_is_the_share_of_repeated_ngrams_of_words_or_characters(text, n, most, unit):
    items = words(text) if unit == "words" else list(text)
    [penalty] = repetition([items], Repetition(ngram=n, max_penalty=most))
    term = {"kind": "repetition", "ngram": n, "max_penalty": most, "unit": unit}
    assert score(term, response=text).terms == {"repetition": penalty}


def test_a_response_without_spaces_is_one_word_and_many_characters():
    term = {"kind": "repetition", "ngram": 1}
    assert score(term, response="ababab").score == 0
    assert score({**term, "unit": "characters"}, response="ababab").score == pytest.approx(-4 / 6)


@given(
    right=st.booleans(),
    finish=st.sampled_from(list(FinishReason)),
    coefficient=st.floats(-2, 2),
    weight=WEIGHTS,
)
def test_stop_properly_takes_the_place_of_its_term_with_that_terms_weight(
    right, finish, coefficient, weight
):
    terms = (
        {**ACCURACY, "weight": weight},
        {"kind": "stop_properly", "of": "accuracy", "coefficient": coefficient},
    )
    result = score(*terms, response="right" if right else "wrong", finish=finish)
    truncated = finish is FinishReason.LENGTH
    [shaped] = stop_properly([right], [truncated], StopProperly(coefficient=coefficient))
    assert result.terms == {"accuracy": float(right), "stop_properly": shaped}
    assert result.score == weight * shaped


@given(
    right=st.booleans(),
    length=LENGTHS,
    limit=st.integers(1, 30),
    ends=st.lists(st.floats(-2, 2), min_size=4, max_size=4),
)
def test_cosine_length_is_right_where_its_term_is(right, length, limit, ends):
    names = ("wrong_short", "wrong_long", "correct_long", "correct_short")
    options = dict(zip(names, ends, strict=True)) | {"max_tokens": limit}
    result = score(
        ACCURACY,
        {"kind": "cosine_length", "of": "accuracy", **options},
        response="right" if right else "wrong",
        num_tokens=length,
    )
    [shaped] = cosine_length([length], [right], CosineLength(**options))
    assert result.terms == {"accuracy": float(right), "cosine_length": shaped}
    assert result.score == shaped


def test_what_counts_as_right_is_a_number_of_the_config(tmp_path):
    (tmp_path / "mine.py").write_text("def f(response): return float(response)")
    partial = {"kind": "python", "function": f"{tmp_path}/mine.py:f", "name": "credit"}
    cosine = {"kind": "cosine_length", "of": "credit", "max_tokens": 10, "right_from": 0.5}
    values = [score(partial, cosine, response=r, num_tokens=0).score for r in ("0.4", "0.5")]
    assert values == [-1.0, 1.0]


def test_transformations_of_transformations_and_penalties_add_up():
    terms = (
        {**ACCURACY, "weight": 2.0},
        {"kind": "format", "pattern": ".*", "weight": 0.5},
        {"kind": "cosine_length", "of": "accuracy", "max_tokens": 8, "correct_long": 0.0},
        {"kind": "overlong", "max_tokens": 4, "weight": 3.0},
        {"kind": "stop_properly", "of": "cosine_length", "coefficient": 0.25},
    )
    result = score(*terms, num_tokens=4, finish=FinishReason.LENGTH)
    assert result.terms == {
        "accuracy": 1.0,
        "format": 1.0,
        "cosine_length": pytest.approx(0.5),
        "overlong": 0.0,
        "stop_properly": pytest.approx(0.125),
    }
    assert result.score == pytest.approx(2 * 0.125 + 0.5)
    late = score(*terms, num_tokens=8)
    assert late.score == pytest.approx(2 * 0.0 + 0.5 - 3.0)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (
            [{"kind": "stop_properly", "of": "accuracy"}, ACCURACY],
            r"roles\.judge\.terms\[0\]\.of: no term before it is called 'accuracy'",
        ),
        (
            [
                ACCURACY,
                {"kind": "stop_properly", "of": "accuracy"},
                {"kind": "cosine_length", "of": "accuracy", "max_tokens": 3},
            ],
            r"roles\.judge\.terms\[2\]\.of: another term takes the place of 'accuracy' already",
        ),
    ],
)
def test_a_transformation_is_of_one_term_that_stands_before_it(terms, message):
    with pytest.raises(ConfigError, match=message):
        scorer(*terms, key="roles.judge.terms")


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"kind": "overlong"}, r"rewards\.terms\[0\]: 'max_tokens' is missing"),
        ({"kind": "overlong", "max_tokens": 2.5}, r"\[0\]\.max_tokens: not a whole number"),
        (
            {"kind": "overlong", "max_tokens": 2, "buffer": -1},
            r"buffer\n.* a whole number from 0 up",
        ),
        ({"kind": "overlong", "max_tokens": 0}, r"\[0\]\.max_tokens: .* cannot have this"),
        ({"kind": "repetition", "ngram": 0}, r"\[0\]\.ngram: .* cannot have this ngram"),
        ({"kind": "repetition", "max_penalty": 1}, r"max_penalty\n.* a number of at most 0"),
        ({"kind": "exact_match", "weight": math.nan}, r"\[0\]\.weight: not a finite number"),
        ({"kind": "overlong", "max_tokens": 2, "cap": 1}, r"\[0\]\.cap: neither true nor false"),
        ({"kind": "repetition", "unit": "letters"}, r"\[0\]\.unit: no such choice"),
        ({"kind": "repetition", "ngram": "3"}, r"\[0\]\.ngram: not a whole number"),
        ({"kind": "stop_properly", "of": 3}, r"\[0\]\.of: no text"),
        ({"kind": "short"}, r"expected: one of exact_match, .*cosine_length"),
    ],
)
def test_terms_from_elsewhere_than_a_config_are_checked_too(term, message):
    with pytest.raises(ConfigError, match=message):
        plugin.open_score(ScoreContext(role=RoleName("verifier"), terms=(term,)))
