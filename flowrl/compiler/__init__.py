"""Program to graph to plan, in one function. (`fl.compile` is the name of the public call, so the
package is called `compiler`.)"""

from __future__ import annotations

from flowrl.compiler.lowering import lower, sampling_of
from flowrl.compiler.stage import CompiledStage, ask_last_stage, compile_stages, trace_stages

__all__ = [
    "CompiledStage",
    "ask_last_stage",
    "compile_stages",
    "lower",
    "sampling_of",
    "trace_stages",
]
