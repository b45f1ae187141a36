"""One stage of a run: steps of a workflow, each from data to published weights.

    take rows from every source -> for each rollout: offer them, collect samples -> batch program

Rollouts take turns, in the order of the graph: they may share an engine and scorers, whose answers
would otherwise reach the wrong driver. A rollout whose samples others answer goes on together with
these (`flowrl.runtime.driver.rollout_tree`). Steps count from 1; between steps a stage can be
written to a checkpoint and resumed in another process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flowrl.backend.batch import Floats
from flowrl.data import PromptItem
from flowrl.errors import CheckpointError
from flowrl.graph import Op
from flowrl.ids import EngineId, NodeId, RoleName
from flowrl.observe.run_status import RolloutStatus
from flowrl.observe.scale_requests import RequestBox
from flowrl.runtime.checkpoint.unused_samples import UNUSED, UnusedSamples, write_unused
from flowrl.runtime.driver.batch_program import BatchProgram
from flowrl.runtime.driver.collected_batch import FailureBudget
from flowrl.runtime.driver.graph_parts import role_of
from flowrl.runtime.driver.payloads import GroupRows, StepBatch, receive_rollout
from flowrl.runtime.driver.replay import REPLAYED, ReplayBuffer
from flowrl.runtime.driver.rollout_driver import RolloutDriver
from flowrl.runtime.driver.rollout_tree import (
    OpenRollout,
    RolloutTree,
    drop_incomplete,
    joined_rollouts,
    members_of,
    rollout_trees,
)
from flowrl.runtime.driver.scaling import Scaling
from flowrl.runtime.driver.sources import Responses, RowSamples, Source, split_rows
from flowrl.runtime.driver.step_report import GeneratedRollout, StepReport, StepResult
from flowrl.runtime.local.engine_fleet import EngineFleet


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResources:
    """What a stage works with.

    Attributes:
        program: The batch part of its graph.
        sources: Data of the source nodes that take rows, in the graph's order.
        row_samples: The source nodes whose samples come with rows.
        rollouts: The open rollouts, in the graph's order.
        failures: Rewards that may fail; a step that is given up spends none.
        report: Makes a step's rows.
        fleets: The engines of policies that have theirs in processes of their own.
    """

    program: BatchProgram
    sources: Sequence[Source]
    row_samples: Sequence[RowSamples]
    rollouts: Sequence[OpenRollout]
    failures: FailureBudget
    report: StepReport
    fleets: Mapping[RoleName, EngineFleet]


class Stage:
    """Steps one by one.

    Attributes:
        has_learned: A step was given up that had changed weights, so that `state` is no longer
            theirs. The steps of this class are given up in rollouts only, before anything learns.
    """

    has_learned = False

    def __init__(self, resources: StageResources) -> None:
        self._program, self._report = resources.program, resources.report
        self._row_samples = resources.row_samples
        self._sources = {source.node: source for source in resources.sources}
        self._rollouts = resources.rollouts
        self._failures = resources.failures
        self._fleets = resources.fleets
        self._observed = _observed(self._rollouts, self._report)
        # A counterpart's group must be there where a baseline or a map puts rollouts side by side.
        self._joined = joined_rollouts(self._program.parts)
        self._trees: Sequence[RolloutTree] = rollout_trees(self._rollouts)
        self._scaling: Scaling | None = None
        self._order = {rollout.node: place for place, rollout in enumerate(self._rollouts)}
        self._collecting: RolloutTree | RolloutDriver | None = None
        self._waits_for = ""
        self._unused: dict[NodeId, UnusedSamples] = {}  # at the last boundary
        self._boundary = self._written()

    @property
    def buffers(self) -> Mapping[NodeId, ReplayBuffer]:
        """What each replay node holds at the last boundary."""
        return self._program.buffers

    def scaled_by(self, box: RequestBox) -> None:
        """Has engines join and leave from now on, as somebody asks for it."""
        self._scaling = Scaling(box, self._rollouts, self._fleets)
        for tree in self._trees:
            tree.scale = self._scaling.look

    def publish(self, engine: EngineId, version: int) -> None:
        """Reports to the rollouts that sample from `engine` that it serves weights `version`.

        Engines in processes of their own are sent the weights first.
        """
        for fleet in self._fleets.values():
            if engine in fleet.engines:
                fleet.publish(fleet.written(version))
        for rollout in self._rollouts:
            if rollout.driver.serves(engine):
                rollout.driver.publish(version)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Keeps scorers and environments unused while the block runs."""
        yield

    def save(self, folder: Path) -> None:
        """Writes the samples that belong to the last `state` into a checkpoint's folder."""
        for node, unused in self._unused.items():
            if unused:
                write_unused(folder / UNUSED / node, unused)
        for node, buffer in self._program.buffers.items():
            buffer.save(folder / REPLAYED / node)

    def close(self) -> None:
        """Ends the engines and journals of the stage; idempotent."""
        with ExitStack() as stack:
            for fleet in self._fleets.values():
                stack.callback(fleet.close)
            if self._scaling is not None:
                stack.callback(self._scaling.close)
            for rollout in self._rollouts:
                if rollout.journal is not None:
                    stack.callback(rollout.journal.close)

    def describe(self) -> str:
        """Returns who waits for whom, in one line."""
        collecting = self._collecting
        return f"the driver waits: {self.doing}" if collecting is None else collecting.describe()

    @property
    def doing(self) -> str:
        """What the trainer does, for people."""
        if self._collecting is not None:
            return "a batch is collected"
        return self._waits_for or self._program.doing or "between two steps"

    def status(self) -> list[RolloutStatus]:
        """Returns what each rollout does; may be called in another thread."""
        return [rollout.driver.status(rollout.node) for rollout in self._rollouts]

    def step(self, number: int) -> StepResult:
        """Makes step `number`. Interrupted before its update, it has changed no weights."""
        self._waits_for = "engines are being opened"
        for fleet in self._fleets.values():
            fleet.wait_ready()  # loading a library is no part of a step
        self._waits_for = ""
        started = time.monotonic()
        step, items = StepBatch(number=number), self._take(self._sources)
        generated = self._generate(step, items)
        self._give_rows(step, items, generated)
        self._program.run(step)
        return self._end(step, generated, started)

    def pair_margins(
        self, items: Sequence[PromptItem], responses: Responses
    ) -> dict[RoleName, Floats]:
        """Measures pairs with the models that the stage trains on pairs of the data.

        Args:
            items: Rows with two responses, which no step has trained on. Where `fl.where` splits
                the rows of a stage, those are measured whose like it trains on.
            responses: Their responses.

        Returns:
            Of each role float32 `[P]`, as in `BatchProgram.pair_margins`.
        """
        parts, found = self._program.parts, dict[RoleName, list[Floats]]()
        for rows in self._row_samples:
            if not rows.pairs:
                continue
            held_out, source = replace(rows, responses=responses), parts.data_of(rows.prompts)
            own = split_rows(parts.graph, {source: items})[rows.prompts]
            updates = [n for n in parts.graph.of_op(Op.UPDATE) if parts.made[n.id] == rows.node]
            size = self._sources[source].num
            for start in range(0, len(own), size):
                step = StepBatch()
                held_out.give(own[start : start + size], step)
                for node in updates:
                    margins = self._program.pair_margins(node, step)
                    if margins is not None:
                        found.setdefault(role_of(node), []).append(margins)
        return {role: np.concatenate(margins) for role, margins in found.items()}

    def _take(self, sources: Iterable[NodeId]) -> dict[NodeId, Sequence[PromptItem]]:
        """Takes the rows of a step from sources; returns prompts by the node that gives them."""
        return self._split({node: self._sources[node].take() for node in sources})

    def _split(
        self, rows: Mapping[NodeId, Sequence[PromptItem]]
    ) -> dict[NodeId, Sequence[PromptItem]]:
        """Returns prompts by the node that gives them, of those of sources."""
        return split_rows(self._program.parts.graph, rows)

    def _give_rows(
        self,
        step: StepBatch,
        items: Mapping[NodeId, Sequence[PromptItem]],
        generated: Sequence[GeneratedRollout] = (),
    ) -> None:
        """Puts the samples that come with rows into the step.

        Args:
            items: Rows by the node that took them.
            generated: Rollouts of the step, whose prompts may be others than `items`: further ones
                of a batch that is refilled, or of a rollout ahead of the trainer.
        """
        parts = self._program.parts
        rows = {node: {i.group: i for i in items[node]} for node in self._sources if node in items}
        for rollout in [each for each in generated if each.part.parent is None]:
            of_step = rows.setdefault(parts.data_of(rollout.part.source), {})
            of_step.update({item.group: item for item in rollout.items})
        whole = split_rows(
            parts.graph, {node: tuple(found.values()) for node, found in rows.items()}
        )
        for samples in self._row_samples:
            samples.give(whole[samples.prompts], step)

    def _end(
        self, step: StepBatch, generated: Sequence[GeneratedRollout], started: float
    ) -> StepResult:
        """Ends a step: assigns scores, and writes the state of the next boundary."""
        self._report.assign_scores(step, generated)
        self._observe(generated)
        for buffer in self._program.buffers.values():
            buffer.commit()
        self._boundary = self._written()
        self._flush_journals()
        return self._report.result(step, generated, started)

    def _flush_journals(self) -> None:
        for rollout in self._rollouts:
            if rollout.journal is not None:
                rollout.journal.flush()

    def state(self) -> dict[str, object]:
        """Returns JSON of the last boundary: after the last whole step, also within the next."""
        return self._boundary

    def _written(self) -> dict[str, object]:
        self._unused = {rollout.part.node.id: rollout.driver.unused() for rollout in self._rollouts}
        schedulers = {
            rollout.part.node.id: rollout.driver.scheduler.to_json() for rollout in self._rollouts
        }
        return {**self._written_sources(), "schedulers": schedulers}

    def _written_sources(self) -> dict[str, object]:
        return {
            "cursors": {node: source.cursor.to_json() for node, source in self._sources.items()},
            "kl_coefficients": dict(self._program.kl_coefficients),
            "replayed": {node: buffer.state() for node, buffer in self._program.buffers.items()},
        }

    def _generate(
        self, step: StepBatch, items: Mapping[NodeId, Sequence[PromptItem]]
    ) -> list[GeneratedRollout]:
        """Collects every rollout's samples and puts them into the step."""
        failed = self._failures.failed
        generated: list[GeneratedRollout] = []
        try:
            for tree in self._trees:
                self._collecting = tree
                generated += tree.collect(step.number, items[tree.root.part.source])
        except BaseException:
            # The step is given up. When a resumed run makes it again, its rewards fail again.
            self._failures.failed = failed
            raise
        finally:
            self._collecting = None
        generated.sort(key=lambda result: self._order[result.part.node.id])
        drop_incomplete(generated, self._joined)
        for result in generated:
            receive_rollout(self._program.parts, result.part, step, delivered_groups(result))
        return generated

    def _observe(self, generated: Sequence[GeneratedRollout]) -> None:
        """Reports the mean score of each prompt's group to a curriculum, in offer order."""
        for result in generated:
            source = self._sources[self._program.parts.data_of(result.part.source)]
            if not source.observes or result.part.node.id not in self._observed:
                continue
            members = members_of(result.collected)
            for item in result.items:
                scores = [p.score for _, p in members.get(item.group, ()) if p.score is not None]
                if scores:
                    source.cursor.observe(item.index, float(np.mean(scores)))


def delivered_groups(generated: GeneratedRollout) -> Sequence[GroupRows]:
    """Returns the groups that the batch part gets, in offer order."""
    if not generated.part.whole:
        return generated.collected.groups
    members = members_of(generated.collected)
    return [(item.group, members[item.group]) for item in generated.items if item.group in members]


def _observed(rollouts: Sequence[OpenRollout], report: StepReport) -> set[NodeId]:
    """Chooses for each source the rollout whose scores rate its prompts: the trained one."""
    chosen: dict[NodeId, NodeId] = {}
    for rollout in rollouts:
        node, source = rollout.part.node.id, rollout.part.source
        if rollout.part.parent is not None:
            continue
        if source not in chosen or node == report.main:
            chosen[source] = node
    return set(chosen.values())


def part_of(state: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Returns a named part of a written state.

    Raises:
        CheckpointError: it is not there.
    """
    part = state.get(name)
    if not isinstance(part, Mapping):
        raise CheckpointError(f"the checkpoint holds no {name}", where="state.json")
    return part
