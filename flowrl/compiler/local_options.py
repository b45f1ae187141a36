"""The choices that a configuration leaves open in a plan for one device: who generates samples."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowrl.compiler.lowering import LoweredStage
from flowrl.config.executors import EXECUTORS
from flowrl.config.load import LoadedConfig
from flowrl.errors import PlanError
from flowrl.graph import Graph, Op
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """The choices that a plan for one device leaves open.

    Attributes:
        base: The plan with everything in the main process.
        request: The configuration's request.
    """

    base: PlacementPlan
    request: LocalRequest

    def plan(
        self, graph: Graph, choice: LocalChoice, reasons: tuple[Reason, ...] = ()
    ) -> PlacementPlan:
        """Returns the plan with a choice, for which there are reasons."""
        return with_choice(self.base, graph, choice, reasons)

    def choices(self) -> tuple[LocalChoice, ...]:
        """Returns all choices that are open, the simplest first."""
        return local_choices(self.request)

    def default(self, graph: Graph) -> PlacementPlan:
        """Returns the plan that is used where nothing was measured.

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


def local_options(loaded: LoadedConfig, stage: LoweredStage, plan: PlacementPlan) -> LocalOptions:
    """Returns the choices that a stage's plan leaves open.

    Raises:
        ConfigError: `train.policies` of the stage is wrong.
    """
    generating = dict.fromkeys(n.role for n in stage.graph.of_op(Op.GENERATE) if n.role is not None)
    in_main = [role for role in generating if plan.placement(role).process == MAIN_PROCESS]
    addresses = dict.fromkeys(d for role in in_main for d in plan.placement(role).devices)
    devices = [plan.pool.device(address) for address in addresses]
    on_cpu = devices and all(device.type == "cpu" for device in devices)
    places = EXECUTORS[loaded.config.executor].engines
    engines = {role: loaded.config.roles[role].num_engines for role in in_main}
    return LocalOptions(
        base=replace(plan, kind="temporal"),
        request=LocalRequest(
            roles=tuple(in_main),
            fixed={role: number for role, number in engines.items() if number is not None},
            num_cores=devices[0].num_cores if on_cpu else 1,
            # A stage that generates nothing has nothing to place apart.
            kind=loaded.config.plan.kind if generating else "auto",
            where=loaded.where("plan.kind"),
            may_run_ahead=stage.context.max_staleness > 0 and bool(generating),
            must_run_ahead=bool(generating) and _samples_ahead(stage),
            in_workers=places == "in workers",
            in_process=places == "in process",
        ),
    )


def _samples_ahead(stage: LoweredStage) -> bool:
    """True if the policies of a stage generate more than a step takes."""
    train = stage.config.train
    if "admission" in train.policies:
        return True
    if not train.policies:
        return False
    from flowrl.compiler.scheduling import scheduler_settings  # few configurations name policies

    settings = scheduler_settings(
        train, group_size=1, max_staleness=0, judges_groups=True, key=f"{stage.prefix}train"
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
