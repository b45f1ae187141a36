"""SPIN: a policy learns to tell the solutions of the data from answers of its earlier self.

Chen et al., "Self-play fine-tuning converts weak language models to strong language models", 2024
(arXiv:2401.01335), equation 4.7 with the logistic loss. For a prompt x, its solution y and an
answer y' that the opponent p_t samples,

    h = log p(y | x) / p_t(y | x) - log p(y' | x) / p_t(y' | x)
    L = mean over prompts of  log(1 + exp(-beta h))

which is the loss of DPO, with the solution as the preferred answer. The opponent is the policy as
it was when its iteration began; an iteration has `every` steps here, and the opponent answers in
each of them instead of once for the whole iteration.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def spin(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    opponent: fl.Policy,
    beta: float = 0.1,
    every: int = 50,
) -> None:
    """Self-play against the policy of `every` steps ago, at most."""
    answers = opponent.generate(prompts, n=1)
    pairs = fl.pair(preferred=fl.Examples.of(prompts), other=answers)
    actor.update(pairs, reference=opponent.logprobs(pairs), loss=fl.loss.dpo(beta))
    opponent.sync(actor, every=every)
