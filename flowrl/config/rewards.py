"""What a score is made of: terms that look at the answer, and terms that shape what those gave.

`flowrl.algo.numbers` says what `numeric_match` and `gsm8k` take for a number. Three ways in which a
term counts:

- rules (`exact_match`, `numeric_match`, `gsm8k`, `format`, `python`) and penalties (`overlong`,
  `repetition`) are added up, each times its `weight`;
- `stop_properly` and `cosine_length` make another number of the term that they name with `of`. They
  have no weight: the named term counts in the sum with that number in place of its own value, times
  its own weight. Both values are reported, each under its name, so that `accuracy` stays what it
  says. A transformation may be `of` another one; `of` names a term that stands before it, and no
  term is transformed twice.

The formulas stand in `flowrl.algo.maps`, with their papers.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from flowrl.config.section import Float, Int, Section

__all__ = [
    "CosineLengthTerm",
    "ExactMatch",
    "FormatMatch",
    "Gsm8kMatch",
    "NumericMatch",
    "OverlongTerm",
    "PythonReward",
    "RepetitionTerm",
    "RewardTerm",
    "RewardsConfig",
    "StopProperlyTerm",
    "Transformation",
]


class ExactMatch(Section):
    """1 where the stripped response equals the answer."""

    kind: Literal["exact_match"]
    name: str = "accuracy"
    weight: Float = 1.0


class NumericMatch(Section):
    """1 where the last number of the response equals the answer's, to a relative tolerance."""

    kind: Literal["numeric_match"]
    name: str = "accuracy"
    weight: Float = 1.0
    tolerance: Float = Field(default=1e-6, ge=0)


class Gsm8kMatch(Section):
    """1 where the number after the last `####` of the response equals the answer's."""

    kind: Literal["gsm8k"]
    name: str = "accuracy"
    weight: Float = 1.0


class FormatMatch(Section):
    """1 where the whole response matches the expression `pattern` (dot matches newlines)."""

    kind: Literal["format"]
    name: str = "format"
    weight: Float = 1.0
    pattern: str


class PythonReward(Section):
    """The user's own function `FILE.py:NAME`, called as `f(prompt, response, answer, row)`."""

    kind: Literal["python"]
    function: str
    name: str = "score"
    weight: Float = 1.0


class OverlongTerm(Section):
    """A penalty, at most 0, on responses of many tokens: soft as in DAPO, or hard.

    Attributes:
        max_tokens: Length at which the penalty is `-factor`; `${train.sampling.max_tokens}` is the
            stage's own limit.
        buffer: Tokens before `max_tokens` over which it grows; 0 is the hard one, which takes
            `factor` off every response longer than `max_tokens`.
        factor: The penalty at `max_tokens`.
        cap: Whether it stays there beyond `max_tokens`, as in the paper, or keeps growing.
    """

    kind: Literal["overlong"]
    name: str = "overlong"
    weight: Float = 1.0
    max_tokens: Int = Field(ge=1)
    buffer: Int = Field(default=0, ge=0)
    factor: Float = Field(default=1.0, ge=0)
    cap: bool = True


class RepetitionTerm(Section):
    """A penalty, at most 0: `max_penalty` times the share of repeated n-grams of the response.

    Attributes:
        ngram: Length of an n-gram.
        max_penalty: Of a response that is nothing but repetition.
        unit: Of what: `words` (split at white space, case ignored), or `characters` for text that
            has no spaces between words. A response of fewer than `ngram` of them is not penalised.
    """

    kind: Literal["repetition"]
    name: str = "repetition"
    weight: Float = 1.0
    ngram: Int = Field(default=3, ge=1)
    max_penalty: Float = Field(default=-1.0, le=0)
    unit: Literal["words", "characters"] = "words"


class StopProperlyTerm(Section):
    """The value of term `of`, times `coefficient` where the response was cut off at max_tokens.

    Attributes:
        coefficient: Below 0 it is no factor but the value itself.
    """

    kind: Literal["stop_properly"]
    name: str = "stop_properly"
    of: str
    coefficient: Float = 0.0


class CosineLengthTerm(Section):
    """A number between a short and a long end by length, for right and for wrong responses.

    Attributes:
        right_from: A response is right where the value of term `of` is at least this.
        max_tokens: Length at which the long end is reached.
    """

    kind: Literal["cosine_length"]
    name: str = "cosine_length"
    of: str
    max_tokens: Int = Field(ge=1)
    wrong_short: Float = -1.0
    wrong_long: Float = -0.5
    correct_long: Float = 0.5
    correct_short: Float = 1.0
    right_from: Float = 1.0


Transformation: TypeAlias = StopProperlyTerm | CosineLengthTerm
"""Terms that take the place of another one's value; they have `of` and no weight."""

RewardTerm: TypeAlias = Annotated[
    ExactMatch
    | NumericMatch
    | Gsm8kMatch
    | FormatMatch
    | PythonReward
    | OverlongTerm
    | RepetitionTerm
    | StopProperlyTerm
    | CosineLengthTerm,
    Field(discriminator="kind"),
]


class RewardsConfig(Section):
    """The score of a sample: the weighted sum of `terms`.

    Attributes:
        terms: Of every reward that has none of its own (`roles.NAME.terms`), and of evaluations.
        timeout_s: Seconds that one sample's score may take.
        max_failures: Samples whose reward may raise, hang or return no number before the run
            stops; they are dropped, never scored 0.
        workers: Processes that score.
    """

    terms: tuple[RewardTerm, ...] = ()
    timeout_s: Float = Field(default=2.0, gt=0)
    max_failures: Int = Field(default=0, ge=0)
    workers: Int = Field(default=1, ge=1)
