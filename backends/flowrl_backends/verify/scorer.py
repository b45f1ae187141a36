"""The scorer: each reward term of the config as a function of a sample, and their weighted sum.

`flowrl_backends.verify.rules` has the terms by kind. Two of them (`flowrl_backends.verify.shaping`)
are `of` another term: in the sum they replace it, with its weight. A term that does not apply to a
sample has no value, and counts nothing in its sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flowrl.backend.protocols import ScoreContext, ScoreRequest, ScoreResult
from flowrl.errors import ConfigError, RewardError
from flowrl.wording import listing
from flowrl_backends.verify.options import TermOptions
from flowrl_backends.verify.rules import BatchRule, Rule, open_rule
from flowrl_backends.verify.shaping import TRANSFORMATIONS, Transformation


@dataclass(frozen=True, slots=True)
class _Transformed:
    """A transformation of the value of another term."""

    transform: Transformation
    of: str


class Scorer:
    """Scores samples one at a time, or several at once where a term gains by it.

    Attributes:
        on_term: See `NamesTerms`.
        batch_size: See `ScoresBatches`.

    Raises:
        ConfigError: A term does not exist, a pattern does not compile, two terms have one name, or
            a term is `of` a term that does not precede it.
        RewardError: A reward function cannot be loaded.
    """

    def __init__(self, context: ScoreContext) -> None:
        self.on_term: Callable[[str], None] = lambda name: None
        self._terms: dict[str, Rule | BatchRule | _Transformed] = {}
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
                self._terms[name] = open_rule(kind, options)
                self._weights.append((options.number("weight", 1.0), name))
        self.batch_size = max(getattr(term, "batch_size", 1) for term in self._terms.values())

    def _transform(
        self, transform: Transformation, name: str, options: TermOptions
    ) -> _Transformed:
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
        return _Transformed(transform, of)

    def score(self, request: ScoreRequest) -> ScoreResult:
        """Returns the weighted sum of the terms, and the value of each term."""
        values: dict[str, float] = {}
        for name, term in self._terms.items():
            self.on_term(name)
            if not isinstance(term, _Transformed):
                value = term(request)
            else:
                value = term.transform(request, values[term.of]) if term.of in values else None
            if value is not None:
                values[name] = value
        self.on_term("")
        return self._result(request, values)

    def score_batch(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """Returns the results of samples, in order."""
        values: list[dict[str, float]] = [{} for _ in requests]
        for name, term in self._terms.items():
            self.on_term(name)
            if isinstance(term, BatchRule):
                found: Sequence[float | None] = term.score_batch(requests)
            elif isinstance(term, _Transformed):
                found = [
                    term.transform(request, known[term.of]) if term.of in known else None
                    for request, known in zip(requests, values, strict=True)
                ]
            else:
                found = [term(request) for request in requests]
            for known, value in zip(values, found, strict=True):
                if value is not None:
                    known[name] = value
        self.on_term("")
        return [self._result(*pair) for pair in zip(requests, values, strict=True)]

    def _result(self, request: ScoreRequest, values: Mapping[str, float]) -> ScoreResult:
        total = 0.0
        for weight, name in self._weights:
            total += weight * values.get(name, 0.0)
        if not values:
            raise RewardError(
                "no reward term applies to this sample", where=f"sample {request.sample}"
            )
        return ScoreResult(sample=request.sample, score=total, terms=values)

    def close(self) -> None:
        """Frees what the terms hold."""
        for term in self._terms.values():
            close = getattr(term, "close", None)
            if close is not None:
                close()
