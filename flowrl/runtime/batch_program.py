"""Runs the batch part of a lowered graph: what comes after a batch is delivered.

The streaming part (source, generate, score, filter) belongs to the rollout driver, sample by
sample. The rest (logprobs, advantage, update, sync) runs here node by node in the graph's order,
each by the function that the table names for its operation. Values are arrays by node and field.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from flowrl.algo import resolve_advantage, resolve_batch_advantage
from flowrl.algo.advantages import AdvantageBatch, Padding
from flowrl.backend.batch import Floats, SequenceBatch, TrainBatch
from flowrl.backend.protocols import OptimizerStep, UpdateSpec
from flowrl.errors import PlanError
from flowrl.graph import Graph, Node, Op, Unit
from flowrl.ids import NodeId, RoleName
from flowrl.plan import PlacementPlan
from flowrl.runtime.workers import PolicyWorker
from flowrl.specs import KL, AdvantageSpec, LossSpec, Sampling

__all__ = ["BatchProgram", "StepBatch", "split_groups"]

_log = logging.getLogger(__name__)

Value: TypeAlias = npt.NDArray[np.float32]


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """A delivered batch on its way through the graph.

    Attributes:
        sequences: Its N samples.
        values: Arrays by (node, field): `[N]` for sample units, `[T]` for token units.
        updates: What the optimizer did, in order.
        seconds: Wall time by operation.
    """

    sequences: SequenceBatch
    values: dict[tuple[NodeId, str], Value] = field(default_factory=dict)
    updates: list[OptimizerStep] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def split_groups(groups: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Cuts rows into `parts` mini-batches of whole groups, as even as groups allow.

    Args:
        groups: Group number of each row; equal ones are adjacent.
        parts: Mini-batches asked for; fewer come back where there are fewer groups.

    Returns:
        Row numbers of each mini-batch, in order.

    >>> split_groups([0, 0, 1, 1, 2, 2], 2)
    ((0, 1, 2, 3), (4, 5))
    """
    starts = [row for row in range(len(groups)) if row == 0 or groups[row] != groups[row - 1]]
    parts = min(parts, len(starts))
    if not parts:
        return ()
    pieces = np.array_split(np.array(starts), parts)
    cuts = [int(piece[0]) for piece in pieces] + [len(groups)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(cuts))


class BatchProgram:
    """The batch part of one stage's graph, ready to run.

    Args:
        graph: At the lowered level.
        plan: Of that graph; says how many mini-batches and rows an update takes at once.
        policies: Open workers by role.
        sampling: Of the rollouts that the batch comes from.
        publish: Publishes a role's new weights; called by sync nodes.
        before: Called before each node runs (the plan's residency switches).
        beat: Called after each optimizer update; something moved.

    Raises:
        PlanError: the graph has an operation that this executor cannot run.
    """

    def __init__(
        self,
        graph: Graph,
        plan: PlacementPlan,
        policies: Mapping[RoleName, PolicyWorker],
        sampling: Sampling,
        publish: Callable[[RoleName], None],
        before: Callable[[NodeId], None],
        beat: Callable[[], None],
    ) -> None:
        self._graph = graph
        self._policies = policies
        self._plan = plan
        self._temperature = sampling.temperature or 1.0  # greedy logprobs are those at 1
        self._max_tokens = sampling.max_tokens
        self._publish = publish
        self._before = before
        self._beat = beat
        streaming = (Op.SOURCE, Op.GENERATE, Op.SCORE, Op.FILTER)
        self._nodes = tuple(node for node in graph.nodes if node.op not in streaming)
        for node in self._nodes:
            if node.op not in _HANDLERS:
                raise PlanError(
                    f"the local executor cannot run {node.op!r}",
                    where=str(node.source or node.id),
                    expected=", ".join(sorted(_HANDLERS)),
                )

    def run(self, step: StepBatch) -> None:
        """Runs every node on a batch; without samples only `sync` is left out, like the rest."""
        if not len(step.sequences):
            return
        for node in self._nodes:
            started = time.monotonic()
            self._before(node.id)
            _HANDLERS[node.op](self, node, step)
            spent = time.monotonic() - started
            step.seconds[str(node.op)] = step.seconds.get(str(node.op), 0.0) + spent

    def _input(self, node: Node, argument: str, step: StepBatch, name: str) -> Value | None:
        """The field `name` of what feeds an argument; None where nothing does."""
        edge = self._graph.feeding(node.id, argument)
        return None if edge is None else step.values[edge.src, name]

    def _advantage(self, node: Node, step: StepBatch) -> None:
        spec = node.attr("spec")
        scores = self._input(node, "scores", step, "score")
        assert isinstance(spec, AdvantageSpec)
        assert scores is not None
        if spec.needs:
            values = self._token_advantage(node, spec, scores, step)
        else:
            values = resolve_advantage(spec)(scores, step.sequences.groups)
        step.values[node.id, "advantage"] = values

    def _token_advantage(
        self, node: Node, spec: AdvantageSpec, scores: Value, step: StepBatch
    ) -> Value:
        """An advantage that looks at tokens; float32 `[N]`, or `[T]` where it has one a token."""
        sequences = step.sequences
        places = Padding.of(sequences.offsets, sequences.response_mask)
        reference = self._input(node, "reference", step, "logprobs")
        drawn = (
            None if reference is None else self._input(node, "rollout", step, "rollout_logprobs")
        )
        batch = AdvantageBatch(
            scores=scores,
            groups=sequences.groups,
            mask=places.pad(sequences.response_mask),
            logprobs=None if drawn is None else places.pad(drawn),
            reference_logprobs=None if reference is None else places.pad(reference),
        )
        values = resolve_batch_advantage(spec)(batch).advantages
        return places.flat(values) if spec.per_token else values

    def _logprobs(self, node: Node, step: StepBatch) -> None:
        assert node.role is not None
        worker = self._policies[node.role]
        step.values[node.id, "logprobs"] = worker.train.logprobs(step.sequences, self._temperature)

    def _update(self, node: Node, step: StepBatch) -> None:
        loss, kl = node.attr("loss"), node.attr("kl")
        assert isinstance(loss, LossSpec)
        assert kl is None or isinstance(kl, KL)
        assert node.role is not None
        sequences = step.sequences
        batch = TrainBatch(
            sequences=sequences,
            behaviour_logprobs=self._behaviour(node, loss, step),
            reference_logprobs=self._input(node, "reference", step, "logprobs"),
            advantages=self._advantages(node, step),
        )
        spec = UpdateSpec(
            loss=loss,
            kl=kl,
            temperature=self._temperature,
            mini_batches=split_groups(sequences.groups.tolist(), self._plan.sizes.mini_batches),
            micro_batch=self._plan.operation(node.id).micro_batch,
            max_tokens=self._max_tokens,
        )
        worker = self._policies[node.role]
        worker.stale = True
        for rows in spec.mini_batches:
            # One call a mini-batch, so that a stall is told by an update, not by a whole step.
            step.updates += worker.train.update(batch, replace(spec, mini_batches=(rows,)))
            self._beat()

    def _advantages(self, node: Node, step: StepBatch) -> Floats | None:
        """float32 `[T]`: what feeds the update, 0 off the responses."""
        edge = self._graph.feeding(node.id, "advantages")
        if edge is None:
            return None
        values, sequences = step.values[edge.src, "advantage"], step.sequences
        field = self._graph.node(edge.src).output("advantage")
        if field is None or field.unit is not Unit.TOKENS:
            values = np.repeat(values, sequences.lengths)
        return np.where(sequences.response_mask, values, np.float32(0)).astype(np.float32)

    def _behaviour(self, node: Node, loss: LossSpec, step: StepBatch) -> Floats | None:
        if "behaviour_logprobs" not in loss.needs:
            return None
        return self._input(node, "rollout", step, "rollout_logprobs")

    def _sync(self, node: Node, step: StepBatch) -> None:
        assert node.role is not None
        self._publish(node.role)


_HANDLERS: Mapping[Op, Callable[[BatchProgram, Node, StepBatch], None]] = {
    Op.ADVANTAGE: BatchProgram._advantage,
    Op.LOGPROBS: BatchProgram._logprobs,
    Op.UPDATE: BatchProgram._update,
    Op.SYNC: BatchProgram._sync,
}
