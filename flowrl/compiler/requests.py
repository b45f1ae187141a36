"""The requests of the stages to the planner: roles, sizes, and the `plan` section of the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import add

from flowrl.cluster.hardware import abbreviated, find_spec
from flowrl.compiler.lengths import assumed_lengths, check_mean, lengths_of, mean_prompt
from flowrl.compiler.lowering import LoweredStage, sampling_of
from flowrl.compiler.role_backends import RoleBackends
from flowrl.compiler.roles import head_of
from flowrl.config.load import LoadedConfig
from flowrl.cost.demand import prompt_bound, response_bound
from flowrl.cost.episodes import CallSeconds
from flowrl.errors import ConfigError, raise_all
from flowrl.graph import Graph, Op
from flowrl.graph.sample_trees import evaluated_role
from flowrl.passes.context import Decision
from flowrl.plan import PlanRequest, Reason, Rejection, RoleRequest
from flowrl.plan.dtypes import check_trained_types
from flowrl.plan.options import EnvironmentRequest, Pin, PlanOptions
from flowrl.plan.pins import FIELDS
from flowrl.program.parameters import RoleKind
from flowrl.program.roles import Environment, Reward
from flowrl.wording import counted, listing, suggestion


def plan_requests(
    stages: Sequence[LoweredStage], role_backends: RoleBackends, *, here: bool = True
) -> list[PlanRequest]:
    """Returns the request of each stage.

    Workers are opened once for all stages, so each request is for the longest sample of the run.

    Args:
        here: The plan is for this very machine, whose one process has one device.

    Raises:
        ConfigError, DataError, PlanError: a model of which the config says too little; lengths,
            pins or environments that cannot be.
    """
    loaded = role_backends.loaded
    kinds = {name: kind for stage in stages for name, kind in stage.kinds.items()}
    measures = loaded.config.data.eval is not None or loaded.config.eval.sets
    evaluated = evaluated_role([stage.graph for stage in stages]) if measures else None
    requests = _with_own_pins(
        stages, [_request(stage, kinds, role_backends, evaluated, here) for stage in stages]
    )
    max_length = max(request.max_length for request in requests)
    return [replace(request, max_length=max_length) for request in requests]


def _with_own_pins(
    stages: Sequence[LoweredStage], requests: Sequence[PlanRequest]
) -> list[PlanRequest]:
    """Leaves each stage the pins of its graph, and the last one those of no graph too."""
    own = [
        {pin.subject for pin in request.options.pins if _has(stage.graph, pin.subject)}
        for stage, request in zip(stages, requests, strict=True)
    ]
    anywhere = set[str]().union(*own)
    filtered = []
    for stage, request, subjects in zip(stages, requests, own, strict=True):
        pins = tuple(
            pin
            for pin in request.options.pins
            if pin.subject in subjects or (not stage.prefix and pin.subject not in anywhere)
        )
        filtered.append(replace(request, options=replace(request.options, pins=pins)))
    return filtered


def _has(graph: Graph, subject: str) -> bool:
    """True if the subject of a pin is a role or a node of a graph, or what nodes do."""
    if subject == "rollout":
        return bool(graph.of_op(Op.GENERATE))
    nodes = {str(node.id) for node in graph.nodes}
    return subject in graph.roles or any(subject in (n, n.rpartition(".")[2]) for n in nodes)


def _request(
    stage: LoweredStage,
    kinds: Mapping[str, RoleKind],
    role_backends: RoleBackends,
    evaluated: str | None,
    here: bool,
) -> PlanRequest:
    loaded, graph, train = role_backends.loaded, stage.graph, stage.config.train
    config = loaded.config
    copied = [config.roles[role].copy_of for role in graph.roles]
    names = dict.fromkeys((*graph.roles, *(role for role in copied if role is not None)))
    limits = [role_backends.longest(name) for name in names if _has_model(kinds, name)]
    generates = graph.of_op(Op.GENERATE)
    # Solutions may be as long as the responses that the run goes on to generate.
    sampling = sampling_of(config.stage_config(config.stages[-1]))
    bounds = [response_bound(graph, node, sampling) for node in generates]
    response = max(bounds, default=sampling.max_tokens)
    longest = config.data.max_prompt_tokens
    prompts = [prompt_bound(graph, node, longest, sampling) for node in generates]
    wanted = max(map(add, prompts, bounds), default=longest + response)
    numbers = [n for node in generates if isinstance(n := node.attr("n"), int)]
    paired = any(node.attr("data") == "pairs" for node in graph.of_op(Op.SOURCE))
    request = PlanRequest(
        roles=tuple(_role_request(name, kinds, role_backends, evaluated) for name in names),
        prompts_per_step=train.prompts_per_step,
        group_size=max(numbers, default=2 if paired else 1),
        mini_batches=train.mini_batches,
        micro_batch=train.micro_batch,
        max_prompt_tokens=max(prompts, default=longest),
        max_response_tokens=response,
        max_length=min([wanted, *(limit for limit in limits if limit is not None)]),
        train_key=f"{stage.prefix}train",
        reasons=tuple(_reason(decision) for decision in stage.decisions),
        max_staleness=stage.context.max_staleness,
        options=_options(loaded, stage, response, here=here),
    )
    check_trained_types(graph, request)
    return request


def _has_model(kinds: Mapping[str, RoleKind], name: str) -> bool:
    return kinds.get(name) not in (Reward, Environment)


def _role_request(
    name: str, kinds: Mapping[str, RoleKind], role_backends: RoleBackends, evaluated: str | None
) -> RoleRequest:
    config, kind = role_backends.roles[name], kinds.get(name)
    own_model = _has_model(kinds, name) and config.copy_of is None
    return RoleRequest(
        name=name,
        backend=config.plugin,
        capabilities=role_backends.plugin(name).capabilities,
        shape=role_backends.shape(name) if own_model else None,
        head="lm" if kind is None else head_of(kind),
        dtype=config.dtype,
        recompute=config.recompute,
        num_slots=config.num_slots,
        ranks=config.ranks,
        copy_of=config.copy_of,
        evaluated=name == evaluated,
        num_workers=role_backends.loaded.config.rewards.workers,
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


# The `plan` section.


def _options(
    loaded: LoadedConfig, stage: LoweredStage, max_response_tokens: int, *, here: bool
) -> PlanOptions:
    """Returns the planner's options.

    Args:
        max_response_tokens: Of the longest response; of the longest episode with its observations.
    """
    plan, longest = loaded.config.plan, loaded.config.data.max_prompt_tokens
    generates = stage.graph.of_op(Op.GENERATE)
    environments = [node.role for node in stage.graph.of_op(Op.INTERACT) if node.role]
    mean, mean_response = plan.mean_prompt_tokens, plan.mean_response_tokens
    check_mean(loaded, "plan.mean_prompt_tokens", mean, longest, "data.max_prompt_tokens")
    if plan.lengths is None:
        limit = "train.sampling.max_tokens"
        key = "plan.mean_response_tokens"
        check_mean(loaded, key, mean_response, max_response_tokens, limit)
    warm_start = stage.prefix and not generates  # it has nothing to generate ahead or apart
    return PlanOptions(
        lengths=lengths_of(plan, max_response_tokens, where=loaded.where("plan.lengths")),
        prompt_tokens=mean_prompt(plan, longest),
        trainer=plan.trainer,
        engine=plan.engine,
        objective=plan.objective,
        kind="auto" if warm_start else plan.kind,
        kind_where=loaded.where("plan.kind"),
        alternatives=plan.alternatives,
        try_batches=plan.try_batches,
        pins=_pins(loaded),
        settings=tuple(_settings(loaded, stage.graph)),
        assumptions=tuple(_assumptions(loaded, stage, max_response_tokens)),
        engine_times=plan.engine_times,
        memory_share=plan.memory_share,
        single_device=here,
        turns=plan.mean_turns,
        said=plan.mean_observation_tokens,
        environments=_environments(loaded, environments),
    )


def _assumptions(loaded: LoadedConfig, stage: LoweredStage, longest: int) -> Iterator[str]:
    """Yields what the plan assumes because the configuration does not say it."""
    plan, train = loaded.config.plan, stage.config.train
    yield from assumed_lengths(plan, longest)
    if plan.mean_prompt_tokens is None:
        prompt = mean_prompt(plan, loaded.config.data.max_prompt_tokens)
        yield (
            f"prompts of {counted(prompt, 'token')} on average, half of the longest; "
            "plan.mean_prompt_tokens says better"
        )
    episodes = bool(stage.graph.of_op(Op.INTERACT))
    if episodes and plan.mean_turns is None:
        yield "episodes of half of their turns on average; plan.mean_turns says better"
    if episodes and plan.mean_observation_tokens is None:
        yield (
            "environments say half of what they may before each turn; "
            "plan.mean_observation_tokens says better"
        )
    if stage.graph.of_op(Op.PROMPTS_OF):
        yield (
            "prompts that are made of samples are answered when all of these are there (a run "
            "answers each as its sample ends); each byte of a template counts as a token, and a "
            "text of the data row as a prompt"
        )
    further = ["train.refill"] if train.refill else []
    further += ["train.policies.over_sampling"] if "over_sampling" in train.policies else []
    if further:
        yield (
            f"only samples that a step learns from are generated ({' and '.join(further)} may ask "
            "for more, which `flowrl simulate` generates)"
        )


def _environments(
    loaded: LoadedConfig, environments: Sequence[str]
) -> dict[str, EnvironmentRequest]:
    """Returns what `plan.environments` says of each environment.

    Args:
        environments: The roles of the stage with which policies exchange turns.
    """
    requests = {}
    for role, given in loaded.config.plan.environments.items():
        config = loaded.config.roles.get(role)
        if role not in environments and (config is None or config.environment is None):
            raise ConfigError(
                f"there is no role {role!r}" if config is None else f"{role!r} is no environment",
                where=loaded.where_within(f"plan.environments.{role}"),
                expected=f"one of {listing(environments)}"
                if environments
                else "none, for no workflow of this run has an environment",
                hint=suggestion(role, environments)
                or f"leave the keys of plan.environments.{role} out",
            )
        spec = find_spec(given.device)
        if spec is None and len(meant := abbreviated(given.device)) == 1:
            (spec,) = meant
        is_name = given.device not in ("cpu", "accelerator")
        requests[role] = EnvironmentRequest(
            calls=CallSeconds(
                reset_s=given.step_s if given.reset_s is None else given.reset_s,
                step_s=given.step_s,
                wait_s=given.wait_s,
            ),
            accelerated=given.device != "cpu",
            kind=(spec.name if spec else given.device) if is_name else None,
            concurrency=given.concurrency,
            nbytes=int(given.memory_gib * (1 << 30)),
        )
    return requests


def _pins(loaded: LoadedConfig) -> tuple[Pin, ...]:
    """Reads pins in both forms: `{rollout: {tp: 2}}`, and `rollout.tp=2` of the command line.

    The planner checks their values.
    """
    pins, problems = list[Pin](), list[ConfigError]()
    waiting: list[tuple[str, object]] = list(reversed(loaded.config.plan.pins.items()))
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{name}.{key}", inner) for key, inner in reversed(value.items())]
            continue
        key = f"plan.pins.{name}"
        text = str(value).lower() if isinstance(value, bool) else str(value)
        subject, dot, field = name.rpartition(".")
        if dot:
            pins.append(Pin(subject=subject, field=field, value=text, where=key))
        else:
            problem = ConfigError(
                "a pin says a number or devices of a part of the plan",
                where=key,
                found=f"{name}={text}",
                expected="WHAT.FIELD=VALUE, for example rollout.tp=2 or actor.devices=0-31",
                hint=f"pin one of {listing(FIELDS)}",
            )
            problems.append(problem)
    raise_all(problems)
    return tuple(pins)


def _settings(loaded: LoadedConfig, graph: Graph) -> Iterator[Pin]:
    """Yields the settings of roles: recomputation, and the engines of each rollout."""

    def setting(subject: str, field: str, value: object, key: str) -> Pin:
        where = loaded.where(key)
        return Pin(subject=subject, field=field, value=str(value), where=where, setting=key)

    for name, role in loaded.config.roles.items():
        if role.recompute != "auto":
            yield setting(name, "recompute", role.recompute, f"roles.{name}.recompute")
        if role.num_engines is not None:
            for node in graph.of_op(Op.GENERATE):
                if node.role == name:
                    yield setting(node.id, "dp", role.num_engines, f"roles.{name}.num_engines")
