"""What each stage asks of the planner: its roles, its sizes, the length of its longest sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flowrl.compiler.planning import plan_options
from flowrl.compiler.players import Players
from flowrl.compiler.roles import head_of
from flowrl.config.load import LoadedConfig
from flowrl.config.schema import RunConfig, StageConfig, TrainConfig
from flowrl.cost.demand import response_bound
from flowrl.graph import Graph, Op
from flowrl.passes.context import Decision
from flowrl.plan import PlanRequest, Reason, Rejection, RoleRequest
from flowrl.plan.dtypes import check_trained_types
from flowrl.program.parameters import RoleKind
from flowrl.program.roles import Environment, Reward
from flowrl.specs import LossSpec, Sampling

__all__ = ["StageRequest", "evaluated_role", "plan_requests", "sampling_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """A stage as far as the planner's request needs it.

    Attributes:
        graph: Lowered.
        decisions: What passes decided.
        max_staleness: Publications that its samples may be behind.
    """

    name: str
    graph: Graph
    decisions: tuple[Decision, ...]
    max_staleness: int = 0


def plan_requests(
    loaded: LoadedConfig,
    stages: Sequence[StageRequest],
    kinds: Mapping[str, RoleKind],
    players: Players,
    *,
    here: bool = True,
) -> list[PlanRequest]:
    """One request a stage.

    Workers are opened once for all stages, so each request is for the longest sample of the run.

    Args:
        kinds: Of all roles that any stage uses.
        here: The plan is for this very machine.

    Raises:
        ConfigError, PlanError: a model of which the config says too little, or what is unknown.
    """
    evaluated = evaluated_role(loaded.config, [stage.graph for stage in stages])
    requests = [_request(loaded, stage, kinds, players, evaluated, here) for stage in stages]
    requests = _with_own_pins(stages, requests)
    max_length = max(request.max_length for request in requests)
    return [replace(request, max_length=max_length) for request in requests]


def _with_own_pins(
    stages: Sequence[StageRequest], requests: Sequence[PlanRequest]
) -> list[PlanRequest]:
    """Each stage with the pins that mean something there; the last one with those of no stage."""
    named = [{pin.subject for pin in one.options.pins} for one in requests]
    meant = [
        {subject for subject in subjects if _names(stage.graph, subject)}
        for stage, subjects in zip(stages, named, strict=True)
    ]
    somewhere = set[str]().union(*meant)
    found = []
    for number, request in enumerate(requests):
        last = number == len(requests) - 1
        pins = tuple(
            pin
            for pin in request.options.pins
            if pin.subject in meant[number] or (last and pin.subject not in somewhere)
        )
        found.append(replace(request, options=replace(request.options, pins=pins)))
    return found


def _names(graph: Graph, subject: str) -> bool:
    """Whether a pin's subject is something of a graph: a role, a node, or what nodes do."""
    if subject == "rollout":
        return bool(graph.of_op(Op.GENERATE))
    nodes = {str(node.id) for node in graph.nodes}
    return subject in graph.roles or any(subject in (n, n.rpartition(".")[2]) for n in nodes)


def sampling_of(stage: StageConfig) -> Sampling:
    """How the rollouts of a stage are drawn."""
    return Sampling(**stage.train.sampling.model_dump())


def evaluated_role(config: RunConfig, graphs: Sequence[Graph]) -> str | None:
    """The policy that held-out samples are drawn from: the last one updated."""
    if config.data.eval is None:
        return None
    policies = [
        node.role
        for graph in graphs
        for node in graph.of_op(Op.UPDATE)
        if isinstance(loss := node.attr("loss"), LossSpec) and loss.predicts == "logprobs"
    ]
    return policies[-1] if policies else None


def _request(
    loaded: LoadedConfig,
    stage: StageRequest,
    kinds: Mapping[str, RoleKind],
    players: Players,
    evaluated: str | None,
    here: bool,
) -> PlanRequest:
    config, graph = loaded.config, stage.graph
    train = config.stage_config(stage.name).train
    names = list(dict.fromkeys((*graph.roles, *_copied(config, graph))))
    roles = [_role_request(loaded, name, kinds, players, evaluated) for name in names]
    limits = [players.longest(role.name) for role in roles if _has_model(kinds, role.name)]
    # Solutions may be as long as the responses that the run goes on to draw.
    sampling = sampling_of(config.stage_config(config.stages[-1]))
    bounds = [response_bound(graph, node, sampling) for node in graph.of_op(Op.GENERATE)]
    response = max(bounds, default=sampling.max_tokens)
    wanted = config.data.max_prompt_tokens + response
    options = plan_options(
        loaded,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=response,
        draws={
            name: [str(node.id) for node in graph.of_op(Op.GENERATE) if node.role == name]
            for name in graph.roles
        },
        here=here,
        environments=[node.role for node in graph.of_op(Op.INTERACT) if node.role],
    )
    options = replace(options, assumptions=(*options.assumptions, *_not_drawn(train)))
    if stage.name != config.stages[-1] and not graph.of_op(Op.GENERATE):
        options = replace(options, kind="auto")  # a warm start has nothing to draw ahead or apart
    request = PlanRequest(
        roles=tuple(roles),
        prompts_per_step=train.prompts_per_step,
        group_size=_group_size(graph),
        mini_batches=train.mini_batches,
        micro_batch=train.micro_batch,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=response,
        max_length=min([wanted, *(limit for limit in limits if limit is not None)]),
        train_key="train" if stage.name == config.stages[-1] else f"stage.{stage.name}.train",
        reasons=tuple(_reason(decision) for decision in stage.decisions),
        max_staleness=stage.max_staleness,
        options=options,
    )
    check_trained_types(graph, request)
    return request


def _not_drawn(train: TrainConfig) -> Iterator[str]:
    """What the stage may draw beside the samples of a step, of which a plan has no times."""
    asked = ["train.refill"] if train.refill else []
    asked += ["train.policies.over_sampling"] if "over_sampling" in train.policies else []
    if asked:
        yield (
            f"no sample is drawn beside those that a step learns from ({' and '.join(asked)}); "
            "`flowrl simulate` draws them"
        )


def _group_size(graph: Graph) -> int:
    """Samples for each prompt: of the largest rollout, or of the data where nothing is drawn."""
    drawn = [n for node in graph.of_op(Op.GENERATE) if isinstance(n := node.attr("n"), int)]
    paired = any(node.attr("data") == "pairs" for node in graph.of_op(Op.SOURCE))
    return max(drawn, default=2 if paired else 1)


def _copied(config: RunConfig, graph: Graph) -> list[str]:
    copies = [config.roles[role].copy_of for role in graph.roles]
    return [role for role in copies if role is not None]


def _has_model(kinds: Mapping[str, RoleKind], name: str) -> bool:
    return kinds.get(name) not in (Reward, Environment)


def _role_request(
    loaded: LoadedConfig,
    name: str,
    kinds: Mapping[str, RoleKind],
    players: Players,
    evaluated: str | None,
) -> RoleRequest:
    config, kind = loaded.config.roles[name], kinds.get(name)
    own_model = _has_model(kinds, name) and config.copy_of is None
    return RoleRequest(
        name=name,
        backend=config.backend,
        capabilities=players.plugin(name).capabilities,
        shape=players.shape(name) if own_model else None,
        head="lm" if kind is None else head_of(kind),
        dtype=config.dtype,
        recompute=config.recompute,
        num_slots=config.num_slots,
        copy_of=config.copy_of,
        evaluated=name == evaluated,
        num_workers=loaded.config.rewards.workers,
    )


def _reason(decision: Decision) -> Reason:
    return Reason(
        subject=decision.subject,
        choice=decision.choice,
        why=decision.why,
        rejected=tuple(
            Rejection(choice=choice, constraint=why) for choice, why in decision.rejected
        ),
    )
