"""The scorer: each reward term of the config as a function of a sample, and their weighted sum.

    kind            value 1 if ...; else 0
    exact_match     the stripped response is the stripped answer
    numeric_match   the response's last number is the answer's last number, to a tolerance
    gsm8k           the number after the response's last `####` is exactly the answer's
    format          the whole response matches the pattern; the dot matches newlines
    python          (any number that the user's function returns)

`flowrl.algo.numbers` defines numbers: text that cannot be read as one number matches nothing. A
reference answer that cannot be read, if a number is needed, is a mistake in the data: rows are
refused when they are read, and here it raises `RewardError`; it is never scored 0.

`flowrl_backends.verify.shaping` adds terms by length, ending and repetition. Two of those are `of`
another term: in the sum they replace it, with its weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TypeAlias

from flowrl.algo.numbers import after_hashes, answer_number, close, last_number
from flowrl.backend.protocols import ScoreContext, ScoreRequest, ScoreResult
from flowrl.errors import ConfigError, RewardError
from flowrl.wording import listing
from flowrl_backends.verify.options import TermOptions
from flowrl_backends.verify.shaping import PENALTIES, TRANSFORMATIONS, Transformation
from flowrl_backends.verify.user_function import UserFunction

__all__ = ["Scorer"]

Term: TypeAlias = Callable[[ScoreRequest, Mapping[str, float]], float]
"""A function of a sample and the values of the previous terms, by name."""


class Scorer:
    """Scores one sample at a time.

    Raises:
        ConfigError: A term does not exist, a pattern does not compile, two terms have one name, or
            a term is `of` a term that does not precede it.
        RewardError: A reward function cannot be loaded.
    """

    def __init__(self, context: ScoreContext) -> None:
        self.on_term: Callable[[str], None] = lambda name: None
        self._terms: dict[str, Term] = {}
        # Each weight, and the name of its value.
        self._weights: list[tuple[float, str]] = []
        if not context.terms:
            raise ConfigError(
                "there is nothing to score with",
                where=context.key,
                found="no terms",
                hint="add one, such as {kind: exact_match}",
            )
        for i, values in enumerate(context.terms):
            options = TermOptions(values, f"{context.key}[{i}]")
            name = str(values.get("name") or values.get("kind"))
            if name in self._terms:
                raise ConfigError(
                    "two reward terms have one name",
                    where=f"{options.where}.name",
                    found=repr(name),
                    hint="give each its own `name`",
                )
            kind = values.get("kind")
            if isinstance(kind, str) and kind in TRANSFORMATIONS:
                self._terms[name] = self._transform(TRANSFORMATIONS[kind](options), name, options)
            else:
                self._terms[name] = _open_term(kind, options)
                self._weights.append((options.number("weight", 1.0), name))

    def _transform(self, transform: Transformation, name: str, options: TermOptions) -> Term:
        """Replaces a term by a transformation of it."""
        of = options.text("of")
        places = [i for i, (_, counted) in enumerate(self._weights) if counted == of]
        if not places:
            raise ConfigError(
                f"another term takes the place of {of!r} already"
                if of in self._terms
                else f"no term before it is called {of!r}",
                where=f"{options.where}.of",
                expected=f"one of {listing(counted for _, counted in self._weights)}",
            )
        (place,) = places
        self._weights[place] = (self._weights[place][0], name)
        return lambda request, values: transform(request, values[of])

    def score(self, request: ScoreRequest) -> ScoreResult:
        """Returns the weighted sum of the terms, and the value of each term."""
        values: dict[str, float] = {}
        for name, term in self._terms.items():
            self.on_term(name)
            values[name] = term(request, values)
        self.on_term("")
        total = 0.0
        for weight, name in self._weights:
            total += weight * values[name]
        return ScoreResult(sample=request.sample, score=total, terms=values)

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


def _open_term(kind: object, options: TermOptions) -> Term:
    rule = _open_rule(kind, options)
    return lambda request, _: rule(request)


def _open_rule(kind: object, options: TermOptions) -> Callable[[ScoreRequest], float]:
    match kind:
        case "exact_match":
            return _exact_match
        case "numeric_match":
            return _numeric_match(options.number("tolerance", 1e-6))
        case "gsm8k":
            return _gsm8k
        case "format":
            return _format(options)
        case "python":
            return UserFunction(options.text("function"), where=f"{options.where}.function")
        case str() if kind in PENALTIES:
            return PENALTIES[kind](options)
        case _:
            rules = ("exact_match", "numeric_match", "gsm8k", "format", "python")
            raise ConfigError(
                "no such reward term",
                where=f"{options.where}.kind",
                found=repr(kind),
                expected=f"one of {listing((*rules, *PENALTIES, *TRANSFORMATIONS))}",
            )


def _exact_match(request: ScoreRequest) -> float:
    return float(request.response.strip() == request.answer.strip())


def _numeric_match(tolerance: float) -> Callable[[ScoreRequest], float]:
    def score(request: ScoreRequest) -> float:
        answer = _answer_number(request)
        value = last_number(request.response)
        return float(value is not None and close(value, answer, tolerance))

    return score


def _gsm8k(request: ScoreRequest) -> float:
    answer = _answer_number(request)
    return float(after_hashes(request.response) == answer)


def _answer_number(request: ScoreRequest) -> Fraction:
    number = answer_number(request.answer)
    if number is None:
        raise RewardError(
            "the reference answer cannot be read as one number",
            where=f"sample {request.sample}",
            found=repr(request.answer[-60:]),
            hint="set data.answer to the field with the answer, or use exact_match",
        )
    return number


def _format(options: TermOptions) -> Callable[[ScoreRequest], float]:
    pattern = options.text("pattern")
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as reason:
        raise ConfigError(
            f"the pattern is not a regular expression: {reason}",
            where=f"{options.where}.pattern",
            found=repr(pattern),
        ) from None

    def score(request: ScoreRequest) -> float:
        return float(compiled.fullmatch(request.response) is not None)

    return score
