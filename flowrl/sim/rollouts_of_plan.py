"""What draws samples in a stage: its rollouts, as the simulation has them, whatever the devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from flowrl.compiler import CompiledStage
from flowrl.compiler.scheduling import scheduler_settings, with_given_groups
from flowrl.cost.demand import mean_prompt, phase_of
from flowrl.errors import ConfigError
from flowrl.graph import Graph, Node, Op, sample_sets
from flowrl.graph.sample_sets import JOINS, SUBSETS, answered_prompts, parents_of
from flowrl.plan.schema import Operation, PlacementPlan, StartUnit
from flowrl.rollout.settings import SchedulerSettings
from flowrl.sim.episodes import EnvironmentTimes, EpisodeShape
from flowrl.sim.model import ChildPrompt, EnvironmentModel, RolloutModel, ScorerModel
from flowrl.sim.scorers import ScoreTimes
from flowrl.sim.times import StageTimes
from flowrl.sim.workload import PromptLengths
from flowrl.specs import Sampling
from flowrl.specs.prompts import PromptTemplate


def rollout_nodes(graph: Graph) -> tuple[Node, ...]:
    """The nodes that draw samples."""
    return tuple(
        node
        for node in graph.of_op(Op.GENERATE, Op.INTERACT)
        if node.op is Op.INTERACT or node.region is None
    )


def longest_response(stage: CompiledStage, node: Node) -> int:
    """Tokens that are drawn for a sample of a rollout at most."""
    player, *_ = stage.graph.generators_of(node)
    most = stage.plan.operation(player.id).max_tokens
    if node.op is Op.INTERACT:
        shape = _shape(node, player)
        most = min(most, shape.turn * shape.max_turns)
    return max(1, most)


def _shape(node: Node, player: Node) -> EpisodeShape:
    observation, turns = node.attr("max_observation_tokens"), node.attr("max_turns")
    sampling = player.attr("sampling")
    assert isinstance(sampling, Sampling)  # lowering fills it
    assert isinstance(turns, int)
    assert isinstance(observation, int)
    return EpisodeShape(turn=sampling.max_tokens, observation=observation, max_turns=turns)


def prompt_lengths(graph: Graph, node: Node, times: StageTimes, longest: int) -> PromptLengths:
    """Lengths of the prompts of a rollout; of those that are made of samples the mean ones.

    Args:
        longest: Tokens of a response at most.
    """
    response = longest / 2 if times.response_tokens is None else times.response_tokens
    values = (mean_prompt(graph, node, value, response) for value in times.prompts.values)
    return PromptLengths(values=tuple(map(round, values)))


def origins_of(graph: Graph) -> Mapping[str, str]:
    """For each node that speaks of samples, the rollout or the source that they come from.

    Sets that are joined are taken to be of the first rollout among them, as long as its samples.
    """
    made = sample_sets(graph)
    found: dict[str, str] = {}
    for node in graph.nodes:
        maker = made[node.id]
        reads = [edge.src for edge in graph.in_edges(node.id) if not edge.carried]
        if node.op in (*SUBSETS, Op.REPLAY, *JOINS):
            origins = [found[source] for source in reads]
            drawn = [name for name in origins if graph.node(name).op is not Op.SOURCE]
            found[node.id] = (drawn or origins)[0]
        else:
            found[node.id] = found.get(maker, maker)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesRead:
    """What an operation of a plan works on.

    Attributes:
        rollout: The rollout that drew it; None for a batch of data, or for none.
        share: Of that rollout's samples (or of the batch), those that it works on.
    """

    rollout: str | None
    share: float


def samples_read(
    graph: Graph, plan: PlacementPlan, origins: Mapping[str, str], operation: Operation
) -> SamplesRead:
    """What an operation works on; `origins` are those of the graph."""
    origin = origins.get(operation.node)
    drawn = origin is not None and graph.node(origin).op is not Op.SOURCE
    made = plan.operation(origin).num_samples if origin is not None else 0
    share = operation.num_samples / made if made and operation.num_samples else 1.0
    return SamplesRead(rollout=origin if drawn else None, share=share)


def untimed(role: str, times: StageTimes) -> ConfigError:
    """The error of a role that draws, whose decode steps nobody knows."""
    return ConfigError(
        "there are no step times for this role",
        where=f"roles.{role}",
        found=times.source,
        hint="measure them with `flowrl profile CONFIG`",
    )


def waits_for(operation: Operation, plan: PlacementPlan, names: Collection[str]) -> tuple[str, ...]:
    """Of some operations, those that must have ended before one begins: what it reads from, and of
    an update what the program has its role do before it, with the weights of then."""
    before = [name for name in operation.after if name in names]
    for other in plan.operations:
        if operation.op != Op.UPDATE or other.node == operation.node:
            break
        own = other.role == operation.role and other.op != Op.SYNC
        if own and other.node in names:
            before.append(other.node)
    return tuple(dict.fromkeys(before))


def is_filtered(plan: PlacementPlan, node: str) -> bool:
    """Whether only groups reach a node that a filter kept while they were drawn."""
    seen, waiting = {node}, [node]
    while waiting:
        for before in plan.operation(waiting.pop()).after:
            operation = plan.operation(before)
            if operation.op == Op.FILTER and operation.start is StartUnit.GROUP:
                return True
            if before not in seen:
                seen.add(before)
                waiting.append(before)
    return False


def switch_seconds(plan: PlacementPlan, times: StageTimes, node: str) -> float:
    """What residency switches before an operation take."""
    return sum(
        times.switches.get((switch.role, switch.what, switch.action), 0.0)
        for switch in plan.residency
        if switch.before == node
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMaker:
    """Makes the rollouts of a stage.

    Attributes:
        staleness: Publications that samples may be behind.
        lane_of: The lane of the environment of a region, by the node that plays with it.
        lanes_of: Those of a role's scorers.
    """

    stage: CompiledStage
    times: StageTimes
    staleness: int
    origins: Mapping[str, str]
    lane_of: Callable[[Node], str]
    lanes_of: Callable[[str], Sequence[str]]

    def make(
        self,
        node: Node,
        *,
        pools: Sequence[tuple[str, int]],
        after: Sequence[str] = (),
        at_once: bool = False,
    ) -> RolloutModel:
        """One rollout.

        Args:
            pools: Whose engines draw for it, or take turns in its episodes, in order; and how many
                each has.
            after: Rollouts that it waits for.
            at_once: Prompts that are made of samples are answered as these end.
        """
        player, *_ = self.stage.graph.generators_of(node)
        plan = self.stage.plan
        pool, num_engines = max(pools, key=lambda pool: pool[1])
        parents = parents_of(self.stage.graph, node) if at_once else None
        settings = self._settings(node, player, num_engines)
        return RolloutModel(
            name=node.id,
            role=pool,
            groups=plan.operation(node.id).num_samples // settings.group_size,
            settings=settings,
            environment=self._environment(node, player) if node.op is Op.INTERACT else None,
            scorers=tuple(
                self._scorer(operation)
                for operation in plan.operations
                if operation.op == Op.SCORE
                and operation.start is StartUnit.SAMPLE
                and phase_of(self.stage.graph.node(operation.node)) is None
                and self.origins[operation.node] == node.id
            ),
            after=tuple(after),
            turns=tuple(name for name, _ in pools),
            parent=None if parents is None else self.origins[parents.id],
            of_kept=parents is not None and parents.op is not Op.GENERATE,
            child_prompt=self._child_prompt(node),
        )

    def _child_prompt(self, node: Node) -> ChildPrompt | None:
        graph = self.stage.graph
        prompts = answered_prompts(graph, node)
        spec = None if prompts is None else graph.node(prompts).attr("spec")
        if spec is None:
            return None
        if not isinstance(spec, PromptTemplate):
            return ChildPrompt(texts=0, prompts=1, responses=1)
        names = Counter(spec.names)
        responses = names["response"] + names["opponent"]
        of_rows = len(spec.names) - responses - names["prompt"]
        texts = sum(len(text.encode()) for text in spec.pieces[::2])
        return ChildPrompt(
            texts=texts + round(of_rows * fmean(self.times.prompts.values)),
            prompts=names["prompt"],
            responses=responses,
        )

    def _settings(self, node: Node, player: Node, num_engines: int) -> SchedulerSettings:
        number = player.attr("n")
        assert isinstance(number, int)  # lowering fills it
        settings = scheduler_settings(
            self.stage.config.train,
            group_size=number,
            max_staleness=self.staleness,
            judges_groups=any(
                operation.op == Op.FILTER
                and operation.start is StartUnit.GROUP
                and self.origins[operation.node] == node.id
                for operation in self.stage.plan.operations
            ),
            num_engines=num_engines,
            key=self.stage.context.train_key,
        )
        takes_more = parents_of(self.stage.graph, node) is None
        if settings.budget is not None and self._has_rows_of_steps(node):
            takes_more = False
        return settings if takes_more else with_given_groups(settings)

    def _has_rows_of_steps(self, node: Node) -> bool:
        """Whether each step has its own rows, also ahead of the trainer, as runs have it."""
        graph = self.stage.graph
        roots = [one for one in rollout_nodes(graph) if parents_of(graph, one) is None]
        prompts = answered_prompts(graph, node)
        return len(roots) > 1 or (prompts is not None and graph.node(prompts).op is Op.WHERE)

    def _environment(self, node: Node, player: Node) -> EnvironmentModel:
        role, known = node.role or "", self.times.environments
        return EnvironmentModel(
            lane=self.lane_of(node),
            times=known.get(node.id) or known.get(role, EnvironmentTimes()),
            shape=self.times.episodes.get(node.id)
            or self.times.episodes.get(role)
            or _shape(node, player),
        )

    def _scorer(self, operation: Operation) -> ScorerModel:
        role = operation.role or ""
        return ScorerModel(
            name=operation.node,
            lanes=tuple(self.lanes_of(role)),
            times=self.times.scorers.get(role, ScoreTimes()),
        )
