"""The search for schedules: exact, over data alone. docs/planner-search.md explains it."""

from __future__ import annotations

from flowrl.plan.search.alike import Alike
from flowrl.plan.search.arrivals import Arrivals, stream_lines
from flowrl.plan.search.best import fewest_devices, search
from flowrl.plan.search.evaluate import (
    Evaluation,
    Evaluator,
    arrivals_of,
    block,
    evaluate,
    seconds_of,
)
from flowrl.plan.search.fronts import Parts
from flowrl.plan.search.problem import EVERY_KIND, Kind, Objective, Option, Problem, Sync, Task
from flowrl.plan.search.result import (
    Binding,
    Change,
    ChangeKind,
    Found,
    Infeasible,
    SearchResult,
)
from flowrl.plan.search.schedule import (
    Asynchronous,
    Leaf,
    Schedule,
    Spatial,
    Temporal,
    draw,
    kind_of,
    leaves,
)
from flowrl.plan.search.two_pools import Cut, CutBounds, Joined, Least, Pair, cuts, restricted

__all__ = [
    "EVERY_KIND",
    "Alike",
    "Arrivals",
    "Asynchronous",
    "Binding",
    "Change",
    "ChangeKind",
    "Cut",
    "CutBounds",
    "Evaluation",
    "Evaluator",
    "Found",
    "Infeasible",
    "Joined",
    "Kind",
    "Leaf",
    "Least",
    "Objective",
    "Option",
    "Pair",
    "Parts",
    "Problem",
    "Schedule",
    "SearchResult",
    "Spatial",
    "Sync",
    "Task",
    "Temporal",
    "arrivals_of",
    "block",
    "cuts",
    "draw",
    "evaluate",
    "fewest_devices",
    "kind_of",
    "leaves",
    "restricted",
    "search",
    "seconds_of",
    "stream_lines",
]
