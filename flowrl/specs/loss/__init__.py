"""Losses by name, which `actor.update(..., loss=...)` minimises.

Programs call the functions (`loss.policy_clip(0.2)`); graphs, plans and configs hold the classes.
The formulas, with paper and equation, are in the docstrings of `flowrl.algo.surrogates` and
`flowrl.algo.losses_supervised`.

    loss.policy_clip(0.2, 0.28)                              # DAPO's clip-higher
    loss.gspo()                                              # a sequence's ratio
    loss.policy_clip(0.2, correction=loss.truncate(2.0))     # decoupled, with TIS
    loss.cispo(rejection=loss.reject(high=0.02))             # without tokens of a large gap
    loss.dpo(beta=0.1)                                       # pairs of answers
"""

from typing import TYPE_CHECKING

from flowrl.specs.loss.base import (
    DPO,
    Aggregation,
    BradleyTerry,
    CrossEntropy,
    ImplicitReward,
    LossSpec,
    Outcome,
    OutcomeLoss,
    PairLoss,
    Prediction,
    TokenOutcome,
    ValueClip,
    bradley_terry,
    cross_entropy,
    dpo,
    implicit_reward,
    outcome,
    value_clip,
)
from flowrl.specs.loss.own import OwnLoss, OwnPairLoss, OwnScoreLoss, OwnValueLoss, own
from flowrl.specs.loss.policy import (
    Correction,
    PolicyLoss,
    Rejection,
    mask_outside,
    reject,
    truncate,
)
from flowrl.specs.loss.surrogates import (
    CISPO,
    DPPO,
    GMPO,
    SAPO,
    TOPR,
    VESPO,
    Kimi,
    KLCov,
    PolicyClip,
    Reinforce,
    cispo,
    dppo,
    gmpo,
    gspo,
    kimi,
    kl_cov,
    luspo,
    policy_clip,
    reinforce,
    sapo,
    topr,
    vespo,
)
from flowrl.specs.names import refusing_others

__all__ = [
    "CISPO",
    "DPO",
    "DPPO",
    "GMPO",
    "SAPO",
    "TOPR",
    "VESPO",
    "Aggregation",
    "BradleyTerry",
    "Correction",
    "CrossEntropy",
    "ImplicitReward",
    "KLCov",
    "Kimi",
    "LossSpec",
    "Outcome",
    "OutcomeLoss",
    "OwnLoss",
    "OwnPairLoss",
    "OwnScoreLoss",
    "OwnValueLoss",
    "PairLoss",
    "PolicyClip",
    "PolicyLoss",
    "Prediction",
    "Reinforce",
    "Rejection",
    "TokenOutcome",
    "ValueClip",
    "bradley_terry",
    "cispo",
    "cross_entropy",
    "dpo",
    "dppo",
    "gmpo",
    "gspo",
    "implicit_reward",
    "kimi",
    "kl_cov",
    "luspo",
    "mask_outside",
    "outcome",
    "own",
    "policy_clip",
    "reinforce",
    "reject",
    "sapo",
    "topr",
    "truncate",
    "value_clip",
    "vespo",
]

if not TYPE_CHECKING:  # a type checker should report unknown names
    __getattr__ = refusing_others(__name__, __all__)
