"""The program of each stage, bound to its roles, traced, and lowered with the stage's settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from flowrl.compiler.role_backends import RoleBackends
from flowrl.config.load import LoadedConfig
from flowrl.config.schema import StageConfig
from flowrl.errors import ConfigError
from flowrl.graph import Graph, Op
from flowrl.passes import Context, PassRecord, run_passes
from flowrl.passes.context import Decision
from flowrl.passes.logprobs import decisions_on_old_logprobs
from flowrl.passes.simplify import decisions_on_merging, decisions_on_sums, merge_logprobs
from flowrl.program.parameters import RoleKind
from flowrl.program.registry import load_workflow
from flowrl.program.workflow import Workflow
from flowrl.specs import GroupRelative, PolicyClip, Sampling
from flowrl.user_lines import definition_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStage:
    """A stage whose program is bound to its roles and traced.

    Attributes:
        name: Its name in the config.
        prefix: The prefix of its keys in the config: `stage.NAME.`, and empty for the last stage.
        config: Its section of the config.
        workflow: The program, bound to its roles.
        traced: The graph of the program; sizes that it leaves to the config are None there.
    """

    name: str
    prefix: str
    config: StageConfig
    workflow: Workflow
    traced: Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredStage(TracedStage):
    """A stage before it is planned.

    Attributes:
        context: The settings that it is lowered with.
        graph: The lowered graph, with every size filled in.
        decisions: The choices of the passes, for the plan.
    """

    context: Context
    graph: Graph
    decisions: tuple[Decision, ...] = ()

    @property
    def kinds(self) -> Mapping[str, RoleKind]:
        """The kind that the program gives to each role that does something."""
        return {r.name: r.kind for r in self.workflow.roles if r.name in self.graph.roles}


def lower(workflow: Workflow) -> Graph:
    """Returns the lowered graph of a workflow without a configuration, with default settings."""
    return run_passes(workflow.trace(), Context(max_staleness=workflow.max_staleness or 0))


def sampling_of(stage: StageConfig) -> Sampling:
    """Returns the sampling options of a stage's rollouts."""
    return Sampling(**stage.train.sampling.model_dump())


def lower_stages(
    loaded: LoadedConfig, role_backends: RoleBackends, given: Workflow | str | None
) -> list[LoweredStage]:
    """Lowers the programs of all stages.

    Args:
        given: Takes the place of the last stage's workflow.

    Raises:
        ConfigError, TraceError, GraphError, BackendError: a program, its arguments, its graph or a
            backend is wrong.
    """
    programs = [
        _traced(loaded, name, prefix, _workflow_of(loaded, name, prefix, None if prefix else given))
        for name, prefix in loaded.stage_prefixes()
    ]
    copies = _exact_copies(loaded, [program.traced for program in programs])
    return [_lowered(loaded, program, copies, role_backends) for program in programs]


def _workflow_of(loaded: LoadedConfig, name: str, prefix: str, given: object) -> Workflow:
    if isinstance(given, Workflow):
        return given
    if isinstance(given, str):
        return load_workflow(given)
    if given is not None:
        raise ConfigError(
            "this is no workflow to compile",
            where=str(definition_of(given)) if inspect.isfunction(given) else "workflow",
            found=repr(given),
            expected="a function marked @fl.workflow, or a reference to one, such as mine.py:NAME",
            hint="write @fl.workflow above its `def`" if inspect.isfunction(given) else None,
        )
    own = loaded.config.stage_config(name).workflow
    if own is not None:
        return load_workflow(own, where=loaded.where(f"{prefix}workflow"))
    return load_workflow(name, where=loaded.where("stages"))


def _traced(loaded: LoadedConfig, name: str, prefix: str, workflow: Workflow) -> TracedStage:
    stage = loaded.config.stage_config(name)
    try:
        workflow = workflow.bind(stage.bind)
        traced = workflow.trace(stage.args)
    except ConfigError as error:
        if error.where is not None and error.where.startswith(("args.", "bind.")):
            error.where = loaded.where(f"{prefix}{error.where}")
        raise
    return TracedStage(name=name, prefix=prefix, config=stage, workflow=workflow, traced=traced)


def _exact_copies(loaded: LoadedConfig, programs: Iterable[Graph]) -> dict[str, str]:
    """Returns the roles that begin every stage as an exact copy of another role, with that role.

    A copy that some stage trains is made once, and keeps what it learnt.
    """
    roles, copies = loaded.config.roles, {}
    trained = {node.role for graph in programs for node in graph.of_op(Op.UPDATE)}
    for name, role in roles.items():
        other = role.copy_of
        if other is None or other not in roles or roles[other].plugin != role.plugin:
            continue
        if name not in trained and role.dtype in ("auto", roles[other].dtype):
            copies[name] = other
    return copies


def _lowered(
    loaded: LoadedConfig,
    program: TracedStage,
    copies: Mapping[str, str],
    role_backends: RoleBackends,
) -> LoweredStage:
    context = _context(loaded, program, copies, role_backends)
    decisions: list[Decision] = []

    def note(record: PassRecord) -> None:
        if record.name == merge_logprobs.__name__:
            decisions.extend(decisions_on_merging(record.before, context))

    graph = run_passes(program.traced, context, observer=note)
    decisions += decisions_on_old_logprobs(graph, context)
    decisions += decisions_on_sums(graph)
    traced = {field.name: getattr(program, field.name) for field in fields(program)}
    return LoweredStage(**traced, context=context, graph=graph, decisions=tuple(decisions))


def _context(
    loaded: LoadedConfig,
    program: TracedStage,
    copies: Mapping[str, str],
    role_backends: RoleBackends,
) -> Context:
    config, algorithm, train = loaded.config, loaded.config.algorithm, program.config.train
    # A role that the config does not name is refused after lowering, if it is still there then.
    named = [role for role in program.traced.roles if role in config.roles]
    capabilities = {role: role_backends.plugin(role).capabilities for role in named}
    return Context(
        group_size=train.group_size,
        prompts_per_step=train.prompts_per_step,
        mini_batches=train.mini_batches,
        sampling=sampling_of(program.config),
        advantage=GroupRelative(std=algorithm.advantage.std),
        loss=PolicyClip(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            aggregation=algorithm.aggregation,
        ),
        max_staleness=_staleness(loaded, program, train.max_staleness),
        truncated=train.truncated,
        trust_rollout_logprobs=algorithm.trust_rollout_logprobs,
        shares_weights={role: capabilities[role].shares_weights for role in named},
        repeats_truncation={role: capabilities[role].repeats_truncation for role in named},
        copies={role: copies[role] for role in named if role in copies},
        train_key=f"{program.prefix}train",
    )


def _staleness(loaded: LoadedConfig, program: TracedStage, configured: int) -> int:
    """Returns the bound that the program declares, or else that of the config."""
    declared = program.workflow.max_staleness
    if declared is None:
        return configured
    # A 0 in the config may be its default, as in the resolved config of a run folder.
    if configured not in (0, declared):
        key = f"{program.prefix}train.max_staleness"
        raise ConfigError(
            f"workflow '{program.workflow.name}' declares max_staleness={declared}, and the config "
            f"asks for {configured}",
            where=f"{program.workflow.source} and {loaded.where(key)}",
            expected="one bound on the age of samples",
            hint=f"leave {key} out, or max_staleness at @fl.workflow",
        )
    return declared
