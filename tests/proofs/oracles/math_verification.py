"""Scores of math answers: each recorded function's by the verifier of its name, and ours.

A case passes if every offered function gives its recorded score and `math` agrees with
`intended_correct`. The recorded functions without a verifier here are compared with nothing.
"""

from __future__ import annotations

from flowrl.errors import RewardError
from flowrl_backends.verify.mathematics import mathematics
from flowrl_backends.verify.peers import PEERS
from tests.proofs.oracles.case import Case

__all__ = ["compute"]

RAISED = "!raised"
"""The result of a function that raises an error; recorded ones name its type."""


def compute(case: Case) -> dict[str, float | str]:
    """Returns the score of each function that is offered, and whether `math` is as intended."""
    response, answer = case.inputs["response"], case.inputs["ground_truth"]
    scores: dict[str, float | str] = {"intended_correct": mathematics(response, answer)}
    for name in PEERS.keys() & case.expected.keys():
        try:
            scores[name] = PEERS[name](response, answer)
        except RewardError:
            scores[name] = RAISED
    return scores
