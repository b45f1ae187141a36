"""The pieces of a step that need a model's devices: what the search places.

Every node that runs a model is a task. What the driver does between them (advantages, filters,
rules that score on a CPU) takes no device; a task that reads from one of those reads from the tasks
behind it. The nodes of an `interact` region are one task: its policy's turns, with what the
environment says between them. So are all updates of one role, and its forward passes with the
weights that it has between two of them: one trainer does them, one after the other in the order of
the program, in one layout, with one set of weights, gradients and optimizer states.

Weights: tasks of a trained role hold its parameters in the trainer's form, and may hold them once.
A role that nothing trains keeps what it began with, so it holds the same parameters as any other
untrained role of that origin; a reference of a *trained* actor does not hold the actor's, for they
part after the first update. Nor does one that takes over weights now and then (`sync`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from flowrl.cost.demand import mean_prompt, phase_of, response_bound
from flowrl.cost.episodes import Episodes
from flowrl.cost.memory import Phase
from flowrl.cost.models import ModelShape
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph, Node, Op, sums_of
from flowrl.graph.sample_sets import parents_of, sampling_node
from flowrl.ids import NodeId
from flowrl.plan.options import ENGINES, TRAINERS, EnvironmentRequest, Library
from flowrl.plan.request import PlanRequest, RoleRequest
from flowrl.plan.workload import rows_per_update, samples_of
from flowrl.specs import AdvantageSpec, MapSpec, Sampling

ASSUMED_SHARE = 0.5
"""Of the most turns and of the longest observation, where nobody says how many there are."""

MAX_PIECES = 16
"""Pieces of a batch beyond which a forward pass gets too small to be worth sending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Who answers the turns of a task.

    Attributes:
        role: The environment's.
        node: Its node.
        sharers: Regions whose environments are on the cores of hosts, or else on accelerators,
            as this one's is; itself included.
        players: Policies that take turns in its episodes; each has a task.
    """

    role: str
    node: NodeId
    episodes: Episodes
    environment: EnvironmentRequest
    sharers: int = 1
    players: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWork:
    """One of the updates that a trainer does in a step, or a forward pass between two of them.

    Attributes:
        node: Its node.
        samples: Of a step.
        rows: Of an optimizer update; 0 of a forward pass.
        prompt_tokens: Of a prompt on average.
        steps: Optimizer steps end it; false of all terms of a sum but the last.
    """

    node: NodeId
    samples: int
    rows: int
    prompt_tokens: float
    steps: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWork:
    """A task, and all that its time and memory follow from.

    Attributes:
        id: Of the node; of a region, that of its policy's turns; of a trainer with several updates,
            that of the first.
        nodes: What it stands for.
        after: Tasks that must have ended, or must have sent a piece.
        phase: What it does.
        trains: Its role is trained in this graph.
        library: What runs it.
        declared: Its backend declares layouts itself; else `library` is what the configuration
            assumes.
        samples: Of a step; of several updates, those of the one with most.
        rows: Of an optimizer update, the largest; 0 where nothing is trained.
        group_size: Samples for each prompt.
        prompt_tokens: Of a prompt on average.
        slots: Samples that one replica decodes at once.
        max_tokens: Of the longest response.
        pieces: In which its inputs may arrive.
        weights: Whose parameters it holds; None for an engine's own copy.
        every: Steps between two times that it is done.
        region: Of a task whose samples are episodes.
        updated: Of a trainer, its updates in the order of the program, with the forward passes
            between two of them.
    """

    id: NodeId
    nodes: tuple[NodeId, ...]
    after: tuple[NodeId, ...]
    role: RoleRequest
    phase: Phase
    shape: ModelShape
    trains: bool
    library: Library
    declared: bool
    samples: int
    rows: int
    group_size: int
    prompt_tokens: float
    slots: int
    max_tokens: int
    pieces: int
    weights: str | None
    every: int = 1
    region: Region | None = None
    updated: tuple[UpdateWork, ...] = ()

    @property
    def operations(self) -> tuple[NodeId, ...]:
        """What a schedule runs of it, one after the other: of a trainer, all its updates."""
        return tuple(one.node for one in self.updated) or (self.id,)

    @property
    def title(self) -> str:
        """For people: its operation, or all the updates that it is."""
        return " and ".join(self.operations)

    @property
    def even_rows(self) -> int:
        """The most that every optimizer update has a multiple of; 0 where nothing is trained."""
        return math.gcd(*(one.rows for one in self.updated))

    @property
    def generates(self) -> bool:
        """It is an engine's task."""
        return self.phase is Phase.ROLLOUT

    @property
    def updates(self) -> bool:
        """It has an optimizer."""
        return self.phase is Phase.UPDATE


def tasks_of(graph: Graph, request: PlanRequest, device_type: str = "cuda") -> tuple[TaskWork, ...]:
    """The tasks of a step, in an order in which they can run.

    Args:
        device_type: That they are to run on. On CPUs no library but the role's own backend is
            meant, with one device a trainer and a replica of an engine.

    Raises:
        PlanError: a role without a model, policies that take turns with an environment on
            accelerators, or another task that must run between two updates of a role.
    """
    _check_regions(graph, request)
    tasks = works_of(graph, request, device_type)
    _check_trainers(tasks, graph)
    return tasks


def works_of(graph: Graph, request: PlanRequest, device_type: str = "cpu") -> tuple[TaskWork, ...]:
    """The same, also of graphs that only one device can run.

    Raises:
        PlanError: a role without a model.
    """
    trained = {node.role for node in graph.of_op(Op.UPDATE)}
    working = [node for node in graph.nodes if phase_of(node) is not None and node.role]
    before = _tasks_before(graph, {node.id for node in working})
    found: list[TaskWork] = []
    for node in working:
        earlier = [
            task.id for task in found if task.role.name == node.role and _ordered(task, node)
        ]
        after = dict.fromkeys((*before[node.id], *earlier))
        found.append(_task(node, tuple(after), node.role in trained, graph, request, device_type))
    return _as_trainers(found, _read_between(graph))


def _read_between(graph: Graph) -> set[NodeId]:
    """Forward passes with the weights that a role has between two updates of a step."""
    updates = {node.id: node.role for node in graph.of_op(Op.UPDATE)}
    last = {role: update for update, role in updates.items()}
    return {
        edge.dst
        for edge in graph.edges
        if edge.src in updates
        and updates[edge.src] == graph.node(edge.dst).role
        and edge.src != last[updates[edge.src]]
    }


def _as_trainers(tasks: Sequence[TaskWork], between: Set[NodeId]) -> tuple[TaskWork, ...]:
    """The tasks, with all that the trainer of a role does as one, in an order in which they can
    run.

    What runs with the weights after the last update waits for the whole.
    """
    updates: dict[str, list[TaskWork]] = {}
    for task in tasks:
        if task.updates or task.id in between:
            updates.setdefault(task.role.name, []).append(task)
    several = {own[-1].id: own for own in updates.values() if len(own) > 1}
    inner = {task.id for own in several.values() for task in own[:-1]}
    trainer = {task.id: own[0].id for own in several.values() for task in own}

    def waiting(task: TaskWork) -> TaskWork:
        after = dict.fromkeys(trainer.get(before, before) for before in task.after)
        return replace(task, after=tuple(name for name in after if name != task.id))

    left = [
        waiting(_trainer(several[task.id]) if task.id in several else task)
        for task in tasks
        if task.id not in inner
    ]
    # What reads a pass between two updates may stand before the last one in the program.
    ready: dict[NodeId, TaskWork] = {}
    while left:
        free = next((task for task in left if ready.keys() >= set(task.after)), left[0])
        ready[free.id] = free
        left.remove(free)
    return tuple(ready.values())


def _trainer(updates: Sequence[TaskWork]) -> TaskWork:
    """The updates of a role as one task."""
    mine = {task.id for task in updates}
    reads = dict.fromkeys(before for task in updates for before in task.after)
    return replace(
        updates[0],
        nodes=tuple(node for task in updates for node in task.nodes),
        after=tuple(before for before in reads if before not in mine),
        samples=max(task.samples for task in updates),
        rows=max(task.rows for task in updates),
        group_size=max(task.group_size for task in updates),
        pieces=1,  # the second begins when the first has seen the whole batch
        every=min(task.every for task in updates),
        updated=tuple(one for task in updates for one in task.updated or (_forward(task),)),
    )


def _forward(task: TaskWork) -> UpdateWork:
    """A forward pass between two updates."""
    return UpdateWork(
        node=task.id, samples=task.samples, rows=0, prompt_tokens=task.prompt_tokens, steps=False
    )


def _check_trainers(tasks: Sequence[TaskWork], graph: Graph) -> None:
    """Checks that nothing else has to run between what a trainer does one after the other."""
    after = {task.id: task.after for task in tasks}
    for task in tasks:
        for name in task.after if len(task.operations) > 1 else ():
            if task.id in _all_before(name, after):
                raise PlanError(
                    f"{name} must run between what the trainer of {task.role.name} does, and plans "
                    "over several devices have all of that in one piece",
                    where=str(graph.node(name).source or name),
                    found=", ".join(task.operations),
                    hint="plan it for one device, or read the weights after the last update",
                )


def _all_before(name: NodeId, after: Mapping[NodeId, tuple[NodeId, ...]]) -> set[NodeId]:
    """Returns the tasks that one waits for, directly or through others."""
    found: set[NodeId] = set()
    waiting = [name]
    while waiting:
        fresh = set(after[waiting.pop()]) - found
        found |= fresh
        waiting += fresh
    return found


def _check_regions(graph: Graph, request: PlanRequest) -> None:
    for episode in graph.of_op(Op.INTERACT):
        environment = request.options.environments.get(str(episode.role))
        if len(graph.generators_of(episode)) > 1 and environment and environment.accelerated:
            raise PlanError(
                f"{episode.id} has several policies that take turns, and plans have their "
                "environment on hosts",
                where=f"plan.environments.{episode.role}.device",
                found="an accelerator",
                hint="leave it out, or give the environment a server of its own",
            )


def _ordered(earlier: TaskWork, node: Node) -> bool:
    """An update must not overtake what reads the weights before it, nor two updates each other."""
    return node.op is Op.UPDATE and not earlier.generates


def _tasks_before(graph: Graph, working: set[NodeId]) -> Mapping[NodeId, tuple[NodeId, ...]]:
    """For each node the tasks that it reads from, directly or through what is no task."""
    reads: dict[NodeId, tuple[NodeId, ...]] = {}
    for node in graph.nodes:
        found: dict[NodeId, None] = {}
        for edge in graph.in_edges(node.id):
            if edge.carried or graph.is_inner(edge):
                continue
            sources = (edge.src,) if edge.src in working else reads.get(edge.src, ())
            found.update(dict.fromkeys(sources))
        if node.op is Op.INTERACT:
            # What reads an episode reads the turns that its policy takes.
            players = [p.id for p in graph.of_op(Op.GENERATE) if p.region == node.region]
            found.update(dict.fromkeys(players))
        reads[node.id] = tuple(found)
    return reads


def _task(
    node: Node,
    after: tuple[NodeId, ...],
    trains: bool,
    graph: Graph,
    request: PlanRequest,
    device_type: str,
) -> TaskWork:
    role = request.role(str(node.role))
    shape = request.shape_of(role)
    if shape is None:
        raise PlanError(
            f"role {role.name!r} has no model",
            where=f"roles.{role.name}",
            hint="set model to a Hugging Face folder, a config.json or a new model, or copy_of",
        )
    phase = phase_of(node)
    assert phase is not None
    library, declared = _library(role, phase, request, device_type)
    tokens = request.max_response_tokens
    if phase is Phase.ROLLOUT:
        tokens = min(
            response_bound(graph, node, Sampling(max_tokens=tokens)),
            request.max_length,
        )
    samples = samples_of(node, graph, request)
    options = request.options
    prompt = mean_prompt(graph, node, options.prompt_tokens, options.lengths.mean)
    rows = rows_per_update(node, graph, request) if phase is Phase.UPDATE else 0
    every = node.attr("every")
    terms = sums_of(graph).get(str(node.attr("sum")), (node,))
    update = UpdateWork(
        node=node.id,
        samples=samples,
        rows=rows,
        prompt_tokens=prompt,
        steps=terms[-1].id == node.id,
    )
    return TaskWork(
        id=node.id,
        nodes=_members(node, graph),
        after=after,
        role=role,
        phase=phase,
        shape=shape,
        trains=trains,
        library=library,
        declared=declared,
        samples=samples,
        rows=rows,
        group_size=_group_size(node, samples, graph, request),
        prompt_tokens=prompt,
        slots=role.num_slots,
        max_tokens=tokens,
        pieces=_pieces(node, phase, graph, request),
        weights=_weights(role, trains, phase, library, graph, request),
        every=every if isinstance(every, int) else 1,
        region=_region(node, graph, request) if phase is Phase.ROLLOUT else None,
        updated=(update,) if phase is Phase.UPDATE else (),
    )


def _group_size(node: Node, samples: int, graph: Graph, request: PlanRequest) -> int:
    """Samples that answer one prompt; of prompts made of samples each is answered by a few."""
    generate = node if node.op is Op.GENERATE else sampling_node(graph, node)
    if generate is not None and parents_of(graph, generate) is not None:
        number = generate.attr("n")
        assert isinstance(number, int)  # lowering fills it
        return number
    return max(1, samples // request.prompts_per_step)


def _region(player: Node, graph: Graph, request: PlanRequest) -> Region | None:
    for node in graph.of_op(Op.INTERACT):
        if player.region is None or node.region != player.region:
            continue
        most, said = node.attr("max_turns"), node.attr("max_observation_tokens")
        assert isinstance(most, int)
        assert isinstance(said, int)
        known = {
            one.id: request.options.environments.get(str(one.role), EnvironmentRequest())
            for one in graph.of_op(Op.INTERACT)
        }
        mine = known[node.id]
        return Region(
            role=str(node.role),
            node=node.id,
            episodes=_episodes(most, said, request),
            environment=mine,
            sharers=sum(one.accelerated == mine.accelerated for one in known.values()),
            players=len(graph.generators_of(node)),
        )
    return None


def _episodes(most_turns: int, most_said: int, request: PlanRequest) -> Episodes:
    """How episodes go, by what the request says of them.

    Raises:
        PlanError: means above the most, or environments that say more than an episode holds.
    """
    options = request.options
    for key, mean, most in (
        ("plan.mean_turns", options.turns, most_turns),
        ("plan.mean_observation_tokens", options.said, most_said),
    ):
        if mean is not None and mean > most:
            raise PlanError(
                "a mean above the most that there may be",
                where=key,
                found=f"{mean:g}",
                expected=f"at most {most}, which the workflow says",
                hint=f"set {key} to at most {most}",
            )
    turns = options.turns or max(1.0, ASSUMED_SHARE * most_turns)
    said = ASSUMED_SHARE * most_said if options.said is None else options.said
    if turns * said >= options.lengths.mean:
        raise PlanError(
            "what an environment says is longer than the episodes that hold it",
            where="plan.mean_response_tokens",
            found=f"{options.lengths.mean:g} tokens, {turns:g} turns with {said:g} before each",
            expected=f"more than {turns * said:g} tokens",
            hint="mean_response_tokens counts generated tokens and observations; set it, or "
            "plan.mean_turns and plan.mean_observation_tokens",
        )
    return Episodes(turns=turns, most_turns=most_turns, said=said)


def _members(node: Node, graph: Graph) -> tuple[NodeId, ...]:
    if node.region is None:
        return (node.id,)
    return tuple(
        other.id
        for other in graph.nodes
        if other.region == node.region and (other is node or other.op is not Op.GENERATE)
    )


def _library(
    role: RoleRequest, phase: Phase, request: PlanRequest, device_type: str
) -> tuple[Library, bool]:
    """What runs a task: the role's backend where it declares layouts, else what is assumed."""
    declared = role.capabilities.layouts
    generates = phase is Phase.ROLLOUT
    if device_type == "cpu":
        library = Library(
            name=role.backend,
            kinds=frozenset({"dp"}) if generates else frozenset(),
            shard="none",
            sleeps=role.capabilities.sleep,
            in_place=role.capabilities.shares_weights,
        )
        return library, True
    if declared:
        return (
            Library(
                name=role.backend,
                kinds=declared,
                shard="none" if generates else "full" if "fsdp" in declared else "optimizer",
                sleeps=role.capabilities.sleep,
            ),
            True,
        )
    options = request.options
    return (ENGINES[options.engine] if generates else TRAINERS[options.trainer]), False


def _pieces(node: Node, phase: Phase, graph: Graph, request: PlanRequest) -> int:
    """Pieces that a task may begin on before it has the whole batch."""
    if phase is Phase.ROLLOUT:
        return 1
    if phase is not Phase.UPDATE:
        return min(MAX_PIECES, request.prompts_per_step)
    # A mini-batch can be learned from as soon as its groups are there, unless something looks at
    # the whole batch before.
    return 1 if _needs_batch(node, graph) else min(MAX_PIECES, request.mini_batches)


def _needs_batch(update: Node, graph: Graph) -> bool:
    """Whether something before an update looks at more than a group at once."""
    seen, waiting = {update.id}, [update.id]
    while waiting:
        node = graph.node(waiting.pop())
        spec = node.attr("spec")
        if isinstance(spec, AdvantageSpec) and not _of_a_group(spec):
            return True
        if isinstance(spec, MapSpec) and not spec.per_sample:
            return True
        for edge in graph.in_edges(node.id):
            if not edge.carried and edge.src not in seen:
                seen.add(edge.src)
                waiting.append(edge.src)
    return False


_BY_GROUP = frozenset(
    {
        *("distill", "gae", "group_in_group", "group_relative", "leave_one_out"),
        *("length_weighted", "pass_at_k", "reinforce_pp", "remax"),
    }
)
"""Advantages that follow from a group alone, unless an option says otherwise."""


def _of_a_group(spec: AdvantageSpec) -> bool:
    about = {getattr(spec, name, None) for name in ("std", "mean")}
    wide = getattr(spec, "whiten", False) or getattr(spec, "batch_std", False)
    return spec.kind in _BY_GROUP and not wide and not about & {"batch", "batch_others"}


def _weights(
    role: RoleRequest,
    trains: bool,
    phase: Phase,
    library: Library,
    graph: Graph,
    request: PlanRequest,
) -> str | None:
    if phase is Phase.ROLLOUT and trains and not library.in_place:
        return None  # an engine's own copy, in its own form
    takes_over = any(sync.role == role.name for sync in graph.of_op(Op.SYNC))
    if trains or takes_over:
        return role.name
    source, seen = role, {role.name}
    while source.copy_of is not None and source.copy_of not in seen:
        source = request.role(source.copy_of)
        seen.add(source.name)
    return f"{source.name} at the start ({role.head})"
