"""The workflow language: a Python function that runs on symbolic handles and leaves a graph."""

from flowrl.program import advantage, filter, select, shaping  # noqa: A004  (read as fl.filter)
from flowrl.program.buffers import replay
from flowrl.program.children import mean_of_children, parent, prompts_of
from flowrl.program.formulas import log, map_of, weighted_sum
from flowrl.program.handles import (
    Advantages,
    Handle,
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
from flowrl.program.registry import import_file, load_workflow, registered_workflows
from flowrl.program.roles import Critic, Environment, Reward, RewardModel, Role
from flowrl.program.sets import Examples, Pairs, concat, pair, where
from flowrl.program.sums import sum_of, term
from flowrl.program.tracer import is_eager
from flowrl.program.workflow import Workflow, workflow

__all__ = [
    "Advantages",
    "Critic",
    "Environment",
    "Examples",
    "Handle",
    "Logprobs",
    "Mapped",
    "Pairs",
    "Policy",
    "Prompts",
    "Returns",
    "Reward",
    "RewardModel",
    "Role",
    "Rollout",
    "Samples",
    "Scores",
    "TokenRewards",
    "Values",
    "Workflow",
    "advantage",
    "concat",
    "filter",
    "import_file",
    "interact",
    "is_eager",
    "load_workflow",
    "log",
    "map_of",
    "mean_of_children",
    "pair",
    "parent",
    "parse",
    "prompts_of",
    "registered_workflows",
    "replay",
    "select",
    "shaping",
    "sum_of",
    "term",
    "weighted_sum",
    "where",
    "win_rate",
    "workflow",
]
