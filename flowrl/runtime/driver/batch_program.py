"""Runs the batch part of a lowered graph: what comes after samples are delivered.

The streaming part (source, generate, interact, rule scores, filters on them) belongs to the rollout
drivers, sample by sample; `flowrl.runtime.driver.graph_parts` divides the graph. The rest runs here
node by node in the graph's order, each by the function that the table names for its operation.

A node works on one set of samples. If a filter leaves none, the nodes that follow on that set are
skipped, and the step lists them. An update that is not due in a step (`every=`) is not made, and
what it alone reads is not computed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from flowrl.algo.kl import adapted
from flowrl.backend.batch import Floats, Sampler, SequenceBatch
from flowrl.backend.protocols import OptimizerStep
from flowrl.errors import PlanError
from flowrl.graph import Node, Op
from flowrl.graph.ir import sums_of
from flowrl.graph.sample_sets import JOINS, SUBSETS
from flowrl.graph.signatures import TOKEN_REWARD
from flowrl.graph.streaming import is_rule_score
from flowrl.ids import NodeId, RoleName
from flowrl.plan import PlacementPlan
from flowrl.runtime.driver.batch_nodes import (
    DISTRIBUTIONS,
    SQUARES,
    NodeInputs,
    reads_distributions,
    reads_squares,
    run_advantage,
    run_map,
    run_mean_of_children,
    run_parent,
    train_batch,
    update_spec,
)
from flowrl.runtime.driver.filters import make_subset, make_turns, rows_kept, rows_selected
from flowrl.runtime.driver.graph_parts import GraphParts, is_due, role_of
from flowrl.runtime.driver.joins import make_pairs, make_whole
from flowrl.runtime.driver.mismatch_guard import MismatchGuard
from flowrl.runtime.driver.payloads import (
    SampleSet,
    StepBatch,
    Term,
    fill_fields,
    sample_set,
    scores_by,
)
from flowrl.runtime.driver.replay import HeldGroup, ReplayBuffer, held_groups
from flowrl.runtime.driver.sums import aligned, merged
from flowrl.runtime.driver.texts import Texts
from flowrl.runtime.groups import DataRef
from flowrl.runtime.spans import DRIVER, SPANS
from flowrl.runtime.workers import PolicyWorker
from flowrl.specs import KL, RowCondition, Sampling
from flowrl.specs.filters import Turns
from flowrl.specs.loss import DPO, BradleyTerry
from flowrl.specs.maps import ROW_PREFIX

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """The workers and callbacks outside a step that nodes act on.

    Attributes:
        policies: Open workers by role.
        publish: Serves a role's new weights to its engine.
        refresh: Gives the first role the weights of the second, or their average with its own.
        before: Called before each node runs (the plan's residency switches).
        beat: Called after each optimizer update; something moved.
        score: Scores samples by the rules of a role.
        guard: Looks at the engine's logprobs before an update.
    """

    policies: Mapping[RoleName, PolicyWorker]
    publish: Callable[[RoleName], None]
    refresh: Callable[[RoleName, RoleName, float], None]
    before: Callable[[NodeId], None]
    beat: Callable[[], None]
    score: Callable[[RoleName, SampleSet, Texts], Floats]
    guard: MismatchGuard


class BatchProgram:
    """The batch part of one stage's graph, ready to run.

    Args:
        parts: A graph at the lowered level, taken apart.
        plan: The plan of that graph; it fixes the mini-batches and rows that an update takes at
            once.
        context: Workers and effects.
        samplings: The sampling options of each rollout and each source.
        texts: The texts and data rows of the stage's samples.
        samplers: The sampling options that trainers repeat, for rollouts with the sampler's
            logprobs.

    Attributes:
        buffers: What each replay node holds.
        doing: The node that is run; empty between two steps.
        quiet: Keeps the scorers unused by rollouts while a block runs that uses them.
        kl_coefficients: Coefficients by update node whose penalty adapts, once it has run.

    Raises:
        PlanError: the graph has an operation that this executor cannot run.
    """

    def __init__(
        self,
        parts: GraphParts,
        plan: PlacementPlan,
        context: StepContext,
        samplings: Mapping[NodeId, Sampling],
        texts: Texts,
        samplers: Mapping[NodeId, Sampler] | None = None,
        buffers: Mapping[NodeId, ReplayBuffer] | None = None,
    ) -> None:
        self.parts = parts
        self.texts = texts
        self.doing = ""
        self.quiet: Callable[[], AbstractContextManager[None]] = nullcontext
        self._plan = plan
        self._context = context
        self._samplings = samplings
        self._samplers = samplers or {}
        self.buffers = buffers or {}
        self.kl_coefficients: dict[NodeId, float] = {}
        # Filters of an asynchronous rollout run maps in another thread than the batch part does,
        # and a user's function need not expect that.
        self._mapping = threading.Lock()
        graph = parts.graph
        # Logprobs of which something reads whole distributions, or the squares of probabilities.
        self._whole = {n.id for n in graph.of_op(Op.LOGPROBS) if reads_distributions(graph, n)}
        self._squared = {n.id for n in graph.of_op(Op.LOGPROBS) if reads_squares(graph, n)}
        self._sums = {
            node.id: (terms, number)
            for terms in sums_of(graph).values()
            for number, node in enumerate(terms, 1)
        }
        for node in parts.batch:
            if node.op not in (*_HANDLERS, *JOINS, *_WITHOUT_SAMPLES):
                raise PlanError(
                    f"the local executor cannot run {node.op!r}",
                    where=str(node.source or node.id),
                    expected=", ".join(sorted(_HANDLERS)),
                )

    def restore(self, kl_coefficients: Mapping[str, object]) -> None:
        """Takes up the coefficients of adaptive penalties, as a checkpoint holds them."""
        for node, coefficient in kl_coefficients.items():
            assert isinstance(coefficient, float)
            self.kl_coefficients[NodeId(node)] = coefficient

    def run(self, step: StepBatch) -> None:
        """Runs the nodes of the batch part, in order.

        What workers compute is waited for where a node reads it, so workers of different roles
        compute at the same time; each one makes its calls in the order of the graph.
        """
        needed = self._needed(step.number)
        try:
            for node in self.parts.batch:
                self.doing = str(node.id)
                self.run_node(node, step, is_needed=node.id in needed)
            step.values.settle()
        finally:
            self.doing = ""
        for name, waited_s in step.values.waited_s.items():
            op = str(self.parts.graph.node(name).op)
            step.seconds[op] = step.seconds.get(op, 0.0) + waited_s

    def _needed(self, number: int) -> set[NodeId]:
        """Returns the nodes that a step needs: what is not read by idle updates alone."""
        graph = self.parts.graph
        idle = {node.id for node in graph.of_op(Op.UPDATE) if not is_due(node, number)}
        acts = (Op.UPDATE, Op.SYNC, Op.LOG)
        # By sets of samples, whoever reads them, a step knows how each sample ends.
        needed = {
            node.id
            for node in graph.nodes
            if node.op in acts or self.parts.made[node.id] == node.id or not idle
        } - idle
        waiting = list(needed)
        while waiting:
            for edge in graph.in_edges(waiting.pop()):
                if edge.src not in needed | idle:
                    needed.add(edge.src)
                    waiting.append(edge.src)
        return needed

    def run_node(self, node: Node, step: StepBatch, *, is_needed: bool = True) -> None:
        """Runs one node, whose inputs the step holds; without a sample it is skipped.

        Args:
            is_needed: False if nothing that happens in this step reads what the node gives.
        """
        self._run_with_samples(node, step, is_needed=is_needed)
        terms, number = self._sums.get(node.id, ((), 0))
        if terms and number == len(terms):
            self._update_sum(node, step)

    def _run_with_samples(self, node: Node, step: StepBatch, *, is_needed: bool) -> None:
        if node.op in JOINS:
            make = make_pairs if node.op is Op.PAIR else make_whole
            if not make(self.parts, node, step):
                step.skipped.append(node.id)
            return
        samples = step.sets.get(self._reads_set(node))
        if not samples and node.op not in _WITHOUT_SAMPLES:
            step.skipped.append(node.id)
            return
        if not is_needed or (node.op is Op.UPDATE and not is_due(node, step.number)):
            return
        started, waited_s = time.monotonic(), sum(step.values.waited_s.values())
        self._context.before(node.id)
        if node.op is Op.SYNC:
            self._sync(node, step)
        elif node.op is Op.REPLAY:
            self._replay(node, step, samples)
        else:
            assert samples is not None
            _HANDLERS[node.op](self, NodeInputs(self.parts, node, step, samples), step)
        waited_s -= sum(step.values.waited_s.values())
        spent = time.monotonic() - started + waited_s
        step.seconds[str(node.op)] = step.seconds.get(str(node.op), 0.0) + spent

    def _reads_set(self, node: Node) -> NodeId:
        """Returns the set on which a node works: its own, or the larger one that it reduces."""
        if node.op not in (*SUBSETS, Op.REPLAY):
            return self.parts.made[node.id]
        edge = self.parts.graph.feeding(node.id, "rollout")
        assert edge is not None  # the verifier of graphs proves it
        return self.parts.made[edge.src]

    def _sampling(self, inputs: NodeInputs) -> Sampling:
        return self._samplings[inputs.samples.origin]

    def _temperature(self, inputs: NodeInputs) -> float:
        return self._sampling(inputs).temperature or 1.0  # greedy logprobs are those at 1

    def _worker(self, node: Node) -> PolicyWorker:
        return self._context.policies[role_of(node)]

    def _put(
        self, inputs: NodeInputs, step: StepBatch, *, as_sampled: bool = False
    ) -> DataRef[SequenceBatch]:
        """Returns a reference to the node's samples, which are put once for trainers of a kind.

        Args:
            as_sampled: With the sampler that their logprobs repeat, if any.
        """
        sampler = self._samplers.get(inputs.samples.origin) if as_sampled else None
        train = self._worker(inputs.node).train
        key = id(inputs.samples), sampler is not None, train.kind
        if key not in step.refs:
            step.refs[key] = train.put_samples(inputs.samples, sampler)
        return step.refs[key]

    # Handlers

    def _advantage(self, inputs: NodeInputs, step: StepBatch) -> None:
        for name, values in run_advantage(inputs).items():
            step.values[inputs.node.id, name] = values

    def _logprobs(self, inputs: NodeInputs, step: StepBatch) -> None:
        node, train = inputs.node, self._worker(inputs.node).train
        sequences = self._put(inputs, step, as_sampled=True)
        temperature, expect = self._temperature(inputs), step.values.expect
        expect(node.id, "logprobs", train.logprobs(sequences, temperature))
        if node.id in self._whole:
            expect(node.id, DISTRIBUTIONS, train.distributions(sequences, temperature))
        if node.id in self._squared:
            expect(node.id, SQUARES, train.squares(sequences, temperature))

    def _values(self, inputs: NodeInputs, step: StepBatch) -> None:
        train = self._worker(inputs.node).train
        step.values.expect(inputs.node.id, "values", train.values(self._put(inputs, step)))

    def _score(self, inputs: NodeInputs, step: StepBatch) -> None:
        """Computes scores or token rewards; rule scores of rollouts came with their samples."""
        node = inputs.node
        if self.parts.streams(node.id):
            scores: Floats = scores_by(role_of(node), inputs.samples.payloads)
        elif is_rule_score(node):
            with self.quiet():
                scores = self._context.score(role_of(node), inputs.samples, self.texts)
        elif node.attr("per") is None:
            computed = self._worker(node).train.scores(self._put(inputs, step))
            step.values.expect(node.id, "score", computed)
            return
        else:
            rewards = self._worker(node).train.token_scores(self._put(inputs, step)).result()
            separator = node.attr("separator")
            if isinstance(separator, str):
                ends = self.texts.step_ends(inputs.samples, separator)
                rewards = np.where(ends, rewards, np.float32(0))
            step.values[node.id, TOKEN_REWARD.name] = rewards
            return
        step.values[node.id, "score"] = scores

    def _filter(self, inputs: NodeInputs, step: StepBatch) -> None:
        make_subset(inputs, step, rows_kept(inputs))

    def _select(self, inputs: NodeInputs, step: StepBatch) -> None:
        spec = inputs.node.attr("spec")
        if isinstance(spec, Turns):
            make_turns(inputs, step, spec)
        else:
            make_subset(inputs, step, rows_selected(inputs))

    def _replay(self, node: Node, step: StepBatch, samples: SampleSet | None) -> None:
        """Takes up the samples of this step, which may be none, and returns earlier ones."""
        rollout = self.parts.graph.node(*self.parts.roots(node.id))
        policy = self.parts.graph.generator_of(rollout)
        assert policy is not None  # the verifier of graphs proves it
        version = self._context.policies[role_of(policy)].version
        fresh: list[HeldGroup] = []
        if samples:
            scores = NodeInputs(self.parts, node, step, samples).floats("scores", "score")
            assert scores is not None  # the verifier of graphs proves it
            fresh = held_groups(samples, scores.tolist(), version)
        buffer = self.buffers[node.id]
        chosen = buffer.draw(step.number, version, fresh)
        step.replayed |= {
            f"{node.id}/held": float(len(buffer.held)),
            f"{node.id}/samples": float(sum(len(group.members) for group in chosen)),
        }
        if not chosen:
            step.skipped.append(node.id)
            return
        made = sample_set(rollout.id, [(group.group, group.members) for group in chosen])
        step.sets[node.id] = made
        fill_fields(node, step, made)
        scored = [score for group in chosen for score in group.scores]
        step.values[node.id, "score"] = np.array(scored, np.float32)
        ages = [version - group.version for group in chosen for _ in group.members]
        step.replayed |= {
            f"{node.id}/age/mean": float(np.mean(ages)),
            f"{node.id}/age/max": float(max(ages)),
        }

    def _where(self, inputs: NodeInputs, step: StepBatch) -> None:
        node, spec = inputs.node, inputs.node.attr("spec")
        assert isinstance(spec, RowCondition)
        reader = str(node.source or node.id)
        values = self.texts.held(inputs.samples, f"{ROW_PREFIX}{spec.field}", reader=reader)
        make_subset(inputs, step, np.flatnonzero([spec.accepts(value) for value in values]))

    def _map(self, inputs: NodeInputs, step: StepBatch) -> None:
        with self._mapping:
            found = run_map(inputs, self.texts)
        for name, values in found.items():
            step.values[inputs.node.id, name] = values

    def _parent(self, inputs: NodeInputs, step: StepBatch) -> None:
        for name, values in run_parent(inputs).items():
            step.values[inputs.node.id, name] = values

    def _mean_of_children(self, inputs: NodeInputs, step: StepBatch) -> None:
        for name, values in run_mean_of_children(inputs).items():
            step.values[inputs.node.id, name] = values

    def _log(self, inputs: NodeInputs, step: StepBatch) -> None:
        """Logs the mean of a field: over samples, or over response tokens."""
        edge, name = inputs.edge("value"), inputs.node.attr("name")
        assert edge is not None
        assert isinstance(name, str)
        (field,) = edge.fields
        values = np.asarray(inputs.read(edge.src, field), np.float64)
        if inputs.is_per_token(edge, field):
            values = values[inputs.sequences.response_mask]
        if len(values):
            step.logged[name] = float(values.mean())

    def _update(self, inputs: NodeInputs, step: StepBatch) -> None:
        node, sampling = inputs.node, self._sampling(inputs)
        worker = self._worker(node)
        self._guard(inputs, worker)
        put = worker.train.put(train_batch(inputs, self._put(inputs, step, as_sampled=True)))
        spec = update_spec(
            inputs,
            self._plan,
            kl=self._penalty(node, step),
            temperature=self._temperature(inputs),
            max_tokens=sampling.max_tokens,
        )
        if node.id in self._sums:
            _, number = self._sums[node.id]
            groups = inputs.samples.numbers
            step.terms.append(Term(node=node, number=number, batch=put, groups=groups, spec=spec))
            return
        worker.stale = True
        steps = step.updates.setdefault(node.id, [])
        # One call a mini-batch, so that the watchdog sees progress at every update.
        coming = [
            self._watched(worker.train.update(put, replace(spec, mini_batches=(rows,))))
            for rows in spec.mini_batches
        ]
        for made in coming:
            with SPANS.waiting_for(made, DRIVER, str(node.id)):
                steps += made.result()
        self._context.guard.check_update(worker, steps[0])
        self._steer(node, steps, len(put))

    def _guard(self, inputs: NodeInputs, worker: PolicyWorker) -> None:
        """Compares the trainer's logprobs of its engine's tokens with those of the engine."""
        origin = self.parts.graph.node(inputs.samples.origin)
        policies = {role_of(node) for node in self.parts.graph.generators_of(origin)}
        if policies != {role_of(inputs.node)} or inputs.samples.made is not None:
            return  # it learns from the samples of others, or from parts and pairs of samples

        def score(samples: SampleSet) -> Floats:
            put = worker.train.put_samples(samples, self._samplers.get(samples.origin))
            return worker.train.logprobs(put, self._temperature(inputs)).result()

        node = inputs.node
        measured = node.attr("behaviour_logprobs") is not None and node.id not in self._sums
        self._context.guard.check(worker, inputs.samples, score, is_measured=measured)

    def _watched(self, future: Future[T]) -> Future[T]:
        future.add_done_callback(lambda _: self._context.beat())
        return future

    def _update_sum(self, last: Node, step: StepBatch) -> None:
        """Makes the updates of a sum whose terms are all there, but for those without a sample."""
        terms, step.terms = step.terms, []
        if not terms:
            return
        started = time.monotonic()
        worker = self._worker(last)
        worker.stale = True
        made: list[list[OptimizerStep]] = []
        for batches in aligned(terms):
            coming = self._watched(worker.train.update_sum(batches))
            with SPANS.waiting_for(coming, DRIVER, str(last.id)):
                made += coming.result()
        step.updates[last.id] = [merged(terms, each) for each in made]
        for term, steps in zip(terms, zip(*made, strict=True), strict=True):
            self._steer(term.node, steps, len(term.batch))
        spent = time.monotonic() - started
        step.seconds[str(last.op)] = step.seconds.get(str(last.op), 0.0) + spent

    def pair_margins(self, node: Node, step: StepBatch) -> Floats | None:
        """Returns float32 `[P]`: how much an update's model prefers the first response of a pair.

        It is the difference of two rewards: a reward model's scores, or the implicit rewards of
        DPO, which the loss reports of the pairs that it learns from (`reward_margin`).

        Args:
            node: The update.
            step: Holds the pairs of its source. The reference's logprobs are added.

        Returns:
            None if the update's loss knows no reward of a response.
        """
        loss, graph = node.attr("loss"), self.parts.graph
        inputs = NodeInputs(self.parts, node, step, step.sets[self.parts.made[node.id]])
        reference, train = inputs.edge("reference"), self._worker(node).train
        if isinstance(loss, BradleyTerry):
            self._context.before(node.id)
            rewards = train.scores(self._put(inputs, step)).result()
        elif (
            isinstance(loss, DPO)
            and reference is not None
            and (compared := graph.node(reference.src)).op is Op.LOGPROBS
        ):
            self.run_node(compared, step)
            self._context.before(node.id)
            sampled = self._put(inputs, step, as_sampled=True)
            gap = train.logprobs(sampled, self._temperature(inputs)).result()
            gap = gap - inputs.token_floats(reference, "logprobs")
            starts = inputs.sequences.offsets[:-1]
            rewards = np.add.reduceat(np.where(inputs.sequences.response_mask, gap, 0), starts)
            rewards = np.asarray(loss.beta * rewards, np.float32)
        else:
            return None
        return rewards[::2] - rewards[1::2]

    def _penalty(self, node: Node, step: StepBatch) -> KL | None:
        """Returns the KL term of an update, with its present coefficient if it adapts."""
        kl = node.attr("kl")
        assert kl is None or isinstance(kl, KL)
        if kl is None or kl.target is None:
            return kl
        coefficient = self.kl_coefficients.setdefault(node.id, kl.coefficient)
        step.kl_coefficients[node.id] = coefficient
        return replace(kl, coefficient=coefficient)

    def _steer(self, node: Node, steps: Sequence[OptimizerStep], samples: int) -> None:
        """Moves an adaptive coefficient by the divergence of all response tokens of the step."""
        kl = node.attr("kl")
        measured = [(made.metrics["kl"], made.num_tokens) for made in steps if "kl" in made.metrics]
        tokens = sum(count for _, count in measured)
        if not isinstance(kl, KL) or kl.target is None or not tokens:
            return
        mean = sum(value * count for value, count in measured) / tokens
        found = adapted(self.kl_coefficients[node.id], mean, samples, kl)
        if np.isfinite(found):  # an update that was skipped may have measured nonsense
            self.kl_coefficients[node.id] = found

    def _sync(self, node: Node, step: StepBatch) -> None:
        role, source = role_of(node), self._source_of_weights(node)
        if role == source:
            if self._context.policies[role].stale:
                self._context.publish(role)
            return
        if is_due(node, step.number):
            decay = node.attr("decay")
            self._context.refresh(role, source, decay if isinstance(decay, float) else 0.0)
            if node.attr("reset_optimizer"):
                self._context.policies[source].train.reset_optimizer().result()

    def _source_of_weights(self, node: Node) -> RoleName:
        edge = self.parts.graph.feeding(node.id, "weights")
        assert edge is not None  # the verifier of graphs proves it
        return role_of(self.parts.graph.node(edge.src))


_WITHOUT_SAMPLES = (Op.SYNC, Op.REPLAY)
"""Operations that run also where the step has no samples for them."""

_HANDLERS: Mapping[Op, Callable[[BatchProgram, NodeInputs, StepBatch], None]] = {
    Op.ADVANTAGE: BatchProgram._advantage,
    Op.LOGPROBS: BatchProgram._logprobs,
    Op.VALUES: BatchProgram._values,
    Op.SCORE: BatchProgram._score,
    Op.FILTER: BatchProgram._filter,
    Op.SELECT: BatchProgram._select,
    Op.WHERE: BatchProgram._where,
    Op.MAP: BatchProgram._map,
    Op.PARENT: BatchProgram._parent,
    Op.MEAN_OF_CHILDREN: BatchProgram._mean_of_children,
    Op.LOG: BatchProgram._log,
    Op.UPDATE: BatchProgram._update,
}
