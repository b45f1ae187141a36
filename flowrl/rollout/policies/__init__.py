"""Policies of the rollout scheduler: small frozen objects that settings name, one kind a file.

Each is a specification like a loss's: it prints, travels in JSON as `{"kind": ..., option: value}`
and imports nothing heavy. Where a rule is a formula, the policy holds it.
"""

from flowrl.rollout.policies.admission import AdmissionPolicy, AdmitAll, AgeBudget
from flowrl.rollout.policies.fairness import FairnessPolicy, FirstCome, WeightedShares
from flowrl.rollout.policies.order import FirstOffered, LongestFirst, OrderPolicy
from flowrl.rollout.policies.over_sampling import OverSampling
from flowrl.rollout.policies.patience import Patience
from flowrl.rollout.policies.publication import (
    AbortRunning,
    FinishRunning,
    KeepRunning,
    PublicationPolicy,
)
from flowrl.rollout.policies.quarantine import NoQuarantine, Quarantine, QuarantinePolicy
from flowrl.rollout.policies.refill import AskByKeepRate, AskMissing, RefillPolicy
from flowrl.rollout.policies.repack import NoRepack, RepackPolicy, RepackTail
from flowrl.rollout.policies.retries import Retries
from flowrl.rollout.policies.routing import LeastLoaded, PromptAffinity, RoutingPolicy
from flowrl.rollout.policies.stragglers import (
    DropStragglers,
    StragglerPolicy,
    WaitForStragglers,
)

__all__ = [
    "AbortRunning",
    "AdmissionPolicy",
    "AdmitAll",
    "AgeBudget",
    "AskByKeepRate",
    "AskMissing",
    "DropStragglers",
    "FairnessPolicy",
    "FinishRunning",
    "FirstCome",
    "FirstOffered",
    "KeepRunning",
    "LeastLoaded",
    "LongestFirst",
    "NoQuarantine",
    "NoRepack",
    "OrderPolicy",
    "OverSampling",
    "Patience",
    "PromptAffinity",
    "PublicationPolicy",
    "Quarantine",
    "QuarantinePolicy",
    "RefillPolicy",
    "RepackPolicy",
    "RepackTail",
    "Retries",
    "RoutingPolicy",
    "StragglerPolicy",
    "WaitForStragglers",
    "WeightedShares",
]
