"""Supervised fine-tuning: the warm start of most reinforcement learning.

Maximum likelihood of each example's solution y given its prompt x, the sum over response tokens
divided by their number in the batch (the SFT stage of Ouyang et al., "InstructGPT", 2022,
arXiv:2203.02155, section 3.5):

    L = - sum_t log pi(y_t | x, y_<t) / number of response tokens
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def sft(examples: fl.Examples, *, actor: fl.Policy) -> None:
    """Supervised fine-tuning on prompts and solutions."""
    actor.update(examples, loss=fl.loss.cross_entropy())
