"""Makes a stage of what a run has open: sources, rollouts, batch program, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flowrl.backend.batch import Ints
from flowrl.backend.truncation import Sampler
from flowrl.compiler import CompiledStage, sampling_of
from flowrl.config.schema import RunConfig
from flowrl.data import PromptCursor, PromptItem, Tokenizer
from flowrl.graph import Node, Op
from flowrl.ids import NodeId, RoleName
from flowrl.rollout import RolloutScheduler, SchedulerSettings
from flowrl.runtime.asynchronous_stage import UNUSED, AsynchronousStage
from flowrl.runtime.batch_program import BatchProgram, Surroundings
from flowrl.runtime.eager_driver import HeldDriver
from flowrl.runtime.eager_rollout import Shown
from flowrl.runtime.eager_stage import EagerStage
from flowrl.runtime.engine_fleet import EngineFleet
from flowrl.runtime.judge import RunNode, group_judge
from flowrl.runtime.materials import Materials
from flowrl.runtime.open_policies import OpenPolicies
from flowrl.runtime.open_rollouts import DriverMaker, RolloutSpec, sampling_of_rollout
from flowrl.runtime.open_scorers import OpenScorers
from flowrl.runtime.prompt_supply import PromptSupply
from flowrl.runtime.receive import role_of
from flowrl.runtime.residency import Residency
from flowrl.runtime.rollout_parts import GraphParts, RolloutPart, is_rule_score
from flowrl.runtime.rollout_thread import RolloutThread
from flowrl.runtime.rollouts import FailureBudget, RolloutDriver
from flowrl.runtime.seeds import derive_seed
from flowrl.runtime.sources import Responses, Source
from flowrl.runtime.stage import OpenRollout, Stage, part_of
from flowrl.runtime.step_report import StepReport, told_score
from flowrl.runtime.streaming_driver import Publication, StreamingDriver
from flowrl.runtime.unused_samples import read_unused
from flowrl.specs import AdvantageSpec, Grammar, Sampling

__all__ = ["StageMaker", "rollout_spec"]

State = Mapping[str, object]


def rollout_spec(parts: GraphParts, part: RolloutPart, purpose: str) -> RolloutSpec:
    """How a rollout of a graph is driven."""
    group_size = part.player.attr("n")
    assert isinstance(group_size, int)  # lowering fills it
    grammar = part.player.attr("grammar")
    assert grammar is None or isinstance(grammar, Grammar)
    told = told_score(parts, part.node.id)
    by_turns = any(
        isinstance(spec := node.attr("spec"), AdvantageSpec) and "turns" in spec.needs
        for node in parts.graph.of_op(Op.ADVANTAGE)
        if parts.origin(node.id) == part.node.id
    )
    return RolloutSpec(
        role=role_of(part.player),
        episodes=part.node if part.node.op is Op.INTERACT else None,
        sampling=sampling_of_rollout(part),
        group_size=group_size,
        purpose=purpose,
        reported=role_of(told) if told is not None and _scores_samples(told) else None,
        needs_states=by_turns,
        grammar=grammar,
    )


def _scores_samples(node: Node) -> bool:
    """Whether a score is there as soon as its sample is finished."""
    return node.op is Op.INTERACT or is_rule_score(node)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMaker:
    """What a run has open, for the stages that it makes of it.

    Attributes:
        beat: Called whenever something moved.
        stop: A true value ends a rollout, or a line of an eager program.
        thread: Gives the thread that asynchronous rollouts run in.
    """

    config: RunConfig
    materials: Materials
    policies: OpenPolicies
    scorers: OpenScorers
    drivers: DriverMaker
    failures: FailureBudget
    beat: Callable[[], None]
    stop: Callable[[], bool]
    thread: Callable[[], RolloutThread]

    def make(
        self, stage: CompiledStage, state: State | None, checkpoint: Path | None = None
    ) -> Stage:
        """A stage at its beginning, or where a checkpoint's state says.

        Args:
            checkpoint: The folder that `state` comes from.

        Raises:
            CheckpointError: the state is of other data.
        """
        parts = GraphParts(stage.graph)
        residency = Residency(stage.plan, self.policies.workers)
        program = self._program(stage, parts, residency)
        if state is not None:
            program.restore(part_of(state, "kl_coefficients"))
        sources = self._sources(stage, state)
        report = StepReport(stage.name, parts, self.policies.use.policy)
        if self.config.executor == "eager":
            shown = Shown(program)
            return EagerStage(
                stage=stage,
                program=program,
                sources=sources,
                rollouts=[
                    self._rollout(stage, program, part, residency, state, shown.run_map, HeldDriver)
                    for part in parts.rollouts
                ],
                failures=self.failures,
                report=report,
                shown=shown,
                tokenizers=self._tokenizers(parts),
                stop=self.stop,
            )
        with ExitStack() as stack:  # of processes, where something fails before the stage is made
            fleets = self._fleets(stage, parts, stack)
            made: Stage
            if stage.context.max_staleness and parts.rollouts:
                made = self._asynchronous(
                    stage, program, sources, residency, report, fleets, state, checkpoint
                )
            else:
                made = Stage(
                    program=program,
                    sources=sources,
                    rollouts=[
                        self._rollout(
                            *(stage, program, part, residency, state, program.run_node),
                            supply=self._supply(stage, part, sources),
                            fleet=fleets.get(role_of(part.player)),
                        )
                        for part in parts.rollouts
                    ],
                    failures=self.failures,
                    report=report,
                )
            stack.pop_all()
        return made

    def _fleets(
        self, stage: CompiledStage, parts: GraphParts, stack: ExitStack
    ) -> dict[RoleName, EngineFleet]:
        """Engines in processes of their own, of the roles that need them."""
        fleets: dict[RoleName, EngineFleet] = {}
        for part in parts.rollouts:
            role = role_of(part.player)
            num = self.config.roles[role].num_engines
            if role in fleets or (num == 1 and not stage.context.max_staleness):
                continue
            fleets[role] = fleet = self.policies.open_fleet(role, num)
            stack.callback(fleet.close)
        return fleets

    def _asynchronous(
        self,
        stage: CompiledStage,
        program: BatchProgram,
        sources: Sequence[Source],
        residency: Residency,
        report: StepReport,
        fleets: Mapping[RoleName, EngineFleet],
        state: State | None,
        checkpoint: Path | None,
    ) -> AsynchronousStage:
        (part,) = program.parts.rollouts
        fleet = fleets[role_of(part.player)]
        train = stage.config.train
        source = next(source for source in sources if source.node == part.source)
        unused = None
        if state is not None and checkpoint is not None:
            unused = read_unused(checkpoint / UNUSED, source.item_of)
        rollout = self._rollout(
            *(stage, program, part, residency, state, program.run_node),
            kind=partial(
                StreamingDriver,
                fleet=fleet,
                batch_groups=train.prompts_per_step,
                publication=Publication(train.at_publication),
                unused=unused,
            ),
            supply=self._supply(stage, part, sources, always=True),
            fleet=fleet,
        )
        return AsynchronousStage(
            program=program,
            sources=sources,
            rollout=rollout,
            failures=self.failures,
            report=report,
            thread=self.thread(),
            stop=self.stop,
            timeout_s=self.config.runtime.stall_timeout_s,
        )

    def _tokenizers(self, parts: GraphParts) -> dict[NodeId, Tokenizer]:
        """Of the samples of each rollout and source: that of a model that reads them."""
        found = {
            part.node.id: self.policies.tokenizer(role_of(part.player)) for part in parts.rollouts
        }
        for node in parts.graph.nodes:
            if node.role in self.policies.use.models and node.id in parts.made:
                tokenizer = self.policies.tokenizer(role_of(node))
                found.setdefault(parts.origin(node.id), tokenizer)
        return found

    def _program(
        self, stage: CompiledStage, parts: GraphParts, residency: Residency
    ) -> BatchProgram:
        # Likelihoods of examples are of the model as it is, whatever its rollouts' temperature.
        plain = replace(sampling_of(stage.config), temperature=1.0)
        samplings: dict[NodeId, Sampling] = {node.id: plain for node in parts.sources}
        samplings |= {part.node.id: sampling_of_rollout(part) for part in parts.rollouts}
        surroundings = Surroundings(
            policies=self.policies.workers,
            publish=self.policies.publish,
            refresh=self.policies.refresh,
            before=residency.switch,
            beat=self.beat,
        )
        samplers = {
            part.node.id: Sampler(
                sampling=samplings[part.node.id],
                stop_token_ids=tuple(self.policies.tokenizer(role_of(part.player)).stop_ids),
            )
            for part in parts.rollouts
            if samplings[part.node.id].logprobs == "sampler"
        }
        return BatchProgram(parts, stage.plan, surroundings, samplings, samplers)

    def _sources(self, stage: CompiledStage, state: State | None) -> list[Source]:
        nodes = stage.graph.of_op(Op.SOURCE)
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

    def _source(
        self, stage: CompiledStage, node: Node, names: tuple[str, ...], state: State | None
    ) -> Source:
        materials, curriculum = self.materials, self.config.data.curriculum
        prompts = materials.train
        responses: Responses | None = None
        match node.attr("data"):
            case "examples":
                prompts, responses, curriculum = materials.examples, self._solution, None
            case "pairs":
                prompts, responses, curriculum = materials.pair_prompts, self._pair, None
        if state is not None:
            cursor = PromptCursor.from_json(state, prompts, curriculum)
        else:
            seed = derive_seed(self.config.seed, "data", *names)
            cursor = PromptCursor(prompts, seed, curriculum=curriculum)
        return Source(
            node=node.id,
            cursor=cursor,
            num=stage.config.train.prompts_per_step,
            responses=responses,
            pairs=node.attr("data") == "pairs",
            observes=curriculum is not None,
            prompts=prompts,
        )

    def _solution(self, item: PromptItem) -> Sequence[Ints]:
        assert self.materials.solutions is not None
        return (self.materials.solutions.of(item),)

    def _pair(self, item: PromptItem) -> Sequence[Ints]:
        assert self.materials.pairs is not None
        return self.materials.pairs.of(item)

    def _supply(
        self,
        stage: CompiledStage,
        part: RolloutPart,
        sources: Sequence[Source],
        *,
        always: bool = False,
    ) -> PromptSupply | None:
        """Further prompts for a rollout; None where its batches are not refilled.

        Args:
            always: The rollout takes all of its prompts that way.
        """
        train = stage.config.train
        if not (train.refill or always):
            return None
        source = next(source for source in sources if source.node == part.source)
        prefix = "" if stage.name == self.config.stages[-1] else f"stage.{stage.name}."
        return PromptSupply(
            take=source.take_further,
            limit=train.refill_limit * train.prompts_per_step,
            where=f"{prefix}train.refill_limit={train.refill_limit}",
        )

    def _rollout(
        self,
        stage: CompiledStage,
        program: BatchProgram,
        part: RolloutPart,
        residency: Residency,
        state: State | None,
        run: RunNode,
        kind: Callable[..., RolloutDriver] = RolloutDriver,
        supply: PromptSupply | None = None,
        fleet: EngineFleet | None = None,
    ) -> OpenRollout:
        """A rollout and its driver.

        Args:
            run: Runs the maps that its filters read.
            kind: Makes the driver.
            supply: Further prompts, where batches are refilled.
            fleet: Its engines, where they are in processes of their own.
        """
        several = len(program.parts.rollouts) > 1
        purpose = f"rollout/{stage.name}/{part.node.id}" if several else f"rollout/{stage.name}"
        spec = rollout_spec(program.parts, part, purpose)
        judge = group_judge(program.parts, part, run)
        if state is None:
            settings = SchedulerSettings(
                group_size=spec.group_size,
                max_staleness=stage.context.max_staleness,
                judges_groups=judge is not None,
                refill=stage.config.train.refill,
            )
            scheduler = RolloutScheduler(settings)
        else:
            written = part_of(part_of(state, "schedulers"), part.node.id)
            scheduler = RolloutScheduler.from_json(dict(written))
        driver: RolloutDriver = self.drivers.make(
            *(spec, scheduler, self.scorers.of_rollout(part), judge),
            kind=kind,
            supply=supply,
            engines=None if fleet is None else fleet.engines,
        )
        return OpenRollout(
            part=part,
            driver=driver,
            begin=lambda: residency.switch(part.player.id),
            fleet=fleet,
        )
