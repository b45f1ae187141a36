"""Reward terms: terms that look at the answer, and terms that shape the values of others.

A term is written `{use: NAME, ...}` with the name of a rule, or `{use: FILE.py:NAME, ...}` with a
function of the user's; `{kind: NAME}` and `{kind: python, function: FILE.py:NAME}` mean the same.
`flowrl.algo.numbers` says which texts `numeric_match` and `gsm8k` read as a number. A term counts
in the score in one of two ways:

- Rules, penalties and functions of the user's are added up, each times its `weight`.
- `stop_properly` and `cosine_length` transform the value of the term that they name with `of`. They
  have no weight: the transformed value replaces that term's own value in the sum, times that term's
  weight. Both values are reported, each under its name, so that `accuracy` keeps its meaning. A
  transformation may be `of` another one; `of` names an earlier term, and no term is transformed
  twice.

`flowrl.algo.maps` has the formulas, with their papers.

A package of its own adds a kind by an entry point: a subclass of `Term` whose `open` returns the
rule.

    [project.entry-points."flowrl.rewards"]
    brevity = "my_package:Brevity"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from flowrl.config.section import Float, InstalledKinds, Int, Refusal, Section
from flowrl.errors import ConfigError
from flowrl.wording import listing, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowrl.backend.protocols import ScoreRequest


class Term(Section):
    """Base of the terms that are added up.

    Attributes:
        name: Name in logs and in `eval.metric`.
        weight: Factor of the value in the score.
        timeout_s: Seconds that this term of a sample may take; by default `rewards.timeout_s`.
    """

    reads_answer: ClassVar[bool] = False
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    """The least and the highest value; None for terms that may give anything."""

    name: str
    weight: Float = 1.0
    timeout_s: Float | None = Field(default=None, gt=0)

    def score_range(self) -> tuple[float, float] | None:
        """Returns the least and the highest value; None if the term may give anything."""
        return self.bounds

    def open(self) -> Callable[[ScoreRequest], float | None]:
        """Returns the rule of a kind that a package adds: the value of a sample.

        It is called in a scorer's process. None means that the term does not apply to a sample. The
        plug-in `verify` has the rules of the kinds in this module.
        """
        raise NotImplementedError(f"{type(self).__name__} has no open()")


class AnswerTerm(Term):
    """Base of the terms that compare the response with the reference answer."""

    reads_answer: ClassVar[bool] = True

    name: str = "accuracy"


class ExactMatch(AnswerTerm):
    """1 where the stripped response equals the answer."""

    kind: Literal["exact_match"]


class NumericMatch(AnswerTerm):
    """1 where the last number of the response equals the answer's, to a relative tolerance."""

    kind: Literal["numeric_match"]
    tolerance: Float = Field(default=1e-6, ge=0)


class Gsm8kMatch(AnswerTerm):
    """1 where the number after the last `####` of the response equals the answer's.

    Attributes:
        flexible: Without a `####`, the last number of the response counts.
    """

    kind: Literal["gsm8k"]
    flexible: bool = False


class MathMatch(AnswerTerm):
    """1 where the final answer of the response equals the answer, as mathematics (math-verify)."""

    kind: Literal["math"]


class PeerMatch(AnswerTerm):
    """The score of another library's function, which `flowrl_backends.verify.peers` describes."""

    kind: Literal[
        "verl_gsm8k_strict",
        "verl_gsm8k_flexible",
        "verl_math_boxed",
        "verl_prime_math",
        "verl_math_dapo",
        "verl_math_verify",
        "skyrl_gsm8k_strict",
        "skyrl_gsm8k_flexible",
        "skyrl_aime",
        "slime_boxed_grade",
        "slime_math_dapo",
        "nemo_dapo",
        "math_verify_default",
        "trl_accuracy_gold_dollar",
        "trl_think_format",
        "areal_math_verify",
        "msrl_math_17k_acc",
        "msrl_acc_for_dapo",
        "msrl_format",
        "msrl_strict_format",
        "mindrlhf_accuracy",
        "mindrlhf_format",
    ]

    bounds: ClassVar[tuple[float, float] | None] = (-1.0, 1.0)


class ChoiceMatch(AnswerTerm):
    """1 where the letter that the response chooses is the answer's, as in `Answer: (B)`.

    Attributes:
        letters: The letters of the choices.
    """

    kind: Literal["choice"]
    letters: str = Field(default="ABCDEFGHIJ", min_length=1)


def _regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise Refusal(
            ConfigError(
                f"pattern is no regular expression: {error}",
                found=repr(pattern),
                hint="correct it, or put a backslash before characters that stand for themselves",
            )
        ) from None
    return pattern


class FormatMatch(Term):
    """1 where the whole response matches the expression `pattern` (dot matches newlines)."""

    kind: Literal["format"]
    name: str = "format"
    pattern: Annotated[str, AfterValidator(_regular_expression)]


class RegexMatch(AnswerTerm):
    """1 where the last match of the expression `pattern` is the answer: its first group, or all."""

    kind: Literal["regex"]
    pattern: Annotated[str, AfterValidator(_regular_expression)]


class TagsMatch(Term):
    """1 where the response is its tags in this order, each once: `<think>...</think> <answer>...`.

    Attributes:
        tags: Names of the tags.
    """

    kind: Literal["tags"]
    name: str = "format"
    tags: tuple[str, ...] = Field(default=("think", "answer"), min_length=1)


class JsonSchemaMatch(Term):
    """1 where the response, or its last block of code, is JSON that a schema allows.

    Attributes:
        schema_file: A file with a JSON schema; none allows any JSON.
    """

    kind: Literal["json_schema"]
    name: str = "format"
    schema_file: str | None = None


class CodeTests(Term):
    """1 where the response's program passes its unit tests, in a sandbox.

    Attributes:
        tests: Field of the row with the tests.
        partial: The value is the share of tests that pass.
        test_s: Seconds that one test may take; `timeout_s` limits all of them.
        memory_gb: Gigabytes that a program may allocate.
    """

    kind: Literal["code"]
    name: str = "accuracy"
    tests: str = "tests"
    partial: bool = False
    test_s: Float = Field(default=4.0, gt=0)
    memory_gb: Float = Field(default=1.0, gt=0)


class RemoteTerm(Term):
    """Base of the terms that a server computes.

    Attributes:
        url: Address of the service, `http://HOST:PORT/PATH`.
        concurrency: Requests at once, of each scorer process.
        retries: Further attempts of a request without an answer.
        request_s: Seconds that an answer may take; `timeout_s` limits a sample, attempts included.
        cache: Answers that are kept for equal requests.
    """

    bounds: ClassVar[tuple[float, float] | None] = None
    reads_answer: ClassVar[bool] = True

    name: str = "judge"
    url: str
    concurrency: Int = Field(default=16, ge=1)
    retries: Int = Field(default=2, ge=0)
    request_s: Float = Field(default=30.0, gt=0)
    cache: Int = Field(default=10_000, ge=0)
    timeout_s: Float | None = Field(default=120.0, gt=0)


class HttpReward(RemoteTerm):
    """The score that a service returns for a sample."""

    kind: Literal["http"]


class JudgeReward(RemoteTerm):
    """The score that a language model gives, by the chat interface of OpenAI.

    Attributes:
        model: Name of the model at the server.
        template: The question; `{prompt}`, `{response}` and `{answer}` are replaced.
        pattern: An expression whose last match in the model's answer is the score: its first group.
        max_tokens: Length of the model's answer.
        api_key_env: Environment variable with the key; none sends no key.
    """

    kind: Literal["judge"]
    model: str
    template: str
    pattern: Annotated[str, AfterValidator(_regular_expression)] = r"(-?\d+(?:\.\d+)?)"
    max_tokens: Int = Field(default=512, ge=1)
    api_key_env: str | None = None


class PythonReward(Term):
    """The user's own function `FILE.py:NAME`; `flowrl.config.reward_signatures` has its forms.

    Attributes:
        chat: TRL's form gets completions as chat messages; by default if the row's prompt is chat
            messages.
    """

    bounds: ClassVar[tuple[float, float] | None] = None
    kind: Literal["python"]
    function: str
    name: str = "score"
    chat: bool | None = None


class OverlongTerm(Term):
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
    max_tokens: Int = Field(ge=1)
    buffer: Int = Field(default=0, ge=0)
    factor: Float = Field(default=1.0, ge=0)
    cap: bool = True

    def score_range(self) -> tuple[float, float] | None:
        """Returns the penalty's range; None if it grows without a cap."""
        return (-self.factor, 0.0) if self.cap else None


class RepetitionTerm(Term):
    """A penalty, at most 0: `max_penalty` times the share of repeated n-grams of the response.

    Attributes:
        ngram: Length of an n-gram.
        max_penalty: The penalty of a response that is nothing but repetition.
        unit: Unit of an n-gram: `words` (split at white space, case ignored), or `characters` for
            text without spaces between words. A response of fewer than `ngram` units has no
            penalty.
    """

    kind: Literal["repetition"]
    name: str = "repetition"
    ngram: Int = Field(default=3, ge=1)
    max_penalty: Float = Field(default=-1.0, le=0)
    unit: Literal["words", "characters"] = "words"

    def score_range(self) -> tuple[float, float] | None:
        """Returns the penalty's range."""
        return self.max_penalty, 0.0


class StopProperlyTerm(Section):
    """The value of term `of`, times `coefficient` where the response was cut off at max_tokens.

    Attributes:
        coefficient: Factor of the value; a number below 0 replaces the value instead.
    """

    kind: Literal["stop_properly"]
    name: str = "stop_properly"
    of: str
    coefficient: Float = 0.0


class CosineLengthTerm(Section):
    """A value that moves with the length from a short to a long end, for right and wrong responses.

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
"""Terms that replace the value of another one; they have `of` and no weight."""

INSTALLED_TERMS = InstalledKinds("flowrl.rewards", "reward kind", Term)
"""The kinds of terms that packages add."""


def _spelled(value: object) -> object:
    """Returns a term with `use` as one with `kind`: a function of the user's, or a rule's name."""
    if not isinstance(value, dict) or "use" not in value:
        return value
    use = value["use"]
    rest = {key: inner for key, inner in value.items() if key not in ("use", "kind", "function")}
    if not isinstance(use, str) or ":" not in use:
        return {"kind": use, **rest}
    return {"kind": "python", "function": use, "name": use.rpartition(":")[2], **rest}


RewardTerm: TypeAlias = Annotated[
    Annotated[
        ExactMatch
        | NumericMatch
        | Gsm8kMatch
        | MathMatch
        | PeerMatch
        | ChoiceMatch
        | FormatMatch
        | RegexMatch
        | TagsMatch
        | JsonSchemaMatch
        | CodeTests
        | HttpReward
        | JudgeReward
        | PythonReward
        | OverlongTerm
        | RepetitionTerm
        | StopProperlyTerm
        | CosineLengthTerm,
        Field(discriminator="kind"),
    ],
    INSTALLED_TERMS,
    BeforeValidator(_spelled),
]


def _consistent(terms: tuple[RewardTerm, ...]) -> tuple[RewardTerm, ...]:
    if problems := list(_term_problems(terms)):
        raise Refusal(*problems)
    return terms


def _term_problems(terms: Sequence[RewardTerm]) -> Iterator[ConfigError]:
    before: list[str] = []
    transformed_by: dict[str, str] = {}
    for index, term in enumerate(terms):
        if term.name in before:
            yield ConfigError(
                f"two reward terms are called {term.name!r}",
                where=str(index),
                hint="give each its own `name`",
            )
        if isinstance(term, StopProperlyTerm | CosineLengthTerm):
            if term.of not in before:
                known = any(term.of == other.name for other in terms)
                yield ConfigError(
                    f"{term.name} is of {term.of!r}, which "
                    + ("does not come before it" if known else "is no reward term"),
                    where=f"{index}.of",
                    expected=f"one of {listing(before)}" if before else "a term before it",
                    hint=None if known else suggestion(term.of, before),
                )
            elif (first := transformed_by.setdefault(term.of, term.name)) != term.name:
                yield ConfigError(
                    f"{first} and {term.name} both take the place of {term.of}",
                    where=f"{index}.of",
                    hint=f"let the second transform the first: of: {first}",
                )
        before.append(term.name)


Terms: TypeAlias = Annotated[tuple[RewardTerm, ...], AfterValidator(_consistent)]
"""Terms of one score: their names differ, and each `of` names an earlier term."""

_SCORE = "the weighted sum of all terms"
_OTHER_METRICS = {
    "length": "mean number of response tokens",
    "truncated": "share of responses that met max_tokens",
}
"""Metrics of an evaluation besides the reward's terms and their weighted sum, `score`."""


def _with_metric_names(terms: Terms) -> Terms:
    """Refuses terms with the name of another metric of evaluations."""
    is_score = len(terms) == 1 and getattr(terms[0], "weight", None) == 1
    taken = _OTHER_METRICS if is_score else {**_OTHER_METRICS, "score": _SCORE}
    problems = [
        ConfigError(
            f"a reward term is called {term.name!r}, which names another metric of evaluations",
            where=f"{index}.name",
            found=f"{term.name}: {taken[term.name]}",
            hint="give the term a `name` of its own",
        )
        for index, term in enumerate(terms)
        if term.name in taken
    ]
    if problems:
        raise Refusal(*problems)
    return terms


class RewardsConfig(Section):
    """The score of a sample: the weighted sum of `terms`."""

    terms: Annotated[Terms, AfterValidator(_with_metric_names)] = ()
    timeout_s: Float = Field(default=2.0, gt=0)
    max_failures: Int = Field(default=0, ge=0)
    failure_score: Float | None = None
    workers: Int = Field(default=1, ge=1)
    memory_gb: Float = Field(default=4.0, gt=0)
