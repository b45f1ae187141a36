"""The scorer: each reward term of the config as a function of a sample, and their weighted sum.

    kind            value 1 where ...; 0 elsewhere
    exact_match     the stripped response is the stripped answer
    numeric_match   the response's last number is the answer's last number, to a tolerance
    gsm8k           the number after the response's last `####` is exactly the answer's
    format          the whole response matches the pattern; the dot matches newlines
    python          (any number that the user's function returns)

`flowrl_backends.verify.numbers` says what a number is. A reference answer that holds no number,
where one is needed, is a fault of the data and raises `RewardError`; it is never scored 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TypeAlias

from flowrl.backend.protocols import ScoreContext, ScoreRequest, ScoreResult
from flowrl.errors import ConfigError, RewardError
from flowrl_backends.verify.numbers import after_hashes, close, last_number
from flowrl_backends.verify.user_function import UserFunction

__all__ = ["Scorer"]

Term: TypeAlias = Callable[[ScoreRequest], float]


class Scorer:
    """Scores one sample at a time.

    Raises:
        ConfigError: A term that does not exist, a pattern that does not compile, a name twice.
        RewardError: A reward function that cannot be loaded.
    """

    def __init__(self, context: ScoreContext) -> None:
        self._terms: dict[str, tuple[float, Term]] = {}
        if not context.terms:
            raise ConfigError(
                "there is nothing to score with",
                where="rewards.terms",
                found="no terms",
                hint="add one, such as {kind: exact_match}",
            )
        for i, options in enumerate(context.terms):
            where = f"rewards.terms[{i}]"
            name = str(options.get("name") or options.get("kind"))
            if name in self._terms:
                raise ConfigError(
                    "two reward terms have one name",
                    where=f"{where}.name",
                    found=repr(name),
                    hint="give each its own `name`",
                )
            weight = _float(options, "weight", 1.0)
            self._terms[name] = (weight, _open_term(options, where))

    def score(self, request: ScoreRequest) -> ScoreResult:
        """The weighted sum of the terms, and each term unweighted."""
        terms: dict[str, float] = {}
        total = 0.0
        for name, (weight, term) in self._terms.items():
            value = term(request)
            terms[name] = value
            total += weight * value
        return ScoreResult(sample=request.sample, score=total, terms=terms)

    def close(self) -> None:
        """Nothing to free."""


def _open_term(options: Mapping[str, object], where: str) -> Term:
    match options.get("kind"):
        case "exact_match":
            return _exact_match
        case "numeric_match":
            return _numeric_match(_float(options, "tolerance", 1e-6))
        case "gsm8k":
            return _gsm8k
        case "format":
            return _format(str(options.get("pattern")), where)
        case "python":
            return UserFunction(str(options.get("function")), where=f"{where}.function")
        case kind:
            raise ConfigError(
                "no such reward term",
                where=f"{where}.kind",
                found=repr(kind),
                expected="exact_match, numeric_match, gsm8k, format or python",
            )


def _exact_match(request: ScoreRequest) -> float:
    return float(request.response.strip() == request.answer.strip())


def _numeric_match(tolerance: float) -> Term:
    def score(request: ScoreRequest) -> float:
        answer = _answer_number(request)
        value = last_number(request.response)
        return float(value is not None and close(value, answer, tolerance))

    return score


def _gsm8k(request: ScoreRequest) -> float:
    answer = _answer_number(request)
    return float(after_hashes(request.response) == answer)


def _answer_number(request: ScoreRequest) -> Fraction:
    """The number after the last `####` of the reference answer, or its last number."""
    number = after_hashes(request.answer)
    if number is None:
        number = last_number(request.answer)
    if number is None:
        raise RewardError(
            "the reference answer holds no number",
            where=f"sample {request.sample}",
            found=repr(request.answer[:60]),
            hint="set data.answer to the field with the answer, or use exact_match",
        )
    return number


def _format(pattern: str, where: str) -> Term:
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as reason:
        raise ConfigError(
            f"the pattern is no regular expression: {reason}",
            where=f"{where}.pattern",
            found=repr(pattern),
        ) from None

    def score(request: ScoreRequest) -> float:
        return float(compiled.fullmatch(request.response) is not None)

    return score


def _float(options: Mapping[str, object], key: str, default: float) -> float:
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError("not a number", where=f"rewards.terms.{key}", found=repr(value))
    return float(value)
