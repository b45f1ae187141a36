"""Program to plan: trace, lower, place. No tensor library is imported, no data is read."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.backend.protocols import Plugin, Service
from flowrl.backend.registry import find
from flowrl.cluster.discover import discover
from flowrl.cluster.load import load_cluster
from flowrl.cluster.pool import ResourcePool
from flowrl.compiler.sizes import SizedStage, check_sizes, compares_a_group
from flowrl.config.load import LoadedConfig
from flowrl.config.nearest import listing, suggestion
from flowrl.config.schema import FreshModel, RoleConfig, RunConfig, StageConfig
from flowrl.cost.models import ModelShape
from flowrl.data import fresh_config_json, vocabulary_of
from flowrl.errors import ConfigError, PlanError
from flowrl.graph import Graph, Op
from flowrl.passes import Context, RoleCost, annotate_cost, run_passes
from flowrl.plan import PlacementPlan, PlanRequest, RoleRequest, make_plan, workload
from flowrl.program import Workflow, load_workflow
from flowrl.specs import AdvantageSpec, GroupRelative, PolicyClip, Sampling

__all__ = ["CompiledStage", "compile_stages", "lower", "sampling_of"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStage:
    """A stage, ready to be executed.

    Attributes:
        traced: What the program says.
        context: What it is lowered with.
        graph: The lowered graph, with the cost of each node.
        plan: Where and how it runs.
    """

    name: str
    config: StageConfig
    workflow: Workflow
    traced: Graph
    context: Context
    graph: Graph
    plan: PlacementPlan


def compile_stages(
    loaded: LoadedConfig,
    *,
    workflow: Workflow | str | None = None,
    pool: ResourcePool | None = None,
) -> tuple[CompiledStage, ...]:
    """Compiles every stage of a configuration.

    Args:
        workflow: Takes the place of the last stage's workflow.
        pool: The devices; by default what `cluster` says.

    Raises:
        ConfigError, TraceError, GraphError, PlanError, BackendError: whatever is wrong with the
            configuration, a program, its graph, a backend, or the fit on the devices.
    """
    config = loaded.config
    workflows = [
        _workflow_of(loaded, name, workflow if name == config.stages[-1] else None)
        for name in config.stages
    ]
    graphs = [
        _graphs(loaded, name, program)
        for name, program in zip(config.stages, workflows, strict=True)
    ]
    for program, (_, graph, _) in zip(workflows, graphs, strict=True):
        _check_roles(loaded, program, graph)
    check_sizes(
        loaded,
        [
            _sized(config, *named, traced, graph)
            for named, (traced, graph, _) in zip(loaded.stage_prefixes(), graphs, strict=True)
        ],
    )
    for _, graph, _ in graphs:
        _warn_of_truncation(graph)
        _warn_of_equal_scores(graph)
    if pool is None:
        pool = discover() if config.cluster == "auto" else load_cluster(Path(config.cluster))
    evaluated = _evaluated_role(config, [graph for _, graph, _ in graphs])
    requests = [
        _request(config, name, graph, evaluated)
        for name, (_, graph, _) in zip(config.stages, graphs, strict=True)
    ]
    # Workers are opened once for all stages, so each plan proves the longest sample of the run.
    max_length = max(request.max_length for request in requests)
    stages = []
    for name, program, (traced, graph, context), sized in zip(
        config.stages, workflows, graphs, requests, strict=True
    ):
        request = replace(sized, max_length=max_length)
        plan = make_plan(graph, request, pool)
        # The plan chooses parameter types, which bytes follow from.
        context = replace(context, costs=_costs(request, graph, plan))
        stages.append(
            CompiledStage(
                name=name,
                config=config.stage_config(name),
                workflow=program,
                traced=traced,
                context=context,
                graph=annotate_cost(graph, context),
                plan=plan,
            )
        )
    return tuple(stages)


def lower(workflow: Workflow) -> Graph:
    """The lowered graph of a workflow without a configuration: every default is the engine's."""
    return run_passes(workflow.trace(), Context())


def sampling_of(stage: StageConfig) -> Sampling:
    """How the rollouts of a stage are drawn."""
    return Sampling(**stage.train.sampling.model_dump())


def _workflow_of(loaded: LoadedConfig, name: str, given: Workflow | str | None) -> Workflow:
    if isinstance(given, Workflow):
        return given
    last = name == loaded.config.stages[-1]
    key = "workflow" if last else f"stage.{name}.workflow"
    own = loaded.config.stage_config(name).workflow
    if given is not None:
        return load_workflow(given)
    if own is not None:
        return load_workflow(own, where=loaded.where(key))
    return load_workflow(name, where=loaded.where("stages"))


def _graphs(loaded: LoadedConfig, name: str, workflow: Workflow) -> tuple[Graph, Graph, Context]:
    """The traced and the lowered graph of a stage, and what it was lowered with."""
    config = loaded.config
    stage = config.stage_config(name)
    try:
        traced = workflow.trace(stage.args)
    except ConfigError as error:
        if error.where is not None and error.where.startswith("args."):
            prefix = "" if name == config.stages[-1] else f"stage.{name}."
            error.where = loaded.where(f"{prefix}{error.where}")
        raise
    train, algorithm = stage.train, config.algorithm
    staleness = workflow.max_staleness
    context = Context(
        group_size=train.group_size,
        prompts_per_step=train.prompts_per_step,
        mini_batches=train.mini_batches,
        sampling=sampling_of(stage),
        advantage=GroupRelative(std=algorithm.advantage.std),
        loss=PolicyClip(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            aggregation=algorithm.aggregation,
        ),
        max_staleness=train.max_staleness if staleness is None else staleness,
        shares_weights={
            role: role in config.roles and _plugin(loaded, role).capabilities.shares_weights
            for role in traced.roles
        },
    )
    return traced, run_passes(traced, context), context


def _costs(request: PlanRequest, graph: Graph, plan: PlacementPlan) -> dict[str, RoleCost]:
    """Of the roles with a model, as the plan places them."""
    costs = {}
    for placement in plan.placements:
        role = request.role(placement.role)
        shape = request.shape_of(role)
        if shape is not None:
            work = workload(role, request, graph, placement.dtype)
            costs[placement.role] = RoleCost(shape=shape, work=work)
    return costs


def _plugin(loaded: LoadedConfig, role: str) -> Plugin:
    key = f"roles.{role}.backend"
    return find(loaded.config.roles[role].backend, where=loaded.where(key))


def _check_roles(loaded: LoadedConfig, workflow: Workflow, graph: Graph) -> None:
    for role in graph.roles:
        if role in loaded.config.roles:
            _plugin(loaded, role)
            continue
        node = next(node for node in graph.nodes if node.role == role)
        raise ConfigError(
            f"workflow {workflow.name!r} has a role {role!r} that the config does not name",
            where=str(node.source or workflow.source),
            found=f"roles {listing(loaded.config.roles)}",
            hint=suggestion(role, loaded.config.roles) or f"add roles.{role}.backend to the config",
        )


def _warn_of_truncation(graph: Graph) -> None:
    """Says so where an update takes tokens for draws of another distribution than they are of."""
    if not any(node.attr("behaviour_logprobs") for node in graph.of_op(Op.UPDATE)):
        return
    for node in graph.of_op(Op.GENERATE):
        sampling = node.attr("sampling")
        if isinstance(sampling, Sampling) and sampling.truncates:
            changed = [
                f"{name}={value}"
                for name, value, plain in (
                    ("top_p", sampling.top_p, 1.0),
                    ("top_k", sampling.top_k, 0),
                    ("min_p", sampling.min_p, 0.0),
                    ("repetition_penalty", sampling.repetition_penalty, 1.0),
                    ("min_tokens", sampling.min_tokens, 0),
                )
                if value != plain
            ]
            _log.warning(
                "%s draws with %s, and its update uses logprobs before that: the gradient is "
                "biased. Leave train.sampling at its defaults to train without bias",
                node.id,
                ", ".join(changed),
            )


def _warn_of_equal_scores(graph: Graph) -> None:
    """Says so where scores that are compared within a group can never differ."""
    for node in graph.of_op(Op.ADVANTAGE):
        spec = node.attr("spec")
        if not isinstance(spec, AdvantageSpec) or not compares_a_group(spec):
            continue
        for source in graph.of_op(Op.GENERATE):
            sampling = source.attr("sampling")
            if isinstance(sampling, Sampling) and sampling.temperature == 0:
                reason = "the same sample for all of a group (temperature=0)"
            else:
                continue
            _log.warning(
                "%s draws %s, so %s has nothing to compare and every advantage is 0: "
                "nothing will be learnt",
                source.id,
                reason,
                node.id,
            )


def _sized(config: RunConfig, name: str, prefix: str, traced: Graph, lowered: Graph) -> SizedStage:
    limits = {role: _longest(role, config.roles[role]) for role in lowered.roles}
    return SizedStage(
        name=name,
        prefix=prefix,
        traced=traced,
        lowered=lowered,
        limits={role: limit for role, limit in limits.items() if limit is not None},
    )


def _evaluated_role(config: RunConfig, graphs: list[Graph]) -> str | None:
    """The policy that held-out samples are drawn from: the last one updated."""
    if config.data.eval is None:
        return None
    updates = [node for graph in graphs for node in graph.of_op(Op.UPDATE)]
    return updates[-1].role if updates else None


def _request(config: RunConfig, name: str, graph: Graph, evaluated: str | None) -> PlanRequest:
    stage = config.stage_config(name)
    train = stage.train
    limits = [
        limit for role in graph.roles if (limit := _longest(role, config.roles[role])) is not None
    ]
    generate = graph.of_op(Op.GENERATE)
    if generate:
        sampling, group_size = generate[0].attr("sampling"), generate[0].attr("n")
    else:
        # Solutions may be as long as the responses that the run goes on to draw.
        sampling, group_size = sampling_of(config.stage_config(config.stages[-1])), 1
    assert isinstance(sampling, Sampling)
    assert isinstance(group_size, int)
    wanted = config.data.max_prompt_tokens + sampling.max_tokens
    return PlanRequest(
        roles=tuple(
            _role_request(config, role, role == evaluated)
            for role in dict.fromkeys((*graph.roles, *_copied(config, graph)))
        ),
        prompts_per_step=train.prompts_per_step,
        group_size=group_size,
        mini_batches=train.mini_batches,
        micro_batch=train.micro_batch,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=sampling.max_tokens,
        max_length=min([wanted, *limits]),
        train_key="train" if name == config.stages[-1] else f"stage.{name}.train",
    )


def _copied(config: RunConfig, graph: Graph) -> list[str]:
    copies = [config.roles[role].copy_of for role in graph.roles]
    return [role for role in copies if role is not None]


def _role_request(config: RunConfig, role: str, evaluated: bool) -> RoleRequest:
    role_config = config.roles[role]
    capabilities = find(role_config.backend).capabilities
    scores = capabilities.services == {Service.SCORE}
    return RoleRequest(
        name=role,
        backend=role_config.backend,
        capabilities=capabilities,
        shape=None if scores else _shape(role, role_config),
        dtype=role_config.dtype,
        num_slots=role_config.num_slots,
        copy_of=role_config.copy_of,
        evaluated=evaluated,
        num_workers=config.rewards.workers,
    )


def _shape(role: str, config: RoleConfig) -> ModelShape | None:
    """The model's shape, from the folder's config.json or from the fields of a new model."""
    if config.copy_of is not None:
        return None
    if config.model is None:
        raise ConfigError(
            "the role has no model",
            where=f"roles.{role}.model",
            expected="a Hugging Face model folder, the fields of a new model, or copy_of",
        )
    if isinstance(config.model, str):
        path = Path(config.model) / "config.json"
        shape = ModelShape.from_hf_config(_read_json(path, role), where=str(path))
        if shape.experts is not None or shape.latent is not None:
            raise PlanError(
                "experts and latent attention can be counted, but no backend here is known to need "
                "the memory that is counted for them",
                where=f"roles.{role}.model",
                found=f"model_type {shape.family!r}",
                expected="llama, mistral, qwen2 or qwen3",
            )
        return shape
    if config.tokenizer is None:
        raise ConfigError(
            "a new model needs a tokenizer",
            where=f"roles.{role}.tokenizer",
            expected="{kind: char, alphabet: ...} or {kind: bpe, vocab_size: ...}",
        )
    vocab_size, eos_id = vocabulary_of(config.tokenizer)
    return ModelShape.from_hf_config(fresh_config_json(config.model, vocab_size, eos_id))


def _longest(role: str, config: RoleConfig) -> int | None:
    """Tokens of the longest sample that the role's model takes; None where nothing says so."""
    match config.model:
        case FreshModel():
            return config.model.max_length
        case str():
            path = Path(config.model) / "config.json"
            limit = _read_json(path, role).get("max_position_embeddings")
            return limit if isinstance(limit, int) and limit > 0 else None
        case None:
            return None


def _read_json(path: Path, role: str) -> Mapping[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the model's config.json cannot be read",
            where=f"roles.{role}.model",
            found=f"{path}: {error}",
            hint="point it at a folder that save_pretrained wrote",
        ) from error
    if not isinstance(value, dict):
        raise ConfigError("the model's config.json is no mapping", where=str(path))
    return value
