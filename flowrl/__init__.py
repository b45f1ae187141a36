"""flowrl: write a reinforcement-learning workflow as a short program, compile it, run it.

    import flowrl as fl

    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        responses = actor.generate(prompts)
        rewards = reward.score(responses)
        actor.update(responses, rewards)

    fl.run(mine, "config.yaml")

Importing the package imports neither torch nor any plug-in; `compile`, `run` and `Compiled` are
loaded at first use.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flowrl.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    DataError,
    FlowError,
    GraphError,
    PlanError,
    RewardError,
    SchedulerError,
    TraceError,
    WorkerDied,
)
from flowrl.graph import Graph
from flowrl.program import advantage, filter, select, shaping  # noqa: A004  (read as fl.filter)
from flowrl.program.children import mean_of_children, parent, prompts_of
from flowrl.program.formulas import log, weighted_sum
from flowrl.program.formulas import map_of as map  # noqa: A004  (read as fl.map)
from flowrl.program.handles import (
    Advantages,
    Logprobs,
    Mapped,
    Prompts,
    Returns,
    Rollout,
    Samples,
    Scores,
    TokenRewards,
    Values,
)
from flowrl.program.judging import parse, win_rate
from flowrl.program.policy import Policy, interact
from flowrl.program.registry import load_workflow
from flowrl.program.roles import Critic, Environment, Reward, RewardModel
from flowrl.program.sets import Examples, Pairs, concat, pair, replay, where
from flowrl.program.sums import sum_of as sum  # noqa: A004  (read as fl.sum)
from flowrl.program.sums import term
from flowrl.program.tracer import is_eager
from flowrl.program.workflow import Workflow, workflow
from flowrl.specs import Sampling, cut, grammar, kl, loss
from flowrl.specs.names import refusing_others
from flowrl.wording import Unconfigured

if TYPE_CHECKING:
    from flowrl.api import Compiled, compile, eager, resume, run  # noqa: A004  (read as fl.compile)

    __version__: str

__all__ = [
    "Advantages",
    "BackendError",
    "CheckpointError",
    "Compiled",
    "ConfigError",
    "Critic",
    "DataError",
    "Environment",
    "Examples",
    "FlowError",
    "Graph",
    "GraphError",
    "Logprobs",
    "Mapped",
    "Pairs",
    "PlanError",
    "Policy",
    "Prompts",
    "Returns",
    "Reward",
    "RewardError",
    "RewardModel",
    "Rollout",
    "Samples",
    "Sampling",
    "SchedulerError",
    "Scores",
    "TokenRewards",
    "TraceError",
    "Values",
    "WorkerDied",
    "Workflow",
    "__version__",
    "advantage",
    "compile",
    "concat",
    "cut",
    "eager",
    "filter",
    "grammar",
    "interact",
    "is_eager",
    "kl",
    "load_workflow",
    "log",
    "loss",
    "map",
    "mean_of_children",
    "pair",
    "parent",
    "parse",
    "prompts_of",
    "replay",
    "resume",
    "run",
    "select",
    "shaping",
    "sum",
    "term",
    "weighted_sum",
    "where",
    "win_rate",
    "workflow",
]

# Warnings read the same in Python and on the command line.
logging.getLogger(__name__).addHandler(Unconfigured())

_LAZY = ("Compiled", "compile", "eager", "resume", "run")


if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            import importlib

            return getattr(importlib.import_module("flowrl.api"), name)
        if name != "__version__":
            refusing_others(__name__, __all__)(name)
        from importlib.metadata import version

        return version("flowrl")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
