"""The workflow language: a Python function that runs on symbolic handles and leaves a graph."""

from flowrl.program import advantage, filter  # noqa: A004  (read as fl.filter)
from flowrl.program.handles import Advantages, Handle, Logprobs, Rollout, Samples, Scores
from flowrl.program.registry import import_file, load_workflow, registered_workflows
from flowrl.program.roles import Examples, Policy, Prompts, Reward, Role
from flowrl.program.workflow import Workflow, workflow

__all__ = [
    "Advantages",
    "Examples",
    "Handle",
    "Logprobs",
    "Policy",
    "Prompts",
    "Reward",
    "Role",
    "Rollout",
    "Samples",
    "Scores",
    "Workflow",
    "advantage",
    "filter",
    "import_file",
    "load_workflow",
    "registered_workflows",
    "workflow",
]
