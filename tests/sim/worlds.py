"""Small models of a stage, for tests of the simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowrl.rollout.settings import SchedulerSettings
from flowrl.sim.costs import LinearCost
from flowrl.sim.lengths import Constant, Lengths
from flowrl.sim.model import EngineModel, LaneModel, OpModel, RolloutModel, SimModel
from flowrl.sim.report import SimReport
from flowrl.sim.run import simulate
from flowrl.sim.step_time import ConstantStep, StepTime
from flowrl.sim.workload import Assumed, PromptLengths, Workload

__all__ = ["LinearStep", "assumed", "run", "small_model"]


@dataclass(frozen=True)
class LinearStep:
    """A step time that is linear in rows and in all tokens of the rows, so sums are exact."""

    fixed: float = 1.0
    row: float = 0.0
    token: float = 0.0
    longest_token: float = 0.0
    prefill: float = 0.0
    leave: float = 0.0

    def decode_s(self, batch: int, context: float, longest: float) -> float:
        return (
            self.fixed
            + self.row * batch
            + self.token * batch * context
            + self.longest_token * longest
        )

    def prefill_s(self, rows: int, tokens: int) -> float:
        return self.prefill * tokens

    def leave_s(self) -> float:
        return self.leave


def assumed(lengths: Lengths, *, seed: int = 0, prompt: int = 10, filtered: float = 0.0) -> Assumed:
    return Assumed(
        lengths,
        seed=seed,
        prompts=PromptLengths(values=(prompt,)),
        longest=100_000,
        filtered_share=filtered,
    )


def small_model(
    *,
    engines: int = 1,
    slots: int = 4,
    groups: int = 2,
    group_size: int = 2,
    times: StepTime | None = None,
    staleness: int = 0,
    learn_s: float = 5.0,
    judges: bool = False,
    shared: bool = False,
) -> SimModel:
    """Engines that draw, a trainer that learns for `learn_s`, and publishes.

    Args:
        shared: The trainer works on the first engine's lane.
    """
    names = [f"engine[{i}]" for i in range(engines)]
    trainer = names[0] if shared else "trainer"
    return SimModel(
        name="small",
        lanes=tuple(LaneModel(name=n, device=n) for n in dict.fromkeys((*names, trainer, "main"))),
        engines=tuple(
            EngineModel(
                name=name,
                role="actor",
                lane=name,
                times=times or ConstantStep(step_s=1.0, prefill=1.0),
                num_slots=slots,
                capacity=slots,
            )
            for name in names
        ),
        rollouts=(
            RolloutModel(
                name="actor.generate",
                role="actor",
                groups=groups,
                settings=SchedulerSettings(
                    group_size=group_size, max_staleness=staleness, judges_groups=judges
                ),
            ),
        ),
        ops=(
            OpModel(
                name="actor.update",
                op="update",
                lanes=(trainer,),
                cost=LinearCost(call_s=learn_s),
                rollout="actor.generate",
                kept_only=True,
            ),
            OpModel(
                name="actor.sync",
                op="sync",
                lanes=(trainer,),
                after=("actor.update",),
                rollout="actor.generate",
                publishes=("actor",),
            ),
        ),
        driver="main",
        ahead=staleness,
    )


def run(model: SimModel, *, steps: int = 3, workload: Workload | None = None, **more) -> SimReport:
    workload = workload or assumed(Constant(tokens=8))
    return simulate(model, steps=steps, workloads={"actor.generate": workload}, **more)


def with_engine(model: SimModel, **changes) -> SimModel:
    return replace(model, engines=tuple(replace(e, **changes) for e in model.engines))
