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
from flowrl.plan.search.fronts import fronts, least_seconds
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
from flowrl.plan.search.two_pools import Joined, Pair, cuts, restricted

__all__ = [
    "EVERY_KIND",
    "Alike",
    "Arrivals",
    "Asynchronous",
    "Binding",
    "Change",
    "ChangeKind",
    "Evaluation",
    "Evaluator",
    "Found",
    "Infeasible",
    "Joined",
    "Kind",
    "Leaf",
    "Objective",
    "Option",
    "Pair",
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
    "fronts",
    "kind_of",
    "least_seconds",
    "leaves",
    "restricted",
    "search",
    "seconds_of",
    "stream_lines",
]
