"""`flowrl simulate`: runs a plan on a virtual clock, with the scheduler of real runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.cli.files import (
    compiled_by,
    format_of,
    given_options,
    is_plan,
    machine_words,
    offering_cluster,
    refuse_plan,
    refuse_together,
    require_json,
    require_output,
    stage_named,
    write_output,
)
from flowrl.errors import ConfigError

if TYPE_CHECKING:
    from flowrl.api import Compiled
    from flowrl.compiler import CompiledStage
    from flowrl.config.load import LoadedConfig
    from flowrl.config.schema import PlanConfig
    from flowrl.cost.source import Cost
    from flowrl.graph import Node
    from flowrl.observe.rows import StepMetrics
    from flowrl.sim.report import Planned, SimReport
    from flowrl.sim.times import StageTimes
    from flowrl.sim.trace import Trace
    from flowrl.sim.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The options of the command line; `flowrl.cli.app` describes each."""

    steps: int = 20
    faults: Path | None = None
    lengths: str | None = None
    engines: int | None = None
    profile: Path | None = None
    stage: str | None = None
    trace: Path | None = None
    against: Path | None = None
    cluster: str | None = None
    pin: Sequence[str] = ()
    plan: Path | None = None
    output: Path | None = None
    json: bool = False


def run(config: Path, overrides: Sequence[str], options: SimulateOptions) -> None:
    """Compiles a configuration and simulates one of its stages.

    Raises:
        FlowError: The configuration or a file is wrong, the stage cannot be simulated, or nothing
            moves in it any more.
    """
    from flowrl.config.load import load_config, locating

    _check(config, options)
    words = [*overrides, *machine_words(options.cluster, options.pin, overrides)]
    loaded = load_config(config, words)
    with offering_cluster(config, words, "--cluster FILE"), locating(loaded):
        _simulate(loaded, options)


def _simulate(loaded: LoadedConfig, options: SimulateOptions) -> None:
    from flowrl.sim.report import Planned, report_json, report_text
    from flowrl.sim.trace import Trace

    config = loaded.config
    path = config.runtime.runs / f"{config.name}.trace.json"
    path = require_json(options.trace, path, "--trace")
    if options.output is not None:
        format_of(options.output, {".html": "html"})
        require_output(options.output)
    compiled = _compiled(loaded, options.plan)
    names = [stage.name for stage in compiled.stages]
    stage = compiled.stages[names.index(stage_named(names, options.stage, config.name))]
    measured = [] if options.against is None else _measured(options.against, stage.name)
    if options.against is not None:
        _warn_of_differences(loaded, stage, options.against, options.engines)
    trace = Trace()
    many = stage.plan.schedule is not None
    cost = _cost(loaded, compiled.config.plan) if many else None
    report = _simulated(compiled, stage, options, trace, cost)
    trace.write(path)
    predicted = stage.plan.prediction
    planned = None
    if predicted.step_s and options.engines is None:  # else it is not the plan that is simulated
        planned = Planned(
            step_s=predicted.step_s,
            idle_share=predicted.idle_share,
            lengths=_other_lengths(stage, _lengths(options), compiled.config.plan),
            faults=options.faults is not None,
        )
    if options.output is not None:
        name = f"simulation of {config.name}, {stage.name}"
        page = _page(name, report, planned, path, is_cut=trace.num_left_out > 0)
        write_output(options.output, page, None if options.json else "simulation, as html")
    if options.json:
        sys.stdout.write(report_json(report, planned))
        return
    print(report_text(report, planned), end="")
    if measured:
        from flowrl.sim.compare import beside, beside_text

        other = f", predicted for lengths {report.workload}" if _replaces_lengths(options) else ""
        print(f"\ncompared with {options.against}{other}\n{beside_text(beside(report, measured))}")
    left_out = f", {trace.num_left_out:,} events left out" if trace.num_left_out else ""
    print(f"trace: {path}{left_out} (open it at https://ui.perfetto.dev)")


def _page(
    name: str, report: SimReport, planned: Planned | None, trace: Path, *, is_cut: bool
) -> str:
    from flowrl.observe.trace import read_spans
    from flowrl.sim.report import report_text
    from flowrl.viz.timeline import render_simulation

    spans = list(read_spans(trace))
    steps = [(step.begin_s, step.begin_s + step.wall_s) for step in report.steps]
    if is_cut:  # the trace has no spans of later steps
        end_s = max(span.end_s for span in spans)
        steps = [step for step in steps if step[1] <= end_s] or steps[:1]
    return render_simulation(name, spans, steps, report_text(report, planned))


def compare_run(compiled: Compiled, folder: Path) -> str | None:
    """Returns the prediction of a run's last stage and its measurement; None without a profile.

    Raises:
        FlowError: The stage cannot be simulated, or the profile is of another model.
    """
    from flowrl.api import profile_of
    from flowrl.sim.compare import beside, beside_text
    from flowrl.sim.report import seconds_text

    stage = compiled.stages[-1]
    profile = profile_of(compiled.config)
    if not profile.is_file():
        return None
    measured = _measured(folder, stage.name)
    options = SimulateOptions(against=folder, profile=profile)
    report = _simulated(compiled, stage, options, None)
    head = f"{stage.name}, by {profile}, predicted for the samples that the run generated"
    planned_s = stage.plan.prediction.step_s
    if planned_s:
        head += (
            f"\n(the plan's {seconds_text(planned_s)} a step were for "
            f"{_expected(compiled, stage)}, before there were any)"
        )
    return f"{head}\n{beside_text(beside(report, measured))}"


def _expected(compiled: Compiled, stage: CompiledStage) -> str:
    """Returns the samples that plans assume, in words."""
    from flowrl.graph import Op
    from flowrl.sim.of_plan import rollout_nodes

    lengths = dict.fromkeys(
        _planned_lengths(stage, node, compiled.config.plan) for node in rollout_nodes(stage.graph)
    )
    return f"lengths {'; '.join(lengths)}" + (
        " and no filtered group" if stage.graph.of_op(Op.FILTER) else ""
    )


def _compiled(loaded: LoadedConfig, plan: Path | None) -> Compiled:
    if plan is not None:
        return compiled_by(loaded, plan)
    from flowrl import api

    return api.compile(None, loaded)


def _cost(loaded: LoadedConfig, plan: PlanConfig) -> Cost | None:
    """Returns the measured costs of a plan over many devices; None where they are estimates."""
    if plan.profile is None and plan.engine_times == "analytic":
        return None
    from flowrl import api
    from flowrl.plan.groups import cost_of

    _, request, measured = api.ask_for_plan(loaded)
    return cost_of(request) if measured is None else measured


def _simulated(
    compiled: Compiled,
    stage: CompiledStage,
    options: SimulateOptions,
    trace: Trace | None,
    cost: Cost | None = None,
) -> SimReport:
    from flowrl.sim.faults import Faults, read_faults
    from flowrl.sim.of_plan import model_of_stage
    from flowrl.sim.run import simulate

    times = _times(compiled, stage, options.profile, cost)
    engines = dict.fromkeys(compiled.config.roles, options.engines) if options.engines else {}
    model = model_of_stage(stage, times, num_engines=engines)
    faults = Faults()
    if options.faults is not None:
        faults = read_faults(options.faults, num_engines=len(model.engines))
    seed = compiled.config.seed
    return simulate(
        model,
        steps=options.steps,
        workloads=_workloads(stage, times, _lengths(options), seed, compiled.config.plan),
        faults=faults,
        seed=seed,
        trace=trace,
    )


def _warn_of_differences(
    loaded: LoadedConfig, stage: CompiledStage, folder: Path, engines: int | None
) -> None:
    """Warns of a run that has another configuration than the simulated one."""
    from flowrl.sim.run_beside import check_run, differences, differences_text

    check_run(folder, stage)
    found = differences(loaded, stage, folder, engines=engines)
    if found:
        print(differences_text(found, folder), file=sys.stderr)


def _measured(folder: Path, stage: str) -> list[StepMetrics]:
    from flowrl.observe.run_folder import RunFolder

    rows = [row for row in RunFolder.open(folder).steps() if row.stage == stage]
    if not rows:
        raise ConfigError(
            "the run has no step of this stage to compare with",
            where=f"--against {folder}",
            expected=f"steps of stage {stage!r}",
            hint="name a run of this configuration, or the stage that it has: --stage NAME",
        )
    return rows


def _check(config: Path, options: SimulateOptions) -> None:
    if is_plan(config):
        refuse_plan(config, "`flowrl simulate`", f"write flowrl simulate CONFIG --plan {config}")
    refuse_together(given_options(options), "--plan", "--cluster", "--pin")


def _times(
    compiled: Compiled, stage: CompiledStage, path: Path | None, cost: Cost | None
) -> StageTimes:
    from flowrl.api import profile_of
    from flowrl.sim.profile import load_profile, profile_times
    from flowrl.sim.times import assumed_times

    if path is None and stage.plan.schedule is not None:
        from flowrl.sim.planned_times import planned_times

        # A profile that lies here is of this machine.
        longest = compiled.config.data.max_prompt_tokens
        return planned_times(stage, compiled.config.plan, cost, longest_prompt=longest)
    found = path or profile_of(compiled.config)
    if path is not None or found.is_file():
        named_by = None if path is None else f"--profile {path}"
        return profile_times(load_profile(found, named_by=named_by), stage, source=str(found))
    print(
        f"warning: there is no profile at {found}, so step times are assumed; `flowrl profile` "
        "measures them, --profile FILE names others",
        file=sys.stderr,
    )
    return assumed_times(stage)


def _lengths(options: SimulateOptions) -> str | None:
    """Returns the lengths that are asked for: by their name, or those of a run."""
    if options.lengths is None and options.against is not None:
        return str(options.against)
    return options.lengths


def _replaces_lengths(options: SimulateOptions) -> bool:
    """True if other lengths are simulated than those of the compared run."""
    if options.against is None or options.lengths is None:
        return False
    return Path(options.lengths) not in (options.against, options.against / "samples.jsonl")


def _planned_lengths(stage: CompiledStage, node: Node, plan: PlanConfig) -> str:
    from flowrl.sim.of_plan import longest_response
    from flowrl.sim.planned_times import planned_lengths

    longest = longest_response(stage, node)
    if stage.plan.schedule is None:
        return planned_lengths(plan, longest)
    return planned_lengths(plan, longest, stage.plan.operation(node.id).environment)


def _other_lengths(stage: CompiledStage, lengths: str | None, plan: PlanConfig) -> str | None:
    """Returns the lengths of the plan where other lengths are simulated, else None."""
    from flowrl.sim.lengths import parse_lengths
    from flowrl.sim.of_plan import rollout_nodes

    def read(text: str) -> str:
        found = parse_lengths(text)
        return str(Path(text) if found is None else found)

    made_for = dict.fromkeys(
        read(_planned_lengths(stage, node, plan)) for node in rollout_nodes(stage.graph)
    )
    if lengths is None or set(made_for) <= {read(lengths)}:
        return None
    return "; ".join(made_for)


def _workloads(
    stage: CompiledStage,
    times: StageTimes,
    lengths: str | None,
    seed: int,
    plan: PlanConfig,
) -> dict[str, Workload]:
    from flowrl.sim.of_plan import longest_response, rollout_nodes
    from flowrl.sim.rollouts_of_plan import prompt_lengths
    from flowrl.sim.workload import open_workload

    found: dict[str, Workload] = {}
    for node in rollout_nodes(stage.graph):
        longest = longest_response(stage, node)
        text = lengths
        if text is None:
            text = _planned_lengths(stage, node, plan)
            unsaid = plan.lengths is None and plan.mean_response_tokens is None
            if unsaid and stage.plan.schedule is None:
                print(
                    f"warning: {node.id}: the lengths of responses are not given, so they are "
                    f"sampled as plans assume, half of the longest on average ({text}, at most "
                    f"{longest}); --lengths names a distribution, or a run to take them from, and "
                    "plan.mean_response_tokens or plan.lengths gives them to plans too",
                    file=sys.stderr,
                )
        found[node.id] = open_workload(
            text,
            stage=stage.name,
            rollout=node.id,
            seed=seed,
            prompts=prompt_lengths(stage.graph, node, times, longest),
            longest=longest,
        )
    return found
