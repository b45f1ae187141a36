"""Makes the rollouts of a stage: schedulers, engines, prompts, and their state in a checkpoint.

`DriverMaker` makes a rollout driver: its engine, its scorers and its random streams.
`RolloutMaker` makes all rollouts of a stage, for training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from flowrl.backend.environment import EnvironmentContext
from flowrl.backend.protocols import GenerateBackend
from flowrl.compiler import CompiledStage
from flowrl.compiler.scheduling import scheduler_settings, with_given_groups
from flowrl.config.schema import RunConfig
from flowrl.data import Tokenizer
from flowrl.graph import Node, Op
from flowrl.graph.streaming import scores_at_once
from flowrl.ids import EngineId, GroupId, NodeId, RoleName, SampleId, engine_id
from flowrl.plan.local import ASYNCHRONOUS, engines_of, engines_that_fit
from flowrl.rollout.events import Event
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.runtime.checkpoint.journal import RolloutJournals
from flowrl.runtime.checkpoint.unused_samples import UNUSED, UnusedSamples, read_unused
from flowrl.runtime.driver.batch_program import BatchProgram
from flowrl.runtime.driver.child_prompts import ChildPrompts
from flowrl.runtime.driver.collected_batch import FailureBudget, Scorers
from flowrl.runtime.driver.filters import GroupJudge, RunNode, group_judge
from flowrl.runtime.driver.graph_parts import GraphParts, RolloutPart, role_of
from flowrl.runtime.driver.payloads import PayloadStore
from flowrl.runtime.driver.rollout_driver import RolloutDriver
from flowrl.runtime.driver.rollout_tree import OpenRollout
from flowrl.runtime.driver.sharing import SharedWorkers
from flowrl.runtime.driver.sources import PromptSupply, Source
from flowrl.runtime.driver.stage import part_of
from flowrl.runtime.driver.step_report import reported_score
from flowrl.runtime.driver.streaming_driver import StreamingDriver
from flowrl.runtime.environments.episodes import EpisodeEngine
from flowrl.runtime.environments.pool import EnvironmentPool
from flowrl.runtime.executor import Executor
from flowrl.runtime.local.engine_fleet import EngineFleet
from flowrl.runtime.setup.policies import OpenPolicies, derive_seed
from flowrl.runtime.setup.scorers import OpenScorers
from flowrl.runtime.workers import Residency
from flowrl.specs import AdvantageSpec, FilterSpec, Grammar, Sampling


def sampling_of_rollout(part: RolloutPart) -> Sampling:
    """Returns the sampling of a rollout; for episodes, `max_tokens` limits one turn."""
    sampling = part.generate_node.attr("sampling")
    assert isinstance(sampling, Sampling)  # lowering fills it
    return sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """The settings of one rollout for its driver.

    Attributes:
        role: The policy that generates, the first one where several take turns.
        others: The other policies that take turns, in order.
        episodes: The `interact` whose turns they are; None for plain responses.
        sampling: The sampling options of every request.
        grammar: The grammar of every response, or of every turn.
        group_size: Samples for each prompt.
        purpose: Names the random streams of its samples.
        reported: The role whose score is a sample's; None if a model or a map gives it later.
        needs_states: True if an environment must return its states.
    """

    role: RoleName
    others: tuple[RoleName, ...] = ()
    episodes: Node | None = None
    sampling: Sampling
    group_size: int
    purpose: str
    reported: RoleName | None = None
    needs_states: bool = False
    grammar: Grammar | None = None


class DriverMaker:
    """Makes the drivers of a run, and opens the environments that they need.

    Args:
        executor: Opens environments.
        max_length: Tokens of the longest sample.
        failures: Rewards and episodes that may fail.
        beat: Called whenever something moved.
        stop: A true value ends a collection.
    """

    def __init__(
        self,
        config: RunConfig,
        policies: OpenPolicies,
        executor: Executor,
        *,
        max_length: int,
        failures: FailureBudget,
        beat: Callable[[], None],
        stop: Callable[[], bool],
    ) -> None:
        self._config = config
        self._policies = policies
        self._executor = executor
        self._max_length = max_length
        self._failures = failures
        self._beat = beat
        self._stop = stop
        self._environments: dict[tuple[RoleName, str], EnvironmentPool] = {}

    def make(
        self,
        spec: RolloutSpec,
        scheduler: RolloutScheduler,
        scorers: Mapping[RoleName, Scorers],
        judge: GroupJudge | None = None,
        *,
        kind: Callable[..., RolloutDriver] = RolloutDriver,
        supply: PromptSupply | None = None,
        engines: Mapping[EngineId, Sequence[GenerateBackend]] | None = None,
        view: Callable[[GenerateBackend], GenerateBackend] | None = None,
        unused: UnusedSamples | None = None,
        journal: Callable[[Event], None] | None = None,
    ) -> RolloutDriver:
        """Makes a driver that continues from its scheduler's state.

        Args:
            kind: Makes the driver.
            supply: Further prompts, where batches are refilled.
            engines: Engines that generate, with one for each policy that takes turns; by default
                those of the policies in this process.
            view: Returns an engine that joins later as the driver sees it.
            unused: Samples that the scheduler knows of already, where it was written before.
            journal: Receives every event.
        """
        worker = self._policies[spec.role]
        seed, purpose = self._config.seed, spec.purpose
        tokenizer = self._policies.tokenizer(spec.role)
        store = PayloadStore()
        here = [self._policies[role].engine for role in (spec.role, *spec.others)]

        def seen(name: EngineId, turns: Sequence[GenerateBackend]) -> GenerateBackend:
            if spec.episodes is None:
                return turns[0]
            # Each has an environment of its own, and so has an evaluation at the same time.
            owner = "" if engines is None else f"{spec.episodes.id}/{name}"
            return self._episodes(spec, spec.episodes, turns, tokenizer, store, owner)

        def seed_of(sample: SampleId) -> int:
            return derive_seed(seed, purpose, sample)

        driver = kind(
            scheduler=scheduler,
            engines={
                name: seen(name, turns)
                for name, turns in (engines or {worker.engine_id: here}).items()
            },
            view=lambda name, engine: seen(name, [engine if view is None else view(engine)]),
            scorers=scorers,
            tokenizer=tokenizer,
            sampling=spec.sampling,
            grammar=spec.grammar,
            group_size=spec.group_size,
            seed_of=seed_of,
            judge=judge,
            failures=self._failures,
            beat=self._beat,
            stop=self._stop,
            stall_timeout_s=self._config.runtime.stall_timeout_s,
            reported=spec.reported,
            store=store,
            supply=supply,
            unused=unused,
            journal=journal,
        )
        if worker.version > scheduler.version:
            driver.publish(worker.version)
        return driver

    def _episodes(
        self,
        spec: RolloutSpec,
        node: Node,
        engines: Sequence[GenerateBackend],
        tokenizer: Tokenizer,
        store: PayloadStore,
        owner: str,
    ) -> EpisodeEngine:
        turns, observed = node.attr("max_turns"), node.attr("max_observation_tokens")
        assert isinstance(turns, int)
        assert isinstance(observed, int)
        seed, purpose = self._config.seed, f"{spec.purpose}/episode"

        def seed_of(group: GroupId) -> int:
            return derive_seed(seed, purpose, group)

        return EpisodeEngine(
            engines=engines,
            policies=(spec.role, *spec.others),
            environments=self._environment(role_of(node), owner),
            tokenizer=tokenizer,
            item_of=lambda sample: store[sample].item,
            seed_of=seed_of,
            max_turns=turns,
            max_length=self._max_length,
            max_observation_tokens=observed,
            needs_states=spec.needs_states,
        )

    def _environment(self, role: RoleName, owner: str) -> EnvironmentPool:
        """Returns the environment of a role for one user, opened when it is first needed."""
        if (role, owner) not in self._environments:
            self._environments[role, owner] = open_environment(self._executor, self._config, role)
        return self._environments[role, owner]

    def close(self) -> None:
        """Ends every environment; idempotent."""
        with ExitStack() as stack:
            for pool in self._environments.values():
                stack.callback(pool.close)
            self._environments.clear()


def open_environment(executor: Executor, config: RunConfig, role: RoleName) -> EnvironmentPool:
    """Opens the environment of a role.

    Raises:
        BackendError: its backend cannot be used, or the user's class cannot be loaded.
    """
    own = config.roles[role]
    context = EnvironmentContext(
        role=role,
        environment=own.environment or "",
        options=dict(own.options),
        seed=derive_seed(config.seed, "environment", role),
        timeout_s=own.timeout_s,
    )
    return executor.open_environment(own.backend, context)


State = Mapping[str, object]


def train_key(config: RunConfig, stage: CompiledStage) -> str:
    """Returns the config key of a stage's `train`."""
    return "train" if stage.name == config.stages[-1] else f"stage.{stage.name}.train"


def settings_of(config: RunConfig, stage: CompiledStage, part: RolloutPart) -> SchedulerSettings:
    """Returns the rules of a rollout's scheduler.

    Raises:
        ConfigError: the configuration's policies are none.
    """
    processes = (engines_of(stage.plan, role_of(node)).processes for node in part.turn_nodes)
    settings = scheduler_settings(
        stage.config.train,
        group_size=_group_size(part),
        # In a synchronous plan nothing is generated ahead, however old samples may be.
        max_staleness=stage.context.max_staleness if stage.plan.kind == ASYNCHRONOUS else 0,
        judges_groups=bool(part.ends),
        num_engines=max(1, *processes),
        key=train_key(config, stage),
    )
    ahead = settings.budget is not None
    if part.parent is None and not (ahead and part.by_rows):
        return settings
    return with_given_groups(settings)


def _group_size(part: RolloutPart) -> int:
    group_size = part.generate_node.attr("n")
    assert isinstance(group_size, int)  # lowering fills it
    return group_size


def rollout_spec(parts: GraphParts, part: RolloutPart, purpose: str) -> RolloutSpec:
    """Returns the specification of a graph's rollout for its driver."""
    grammar = part.generate_node.attr("grammar")
    assert grammar is None or isinstance(grammar, Grammar)
    scoring_node = reported_score(parts, part.node.id)
    by_turns = any(
        isinstance(spec := node.attr("spec"), AdvantageSpec) and "turns" in spec.needs
        for node in parts.graph.of_op(Op.ADVANTAGE)
        if parts.origin(node.id) == part.node.id
    )
    return RolloutSpec(
        role=role_of(part.generate_node),
        others=tuple(map(role_of, part.turn_nodes[1:])),
        episodes=part.node if part.node.op is Op.INTERACT else None,
        sampling=sampling_of_rollout(part),
        group_size=_group_size(part),
        purpose=purpose,
        reported=role_of(scoring_node)
        if scoring_node is not None
        and scores_at_once(scoring_node)
        and parts.streams(scoring_node.id)
        else None,
        needs_states=by_turns,
        grammar=grammar,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMaker:
    """Makes the rollouts of one stage.

    Attributes:
        state: A checkpoint's state of the stage; None at its beginning.
        checkpoint: The folder that `state` comes from.
        journals: The journals in which rollouts note events.
        shared: Makes views of engines and scorers that several rollouts use at the same time.
    """

    config: RunConfig
    stage: CompiledStage
    program: BatchProgram
    sources: Sequence[Source]
    residency: Residency
    policies: OpenPolicies
    scorers: OpenScorers
    drivers: DriverMaker
    state: State | None
    checkpoint: Path | None
    journals: RolloutJournals
    shared: SharedWorkers = field(default_factory=SharedWorkers)

    @property
    def is_streaming(self) -> bool:
        """True if prompts are generated ahead of the trainer."""
        return any(
            settings_of(self.config, self.stage, part).runs_ahead
            for part in self.program.parts.rollouts
        )

    def fleets(self, stack: ExitStack) -> dict[RoleName, EngineFleet]:
        """Opens the engine processes of the roles for which the plan has them.

        Args:
            stack: Closes them.
        """
        fleets: dict[RoleName, EngineFleet] = {}
        nodes = [node for part in self.program.parts.rollouts for node in part.turn_nodes]
        for role in dict.fromkeys(map(role_of, nodes)):
            engines = engines_of(self.stage.plan, role)
            if not engines.processes:
                continue
            most = engines_that_fit(self.stage.plan, role)
            fleets[role] = fleet = self.policies.open_fleet(role, engines, most)
            stack.callback(fleet.close)
        return fleets

    def make(
        self,
        part: RolloutPart,
        run: RunNode,
        fleets: Mapping[RoleName, EngineFleet],
        *,
        kind: Callable[..., RolloutDriver] = RolloutDriver,
    ) -> OpenRollout:
        """Makes a rollout and its driver.

        Args:
            run: Runs the maps that its filters read.
            fleets: The engines of roles that have theirs in processes of their own.
            kind: Makes the driver, unless prompts are generated ahead of the trainer.
        """
        train = self.stage.config.train
        if self.is_streaming:
            fleet = fleets[role_of(part.generate_node)]
            kind = partial(StreamingDriver, fleet=fleet, batch_groups=train.prompts_per_step)
        several = len(self.program.parts.rollouts) > 1
        name = self.stage.name
        purpose = f"rollout/{name}/{part.node.id}" if several else f"rollout/{name}"
        scheduler, unused = self._scheduler(part)
        journal = self.journals.open(name, part.node.id)
        if journal is not None:
            journal.begin(scheduler)
        spec = rollout_spec(self.program.parts, part, purpose)
        driver = self.drivers.make(
            spec,
            scheduler,
            self._scorers(part),
            group_judge(self.program.parts, part, run),
            kind=kind,
            supply=self._supply(part)
            if scheduler.settings.refill or scheduler.settings.budget is not None
            else None,
            engines=self._engines(part, fleets),
            view=self._view(part),
            unused=unused,
            journal=None if journal is None else journal.note,
        )
        return OpenRollout(
            part=part,
            driver=driver,
            begin=lambda: self._begin(part),
            switches=any(self.residency.has_switches(node.id) for node in part.turn_nodes),
            prompts=None
            if part.prompts is None
            else ChildPrompts(part.prompts, self.policies.tokenizer(role_of(part.generate_node))),
            journal=journal,
        )

    def _engines(
        self, part: RolloutPart, fleets: Mapping[RoleName, EngineFleet]
    ) -> Mapping[EngineId, Sequence[GenerateBackend]] | None:
        """Returns the engines of a rollout, with one for each turn of a round.

        Where several policies take turns, as many are put together as the one with most has; those
        of the others serve several then. None means the engines in this process, which the
        rollout has for itself.
        """
        roles = list(map(role_of, part.turn_nodes))
        others = self._roles_of_others(part)
        if not others & set(roles) and not fleets.keys() & roles:
            return None
        engines = {
            role: list(fleets[role].engines.values())
            if role in fleets
            else [self.policies[role].engine]
            for role in roles
        }
        number = max(map(len, engines.values()))

        def engine_of(role: RoleName, place: int) -> GenerateBackend:
            own = engines[role]
            engine = own[place % len(own)]
            if role not in others and len(own) == number:
                return engine
            return self.shared.engine(engine, NodeId(f"{part.node.id}[{place}]"))

        found: dict[EngineId, Sequence[GenerateBackend]] = {}
        for place in range(number):
            of_role = {role: engine_of(role, place) for role in engines}
            found[engine_id(roles[0], place)] = [of_role[role] for role in roles]
        return found

    def _view(self, part: RolloutPart) -> Callable[[GenerateBackend], GenerateBackend] | None:
        """Returns what makes a rollout's view of an engine; None if it has it for itself."""
        if role_of(part.generate_node) not in self._roles_of_others(part):
            return None
        return lambda engine: self.shared.engine(engine, part.node.id)

    def _roles_of_others(self, part: RolloutPart) -> set[RoleName]:
        return {role_of(node) for other in self._other_parts(part) for node in other.turn_nodes}

    def _scorers(self, part: RolloutPart) -> Mapping[RoleName, Scorers]:
        """Returns the scorers of a rollout's samples."""
        own = self.scorers.of_rollout(part)
        if self.config.executor == "eager":  # each rollout keeps the answers of its own samples
            return own
        parts = self._other_parts(part)
        shared = {role for other in parts for role in self.scorers.of_rollout(other)}
        return {
            role: self.shared.scorers(scorers, part.node.id) if role in shared else scorers
            for role, scorers in own.items()
        }

    def _other_parts(self, part: RolloutPart) -> list[RolloutPart]:
        """Returns the rollouts that go on at the same time: of one tree, or all that run ahead."""
        parts = self.program.parts
        others, root = [o for o in parts.rollouts if o is not part], parts.root(part)
        return others if self.is_streaming else [o for o in others if parts.root(o) is root]

    def _begin(self, part: RolloutPart) -> None:
        for node in part.turn_nodes:
            self.residency.switch(node.id)

    def _supply(self, part: RolloutPart) -> PromptSupply:
        train = self.stage.config.train
        return PromptSupply(
            take=self._source(part.source).take_further,
            limit=train.refill_limit * train.prompts_per_step,
            where=f"{train_key(self.config, self.stage)}.refill_limit={train.refill_limit}",
            filters=_filters(part),
        )

    def _source(self, node: NodeId) -> Source:
        data = self.program.parts.data_of(node)
        return next(source for source in self.sources if source.node == data)

    def _scheduler(self, part: RolloutPart) -> tuple[RolloutScheduler, UnusedSamples | None]:
        """Returns a rollout's scheduler, and the samples of a checkpoint that belong to it."""
        if self.state is None:
            return RolloutScheduler(settings_of(self.config, self.stage, part)), None
        written = part_of(part_of(self.state, "schedulers"), part.node.id)
        scheduler = RolloutScheduler.from_json(dict(written))
        folder = None if self.checkpoint is None else self.checkpoint / UNUSED / part.node.id
        if folder is None or not folder.is_dir():
            return scheduler, UnusedSamples()
        return scheduler, read_unused(folder, self._source(part.source).item_of)


def _filters(part: RolloutPart) -> dict[str, str]:
    """Returns the text of each filter by its reason; of all filters with that reason."""
    found: dict[str, str] = {}
    for node in part.filters:
        spec = node.attr("spec")
        assert isinstance(spec, FilterSpec)
        before = found.get(spec.reason)
        found[spec.reason] = str(spec) if before is None else f"{before} or {spec}"
    return found
