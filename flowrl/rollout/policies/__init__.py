"""Policies of the rollout scheduler: small frozen objects that settings name.

Each is a specification like a loss's: it prints, travels in JSON as `{"kind": ..., option: value}`
and imports nothing heavy. Where a rule is a formula, the policy holds it.
"""

from flowrl.rollout.policies.engines import (
    AbortRunning,
    FinishRunning,
    FirstOffered,
    KeepRunning,
    LeastLoaded,
    LongestFirst,
    NoQuarantine,
    NoRepack,
    OrderPolicy,
    PromptAffinity,
    PublicationPolicy,
    Quarantine,
    QuarantinePolicy,
    RepackPolicy,
    RepackTail,
    RoutingPolicy,
)
from flowrl.rollout.policies.limits import (
    DropStragglers,
    Patience,
    Retries,
    StragglerPolicy,
    WaitForStragglers,
)
from flowrl.rollout.policies.prompts import (
    AdmissionPolicy,
    AdmitAll,
    AgeBudget,
    AskByKeepRate,
    AskMissing,
    FairnessPolicy,
    FirstCome,
    OverSampling,
    RefillPolicy,
    WeightedShares,
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
