import pytest

from flowrl.backend.protocols import FinishReason, ScoreContext, ScoreRequest
from flowrl.backend.registry import find


@pytest.mark.parametrize(("response", "score"), [("it is 42", 0.5), ("it is 41", 0.0)])
def test_a_score_is_the_weighted_sum_of_the_terms(response, score):
    scorer = find("acme").open_score(
        ScoreContext(role="verifier", terms=({"name": "accuracy", "weight": 0.5},))
    )
    result = scorer.score(
        ScoreRequest(
            sample="0/0/0",
            prompt="6 times 7",
            response=response,
            answer="42",
            row={},
            finish=FinishReason.STOP,
            num_tokens=3,
        )
    )
    assert (result.score, result.terms) == (score, {"accuracy": 2 * score})
    scorer.close()
