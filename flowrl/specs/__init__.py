"""Torch-free specifications of formulas: advantages, losses, KL terms and filters."""

from flowrl.specs.advantage import AdvantageSpec, GroupRelative
from flowrl.specs.base import Scalar, Spec, spec_from_json
from flowrl.specs.filters import FilterSpec, ZeroVariance
from flowrl.specs.kl import KL
from flowrl.specs.loss import Aggregation, CrossEntropy, LossSpec, PolicyClip
from flowrl.specs.optimizer import AdamW
from flowrl.specs.sampling import FinishReason, Sampling

__all__ = [
    "KL",
    "AdamW",
    "AdvantageSpec",
    "Aggregation",
    "CrossEntropy",
    "FilterSpec",
    "FinishReason",
    "GroupRelative",
    "LossSpec",
    "PolicyClip",
    "Sampling",
    "Scalar",
    "Spec",
    "ZeroVariance",
    "spec_from_json",
]
