"""Losses by name: what `actor.update(..., loss=...)` minimises.

Functions are spelled as a program reads (`loss.policy_clip(0.2)`); the classes are what graphs,
plans and configs hold. Formulas, with paper and equation, stand at their implementations in
`flowrl.algo.losses` and its neighbours.

    loss.policy_clip(0.2, 0.28)                              # DAPO's clip-higher
    loss.gspo()                                              # a sequence's ratio
    loss.policy_clip(0.2, correction=loss.truncate(2.0))     # decoupled, with TIS
    loss.cispo(rejection=loss.reject(high=0.02))             # without tokens that moved
    loss.dpo(beta=0.1)                                       # pairs of answers
"""

from typing import TYPE_CHECKING

from flowrl.specs.loss.base import (
    DPO,
    Aggregation,
    BradleyTerry,
    CrossEntropy,
    LossSpec,
    PairLoss,
    Prediction,
    ValueClip,
    bradley_terry,
    cross_entropy,
    dpo,
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
from flowrl.specs.names import raise_missing

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
    "KLCov",
    "Kimi",
    "LossSpec",
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
    "ValueClip",
    "bradley_terry",
    "cispo",
    "cross_entropy",
    "dpo",
    "dppo",
    "gmpo",
    "gspo",
    "kimi",
    "kl_cov",
    "luspo",
    "mask_outside",
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

if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

    def __getattr__(name: str) -> object:
        raise_missing(__name__, name, __all__)
