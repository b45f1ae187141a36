"""Times of a stage by the plan that it has: what the planner predicted of a plan over many devices.

Decode steps are the cost source's, one by one, so that the simulated rollout waits for its longest
responses and its slots. An operation on samples takes the seconds that the plan says of it, where
the samples are those that the plan was made for. Others take as much longer as the same cost
source has it: seconds are linear in tokens, through its estimates for the plan's lengths and for
half of them, and in proportion to samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrl.cluster.hardware import Machine, device_spec
from flowrl.compiler import CompiledStage
from flowrl.compiler.lengths import lengths_of, mean_prompt
from flowrl.config.schema import PlanConfig
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.demand import mean_prompt as mean_of_prompts
from flowrl.cost.lengths import ConstantLengths, EmpiricalLengths, Lengths, LognormalLengths
from flowrl.cost.models import ModelShape
from flowrl.cost.occupancy import reserve_tokens
from flowrl.cost.source import Cost
from flowrl.errors import PlanError
from flowrl.graph import Op
from flowrl.plan.many_form import EnvironmentUse
from flowrl.plan.schema import Operation, PlacementPlan
from flowrl.plan.search_options import CHUNK_S
from flowrl.sim.cost_steps import AnalyticStep
from flowrl.sim.costs import LinearCost
from flowrl.sim.episodes import EnvironmentTimes, EpisodeShape
from flowrl.sim.times import EngineTimes, NodeTimes, StageTimes
from flowrl.sim.workload import PromptLengths


def planned_times(
    stage: CompiledStage,
    plan: PlanConfig,
    cost: Cost | None = None,
    *,
    longest_prompt: int | None = None,
) -> StageTimes:
    """See the module.

    Args:
        plan: Says how long prompts and responses are.
        cost: What the plan was made with; by default estimates.
        longest_prompt: Tokens of the longest prompt of the data; by default of any prompt.

    Raises:
        PlanError: the plan predicts nothing, or is of a device that no catalogue has.
    """
    sizes = stage.plan.sizes
    lengths = lengths_of(plan, sizes.max_response_tokens)
    longest = sizes.max_prompt_tokens if longest_prompt is None else longest_prompt
    prompt = max(1, round(mean_prompt(plan, longest)))
    line = _Line(
        stage=stage,
        cost=AnalyticCost() if cost is None else cost,
        prompt=float(prompt),
        lengths=lengths,
    )
    players: dict[str, EngineTimes] = {}
    engines: dict[str, EngineTimes] = {}
    for operation in stage.plan.operations:
        if operation.role is not None and operation.op == Op.GENERATE:
            reserve = round(reserve_tokens(lengths.mean))
            players[operation.node] = _engine(stage, operation, line.cost, reserve)
            engines.setdefault(operation.role, players[operation.node])
    return StageTimes(
        source="those that the plan predicts",
        engines=engines,
        players=players,
        nodes=dict(line.nodes()),
        environments=_environments(stage.plan),
        episodes=_episodes(stage.plan),
        prompts=PromptLengths(values=(prompt,)),
        response_tokens=lengths.mean,
    )


def _environments(plan: PlacementPlan) -> dict[str, EnvironmentTimes]:
    """Those that a plan has, each as one thread that is as fast as all its calls at once.

    By the node that plays: an environment may have other devices for each region.

    The rest of what a call takes is waited for beside.
    """
    found = {}
    for operation in plan.operations:
        use = operation.environment
        if use is not None:
            mean_s = (use.turns * use.step_s + use.reset_s) / (use.turns + 1)
            call_s = mean_s / use.at_once
            found[operation.node] = EnvironmentTimes(
                call_s=call_s, wait_s=max(0.0, use.wait_s + mean_s - call_s)
            )
    return found


def _episodes(plan: PlacementPlan) -> dict[str, EpisodeShape]:
    """Turns and observations of mean length, by the node that plays."""
    found = {}
    for operation in plan.operations:
        use = operation.environment
        if use is not None:
            found[operation.node] = EpisodeShape(
                turn=max(1, round(use.drawn)),
                observation=round(use.said),
                max_turns=operation.max_turns,
                stretches=True,
            )
    return found


def _engine(stage: CompiledStage, operation: Operation, cost: Cost, reserve: int) -> EngineTimes:
    if operation.seconds is None:
        raise PlanError(
            "the plan predicts no times",
            where=f"plan of {stage.name!r}",
            found=operation.node,
            hint="make it for a cluster whose devices are in configs/hardware, or give their rates",
        )
    step = AnalyticStep(
        cost,
        _shape(stage, operation),
        # Alone, but for those over which its experts are divided.
        replace(operation.layout, dp=operation.layout.server_replicas),
        _machine(stage.plan, operation),
    )
    return EngineTimes(step=step, kv_tokens=operation.kv_tokens or None, reserve=reserve)


def _shape(stage: CompiledStage, operation: Operation) -> ModelShape:
    known = stage.context.costs.get(operation.role or "")
    if known is None:
        raise PlanError(
            "nothing is known of this role's model",
            where=f"plan of {stage.name!r}",
            found=f"role {operation.role!r} of {operation.node}",
            hint="give the configuration that the plan was made for",
        )
    return known.shape


def _machine(plan: PlacementPlan, operation: Operation) -> Machine:
    """What the plan was made with; of a plan that does not hold it, the catalogue's figures."""
    device = plan.pool.device(operation.devices[0])
    if device.machine is not None:
        known = plan.pool.machines[device.machine]
        return Machine(spec=known.spec, node_size=known.node_size)
    alike = Counter(d.node for d in plan.pool.devices if d.name == device.name)
    return Machine(
        spec=device_spec(device.name, where="cluster"), node_size=max(1, alike[device.node])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """What operations of a plan cost by their samples.

    Attributes:
        prompt: Tokens of a prompt of the data.
    """

    stage: CompiledStage
    cost: Cost
    prompt: float
    lengths: Lengths

    def nodes(self) -> Iterator[tuple[str, NodeTimes]]:
        """Of every operation that the plan has seconds for, rollouts aside."""
        for operation in self.stage.plan.operations:
            if operation.role is None or operation.seconds is None:
                continue
            if operation.op != Op.GENERATE:
                yield (
                    operation.node,
                    NodeTimes(
                        cost=self._of(operation, operation.seconds - operation.move_s),
                        move_s=operation.move_s,
                        piece_s=CHUNK_S + operation.move_s,
                    ),
                )

    def _of(self, operation: Operation, seconds: float) -> LinearCost:
        """`seconds` for the samples of the plan."""
        rows, mean = max(1, operation.num_samples), self.lengths.mean
        tokens = rows * (self._prompt_of(operation) + mean)
        full = self._estimate(operation, self.lengths)
        half = self._estimate(operation, _halved(self.lengths))
        by_token = (full - half) / (rows * mean / 2) * tokens
        share = min(1.0, max(0.0, by_token / full)) if full else 1.0
        return LinearCost(row_s=seconds * (1 - share) / rows, token_s=seconds * share / tokens)

    def _prompt_of(self, operation: Operation) -> float:
        """Tokens of the prompts of an operation's samples; longer where they are made of others."""
        graph = self.stage.graph
        return mean_of_prompts(graph, graph.node(operation.node), self.prompt, self.lengths.mean)

    def _estimate(self, operation: Operation, lengths: Lengths) -> float:
        where = (
            _shape(self.stage, operation),
            operation.layout,
            _machine(self.stage.plan, operation),
        )
        if operation.op == Op.UPDATE:
            return self.cost.train(
                *where,
                samples=operation.num_samples,
                prompt_tokens=self._prompt_of(operation),
                lengths=lengths,
                mini_batches=self.stage.plan.sizes.mini_batches,
                micro_tokens=operation.micro_tokens,
                recompute=operation.recompute,  # type: ignore[arg-type]
                shard=operation.shard,  # type: ignore[arg-type]
                offload_optimizer="optimizer" in operation.offload,
            ).seconds
        return self.cost.forward(
            *where,
            samples=operation.num_samples,
            prompt_tokens=self._prompt_of(operation),
            lengths=lengths,
            micro_tokens=operation.micro_tokens,
            shard=operation.shard,  # type: ignore[arg-type]
        ).seconds


def _halved(lengths: Lengths) -> Lengths:
    """Responses of half the length."""
    match lengths:
        case LognormalLengths():
            return replace(lengths, mean=lengths.mean / 2, maximum=lengths.maximum / 2)
        case EmpiricalLengths():
            return EmpiricalLengths(values=tuple(value / 2 for value in lengths.values))
        case _:
            return ConstantLengths(tokens=lengths.mean / 2)


def planned_lengths(
    plan: PlanConfig, longest: int, environment: EnvironmentUse | None = None
) -> str:
    """The lengths that a plan was made for, as `--lengths` names them.

    Args:
        longest: Tokens that are drawn for a sample at most.
        environment: Of episodes: of their tokens those are meant that are drawn.
    """
    if plan.lengths is not None:
        return str(plan.lengths)
    if environment is not None and plan.mean_response_tokens is not None:
        drawn = {"mean_response_tokens": environment.turns * environment.drawn}
        plan = plan.model_copy(update=drawn)
    lengths = lengths_of(plan, longest)
    if not isinstance(lengths, LognormalLengths):
        return f"constant:{lengths.mean:.0f}"
    return f"lognormal:mean={lengths.before_cut:g},sigma={lengths.sigma:g}"
