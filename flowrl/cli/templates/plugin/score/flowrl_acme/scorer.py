"""Scores a response 1 if it contains the reference answer, else 0. Replace `_value`.

It runs in a process of its own under a time limit, so it may raise and may block.
"""

from flowrl.backend.protocols import ScoreContext, ScoreRequest, ScoreResult


class AcmeScorer:
    def __init__(self, context: ScoreContext) -> None:
        self._weights = {str(term["name"]): float(term["weight"]) for term in context.terms}

    def score(self, request: ScoreRequest) -> ScoreResult:
        terms = {name: self._value(name, request) for name in self._weights}
        score = sum(self._weights[name] * value for name, value in terms.items())
        return ScoreResult(sample=request.sample, score=score, terms=terms)

    def _value(self, name: str, request: ScoreRequest) -> float:
        """Returns the value of a term, which the config names."""
        return float(request.answer in request.response)

    def close(self) -> None:
        pass
