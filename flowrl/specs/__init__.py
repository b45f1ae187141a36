"""Torch-free specifications of formulas: advantages, losses, KL terms, filters, shaping.

The bases and the most used classes can be imported from here, and every class from its module.
"""

from flowrl.specs.advantage import AdvantageSpec, GroupRelative
from flowrl.specs.attributes import AdamW, FinishReason, Sampling
from flowrl.specs.base import Scalar, Spec, spec_from_json
from flowrl.specs.filters import FilterSpec, Replay, RowCondition, SelectSpec
from flowrl.specs.grammar import Grammar
from flowrl.specs.kl import KL
from flowrl.specs.loss import CrossEntropy, LossSpec, OwnLoss, PolicyClip
from flowrl.specs.maps import MapSpec
from flowrl.specs.prompts import PromptsSpec

__all__ = [
    "KL",
    "AdamW",
    "AdvantageSpec",
    "CrossEntropy",
    "FilterSpec",
    "FinishReason",
    "Grammar",
    "GroupRelative",
    "LossSpec",
    "MapSpec",
    "OwnLoss",
    "PolicyClip",
    "PromptsSpec",
    "Replay",
    "RowCondition",
    "Sampling",
    "Scalar",
    "SelectSpec",
    "Spec",
    "spec_from_json",
]
