"""Makes a stage of what a run has open: sources, rollouts, batch program, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flowrl.backend.batch import Sampler
from flowrl.compiler import CompiledStage, sampling_of
from flowrl.config.schema import RunConfig
from flowrl.data import PromptCursor, PromptItem, PromptMixture, Tokenizer
from flowrl.graph import Node, Op
from flowrl.graph.sample_sets import JOINS
from flowrl.ids import NodeId
from flowrl.observe.scale_requests import RequestBox
from flowrl.runtime.checkpoint.journal import RolloutJournals
from flowrl.runtime.driver.asynchronous_stage import AsynchronousStage
from flowrl.runtime.driver.batch_program import BatchProgram, StepContext
from flowrl.runtime.driver.collected_batch import FailureBudget
from flowrl.runtime.driver.graph_parts import GraphParts, role_of
from flowrl.runtime.driver.late_scores import LateScores
from flowrl.runtime.driver.mismatch_guard import MismatchGuard
from flowrl.runtime.driver.replay import REPLAYED, ReplayBuffer
from flowrl.runtime.driver.sources import RowSamples, Source
from flowrl.runtime.driver.stage import Stage, StageResources, part_of
from flowrl.runtime.driver.step_report import StepReport
from flowrl.runtime.driver.texts import Texts
from flowrl.runtime.driver.threads import RolloutThread
from flowrl.runtime.eager.rollout import TwoPhaseDriver, VisibleResults
from flowrl.runtime.eager.stage import EagerStage
from flowrl.runtime.setup.policies import OpenPolicies, derive_seed
from flowrl.runtime.setup.prepared_inputs import PreparedInputs
from flowrl.runtime.setup.rollouts import DriverMaker, RolloutMaker, sampling_of_rollout
from flowrl.runtime.setup.scorers import OpenScorers
from flowrl.runtime.setup.user_inputs import shares_of
from flowrl.runtime.workers import Residency
from flowrl.specs import Replay, Sampling

State = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMaker:
    """Makes stages from the open resources of a run.

    Attributes:
        beat: Called whenever something moved.
        stop: A true value ends a rollout, or a line of an eager program.
        thread: Gives the thread that asynchronous rollouts run in.
        journals: The journals in which rollouts note events.
        requests: Asks for engines to join and leave.
    """

    config: RunConfig
    prepared_inputs: PreparedInputs
    policies: OpenPolicies
    scorers: OpenScorers
    drivers: DriverMaker
    failures: FailureBudget
    beat: Callable[[], None]
    stop: Callable[[], bool]
    thread: Callable[[], RolloutThread]
    journals: RolloutJournals
    requests: RequestBox

    def make(
        self,
        stage: CompiledStage,
        state: State | None,
        checkpoint: Path | None = None,
        buffers: Mapping[NodeId, ReplayBuffer] | None = None,
    ) -> Stage:
        """Makes a stage at its beginning, or at a checkpoint's state.

        Args:
            checkpoint: The folder that `state` comes from.
            buffers: Replayed samples of the stage that this one goes on for.

        Raises:
            CheckpointError: the state is of other data.
        """
        parts = GraphParts(stage.graph)
        residency = Residency(stage.plan, self.policies.workers)
        tokenizers = self._tokenizers(parts)
        sources = self._sources(stage, state)
        if buffers is None:
            buffers = self._buffers(stage, parts, sources, state, checkpoint)
        program = self._program(stage, parts, residency, Texts(tokenizers), buffers)
        if state is not None:
            program.restore(part_of(state, "kl_coefficients"))
        resources = partial(
            StageResources,
            program=program,
            sources=sources,
            row_samples=self._row_samples(stage),
            failures=self.failures,
            report=StepReport(stage.name, parts, self.policies.use.policy, tokenizers),
        )
        maker = RolloutMaker(
            config=self.config,
            stage=stage,
            program=program,
            sources=sources,
            residency=residency,
            policies=self.policies,
            scorers=self.scorers,
            drivers=self.drivers,
            state=state,
            checkpoint=checkpoint,
            journals=self.journals,
        )
        if self.config.executor == "eager":
            visible = VisibleResults(program)
            rollouts = [
                maker.make(part, visible.run_map, {}, kind=TwoPhaseDriver)
                for part in parts.rollouts
            ]
            return EagerStage(
                resources(rollouts=rollouts, fleets={}),
                stage=stage,
                visible=visible,
                stop=self.stop,
            )
        with ExitStack() as stack:  # of processes, where something fails before the stage is made
            fleets = maker.fleets(stack)
            rollouts = [maker.make(part, program.run_node, fleets) for part in parts.rollouts]
            opened = resources(rollouts=rollouts, fleets=fleets)
            made = self._asynchronous(opened, state) if maker.is_streaming else Stage(opened)
            made.scaled_by(self.requests)
            stack.pop_all()
        return made

    def _asynchronous(self, resources: StageResources, state: State | None) -> AsynchronousStage:
        return AsynchronousStage(
            resources,
            thread=self.thread(),
            publish=self.policies.publish,
            stop=self.stop,
            timeout_s=self.config.runtime.stall_timeout_s,
            ahead={} if state is None else _rows_ahead(state, resources.sources),
        )

    def _tokenizers(self, parts: GraphParts) -> dict[NodeId, Tokenizer]:
        """Returns the tokenizer of each rollout, source and join."""
        of_rows = self.policies.tokenizer(self.policies.use.reader)  # which encoded them
        found = {node.id: of_rows for node in parts.graph.of_op(Op.SOURCE, *JOINS)}
        for part in parts.rollouts:
            found[part.node.id] = self.policies.tokenizer(role_of(part.generate_node))
        return found

    def _buffers(
        self,
        stage: CompiledStage,
        parts: GraphParts,
        sources: Sequence[Source],
        state: State | None,
        checkpoint: Path | None,
    ) -> dict[NodeId, ReplayBuffer]:
        """Returns what each replay node holds: nothing, or the samples of a checkpoint."""
        found: dict[NodeId, ReplayBuffer] = {}
        for node in stage.graph.of_op(Op.REPLAY):
            spec = node.attr("spec")
            assert isinstance(spec, Replay)
            names = ("replay", stage.name, node.id)
            seed_of = partial(_seed_of_step, self.config.seed, names)
            found[node.id] = buffer = ReplayBuffer(spec, seed_of)
            if state is None:
                continue
            assert checkpoint is not None  # a stage without one hands its buffers over
            (rollout,) = parts.roots(node.id)
            prompts = next(part.source for part in parts.rollouts if part.node.id == rollout)
            source = next(s for s in sources if s.node == parts.data_of(prompts))
            held = part_of(state, "replayed").get(node.id)
            buffer.restore(held, checkpoint / REPLAYED / node.id, source.item_of)
        return found

    def _program(
        self,
        stage: CompiledStage,
        parts: GraphParts,
        residency: Residency,
        texts: Texts,
        buffers: Mapping[NodeId, ReplayBuffer],
    ) -> BatchProgram:
        # Likelihoods of examples are of the model as it is, whatever its rollouts' temperature.
        plain = replace(sampling_of(stage.config), temperature=1.0)
        samplings: dict[NodeId, Sampling] = {node.id: plain for node in parts.sources}
        samplings |= {part.node.id: sampling_of_rollout(part) for part in parts.rollouts}
        for node in stage.graph.of_op(*JOINS):
            # The verifier of graphs proves that the rollouts among them have one temperature.
            of_parts = [samplings[root] for root in sorted(parts.roots(node.id))]
            drawn = [s for s in of_parts if s is not plain] or of_parts
            samplings[node.id] = replace(drawn[0], max_tokens=max(s.max_tokens for s in of_parts))
        context = StepContext(
            policies=self.policies.workers,
            publish=self.policies.publish,
            refresh=self.policies.refresh,
            before=residency.switch,
            beat=self.beat,
            score=LateScores(
                pools=self.scorers.pools,
                failures=self.failures,
                beat=self.beat,
                stall_timeout_s=self.config.runtime.stall_timeout_s,
            ).score,
            guard=MismatchGuard(stage.config.train),
        )
        samplers = {
            part.node.id: Sampler(
                sampling=samplings[part.node.id],
                stop_token_ids=tuple(self.policies.tokenizer(role_of(part.generate_node)).stop_ids),
            )
            for part in parts.rollouts
            if samplings[part.node.id].logprobs == "sampler"
        }
        return BatchProgram(parts, stage.plan, context, samplings, texts, samplers, buffers)

    def _sources(self, stage: CompiledStage, state: State | None) -> list[Source]:
        nodes = [node for node in stage.graph.of_op(Op.SOURCE) if not node.inputs]
        written = None if state is None else part_of(state, "cursors")
        return [
            self._source(
                stage,
                node,
                # One source has the stream that it had before there could be several.
                (stage.name,) if len(nodes) == 1 else (stage.name, node.id),
                None if written is None else part_of(written, node.id),
            )
            for node in nodes
        ]

    def _row_samples(self, stage: CompiledStage) -> list[RowSamples]:
        made = []
        for node in GraphParts(stage.graph).sources:
            edge, pairs = stage.graph.feeding(node.id, "prompts"), node.attr("data") == "pairs"
            responses = self.prepared_inputs.pairs if pairs else self.prepared_inputs.solutions
            assert responses is not None
            made.append(
                RowSamples(
                    node=node.id,
                    responses=responses.of,
                    pairs=pairs,
                    prompts=node.id if edge is None else edge.src,
                )
            )
        return made

    def _source(
        self, stage: CompiledStage, node: Node, names: tuple[str, ...], state: State | None
    ) -> Source:
        generates = node.attr("data") == "prompts"
        prompts = self.prepared_inputs.of_source(stage.graph, node)
        curriculum = self.config.data.curriculum if generates else None
        seed = derive_seed(self.config.seed, "data", *names)
        cursor: PromptCursor | PromptMixture
        shares = shares_of(self.config, stage, generates=generates)
        if shares is not None:
            cursor = PromptMixture(
                prompts,
                seed,
                shares.weights,
                shares.source_of,
                where=shares.where,
                curriculum=curriculum,
            )
            if state is not None:
                cursor.restore(state)
        elif state is not None:
            cursor = PromptCursor.from_json(state, prompts, curriculum)
        else:
            cursor = PromptCursor(prompts, seed, curriculum=curriculum)
        return Source(
            node=node.id,
            cursor=cursor,
            num=stage.config.train.prompts_per_step,
            observes=curriculum is not None,
            prompts=prompts,
        )


def _seed_of_step(seed: int, names: tuple[str, ...], step: int) -> int:
    return derive_seed(seed, *names, str(step))


def _rows_ahead(
    state: State, sources: Sequence[Source]
) -> dict[int, dict[NodeId, Sequence[PromptItem]]]:
    """Returns the rows that a checkpoint's run had taken for later steps."""
    found: dict[int, dict[NodeId, Sequence[PromptItem]]] = {}
    # Checkpoints from before rows were taken ahead have none.
    ahead = part_of(state, "rows_ahead") if "rows_ahead" in state else {}
    for number, rows in ahead.items():
        assert isinstance(rows, Mapping)
        found[int(number)] = {
            source.node: [source.item_of(group) for group in rows[source.node]]
            for source in sources
            if source.node in rows
        }
    return found
