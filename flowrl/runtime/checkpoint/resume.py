"""Going on with a run: what must still be as it was, and what the user may change.

    open the folder -> latest checkpoint -> stages, steps, files, graphs are those it began with
    -> cut the logs back -> execute

With `accept_changes` a run continues with files that have changed since it began: each is named,
and from then on they are the run's own. Training data may then have other rows: the cursor keeps
its position if there are as many prompts, and begins a new epoch if there are more or fewer.
Samples that were generated before keep their tokens. The graph may have other numbers, but must
have the same nodes and edges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from flowrl.compiler import CompiledStage
from flowrl.config.schema import RunConfig
from flowrl.errors import CheckpointError, ConfigError
from flowrl.files import decode_json
from flowrl.graph import Graph, format_graph, graph_from_json, graph_to_json
from flowrl.observe.display import Display, open_display
from flowrl.observe.rows import RunInfo, Summary
from flowrl.observe.run_folder import RunFolder
from flowrl.runtime.checkpoint.run_files import InputFiles
from flowrl.runtime.checkpoint.store import Checkpoint, CheckpointStore, Position
from flowrl.runtime.driver.stage import part_of
from flowrl.runtime.executor import executor_of
from flowrl.runtime.run import config_yaml, execute, is_done
from flowrl.runtime.setup.user_inputs import RunInputs


def resume_local(
    config: RunConfig,
    stages: Sequence[CompiledStage],
    path: Path,
    *,
    display: Display | None = None,
    accept_changes: bool = False,
) -> tuple[Path, Summary]:
    """Goes on with a run from its latest checkpoint; from the start where it has none.

    A run that is finished stays as it is, unless its last stage now has more steps.

    Args:
        accept_changes: Goes on with files that have changed since the run began; see the module.

    Raises:
        CheckpointError: the checkpoint is damaged or of another run, or a file has changed.
        ConfigError: the last stage has fewer steps now than it has made.
        FlowError: whatever ends the run early.
    """
    executor_of(config).require_runnable(config, stages)
    with RunFolder.resume(path) as folder:
        store = CheckpointStore(folder.checkpoints, config.runtime.keep_checkpoints)
        checkpoint = store.latest()
        names = [stage.name for stage in stages]
        summary = folder.read_summary()
        if checkpoint is None and summary is not None:
            raise CheckpointError(
                "this run is finished, and its checkpoints are gone",
                where=str(store.folder),
                found="no whole checkpoint",
                hint=f"put its checkpoints back; to start again: flowrl run {folder.config_path}",
            )
        if checkpoint is not None:
            _check_position(checkpoint, stages, path)
            if summary is not None and _is_finished(checkpoint, stages):
                return folder.path, _show_finished(summary, folder, names, display)
        files = InputFiles(config, stages, folder.path)
        notes = _check_files(files, accept_changes)
        if checkpoint is None:
            notes = [f"{store.folder} has no checkpoint: the run starts again", *notes]
            folder.truncate_after(names, names[0], -1)
        else:
            position = checkpoint.position
            _check_graphs(stages[position.stage_index :], path, accept_changes)
            folder.truncate_after(names, position.stage, position.step)
            if accept_changes:
                checkpoint = _without_fingerprints(checkpoint)
        files.write()
        folder.write_config(config_yaml(config))  # with what this resumption changes
        for stage in stages:  # also if a checkpoint was edited by hand
            folder.write_plan(stage.name, stage.plan.to_dict(), stage.plan.to_yaml())
            if accept_changes:
                text, data = format_graph(stage.graph), graph_to_json(stage.graph)
                folder.write_graph(stage.name, text, data)
        with closing(RunInputs(config, stages, folder.path / "models")) as inputs:
            done = execute(folder, inputs, checkpoint, display, notes)
        return folder.path, done


def _check_position(checkpoint: Checkpoint, stages: Sequence[CompiledStage], path: Path) -> None:
    """Checks that the checkpoint is of a step that these stages have."""
    position, names = checkpoint.position, [stage.name for stage in stages]
    if position.stage not in names or names.index(position.stage) != position.stage_index:
        raise CheckpointError(
            "the checkpoint is of another sequence of stages",
            where=str(checkpoint.path),
            found=f"stage {position.stage!r} at place {position.stage_index}",
            expected=f"stages {', '.join(names)}",
            hint="resume it with the stages that it began with, or start a new run",
        )
    _check_steps(stages[position.stage_index], position, path)


def _check_steps(stage: CompiledStage, position: Position, path: Path) -> None:
    if position.step > stage.config.train.steps:
        raise ConfigError(
            f"the run has made {position.step} steps of {stage.name!r} already",
            where=f"{path} (train.steps)",
            found=f"train.steps={stage.config.train.steps}",
            expected=f"at least {position.step}",
            hint="name more steps, or start a new run with fewer",
        )


def _is_finished(checkpoint: Checkpoint, stages: Sequence[CompiledStage]) -> bool:
    """True if nothing is left to do: the last stage made all its steps, or stopped early."""
    position = checkpoint.position
    last = position.stage_index == len(stages) - 1
    return last and is_done(checkpoint, stages[position.stage_index])


def _check_files(files: InputFiles, accept_changes: bool) -> list[str]:
    """Returns a note for each file that has changed.

    Raises:
        CheckpointError: a file has changed, and changes are not accepted.
    """
    changes = files.changes()
    if changes is None:
        return ["the run folder has no inputs.json, so its files are not compared"]
    if not accept_changes:
        files.refuse_changes(changes)
    return [f"goes on with a changed file: {change}" for change in changes]


def _check_graphs(stages: Sequence[CompiledStage], path: Path, accept_changes: bool) -> None:
    """Checks that the graphs are those the run began with; source lines may have moved."""
    for stage in stages:
        written = path / f"graph.{stage.name}.json"
        if not written.is_file():
            continue
        try:
            began = graph_from_json(decode_json(written.read_bytes()))
        except ValueError as error:
            raise CheckpointError(
                "the graph of a run cannot be read",
                where=str(written),
                found=str(error),
                hint="put the file back as it was; without it, graphs are not compared",
            ) from None
        if _without_costs(began) == _without_costs(stage.graph):
            continue
        if accept_changes and _structure(began) == _structure(stage.graph):
            continue
        raise CheckpointError(
            f"the workflow of stage {stage.name!r} is not the one that this run began with",
            where=str(written),
            found=f"workflow {stage.workflow.name!r} ({stage.workflow.source})",
            hint="undo the change of the workflow, or start a new run",
        )


def _without_costs(graph: Graph) -> str:
    """Returns the graph without the costs on the device for which it was planned."""
    return format_graph(graph.with_nodes(node.without_attrs("cost") for node in graph.nodes))


def _structure(graph: Graph) -> object:
    """Returns the nodes and edges that a checkpoint's state needs, without attributes."""
    return [(node.id, node.op, node.role) for node in graph.nodes], graph.edges


def _without_fingerprints(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint without the fingerprints by which it refuses other data."""
    stage = part_of(checkpoint.state, "stage")
    cursors = part_of(stage, "cursors")
    state = {key: value for key, value in checkpoint.state.items() if key != "held_out"}
    without = {node: _without_fingerprint(cursor) for node, cursor in cursors.items()}
    return replace(checkpoint, state={**state, "stage": {**stage, "cursors": without}})


def _without_fingerprint(cursor: object) -> object:
    """Removes data fingerprints from the cursor of a source, or of each source of a mixture."""
    if not isinstance(cursor, Mapping):
        return cursor
    return {k: _without_fingerprint(v) for k, v in cursor.items() if k != "fingerprint"}


def _show_finished(
    summary: Summary, folder: RunFolder, stages: Sequence[str], display: Display | None
) -> Summary:
    screen = open_display() if display is None else display
    screen.start(RunInfo(name=summary.name, folder=folder.path, stages=tuple(stages)))
    screen.note("this run is finished; a larger train.steps goes on with it")
    screen.end(summary)
    if display is None:
        screen.close()
    return summary
