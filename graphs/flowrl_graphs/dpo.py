"""DPO: learning from preferences without a reward model and without rollouts.

Rafailov et al., "Direct preference optimization: your language model is secretly a reward model",
2023 (arXiv:2305.18290), equation 7. For a prompt q, the preferred answer o_w and the other one o_l,

    h = log pi(o_w | q) / pi_reference(o_w | q) - log pi(o_l | q) / pi_reference(o_l | q)
    L = - mean over pairs of  log sigmoid(beta h)

The reference is the policy as it is when the stage begins. `label_smoothing` above 0 is the share
of pairs that are thought to be labelled the wrong way round (Mitchell, 2023, conservative DPO).
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def dpo(
    pairs: fl.Pairs,
    *,
    actor: fl.Policy,
    reference: fl.Policy,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> None:
    """Direct preference optimisation on pairs of the data."""
    actor.update(
        pairs,
        reference=reference.logprobs(pairs),
        loss=fl.loss.dpo(beta, label_smoothing=label_smoothing),
    )
