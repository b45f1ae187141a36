"""Requests of each stage: to the planner (roles, sizes, the longest sample) and to data rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flowrl.compiler.planning import plan_options
from flowrl.compiler.role_backends import RoleBackends
from flowrl.compiler.roles import head_of
from flowrl.config.load import LoadedConfig
from flowrl.config.rewards import ExactMatch, Gsm8kMatch, NumericMatch, PythonReward, RewardTerm
from flowrl.config.schema import RunConfig, StageConfig, TrainConfig
from flowrl.config.user_functions import environment_parameters, reward_parameters
from flowrl.cost.demand import response_bound
from flowrl.graph import Graph, Op
from flowrl.passes.context import Decision
from flowrl.plan import PlanRequest, Reason, Rejection, RoleRequest
from flowrl.plan.dtypes import check_trained_types
from flowrl.program.parameters import RoleKind
from flowrl.program.roles import Environment, Reward
from flowrl.specs import LossSpec, Sampling

if TYPE_CHECKING:
    from flowrl.data.rows import RowNeeds, Split

__all__ = [
    "StageRequest",
    "evaluated_role",
    "plan_requests",
    "row_needs",
    "sampling_of",
]


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
    role_backends: RoleBackends,
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
    requests = [_request(loaded, stage, kinds, role_backends, evaluated, here) for stage in stages]
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
    role_backends: RoleBackends,
    evaluated: str | None,
    here: bool,
) -> PlanRequest:
    config, graph = loaded.config, stage.graph
    train = config.stage_config(stage.name).train
    names = list(dict.fromkeys((*graph.roles, *_copied(config, graph))))
    roles = [_role_request(loaded, name, kinds, role_backends, evaluated) for name in names]
    limits = [role_backends.longest(role.name) for role in roles if _has_model(kinds, role.name)]
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
    role_backends: RoleBackends,
    evaluated: str | None,
) -> RoleRequest:
    config, kind = loaded.config.roles[name], kinds.get(name)
    own_model = _has_model(kinds, name) and config.copy_of is None
    return RoleRequest(
        name=name,
        backend=config.backend,
        capabilities=role_backends.plugin(name).capabilities,
        shape=role_backends.shape(name) if own_model else None,
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


# The fields of data rows that stages, rewards and environments read.


def row_needs(config: RunConfig, graphs: Sequence[Graph], split: Split) -> RowNeeds:
    """What a row must have beside its prompt.

    A function of the user's own asks for the answer by a parameter of that name. Where its file
    does not tell (it is decorated, or imported), a reward is taken to ask for it, and an
    environment is not: it is given the whole row.

    Args:
        graphs: Of all stages.
    """
    from flowrl.data.rows import RowNeeds  # planning reads no rows

    kinds = {node.attr("data") for graph in graphs for node in graph.of_op(Op.SOURCE)}
    train = split == "train"
    terms = list(_terms(config, graphs, train=train))
    return RowNeeds(
        answer=any(map(_reads_answer, terms)) or _environment_reads(config, graphs),
        number=any(isinstance(term, Gsm8kMatch | NumericMatch) for term in terms),
        solution=train and bool(kinds & {"examples", "pairs"}),
        rejected=train and "pairs" in kinds,
    )


def _terms(config: RunConfig, graphs: Sequence[Graph], *, train: bool) -> Iterator[RewardTerm]:
    """The reward terms that score responses to the rows."""
    scores = [
        node
        for graph in graphs
        for node in graph.of_op(Op.SCORE)
        if node.attr("by") != "model" and node.role is not None
    ]
    roles = {str(node.role) for node in scores}
    terms = [config.terms_of(role)[0] for role in sorted(roles)]
    # The turns of an episode are scored by its environment.
    draws = any(node.region is None for graph in graphs for node in graph.of_op(Op.GENERATE))
    if draws or not train:
        # Told of all that is drawn and of held-out samples, also where no program scores by them.
        terms.append(config.rewards.terms)
    if scores or draws or not train:
        yield from (term for several in terms for term in several)


def _environment_reads(config: RunConfig, graphs: Sequence[Graph]) -> bool:
    """Whether an environment reads the rows' answers."""
    used = {str(role) for graph in graphs for role in graph.roles}
    for role in used & set(config.roles):
        target = config.roles[role].environment
        asked = None if target is None else environment_parameters(target, "reset")
        # `**kwargs` passes on whatever there is.
        if asked is not None and "answer" in (*asked.required, *asked.optional):
            return True
    return False


def _reads_answer(term: RewardTerm) -> bool:
    match term:
        case ExactMatch() | NumericMatch() | Gsm8kMatch():
            return True
        case PythonReward():
            asked = reward_parameters(term.function)
            return asked is None or asked.asks_for("answer")
        case _:
            return False
