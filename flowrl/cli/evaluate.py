"""`flowrl eval`: measures a model on the held-out sets of a config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.errors import CheckpointError, ConfigError
from flowrl.graph import Graph, Op

if TYPE_CHECKING:
    from flowrl.observe.rows import EvaluationRow


def run(
    path: Path, config: Path | None, overrides: Sequence[str], *, as_json: bool = False
) -> None:
    """Prints the metrics of a model with their standard errors, a line for each held-out set.

    Args:
        path: A Hugging Face folder, or a run folder, whose model is measured.
        config: The config with the held-out sets and the rewards; that of the run by default.

    Raises:
        FlowError: The model, the config or an input cannot be used.
    """
    from flowrl import api
    from flowrl.config.load import load_config, locating
    from flowrl.files import encode_json
    from flowrl.graph.sample_trees import evaluated_role
    from flowrl.runtime.evaluate import evaluate_local

    is_run = (path / "config.yaml").is_file()
    of_run = path if is_run else path.parent  # runs/mine/best has the config of runs/mine
    if config is None and not (of_run / "config.yaml").is_file():
        raise ConfigError(
            "a model folder is measured by a config",
            where="command line",
            found=str(path),
            hint=f"flowrl eval {path} CONFIG",
        )
    source = of_run / "config.yaml" if config is None else config
    loaded = load_config(source, overrides)
    last = loaded.config.stages[-1]
    graphs = api.trace(loaded)
    role = evaluated_role([graphs[last]])
    if role is None:
        raise ConfigError(
            "the config has no policy to measure on held-out data",
            where=str(source),
            expected="a last stage that trains a policy",
            hint="name a config whose last stage updates the policy that is measured",
        )
    model = _model_of_run(path, role) if is_run else path
    models = {role: model, **_others_of_run(of_run, graphs[last], role)}
    only = [f"stages=[{last}]"]
    for name, folder in models.items():
        # What began as a copy has weights of its own by now.
        only += [f"roles.{name}.copy_of=null", f"roles.{name}.model={folder}"]
    loaded = load_config(source, [*overrides, *only])
    with locating(loaded):
        compiled = api.compile(None, loaded)
        rows = evaluate_local(compiled.config, compiled.stages)
    if as_json:
        print(encode_json({"model": str(model), "sets": [row.to_json() for row in rows]}), end="")
        return
    print(f"model {model}, config {source}")
    for row in rows:
        print(_line(row))


def _model_of_run(path: Path, role: str) -> Path:
    """Returns the model of a run: the exported one, or that of its newest checkpoint."""
    if (path / "model" / "config.json").is_file():
        return path / "model"
    saved = sorted(path.glob(f"checkpoints/*/{role}/model"))
    whole = [model for model in saved if (model.parents[1] / "MANIFEST.json").is_file()]
    if not whole:
        raise CheckpointError(
            "this run has no model yet",
            where=str(path),
            expected="model/, which a run writes at its end, or a checkpoint",
            hint="name a model folder instead, or finish the run (flowrl run --resume)",
        )
    return whole[-1]


def _others_of_run(run: Path, graph: Graph, role: str) -> dict[str, Path]:
    """Returns the models of the policies that take turns with a role, where a run trained them."""
    folders: dict[str, Path] = {}
    for node in graph.of_op(Op.INTERACT):
        policies = [str(policy.role) for policy in graph.generators_of(node)]
        if role in policies:
            folders |= {name: run / "trained" / name for name in policies if name != role}
    return {name: folder for name, folder in folders.items() if folder.is_dir()}


def _line(row: EvaluationRow) -> str:
    """Returns `data.eval: 512 prompts x 4 at temperature 1: accuracy 0.412 (se 0.011)  ...`."""
    numbers = "  ".join(
        f"{name} {value:.3f}" + (f" (se {row.errors[name]:.3f})" if name in row.errors else "")
        for name, value in row.metrics.items()
    )
    name = row.name or "data.eval"
    return (
        f"{name}: {row.num} prompts x {row.samples} at temperature {row.temperature:g}: {numbers}"
    )
