"""A rollout of a program that runs line by line: it stops between sampling and scoring.

    sample -> all samples are generated, none is scored -> release -> scored, judged, delivered

    generate        sample: all its samples
    score           the role's rewards, called now
    map, filter     on all its samples, as they will be judged
    (batch part)    hand_over: the driver scores and judges with the scores known by then

The driver holds the scheduler's requests for scores until `release`, so that the lines that score,
map and filter can show their results before the batch is delivered. The batch itself is made by the
same scheduler, in the same order of samples, as in a compiled run.

Until the hand-over, sets and values of the rollout are in `visible`. A group leaves `visible` when
one of its rewards fails, as it will leave the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.backend.protocols import Finished, ScoreResult
from flowrl.data import PromptItem
from flowrl.errors import RewardError, SchedulerError
from flowrl.graph import Node, Op, Unit, score_source
from flowrl.ids import GroupId, NodeId, RoleName, SampleId, sample_id
from flowrl.rollout.actions import Score
from flowrl.runtime.driver.batch_nodes import NodeInputs
from flowrl.runtime.driver.batch_program import BatchProgram
from flowrl.runtime.driver.collected_batch import (
    CollectedBatch,
    FailureBudget,
    Scorers,
    decode_responses,
    score_request,
)
from flowrl.runtime.driver.filters import group_sizes, kept_groups, make_subset, rows_kept
from flowrl.runtime.driver.graph_parts import role_of
from flowrl.runtime.driver.payloads import (
    GroupRows,
    Payload,
    SampleSet,
    StepBatch,
    fill_fields,
    sample_set,
    scores_by,
)
from flowrl.runtime.driver.rollout_driver import RolloutDriver
from flowrl.runtime.driver.rollout_tree import (
    OpenRollout,
    RolloutTree,
    order_of_parents,
    sort_groups,
)
from flowrl.runtime.driver.rounds import one_round
from flowrl.runtime.driver.step_report import GeneratedRollout
from flowrl.runtime.scoring.in_process import InlineScorer
from flowrl.runtime.scoring.pool import ScoreFailure
from flowrl.specs import FilterSpec

_POLL_S = 0.25
_ABANDON_S = 10.0
"""Seconds that engines may take to report the ends of aborted samples."""


class TwoPhaseDriver(RolloutDriver):
    """See the module; the arguments are those of `RolloutDriver`, the scorers `InlineScorer`s."""

    def __init__(self, *, scorers: Mapping[RoleName, Scorers], **arguments: Any) -> None:
        self._held_scores: list[Score] = []
        self._holding = False
        self._inline: dict[RoleName, InlineScorer] = {}
        for role, scorer in scorers.items():
            assert isinstance(scorer, InlineScorer)
            self._inline[role] = scorer.for_rollout()
        super().__init__(scorers=self._inline, **arguments)

    def begin(self) -> None:
        """See `RolloutDriver`; holds the requests for scores."""
        super().begin()
        for scorer in self._inline.values():
            scorer.forget()
        self._holding = True

    def generated(self, items: Sequence[PromptItem]) -> list[GroupRows]:
        """Returns the groups of `items` whose samples all ended without a failed episode or reward.

        May be called before `release`.
        """
        found: list[GroupRows] = []
        for item in items:
            names = [sample_id(item.group, member) for member in range(self._group_size)]
            payloads = [self.store.get(name) for name in names]
            members = [
                (name, payload)
                for name, payload in zip(names, payloads, strict=True)
                if payload is not None and payload.broken is None
            ]
            if len(members) == len(names):
                found.append((item.group, members))
        return found

    def prefetch_scores(
        self, role: RoleName, sample: SampleId, payload: Payload
    ) -> tuple[ScoreResult | ScoreFailure, BaseException | None]:
        """Scores a sample now; returns the result and the reward's error. `release` reuses it."""
        scorer = self._inline[role]
        return scorer.prefetch(score_request(sample, payload)), scorer.cause(sample)

    def release(self, batch: int, groups: int) -> CollectedBatch:
        """Has everything scored and judged that is not yet, and takes the batch.

        Raises:
            RewardError: more rewards failed than allowed.
        """
        self._holding = False
        held_scores, self._held_scores = self._held_scores, []
        for action in held_scores:
            self._score(action)
        self._emit()
        if not groups:
            return CollectedBatch(version=self.scheduler.version)
        self.run(lambda: self.has_settled(batch))
        return self.take(batch)

    def abandon(self) -> None:
        """Empties the engines of a step that is given up; the driver is of no use after that.

        Raises:
            SchedulerError: an engine does not let go of its samples.
        """
        for engine_id, engine in self._engines.items():
            live = set(self._running[engine_id])
            engine.abort(tuple(live))
            end = self._clock() + _ABANDON_S
            while live:
                for output in engine.poll(_POLL_S):
                    if isinstance(output, Finished):
                        live.discard(output.sample)
                if live and self._clock() > end:
                    raise SchedulerError(
                        "the engine does not let go of a step that was given up",
                        where=f"engine {engine_id}",
                        found=f"{len(live)} samples after {_ABANDON_S:g} s",
                    )
            self._running[engine_id].clear()

    def _score(self, action: Score) -> None:
        if not self._holding:
            super()._score(action)
            return
        payloads = [self.store[sample] for sample in action.samples]
        decode_responses(
            self._tokenizer, [payload for payload in payloads if not payload.is_episode]
        )
        if self.on_generated is not None:
            self.on_generated(list(zip(action.samples, payloads, strict=True)))
        self._held_scores.append(action)


class VisibleResults:
    """The sets and values of a step's rollouts before the hand-over; cleared for each step.

    Attributes:
        batch: Sets and values, in the form of a step.
    """

    def __init__(self, program: BatchProgram) -> None:
        self._program = program
        self.batch = StepBatch()

    def begin(self, number: int) -> None:
        """Forgets the step before."""
        self.batch = StepBatch(number=number)

    def run_map(self, node: Node, step: StepBatch) -> None:
        """Gives a step what a map has made of its samples already; else runs the map.

        A map of a rollout gives the same of a sample whatever others are there, so the user's
        function is called at its own line alone.
        """
        maker = self._program.parts.made[node.id]
        wanted, known_samples = step.sets.get(maker), self.batch.sets.get(maker)
        names = [field.name for field in node.outputs]
        known = known_samples is not None and all(
            (node.id, name) in self.batch.values for name in names
        )
        places = (
            {s: i for i, s in enumerate(known_samples.samples)} if known_samples and known else {}
        )
        if not wanted or not places.keys() >= set(wanted.samples):
            self._program.run_node(node, step)
            return
        assert known_samples is not None
        rows = np.array([places[sample] for sample in wanted.samples], np.int64)
        self._give(node, known_samples, rows, step)

    def _give(self, node: Node, known_samples: SampleSet, rows: Ints, step: StepBatch) -> None:
        """Copies rows of a node's outputs into a step."""
        places = known_samples.sequences.places(rows.tolist())
        for field in node.outputs:
            values = self.batch.values.find(node.id, field.name)
            if values is not None:
                of_tokens = field.unit is Unit.TOKENS
                step.values[node.id, field.name] = values[places if of_tokens else rows]

    def keep(self, origin: NodeId, groups: Sequence[str]) -> None:
        """Leaves only these groups of a rollout, in all its sets and values."""
        parts, stay = self._program.parts, set(groups)
        for maker, samples in list(self.batch.sets.items()):
            if samples.origin != origin or stay >= set(samples.groups):
                continue
            rows = np.array([i for i, g in enumerate(samples.groups) if g in stay], np.int64)
            for node in parts.graph.nodes:
                if parts.made[node.id] == maker:
                    self._give(node, samples, rows, self.batch)
            self.batch.sets[maker] = samples.select(rows)


@dataclass(slots=True, kw_only=True, eq=False)
class EagerRollout:
    """One rollout in one step; see the module.

    Attributes:
        rollout: The rollout, whose driver is a `TwoPhaseDriver`.
        tree: The rollouts that it is generated with.
        parent: The rollout of whose samples its prompts are made; None where they are the data's.
        program: The batch part of its graph.
        visible: Holds its sets and values until the hand-over.
        items: Prompts of the step; those that are made of samples are there once it is generated.
        number: Number of the step.
        budget: The failures that rewards may still have in this step; a copy, which `release`
            ignores.
        version: Weights with which it began; None until it is generated.
        generated: The rollout that was handed over; None until then.
    """

    rollout: OpenRollout
    tree: RolloutTree
    parent: EagerRollout | None
    program: BatchProgram
    visible: VisibleResults
    number: int
    budget: FailureBudget
    items: Sequence[PromptItem] = ()
    version: int | None = None
    generated: GeneratedRollout | None = None

    @property
    def node(self) -> Node:
        """The `generate` or `interact`."""
        return self.rollout.part.node

    @property
    def driver(self) -> TwoPhaseDriver:
        """The driver, between sampling and delivery."""
        driver = self.rollout.driver
        assert isinstance(driver, TwoPhaseDriver)
        return driver

    def generate(self) -> None:
        """Generates all its samples; a second call does nothing.

        Those that are made of these as they end are generated too, as in a compiled run, so that
        engines have the same samples side by side: the last bit of logprobs depends on that.
        """
        if self.version is not None:
            return
        self.version = self.driver.scheduler.version
        if self.parent is None or self.tree.waits(self.rollout):
            self.rollout.begin()
            if self.parent is not None:
                self.items = self.prompts()
            self._generate_together()
        else:  # they are generated, with their parents
            self.items = self.tree.offered_to(self.rollout, order_of_parents(self.parent.items))
        if self.items:
            self.driver.request(self.number, len(self.items))
        samples = sample_set(self.node.id, self.driver.generated(self.items))
        self.visible.batch.sets[self.node.id] = samples
        fill_fields(self.node, self.visible.batch, samples)

    def _generate_together(self) -> None:
        together = [rollout.driver for rollout in self.tree.generated_with(self.rollout)]
        for driver in together:
            driver.begin()
        self.driver.offer(self.items)
        self.driver.run(
            lambda: not any(driver.is_generating for driver in together),
            lambda: one_round(together),
        )

    def prompts(self) -> list[PromptItem]:
        """Returns the prompts that are made of samples; these are visible."""
        make, parents = self.rollout.prompts, self.rollout.part.parents
        assert make is not None
        assert parents is not None
        samples = self.visible.batch.sets[parents]
        return make.items(samples.rows)

    def show(self, node: Node) -> None:
        """Runs the line of a score, a map or a filter, before the samples are handed over."""
        match node.op:
            case Op.SCORE:
                self._score(node)
            case Op.MAP:
                self.program.run_node(node, self.visible.batch)
            case Op.FILTER:
                self._filter(node)
            case _:
                raise AssertionError(f"{node.id} does not stream")

    def hand_over(self) -> GeneratedRollout:
        """Scores and judges what is left, and takes the batch; what a second call returns too."""
        if self.generated is None:
            self.generate()
            assert self.version is not None
            collected = self.driver.release(self.number, len(self.items))
            if self.parent is not None:
                sort_groups(collected, order_of_parents(self.parent.items))
            self.generated = GeneratedRollout(
                part=self.rollout.part, items=self.items, collected=collected, version=self.version
            )
        return self.generated

    def keep_delivered(self, generated: GeneratedRollout) -> None:
        """Leaves only groups that ended well; filtered ones did."""
        filtered = [payload.item.group for _, payload, _ in generated.collected.filtered]
        groups = [group for group, _ in generated.collected.groups]
        self.visible.keep(self.node.id, [*filtered, *groups])

    def _score(self, node: Node) -> None:
        """Scores every sample of the rollout, those that a filter removed too, as a driver does."""
        role, parts, batch = role_of(node), self.program.parts, self.visible.batch
        if self.generated is None:
            failed = self._prefetch_scores(role)
            groups = batch.sets[self.node.id].groups
            self.visible.keep(self.node.id, [group for group in groups if group not in failed])
        maker = parts.made[node.id]
        if maker not in batch.sets:  # the turns of one of several policies
            self.program.run_node(parts.graph.node(maker), batch)
        batch.values[node.id, "score"] = scores_by(role, batch.sets[maker].payloads)

    def _prefetch_scores(self, role: RoleName) -> set[GroupId]:
        """Calls a role's rewards; the groups of which one failed.

        Raises:
            RewardError: more failed than may; what the reward itself raised is the cause.
        """
        failed = set()
        for group, members in self.driver.generated(self.items):
            for sample, payload in members:
                answer, cause = self.driver.prefetch_scores(role, sample, payload)
                if not isinstance(answer, ScoreFailure):
                    payload.scores[role] = answer.score
                    continue
                failed.add(group)
                try:
                    self.budget.spend(answer, payload)
                except RewardError as error:
                    raise error from cause
        return failed

    def _filter(self, node: Node) -> None:
        parts, batch = self.program.parts, self.visible.batch
        edge = parts.graph.feeding(node.id, "rollout")
        assert edge is not None  # the verifier of graphs proves it
        samples = batch.sets[parts.made[edge.src]]
        if not samples:
            batch.sets[node.id] = samples
            batch.skipped.append(node.id)
            return
        inputs = NodeInputs(parts, node, batch, samples)
        # A filter of the batch part compares scores as the batch has them.
        of_batch = any(node.id == other.id for other in parts.batch)
        make_subset(inputs, batch, rows_kept(inputs) if of_batch else self._rows_judged(inputs))

    def _rows_judged(self, inputs: NodeInputs) -> Ints:
        """Returns int64, the rows that a filter keeps when it judges groups as they are scored."""
        node = inputs.node
        spec, source = node.attr("spec"), score_source(self.program.parts.graph, node.id)
        assert isinstance(spec, FilterSpec)
        assert source is not None  # the verifier of graphs proves it
        if source.op is Op.MAP:
            given = inputs.get("scores", "score")
            assert given is not None
            scores = np.asarray(given, np.float64)
        else:
            role = role_of(source)
            found_scores = [payload.scores[role] for payload in inputs.samples.payloads]
            scores = np.array(found_scores, np.float64)
        sizes = group_sizes(inputs.samples.numbers)
        return np.flatnonzero(np.repeat(kept_groups(spec, scores, sizes), sizes))
