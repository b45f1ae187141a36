"""Torch-free specifications of formulas: advantages, losses, KL terms, filters, shaping."""

from flowrl.specs.advantage import (
    GPG,
    AdvantageSpec,
    GroupRelative,
    LeaveOneOut,
    LengthWeighted,
    MaxRL,
    NormaliseThenSum,
    PassAtK,
)
from flowrl.specs.base import Scalar, Spec, spec_from_json
from flowrl.specs.filters import Difficulty, FilterSpec, ZeroVariance
from flowrl.specs.grammar import Grammar, JsonSchema, Regex
from flowrl.specs.kl import KL, AdaptiveKL
from flowrl.specs.loss import Aggregation, CrossEntropy, LossSpec, OwnLoss, PolicyClip
from flowrl.specs.maps import MapSpec, OwnMap, UserMap, WeightedSum
from flowrl.specs.optimizer import AdamW
from flowrl.specs.own_advantage import OwnAdvantage, UserAdvantage
from flowrl.specs.sampling import FinishReason, Sampling
from flowrl.specs.select import BestAndWorst, RandomK, SelectSpec, Threshold, Top
from flowrl.specs.shaping import (
    CosineLength,
    Repetition,
    ShapingSpec,
    SoftOverlong,
    StopProperly,
)
from flowrl.specs.token_advantage import (
    GAE,
    Distill,
    GroupInGroup,
    OptimalTokenBaseline,
    ReinforcePP,
    ReMax,
)

__all__ = [
    "GAE",
    "GPG",
    "KL",
    "AdamW",
    "AdaptiveKL",
    "AdvantageSpec",
    "Aggregation",
    "BestAndWorst",
    "CosineLength",
    "CrossEntropy",
    "Difficulty",
    "Distill",
    "FilterSpec",
    "FinishReason",
    "Grammar",
    "GroupInGroup",
    "GroupRelative",
    "JsonSchema",
    "LeaveOneOut",
    "LengthWeighted",
    "LossSpec",
    "MapSpec",
    "MaxRL",
    "NormaliseThenSum",
    "OptimalTokenBaseline",
    "OwnAdvantage",
    "OwnLoss",
    "OwnMap",
    "PassAtK",
    "PolicyClip",
    "RandomK",
    "ReMax",
    "Regex",
    "ReinforcePP",
    "Repetition",
    "Sampling",
    "Scalar",
    "SelectSpec",
    "ShapingSpec",
    "SoftOverlong",
    "Spec",
    "StopProperly",
    "Threshold",
    "Top",
    "UserAdvantage",
    "UserMap",
    "WeightedSum",
    "ZeroVariance",
    "spec_from_json",
]
