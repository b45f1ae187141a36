"""Measures a model on the held-out sets of a config, without a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from flowrl.compiler import CompiledStage
from flowrl.config.schema import RunConfig
from flowrl.errors import ConfigError
from flowrl.observe.display import SilentDisplay
from flowrl.observe.rows import EvaluationRow
from flowrl.observe.run_folder import RunFolder
from flowrl.runtime.executor import executor_of
from flowrl.runtime.setup.open_run import OpenRun
from flowrl.runtime.setup.user_inputs import RunInputs


def evaluate_local(config: RunConfig, stages: Sequence[CompiledStage]) -> list[EvaluationRow]:
    """Returns a row for each held-out set: what the policy of the last stage scores as it begins.

    Raises:
        FlowError: this executor cannot run the stages, an input cannot be used, or the config
            measures nothing.
    """
    executor_of(config).require_runnable(config, stages)
    with (
        TemporaryDirectory(prefix="flowrl-eval-") as parent,
        closing(RunInputs(config, stages)) as inputs,
        RunFolder.create(Path(parent), "eval") as folder,
    ):
        inputs.settle(folder.path / "models")
        opened = OpenRun(config, stages, folder, inputs, SilentDisplay(), stop=lambda: False)
        with closing(opened):
            opened.open(None)
            rows = opened.evaluate(stages[-1].name, 0, None)
    if not rows:
        raise ConfigError(
            "the config measures nothing on held-out data",
            where="eval",
            expected="data.eval or eval.sets, a policy that is trained, and rewards.terms or an "
            "environment",
            hint="set data.eval and rewards.terms",
        )
    return rows
