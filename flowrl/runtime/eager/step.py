"""One step of a program that runs line by line: each operation is carried out when it is called.

The lowered graph defines each operation, so that defaults, old logprobs and the like are those of
the compiled run, and its order is kept:

- Rollouts, rule scores, and the maps and filters on them run at their lines (`EagerRollout`).
- The first line that works on whole batches hands over the rollouts that it needs, or all of them
  if it runs a model: as in the compiled run, everything is sampled before a model computes or
  learns. Lines further down that use those rollouts find their results ready.
- Nodes of the batch part run at their lines, in the order of the lowered graph: before each line
  those that passes inserted in front of it, after it the syncs of its weights.

The program calls all of its operations; the lowered graph lacks those that a pass merged into
another or dropped. The node mapping gives the lowered node of each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from flowrl.backend.batch import Mask
from flowrl.compiler import CompiledStage
from flowrl.data import PromptItem
from flowrl.errors import TraceError
from flowrl.graph import DType, Field, Graph, Node, Op, Unit
from flowrl.graph.signatures import PREFERRED, PROMPT, ROLLOUT_LOGPROBS, TOKENS
from flowrl.graph.streaming import is_rule_score
from flowrl.ids import NodeId
from flowrl.passes import PassRecord, run_passes
from flowrl.passes.simplify import ancestors
from flowrl.program.values import SamplesValue, samples_summary, shortened
from flowrl.runtime.driver.batch_program import BatchProgram
from flowrl.runtime.driver.graph_parts import GraphParts
from flowrl.runtime.driver.payloads import (
    Array,
    SampleSet,
    StepBatch,
    StepValues,
    receive_rollout,
    sample_set,
)
from flowrl.runtime.driver.rollout_tree import drop_incomplete, joined_rollouts
from flowrl.runtime.driver.stage import delivered_groups
from flowrl.runtime.driver.step_report import GeneratedRollout
from flowrl.runtime.driver.texts import Texts
from flowrl.runtime.eager.rollout import EagerRollout, VisibleResults


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMapping:
    """Maps traced nodes that the lowered graph lacks.

    Attributes:
        merged: The lowered node with the same values, by traced node.
        dropped: The pass that dropped each of the other nodes.
    """

    merged: Mapping[NodeId, NodeId]
    dropped: Mapping[NodeId, str]

    def lowered_id(self, node: NodeId) -> NodeId:
        """Returns the node with the values of `node`: itself, or the one it was merged into."""
        return self.merged.get(node, node)


def node_mapping_of(stage: CompiledStage) -> NodeMapping:
    """Runs the passes once more, and looks where each node goes."""
    merged: dict[NodeId, NodeId] = {}
    dropped: dict[NodeId, str] = {}

    def note(record: PassRecord) -> None:
        left = {node.id for node in record.after.nodes}
        for node in record.before.nodes:
            if node.id not in left:
                other = _reader_now_reads(record.before, record.after, node.id)
                if other is None:
                    dropped[node.id] = record.name
                else:
                    merged[node.id] = other

    run_passes(stage.traced, stage.context, observer=note)
    # The node into which another was merged may be dropped later, with all its readers.
    for node, other in list(merged.items()):
        if other in dropped:
            del merged[node]
            dropped[node] = dropped[other]
    return NodeMapping(merged=merged, dropped=dropped)


def _reader_now_reads(before: Graph, after: Graph, node: NodeId) -> NodeId | None:
    """Returns the node that a reader of a removed node reads in its place."""
    for edge in before.edges:
        if edge.src == node:
            now = after.feeding(edge.dst, edge.argument)
            if now is not None:
                return now.src
    return None


_OF_MODELS = (Op.LOGPROBS, Op.VALUES, Op.UPDATE, Op.SYNC)


class EagerStep:
    """See the module.

    Args:
        program: The batch part of the lowered graph.
        traced: The graph that the program was compiled to.
        node_mapping: Maps the traced nodes that the lowered graph lacks.
        rollouts: The rollouts of the step, in the graph's order.
        visible: Holds rollouts until they are handed over.
        batch: The step's samples and values; those of data sources are there.
        items: Rows of each source.
        stop: A true value ends the step, while it has changed no weights.

    Attributes:
        has_learned: Weights have changed since the step began.
    """

    def __init__(
        self,
        *,
        program: BatchProgram,
        traced: Graph,
        node_mapping: NodeMapping,
        rollouts: Sequence[EagerRollout],
        visible: VisibleResults,
        batch: StepBatch,
        items: Mapping[NodeId, Sequence[PromptItem]],
        stop: Callable[[], bool],
    ) -> None:
        self.has_learned = False
        self._program = program
        self._parts = program.parts
        self._traced = {node.id: node for node in traced.nodes}
        self._lowered = {node.id: node for node in program.parts.graph.nodes}
        self._node_mapping = node_mapping
        self._rollouts = {rollout.node.id: rollout for rollout in rollouts}
        self._joined = joined_rollouts(program.parts)
        self._together = _handed_over_together(program.parts, self._joined)
        self._shown: set[NodeId] = set()
        self._handed_over: set[NodeId] = {node.id for node in program.parts.sources}
        self._visible = visible.batch
        self._visible_maps = visible
        self._batch = batch
        self._items = items
        self._stop = stop
        self._pending = list(program.parts.batch)
        self._places = {node.id: place for place, node in enumerate(program.parts.batch)}

    # Lines

    def run(self, node_id: NodeId) -> None:
        """Carries out the operation of a traced node.

        Raises:
            KeyboardInterrupt: `stop` returned true.
        """
        if self._stop() and not self.has_learned:
            raise KeyboardInterrupt
        node = self._lowered.get(node_id)
        if node is None or node.op is Op.SOURCE:
            return
        rollout = self._rollouts.get(node_id)
        if rollout is not None:
            self._generate(rollout)
        elif node.region is not None:
            return  # the policy's side of an interact, which is generated as one
        elif self._parts.streams(node_id):
            self._show(node)
        elif node_id in self._places:
            self._work_up_to(node)

    def finish(self) -> list[GeneratedRollout]:
        """Runs nodes without a line of their own, and returns the rollouts in the graph's order."""
        self._hand_over(set(self._rollouts))
        for node in tuple(self._pending):
            self._run(node)
        return [rollout.hand_over() for rollout in self._rollouts.values()]

    def _show(self, node: Node) -> None:
        """Runs the line of a score, a map or a filter of a rollout; once."""
        if node.id not in self._shown:
            self._shown.add(node.id)
            self._rollouts[self._parts.origin(node.id)].show(node)

    def _generate(self, rollout: EagerRollout) -> None:
        """Generates a rollout, after the parents of its samples and the filter that keeps them."""
        part = rollout.rollout.part
        if part.parents is not None and part.parent is not None:
            self._generate(self._rollouts[part.parent])
            needed = ancestors(self._parts.graph, [part.parents], within_step=True)
            for node in self._lowered.values():
                if node.id in needed and self._parts.origin(node.id) == part.parent != node.id:
                    self._show(node)
        rollout.generate()

    def _work_up_to(self, node: Node) -> None:
        """Runs a node of the batch part, and the nodes before it in the lowered graph."""
        self._hand_over(self._rollouts_for(node))
        place = self._places[node.id]
        for other in tuple(self._pending):
            if self._places[other.id] <= place and self._is_ready(other):
                self._run(other)
        for other in self._parts.batch[place + 1 :]:
            if other.op is not Op.SYNC or other.id in self._traced or other not in self._pending:
                break
            self._run(other)

    def _run(self, node: Node) -> None:
        self._pending.remove(node)
        self.has_learned = self.has_learned or node.op in (Op.UPDATE, Op.SYNC)
        if node.op is Op.MAP and self._parts.streams(node.id):
            self._visible_maps.run_map(node, self._batch)
        else:
            self._program.run_node(node, self._batch)

    # Rollouts

    def _origins(self, node: Node) -> set[NodeId]:
        """Rollouts and sources that a node reads of."""
        reads = self._parts.graph.in_edges(node.id)
        return {root for e in reads if not e.carried for root in self._parts.roots(e.src)}

    def _is_ready(self, node: Node) -> bool:
        return self._origins(node) <= self._handed_over

    def _rollouts_for(self, node: Node) -> set[NodeId]:
        """Returns the rollouts that must be there before a node runs."""
        if node.op in _OF_MODELS or (node.op is Op.SCORE and not is_rule_score(node)):
            return set(self._rollouts)
        origins = self._origins(node)
        for together in self._together:
            if together & origins:
                origins |= together
        return origins & set(self._rollouts)

    def _hand_over(self, wanted: set[NodeId]) -> None:
        """Puts rollouts into the batch, together with those that they are compared with."""
        ids = list(self._rollouts)
        last = max((ids.index(node) for node in wanted), default=-1)
        for rollout in list(self._rollouts.values())[: last + 1]:
            self._generate(rollout)
        for node in ids:
            if node not in wanted or node in self._handed_over:
                continue
            joined = next(group for group in self._together if node in group)
            together = [self._rollouts[each] for each in ids if each in joined]
            for rollout in together:
                self._generate(rollout)
            generated = [rollout.hand_over() for rollout in together]
            drop_incomplete(generated, self._joined)
            for rollout, result in zip(together, generated, strict=True):
                rollout.keep_delivered(result)
                receive_rollout(self._parts, result.part, self._batch, delivered_groups(result))
                self._handed_over.add(rollout.node.id)

    # Values

    def value(self, node_id: NodeId, fields: Sequence[Field]) -> object:
        """Returns the value of a node; see `Handle.value`. For an update, its optimizer steps.

        Raises:
            TraceError: a pass left the node out.
        """
        node = self._node(node_id)
        match node.op:
            case Op.SOURCE | Op.WHERE if node.output(PROMPT.name) is not None:
                return tuple(self._items[node.id])
            case Op.PROMPTS_OF:
                return tuple(self._prompts(node))
            case Op.UPDATE:
                return tuple(self._batch.updates.get(node.id, ()))
            case Op.LOG:
                return self._batch.logged.get(str(node.attr("name")))
            case _ if is_of_samples(fields):
                return self._samples(node)
            case _:
                arrays = arrays_of(node, fields, self._batch_of(node))
                return arrays if len(arrays) != 1 else next(iter(arrays.values()))

    def text_of_value(self, node_id: NodeId, fields: Sequence[Field]) -> str:
        """Returns the value of a node as one line of text."""
        node_id = self._node_mapping.lowered_id(node_id)
        if node_id in self._node_mapping.dropped:
            return f"left out by {self._node_mapping.dropped[node_id]}"
        node = self._node(node_id)
        if node.op is Op.PROMPTS_OF:
            return prompts_text([item.prompt for item in self._prompts(node)])
        if node.output(PROMPT.name) is not None:
            return prompts_text([item.prompt for item in self._items[node.id]])
        if is_of_samples(fields):
            return samples_summary(self._samples(node))
        batch = self._batch_of(node)
        return arrays_text(arrays_of(node, fields, batch), fields, self._mask(node, batch))

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes of the lowered graph, in order."""
        return tuple(self._lowered)

    def node(self, node_id: str) -> Node:
        """Returns a node of the lowered graph, or the one that a traced node was merged into.

        Raises:
            KeyError: no such node.
            TraceError: a pass left it out.
        """
        if node_id not in self._traced and node_id not in self._lowered:
            raise KeyError(f"no node {node_id!r}; there are {', '.join(self._lowered)}")
        return self._node(NodeId(node_id))

    def _node(self, node_id: NodeId) -> Node:
        node_id = self._node_mapping.lowered_id(node_id)
        if node_id in self._lowered:
            return self._lowered[node_id]
        name = self._node_mapping.dropped[node_id]
        raise TraceError(
            f"{node_id} has no value: the pass {name} left it out, as in the compiled program",
            where=str(self._traced[node_id].source or node_id),
            hint="no update, sync or log needs what it gives, directly or not",
        )

    def _prompts(self, node: Node) -> Sequence[PromptItem]:
        """Returns the prompts that a node makes of samples."""
        answers = (r for r in self._rollouts.values() if r.rollout.part.prompts == node)
        rollout = next(answers)  # a pass drops prompts that nothing answers
        return rollout.items or rollout.prompts()

    def _batch_of(self, node: Node) -> StepBatch:
        """Returns where the values of a node are: the batch once it ran there, else `visible`."""
        batch = self._batch
        ran = node.id in batch.sets or node.id in batch.skipped
        ran = ran or any((node.id, field.name) in batch.values for field in node.outputs)
        return batch if ran else self._visible

    def _samples(self, node: Node) -> SamplesValue:
        batch = self._batch_of(node)
        samples = batch.sets.get(node.id)
        if samples is None:
            samples = sample_set(self._parts.origin(node.id), [])
        return samples_value(node.id, samples, batch.values, self._program.texts)

    def _mask(self, node: Node, batch: StepBatch) -> Mask | None:
        samples = batch.sets.get(self._parts.made[node.id])
        return None if samples is None else samples.sequences.response_mask


def _handed_over_together(parts: GraphParts, joined: Sequence[set[NodeId]]) -> list[set[NodeId]]:
    """Returns the rollouts in sets that are dropped of together: trees, and those compared."""
    together = [{part.node.id, parts.root(part).node.id} for part in parts.rollouts]
    for group in joined:
        together.append(set(group))
    found: list[set[NodeId]] = []
    for group in together:
        for other in [other for other in found if other & group]:
            found.remove(other)
            group |= other
        found.append(group)
    return found


# Values of handles, and their `repr`.

_T = TypeVar("_T", bound=np.generic)

_DTYPES: dict[DType, type[np.generic]] = {
    DType.INT64: np.int64,
    DType.FLOAT32: np.float32,
    DType.BOOL: np.bool_,
}
_SHOWN = 8
"""Values of an array that `repr` shows."""


def is_of_samples(fields: Sequence[Field]) -> bool:
    """True if fields are those of samples, and not numbers on them."""
    return any(field.name == TOKENS.name for field in fields)


def samples_value(
    node: NodeId, samples: SampleSet, values: StepValues, texts: Texts
) -> SamplesValue:
    """Returns the samples of a set.

    Args:
        node: The node that made the set.
        values: Outputs of nodes, `[N]` and `[T]`.
    """
    sequences = samples.sequences
    # Arrays of the step itself are read-only: writing raises, and the run is unchanged.
    logprobs: Any
    preferred: Any
    logprobs, preferred = (values.find(node, f.name) for f in (ROLLOUT_LOGPROBS, PREFERRED))
    return SamplesValue(
        samples=tuple(sequences.samples),
        groups=tuple(samples.groups),
        prompts=tuple(payload.item.prompt for payload in samples.payloads),
        texts=tuple(texts.response(samples.origin, payload) for payload in samples.payloads),
        tokens=_read_only(sequences.tokens),
        offsets=_read_only(sequences.offsets),
        response_mask=_read_only(sequences.response_mask),
        lengths=_read_only(sequences.response_lengths),
        rollout_logprobs=None if logprobs is None else _read_only(logprobs),
        preferred=None if preferred is None else _read_only(preferred),
        turn=None if sequences.turn is None else _read_only(sequences.turn),
        token_reward=None if sequences.token_reward is None else _read_only(sequences.token_reward),
        state=None if sequences.state is None else _read_only(sequences.state),
    )


def arrays_of(node: Node, fields: Sequence[Field], batch: StepBatch) -> dict[str, Array]:
    """Returns the arrays of a node's fields; empty ones if it had no sample to work on."""
    found: dict[str, Array] = {}
    for field in fields:
        values = batch.values.find(node.id, field.name)
        if values is None:
            values = np.zeros(0, _DTYPES[field.dtype])
        found[field.name] = _read_only(values)
    return found


def _read_only(values: npt.NDArray[_T]) -> npt.NDArray[_T]:
    view = values.view()
    view.flags.writeable = False
    return view


def arrays_text(arrays: Mapping[str, Array], fields: Sequence[Field], mask: Mask | None) -> str:
    """Returns `score float32[16], mean 0.25: 0, 1, 0, ...`.

    Args:
        mask: bool `[T]`, of the response tokens; other tokens' values are not shown.
    """
    texts = []
    for field in fields:
        values = arrays[field.name]
        of_tokens = field.unit is Unit.TOKENS and mask is not None and len(mask) == len(values)
        seen = values[mask] if of_tokens else values
        text = f"{field.name} {values.dtype}[{len(values)}]"
        if len(seen):
            first = ", ".join(f"{value:.4g}" for value in seen[:_SHOWN].tolist())
            more = ", ..." if len(seen) > _SHOWN else ""
            at = " at response tokens" if of_tokens else ""
            text += f", mean{at} {float(seen.mean()):.4g}: {first}{more}"
        texts.append(text)
    return "; ".join(texts)


def prompts_text(texts: Sequence[str]) -> str:
    """Returns `4 prompts: '1+2=', ...`."""
    return f"{len(texts)} prompts: {shortened(texts[0])}{', ...' if len(texts) > 1 else ''}"
