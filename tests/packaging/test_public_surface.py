"""What flowrl exports, and what importing it costs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import flowrl
from flowrl import errors

HEAVY = (
    "torch",
    "transformers",
    "ray",
    "pydantic",
    "omegaconf",
    "yaml",
    "networkx",
    "numpy",
    "rich",
    "typer",
    "asyncio",
)

EXPORTED = [
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


def test_the_public_surface_is_this_and_nothing_else() -> None:
    assert list(flowrl.__all__) == EXPORTED
    for name in EXPORTED:
        assert getattr(flowrl, name) is not None
    assert set(EXPORTED) <= set(dir(flowrl))


def test_importing_flowrl_imports_nothing_heavy() -> None:
    code = f"import sys, flowrl; print(*[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


def test_tracing_and_planning_import_no_tensor_library() -> None:
    code = (
        "import sys, flowrl.compiler, flowrl.plan, flowrl.viz, flowrl.cluster, flowrl.passes, "
        "flowrl.rollout, flowrl.config.check, flowrl.backend.registry;"
        "print(*[m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


RUNS = {"flowrl.data", "flowrl.rollout", "flowrl.runtime", "flowrl.sim", "flowrl.backend.batch"}
"""Of flowrl, what runs or simulates workflows."""


@pytest.mark.parametrize(
    ("command", "spared"),
    [
        ("plan configs/grpo_qwen25_7b.yaml --cluster configs/clusters/h100_1x8.yaml", {"numpy.ma"}),
        ("plan configs/ppo_qwen25_7b.yaml --cluster configs/clusters/h100_8x8.yaml", {"numpy.ma"}),
        ("graph configs/quickstart.yaml --format text", {"numpy", "flowrl.plan.many"}),
        ("graph configs/ppo_rm.yaml --format text --level lowered", {"numpy", "flowrl.plan.many"}),
    ],
)
def test_commands_import_no_more_than_they_read(
    command: str, spared: set[str], repository: Path
) -> None:
    spared = spared | RUNS | {"torch", "transformers", "ray", "tokenizers", "rich", "networkx"}
    code = (
        "import sys\nfrom flowrl.cli import main\ntry:\n    main(sys.argv[2:])\nfinally:\n"
        "    print(*(m for m in sys.argv[1].split() if m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, " ".join(sorted(spared)), *command.split()],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=repository,
    )
    assert done.stdout
    assert done.stderr.split() == []


def test_the_tree_at_the_top_of_errors_is_the_tree_of_classes() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"^ {4}(?P<rail>[| ]*)[|`]-- (\w+)", errors.__doc__, flags=re.MULTILINE)
    parents = {0: "FlowError"}
    tree = {}
    for rail, name in drawn:
        depth = len(rail) // 4
        tree[name] = parents[depth]
        parents[depth + 1] = name
    public = {name: getattr(errors, name) for name in errors.__all__}
    classes = {name: value for name, value in public.items() if _is_error(value)}
    assert tree == {
        name: cls.__bases__[0].__name__ for name, cls in classes.items() if name != "FlowError"
    }
    assert {name for name in vars(errors) if _is_error(getattr(errors, name))} == set(classes)


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)
