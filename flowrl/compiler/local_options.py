"""What a configuration leaves open of a plan for one device: who draws samples."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowrl.config.load import LoadedConfig
from flowrl.config.schema import StageConfig
from flowrl.errors import PlanError
from flowrl.graph import Graph, Op
from flowrl.passes import Context
from flowrl.plan.host import MAIN_PROCESS
from flowrl.plan.local import (
    LocalChoice,
    LocalRequest,
    asked_ahead,
    default_choice,
    local_choices,
    over_budget,
    with_choice,
)
from flowrl.plan.schema import PlacementPlan, Reason

__all__ = ["LocalOptions", "local_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """See the module.

    Attributes:
        base: The plan with everything in the main process.
        request: What was asked for.
    """

    base: PlacementPlan
    request: LocalRequest

    def plan(
        self, graph: Graph, choice: LocalChoice, reasons: tuple[Reason, ...] = ()
    ) -> PlacementPlan:
        """The plan that draws as `choice` says."""
        return with_choice(self.base, graph, choice, reasons)

    def choices(self) -> tuple[LocalChoice, ...]:
        """All that are open, the fewest moving parts first."""
        return local_choices(self.request)

    def default(self, graph: Graph) -> PlacementPlan:
        """The plan where nothing was measured.

        Raises:
            PlanError: what is asked for cannot be, or does not fit.
        """
        request = self.request
        choice = default_choice(request)
        reasons: tuple[Reason, ...] = ()
        if request.roles and (len(self.choices()) > 1 or any(n for _, n in choice.engines)):
            reasons = (_unmeasured(request, choice),)
        plan = self.plan(graph, choice, reasons)
        if (lack := over_budget(plan)) is not None:
            raise PlanError(
                f"there is no room for this: {choice}",
                where="roles.*.num_engines",
                found=lack,
                hint="ask for fewer engines, or for fewer slots (roles.ROLE.num_slots)",
            )
        return plan


def local_options(
    loaded: LoadedConfig,
    config: StageConfig,
    graph: Graph,
    plan: PlacementPlan,
    context: Context,
) -> LocalOptions:
    """What is open of a stage's plan.

    Raises:
        ConfigError: the policies of the stage's scheduler are none.
    """
    roles = tuple(dict.fromkeys(n.role for n in graph.of_op(Op.GENERATE) if n.role is not None))
    in_main = [role for role in roles if plan.placement(role).process == MAIN_PROCESS]
    devices = {plan.pool.device(d).address for r in in_main for d in plan.placement(r).devices}
    of_cpu = [plan.pool.device(d) for d in devices if plan.pool.device(d).type == "cpu"]
    cores = of_cpu[0].num_cores if of_cpu and len(of_cpu) == len(devices) else 1
    known = {role: loaded.config.roles[role].num_engines for role in in_main}
    spare = bool(config.train.policies) and _draws_spare(config, context)
    return LocalOptions(
        base=replace(plan, kind="temporal"),
        request=LocalRequest(
            roles=tuple(in_main),
            fixed={role: number for role, number in known.items() if number is not None},
            num_cores=cores,
            # A stage that draws nothing has nothing to place apart.
            kind=loaded.config.plan.kind if roles else "auto",
            where=loaded.where("plan.kind"),
            may_run_ahead=context.max_staleness > 0 and bool(roles),
            must_run_ahead=spare and bool(roles),
            in_process=loaded.config.executor == "eager",
        ),
    )


def _draws_spare(config: StageConfig, context: Context) -> bool:
    """Whether policies draw more than a step takes."""
    from flowrl.compiler.scheduling import scheduler_settings  # few configurations name policies

    if "admission" in config.train.policies:
        return True
    settings = scheduler_settings(
        config.train, group_size=1, max_staleness=0, judges_groups=True, key=context.train_key
    )
    return settings.budget is not None


def _unmeasured(request: LocalRequest, choice: LocalChoice) -> Reason:
    why = "nothing is measured, so it has the fewest moving parts"
    if request.kind != "auto":
        why = f"{request.where} asks for {request.kind}"
    elif (asked := asked_ahead(request, choice)) is not None:
        why = f"{asked}, and nothing is measured"
    elif request.fixed:
        why = "num_engines is set, and nothing is measured"
    return Reason(
        subject=", ".join(f"{role}.generate" for role in request.roles),
        choice=f"{choice.kind}: {choice}",
        why=f"{why}; `flowrl profile` measures what others would take",
    )
