"""The compiler passes: pure functions from graph to graph."""

from flowrl.passes.context import Context
from flowrl.passes.pipeline import PASSES, Pass, PassRecord, pass_names, run_passes

__all__ = ["PASSES", "Context", "Pass", "PassRecord", "pass_names", "run_passes"]
