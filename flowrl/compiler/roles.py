"""Checks that the backend and the model of each role can do what the programs ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields

from flowrl.backend.plugin import Capabilities, Head, Service
from flowrl.backend.registry import available, check_options
from flowrl.compiler.lowering import LoweredStage
from flowrl.compiler.role_backends import RoleBackends
from flowrl.cost.demand import phase_of
from flowrl.errors import ConfigError, FlowError, GraphError
from flowrl.graph import Graph, Node, Op
from flowrl.graph.sample_sets import sampling_node
from flowrl.graph.streaming import is_rule_score
from flowrl.ids import RoleName
from flowrl.passes.settle_truncation import changed_options
from flowrl.program.parameters import RoleKind
from flowrl.program.policy import Policy
from flowrl.program.roles import Critic, Environment, Reward, RewardModel
from flowrl.specs import Sampling
from flowrl.wording import listing, suggestion

_SERVICES: Mapping[RoleKind, tuple[Service, ...]] = {
    Policy: (Service.GENERATE, Service.TRAIN),
    Critic: (Service.TRAIN,),
    RewardModel: (Service.TRAIN,),
    Reward: (Service.SCORE,),
    Environment: (Service.ENVIRONMENT,),
}
"""The services of which a backend must offer one, for each kind of role."""

_MODELS: tuple[RoleKind, ...] = (Policy, Critic, RewardModel)


def head_of(kind: RoleKind) -> Head:
    """Returns the head of the model of a role."""
    return "value" if kind in (Critic, RewardModel) else "lm"


def check_roles(stages: Sequence[LoweredStage], role_backends: RoleBackends) -> None:
    """Checks the roles of all stages.

    Raises:
        ConfigError, GraphError: the first thing that is wrong.
        BackendError: no such backend, or a broken one.
    """
    _check_named(role_backends, stages)
    _check_one_kind(stages)
    kinds = {name: kind for stage in stages for name, kind in stage.kinds.items()}
    readers: list[str] = []
    for stage in stages:
        for name, kind in stage.kinds.items():
            _check_backend(role_backends, stage, name, kind)
            _check_options(role_backends, name, kind)
            _check_copy(role_backends, stage, name, kinds)
        for problem in (
            *_abilities(role_backends, stage),
            *_meetings(stage, role_backends, readers),
        ):
            raise problem


def _check_named(role_backends: RoleBackends, stages: Sequence[LoweredStage]) -> None:
    missing: dict[RoleName, LoweredStage] = {}
    for stage in stages:
        for role in stage.graph.roles:
            if role not in role_backends.roles:
                missing.setdefault(role, stage)
    if not missing:
        return
    lines, hints = [], []
    of_workflow: dict[str, list[str]] = {}
    for role, stage in missing.items():
        node = next(node for node in stage.graph.nodes if node.role == role)
        lines.append(str(node.source or stage.workflow.source))
        hint = _missing_role(stage, role, role_backends)
        hints.append(hint if len(missing) == 1 else f"{role}: {hint}")
        of_workflow.setdefault(stage.workflow.name, []).append(repr(role))
    own = (
        f"workflow {name!r} has {'a role' if len(roles) == 1 else 'roles'} {', '.join(roles)}"
        for name, roles in of_workflow.items()
    )
    raise ConfigError(
        f"{' and '.join(own)} that the config does not name",
        where=f"{', '.join(lines)} and {role_backends.loaded.where('roles')}",
        found=f"roles {listing(role_backends.roles)}",
        hint="; ".join(hints),
    )


def _missing_role(stage: LoweredStage, role: str, role_backends: RoleBackends) -> str:
    """Returns how to name a role: with an entry of its own, or by binding it to others."""
    kind = stage.kinds[role]
    entry = f"set roles.{role}.backend to one that offers {_offering(kind)}"
    if kind in _MODELS:
        entry = role_backends.suggest_model(role)
    parameter = next(r for r in stage.workflow.roles if r.name == role)
    bind = f"{stage.prefix}bind.{parameter.parameter}"
    if parameter.parameter in stage.config.bind:
        return suggestion(role, role_backends.roles) or entry
    if parameter.listed:
        return f"{entry}; or set {bind}=[NAME, NAME, ...], keys of roles"
    if similar := suggestion(role, role_backends.roles):
        return similar
    unused = (name for name in role_backends.roles if name not in stage.kinds)
    wanted = set(_SERVICES[kind])
    fits = (n for n in unused if role_backends.plugin(n).capabilities.services & wanted)
    other = next(fits, None)
    return entry if other is None else f"{entry}; or set {bind}={other}"


def _offering(kind: RoleKind) -> str:
    """Returns the services that a kind of role needs, and the installed backends with one."""
    wanted = _SERVICES[kind]
    names = _backends(lambda capabilities: bool(capabilities.services & set(wanted)))
    return f"{' or '.join(wanted)}: {names}"


def _check_one_kind(stages: Sequence[LoweredStage]) -> None:
    """Checks that a role has one model with one head for the whole run."""
    seen: dict[str, tuple[RoleKind, LoweredStage]] = {}
    for stage in stages:
        for name, kind in stage.kinds.items():
            first, before = seen.setdefault(name, (kind, stage))
            if first is not kind:
                raise ConfigError(
                    f"role {name!r} is used for two incompatible models: {_named(kind)} in stage "
                    f"{stage.name!r}, {_named(first)} in stage {before.name!r}",
                    where=f"{stage.workflow.source} and {before.workflow.source}",
                    expected="one kind of role throughout a run",
                    hint=f"give one of the two another name, and its own entry under roles "
                    f"(copy_of={name} begins as a copy)",
                )


def _named(kind: RoleKind) -> str:
    return f"{kind.kind} (fl.{kind.__name__})"


def _check_backend(
    role_backends: RoleBackends, stage: LoweredStage, name: str, kind: RoleKind
) -> None:
    backend = role_backends.roles[name].plugin
    capabilities = role_backends.plugin(name).capabilities
    where = f"{stage.workflow.source} and {role_backends.loaded.where(f'roles.{name}.backend')}"
    if not capabilities.services & set(_SERVICES[kind]):
        raise ConfigError(
            f"role {name!r} of workflow {stage.workflow.name!r} is {_named(kind)}, which backend "
            f"{backend!r} cannot play",
            where=where,
            found=f"it offers {', '.join(sorted(capabilities.services)) or 'nothing'}",
            expected=f"a backend that offers {_offering(kind)}",
            hint=_other_kind(name, kind, capabilities),
        )
    named = role_backends.roles[name].environment is not None
    if kind is Environment and capabilities.user_environment and not named:
        raise ConfigError(
            f"role {name!r} is an environment, and its class is not named",
            where=f"{stage.workflow.source} and {role_backends.loaded.where(f'roles.{name}')}",
            expected="FILE.py:NAME or module:NAME",
            hint=f"set roles.{name}.environment=FILE.py:NAME",
        )
    model = role_backends.roles[name].model
    is_new = model is not None and not isinstance(model, str)
    if kind is Policy and is_new and Service.TRAIN not in capabilities.services:
        raise ConfigError(
            f"role {name!r} has a new model, whose weights a trainer makes, and backend "
            f"{backend!r} is none",
            where=where,
            found=f"it offers {', '.join(sorted(capabilities.services))}",
            hint=f"name a model folder in roles.{name}.model, or a backend that trains",
        )
    head = head_of(kind)
    if kind in _MODELS and head not in capabilities.heads:
        raise ConfigError(
            f"role {name!r} is {_named(kind)}, whose model ends in one number a position, and "
            f"backend {backend!r} has no such head",
            where=where,
            found=f"heads {', '.join(sorted(capabilities.heads))}",
            expected=f"a backend with the head {head}: "
            + _backends(lambda c: Service.TRAIN in c.services and head in c.heads),
            hint=f"set roles.{name}.backend to one of these",
        )


def _check_options(role_backends: RoleBackends, name: str, kind: RoleKind) -> None:
    """Checks the options of a role against what its plug-ins declare."""
    loaded, config = role_backends.loaded, role_backends.roles[name]
    for key, (backend, model) in role_backends.option_models(name).items():
        if model is None and kind is Environment:
            continue  # arguments of the user's class, or the plug-in's own matter
        values: Mapping[str, object] = getattr(config, key)
        check_options(backend, model, values, at=f"roles.{name}.{key}", where=loaded.places)


def _other_kind(name: str, kind: RoleKind, capabilities: Capabilities) -> str:
    if kind is Reward and Service.TRAIN in capabilities.services:
        return (
            f"annotate it {name}: fl.RewardModel where a model scores, or set roles.{name}.backend"
        )
    if kind is RewardModel and Service.SCORE in capabilities.services:
        return f"annotate it {name}: fl.Reward where rules score, or set roles.{name}.backend"
    return f"set roles.{name}.backend; `flowrl backends` lists what is installed"


def _backends(fits: Callable[[Capabilities], bool]) -> str:
    names = [
        entry.name
        for entry in available()
        if entry.plugin is not None and fits(entry.plugin.capabilities)
    ]
    return ", ".join(names) or "none is installed"


def _check_copy(
    role_backends: RoleBackends, stage: LoweredStage, name: str, kinds: Mapping[str, RoleKind]
) -> None:
    other = role_backends.roles[name].copy_of
    if other is None or other not in kinds:
        return
    kind, copied = kinds[name], kinds[other]
    where = f"{stage.workflow.source} and {role_backends.loaded.where(f'roles.{name}.copy_of')}"
    if kind not in _MODELS or copied not in _MODELS:
        bare, bare_kind = (name, kind) if kind not in _MODELS else (other, copied)
        raise ConfigError(
            f"role {name!r} is a copy of {other!r}, but {bare!r} is {_named(bare_kind)}, which has "
            "no model",
            where=where,
            hint=f"leave roles.{name}.copy_of out",
        )
    if head_of(kind) == "lm" and head_of(copied) != "lm":
        raise ConfigError(
            f"role {name!r} is {_named(kind)}, and cannot begin as a copy of {other!r}, "
            f"{_named(copied)}: that model has no output over the vocabulary",
            where=where,
            hint=f"give roles.{name} a model, or make it a copy of a policy",
        )


_FORWARD = (Op.LOGPROBS, Op.VALUES, Op.SCORE)


def _runs_model(node: Node) -> bool:
    """True for a forward pass, which trainers make."""
    return node.op in _FORWARD and not is_rule_score(node)


def _abilities(role_backends: RoleBackends, stage: LoweredStage) -> Iterator[GraphError]:
    """Yields nodes that ask an engine or a trainer for what its backend does not declare."""
    for node in stage.graph.of_op(Op.GENERATE, Op.SYNC, Op.UPDATE, *_FORWARD):
        changed = changed_options(node)
        kind = changed.pop("grammar", None)
        if isinstance(sampling := node.attr("sampling"), Sampling) and sampling.stop:
            changed["stop"] = sampling.stop
        edge = stage.graph.feeding(node.id, "weights")
        source = None if edge is None else stage.graph.node(edge.src).role
        average = "average" if node.attr("decay") else None
        reset = "reset" if node.attr("reset_optimizer") else None
        summed = "sum" if node.attr("sum") else None
        takes = node.op is Op.SYNC and source != node.role
        trains = "train" if node.op is Op.UPDATE or takes or _runs_model(node) else None
        generates = "generate" if node.op is Op.GENERATE else None
        for role, ability, what, declared in (
            (node.role, kind, f"hold its tokens to a grammar ({kind})", "grammars"),
            (node.role, average, "average weights (decay=)", "updates"),
            (source, reset, "reset an optimizer", "updates"),
            (node.role, summed, "learn from a sum (fl.sum)", "updates"),
            (node.role, trains, "do what a trainer does", "services"),
            (node.role, generates, "generate", "services"),
            *((node.role, key, f"sample with {key}={changed[key]}", "sampling") for key in changed),
        ):
            if role is None or ability is None:
                continue
            known = getattr(role_backends.plugin(role).capabilities, declared)
            if ability not in known:
                yield node.error(
                    f"{node.id} asks {role} to {what}, which backend "
                    f"{role_backends.roles[role].plugin!r} cannot",
                    found=f"it can {', '.join(sorted(known)) or 'do no such thing'}",
                    expected=f"roles.{role}.backend that declares {ability}: "
                    + _backends(lambda c, a=ability, of=declared: a in getattr(c, of)),  # type: ignore[misc]
                )


def _meetings(
    stage: LoweredStage, role_backends: RoleBackends, readers: list[str]
) -> Iterator[FlowError]:
    """Yields models that do not fit each other: readers and generators of samples, and syncs.

    Args:
        readers: Roles that read the data, which is encoded once for the whole run. The roles of
            this stage are added.
    """
    graph = stage.graph
    for node in graph.nodes:
        if node.op is Op.SYNC:
            yield from _same_model(graph, node, role_backends)
        if node.role is None or phase_of(node) is None:
            continue
        generate = None if node.op is Op.GENERATE else sampling_node(graph, node)
        if generate is not None:
            yield from _same_vocabulary(
                node, str(generate.role), f"{generate.id} generated", role_backends
            )
        else:
            readers.append(node.role)
            yield from _same_vocabulary(node, readers[0], f"{readers[0]} reads too", role_backends)


def _same_vocabulary(
    node: Node, other: str, how: str, role_backends: RoleBackends
) -> Iterator[FlowError]:
    role = str(node.role)
    if role_backends.source(role) == role_backends.source(other):
        return
    mine, theirs = role_backends.vocabulary(role), role_backends.vocabulary(other)
    if mine.agrees_with(theirs):
        return
    what = "prompts" if node.op is Op.GENERATE else "samples"
    yield node.error(
        f"{node.id} reads {what} that {how}, but a token id does not mean the same to "
        f"{role} and {other}",
        found=f"{mine.size} tokens ({mine.origin}) and {theirs.size} tokens ({theirs.origin})",
        expected="one vocabulary",
        hint="take models with one tokenizer",
    )


def _same_model(graph: Graph, sync: Node, role_backends: RoleBackends) -> Iterator[FlowError]:
    edge = graph.feeding(sync.id, "weights")
    source = None if edge is None else graph.node(edge.src).role
    if source is None or sync.role is None or source == sync.role:
        return
    mine, theirs = role_backends.shape(sync.role), role_backends.shape(source)
    if mine == theirs:
        return
    differing = [f.name for f in fields(mine) if getattr(mine, f.name) != getattr(theirs, f.name)]
    said = [
        ", ".join(f"{name}={getattr(shape, name)}" for name in differing)
        for shape in (mine, theirs)
    ]
    yield sync.error(
        f"{sync.role} takes over the weights of {source}, but the two models differ",
        found=f"{sync.role}: {said[0]} ({role_backends.origin(sync.role)}); "
        f"{source}: {said[1]} ({role_backends.origin(source)})",
        expected="models of one shape",
        hint=f"set roles.{sync.role}.copy_of={source}, and no model of its own",
    )
