"""The compiler passes: pure functions from graph to graph."""

from flowrl.passes.annotate_cost import annotate_cost
from flowrl.passes.context import Context, RoleCost
from flowrl.passes.pipeline import PASSES, Pass, PassRecord, pass_names, run_passes

__all__ = [
    "PASSES",
    "Context",
    "Pass",
    "PassRecord",
    "RoleCost",
    "annotate_cost",
    "pass_names",
    "run_passes",
]
