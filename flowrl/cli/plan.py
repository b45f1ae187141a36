"""`flowrl plan`: where every role runs, memory by role and phase, what a step does and takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.cli.other_machines import offering_cluster
from flowrl.cli.output import format_of, require_output, write_output
from flowrl.cli.plan_options import PlanCommand, as_overrides, is_plan, refuse_ignored
from flowrl.errors import ConfigError, FlowError

if TYPE_CHECKING:
    from flowrl.api import Compiled
    from flowrl.cluster.hardware import DeviceSpec
    from flowrl.cluster.pool import DeviceGroup, ResourcePool
    from flowrl.config.load import LoadedConfig
    from flowrl.plan import PlacementPlan
    from flowrl.plan.sizing import Job, Size

__all__ = ["numbers_of", "run"]


_FORMATS = {".json": "json", ".yaml": "yaml", ".yml": "yaml"}

LARGE = 1024
"""Devices of a pool whose plans are told of as they are made."""


def run(config: Path, overrides: Sequence[str], options: PlanCommand) -> None:
    """Compiles a configuration and prints or writes the plan of its last stage.

    Raises:
        FlowError: anything that is wrong with the configuration, or a job that does not fit.
    """
    refuse_ignored(config, overrides, options)
    if options.output is not None:
        format_of(options.output, _FORMATS)
        require_output(options.output)
    words = [*overrides, *as_overrides(options, overrides)]
    with offering_cluster(config, words, "--cluster FILE"):
        _print(config, words, options)


def _print(config: Path, words: Sequence[str], options: PlanCommand) -> None:
    """What is asked for."""
    if options.routes is not None:
        _print_routes(config, words, options.routes, options)
    elif options.plan is not None:
        _print_priced(config, options.plan, words, options)
    elif options.diff is not None:
        _print_diff(*_plans_of(config, options.diff, words), options)
    elif options.min_devices or options.sweep is not None:
        _print_sizes(config, words, options)
    elif options.device is not None:
        raise _device_without_sizes(options)
    else:
        _print_plan(config, words, options)


def _device_without_sizes(options: PlanCommand) -> ConfigError:
    """Of a device that is named where no number of devices is looked for.

    Raises:
        ConfigError: no device has the name, which is said first.
    """
    from flowrl.cluster.hardware import device_spec

    device_spec(options.device or "", where="--device")
    if options.cluster is not None:
        return ConfigError(
            "a plan takes its devices from the cluster",
            where="--device and --cluster",
            found=f"{options.device} beside {options.cluster}",
            hint="leave --device out; --device alone goes with --min-devices or --sweep",
        )
    return ConfigError(
        "a device alone is no cluster",
        where="--device",
        found=options.device,
        expected="--min-devices or --sweep devices=8:1024 beside it, or --cluster FILE",
        hint=f"for example --device {options.device} --min-devices",
    )


def _print_plan(config: Path, words: Sequence[str], options: PlanCommand) -> None:
    here: list[str] = []
    by_time = True
    if is_plan(config):
        plans = [_plan_of(config, words)]
        steps = [one.step_s for one in plans[0].alternatives if one.step_s is not None]
        by_time = steps == sorted(steps)  # a file does not say its objective, but keeps the order
        _warn_of_name(plans[0], config)
    else:
        from flowrl import api

        compiled = api.compile(None, config, overrides=words)
        plans = [stage.plan for stage in compiled.stages]
        by_time = compiled.config.plan.objective == "step_time"
        here = _not_here(compiled) if options.output is None and not options.as_json else []
    last = plans[-1]
    if options.top is not None and options.output is None and not options.as_json:
        from flowrl.plan.explain.top import top_lines

        lines = top_lines(last, options.top, of_file=is_plan(config), by_time=by_time)
        print("\n".join(lines))
        if options.explain:
            from flowrl.plan.show.plan import plan_text

            print("\n" + plan_text(last, explain=True))
        return
    print("".join(f"{line}\n" for line in here), end="")
    _tell(plans, options)
    if is_plan(config) and not (options.output or options.as_json):
        anew = f"flowrl plan CONFIG --plan {config}"
        print(f"\ntimes and memory are the file's; its decisions are priced anew by: {anew}")


def _not_here(compiled: Compiled) -> list[str]:
    """What a run would be refused for on this machine, where the first plan does not say it."""
    from flowrl.compiler.this_machine import require_here
    from flowrl.plan.show.many import NOT_HERE
    from flowrl.plan.show.plan import not_here

    plans = [stage.plan for stage in compiled.stages]
    told = dict.fromkeys(line for plan in plans for line in not_here(plan))
    if told:
        return [line for line in told if line not in not_here(plans[0])]
    try:
        require_here(compiled.config, compiled.stages)
    except FlowError as error:
        return [f"{NOT_HERE}{error.what} ({error.found})"]
    return []


def _tell(plans: Sequence[PlacementPlan], options: PlanCommand) -> None:
    """Writes the last plan, or prints all."""
    if options.output is not None:
        _write(plans, options.output)
        return
    if options.as_json:
        sys.stdout.write(plans[-1].to_json())
        return
    from flowrl.plan.show.plan import plan_renderable, plan_text

    for plan in plans:
        if sys.stdout.isatty():
            from rich.console import Console

            Console(highlight=False).print(plan_renderable(plan, explain=options.explain))
        else:
            print(plan_text(plan, explain=options.explain))


def _print_priced(config: Path, written: Path, words: Sequence[str], options: PlanCommand) -> None:
    """A plan's file by its decisions, or what another plan does otherwise than it."""
    from flowrl.plan import load_plan

    graph = load_plan(written, alone=False).graph
    stages = _compiled_by(config, written, words).stages
    plan = next(stage.plan for stage in reversed(stages) if stage.graph.name == graph)
    if options.diff is not None:
        _print_diff(plan, _other_plan(options.diff, words), options)
    else:
        _tell([plan], options)


def _compiled_by(config: Path, written: Path, words: Sequence[str]) -> Compiled:
    from flowrl.cli.given_plan import compiled_by
    from flowrl.config.load import load_config, locating

    loaded = load_config(config, words)
    with locating(loaded):
        return compiled_by(loaded, written)


def _print_routes(config: Path, words: Sequence[str], names: str, options: PlanCommand) -> None:
    """The ways of the last stage's parameters, by a plan's file or a new plan."""
    from flowrl import api
    from flowrl.cli.routes import print_routes

    if options.plan is not None:
        stages = _compiled_by(config, options.plan, words).stages
    else:
        stages = api.compile(None, config, overrides=words).stages
    print_routes(stages[-1], names, options)


def _warn_of_name(plan: PlacementPlan, path: Path) -> None:
    """Tells of a plan whose workflow nobody installed: an edited name fits no configuration."""
    from flowrl.config.nearest import suggestion
    from flowrl.program import registered_workflows

    known = registered_workflows()
    if plan.graph not in known:
        meant = suggestion(plan.graph, known)
        print(
            f"warning: {path} (graph): no installed workflow is called {plan.graph!r}, so only a "
            "configuration that brings one of this name can run or simulate the plan"
            + (f"; {meant}" if meant else ""),
            file=sys.stderr,
        )


def _write(plans: Sequence[PlacementPlan], output: Path) -> None:
    """The last one, and on standard error what it is."""
    from flowrl.plan.explain.top import one_line

    plan = plans[-1]
    last = f", the last of {len(plans)} stages" if len(plans) > 1 else ""
    text = plan.to_json() if _FORMATS[output.suffix] == "json" else plan.to_yaml()
    write_output(output, text, f"plan of {plan.graph}{last}, {one_line(plan)}")


def _plan_of(path: Path, words: Sequence[str]) -> PlacementPlan:
    """A plan that was written, or the one of a configuration."""
    if is_plan(path):
        from flowrl.plan import load_plan

        return load_plan(path)
    from flowrl import api

    return api.compile(None, path, overrides=words).plan


def _other_plan(path: Path, words: Sequence[str], option: str = "--diff ") -> PlacementPlan:
    """One of two plans that are compared.

    Args:
        option: That names it; empty of the first one.

    Raises:
        ConfigError: there is no such file, whatever it was to be.
    """
    from flowrl.config.nearest import nearest_file

    if not path.exists():
        raise ConfigError(
            "no such file",
            where=f"{option}{path}",
            expected="a plan that was written, or a configuration to plan",
            hint=nearest_file(path) or "`flowrl plan CONFIG -o FILE.json` writes a plan",
        )
    return _plan_of(path, words)


def _plans_of(
    first: Path, second: Path, words: Sequence[str]
) -> tuple[PlacementPlan, PlacementPlan]:
    """Two plans, each of which may be made of a configuration.

    Raises:
        FlowError: a plan cannot be read or made; beside one that was written it says what the
            other one is, for whoever took it for a plan.
    """
    plans = []
    for path, other in ((first, second), (second, first)):
        try:
            plans.append(_other_plan(path, words, "--diff " if path is second else ""))
        except FlowError as error:
            if is_plan(other) and not is_plan(path) and path.is_file():
                error.what = (
                    f"{path} is a configuration and no plan, and none can be made of it here: "
                    f"{error.what}"
                )
                error.hint = (
                    f"name a plan that --output wrote in the place of {path}; or --cluster FILE "
                    f"for a plan of it" + (f"; or {error.hint}" if error.hint else "")
                )
            raise
    return plans[0], plans[1]


def _print_diff(old: PlacementPlan, new: PlacementPlan, options: PlanCommand) -> None:
    from flowrl.plan.show.diff import diff_plans

    if old.graph != new.graph:
        print(
            f"warning: --diff: the plans are of different workflows, {old.graph!r} and "
            f"{new.graph!r}",
            file=sys.stderr,
        )
    lines = diff_plans(old, new)
    if options.as_json:
        print(json.dumps(list(lines), indent=2))
    else:
        print("\n".join(lines) or "the plans are equal")


def _print_sizes(config: Path, words: Sequence[str], options: PlanCommand) -> None:
    """How many devices, or what it takes on each number of them, for each kind of device."""
    from flowrl import api
    from flowrl.config.load import load_config
    from flowrl.plan.groups import cost_of
    from flowrl.plan.sizing import Job

    loaded = load_config(config, words)
    graph, request, measured = api.ask_for_plan(loaded)
    jobs = [
        Job(
            graph=graph,
            request=request,
            spec=kind.spec,
            cost=cost_of(request) if measured is None else measured,
            node_size=kind.node_size,
            host=kind.host,
            cores=kind.cores,
            where="--min-devices" if options.sweep is None else "--sweep",
        )
        for kind in _kinds(options)
    ]
    found = [_sizes_of(job, options, loaded) for job in jobs]
    failed = [one for one in found if isinstance(one, FlowError)]
    if len(failed) == len(found):
        raise failed[0]
    if options.as_json:
        plain = [_plain(one) for one in found]
        names = [job.spec.name for job in jobs]
        print(
            json.dumps(
                plain[0] if len(jobs) == 1 else dict(zip(names, plain, strict=True)), indent=2
            )
        )
        return
    print("\n\n".join(_size_text(job, one) for job, one in zip(jobs, found, strict=True)))
    stages = loaded.config.stages
    if len(stages) > 1:
        print(f"of stage {stages[-1]}, the last of {' -> '.join(stages)}")


def _sizes_of(
    job: Job, options: PlanCommand, loaded: LoadedConfig
) -> Size | tuple[Size | int, ...] | FlowError:
    from flowrl.plan.sizing import fewest, sizes

    try:
        if options.sweep is None:
            return fewest(job)
        return sizes(job, numbers_of(options.sweep, job.node_size), _tell_of_large)
    except FlowError as error:
        error.where = loaded.located(error.where)
        return error


def _tell_of_large(devices: int) -> None:
    """A pool that takes seconds is told of, so that nobody waits in silence."""
    if devices >= LARGE:
        print(f"planning for {devices} devices ...", file=sys.stderr, flush=True)


def _plain(found: Size | tuple[Size | int, ...] | FlowError) -> object:
    if isinstance(found, FlowError):
        return {"fits": False, "error": str(found)}
    if not isinstance(found, tuple):
        return asdict(found)
    return [
        {"devices": one, "fits": False} if isinstance(one, int) else asdict(one) for one in found
    ]


def _size_text(job: Job, found: Size | tuple[Size | int, ...] | FlowError) -> str:
    from flowrl.plan.explain.top import fewest_lines, sweep_lines

    if isinstance(found, FlowError):
        return f"on {job.spec.name}: {found}"
    if isinstance(found, tuple):
        return "\n".join(sweep_lines(found, job))
    return "\n".join(fewest_lines(found, job))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A kind of device that sizes are asked for.

    Attributes:
        host: Each device's part of the host's memory; None where nobody describes the host.
        cores: Of the host; likewise.
    """

    spec: DeviceSpec
    node_size: int
    host: int | None = None
    cores: int | None = None


def _kinds(options: PlanCommand) -> list[_Kind]:
    """The device that is named, or each kind of the cluster, in the nodes that hold most of it."""
    from flowrl.cluster.hardware import device_spec
    from flowrl.plan.groups import host_share
    from flowrl.plan.names import RATES

    if options.device is not None:
        from flowrl.plan.sizing import NODE_SIZE

        spec = device_spec(options.device, where="--device")
        if spec.type == "cpu":
            raise _counts_accelerators("--device", options)
        return [_Kind(spec=spec, node_size=options.node_size or NODE_SIZE)]
    cluster = options.cluster
    if cluster is None:
        raise ConfigError(
            "of which device?",
            where="--sweep" if options.sweep is not None else "--min-devices",
            hint="add --device NAME (configs/hardware) or --cluster FILE",
        )
    pool = _pool(cluster)
    if pool.types == {"cpu"}:
        raise _counts_accelerators(f"--cluster {cluster}", options)
    groups = [group for group in pool.groups() if group.spec is not None]
    if not groups:
        raise ConfigError(
            "no device of this cluster is in the catalogue",
            where=f"--cluster {cluster}",
            hint=f"name one with --device, or give its rates: {RATES}",
        )
    known = {group.device.name for group in groups}
    for name in sorted({group.device.name for group in pool.groups()} - known):
        print(
            f"warning: --cluster {cluster}: {name} is not looked at, for no time is known of it, "
            f"which takes {RATES}",
            file=sys.stderr,
        )
    largest: dict[str, DeviceGroup] = {}
    for group in groups:
        before = largest.get(group.device.name)
        if before is None or len(group.addresses) > len(before.addresses):
            largest[group.device.name] = group
    return [
        _Kind(
            spec=replace(group.machine.spec, memory_bytes=group.device.free_bytes),
            node_size=group.node_size,
            host=host_share(pool, group),
            cores=group.host_cores,
        )
        for group in largest.values()
    ]


def _pool(cluster: str) -> ResourcePool:
    from flowrl.config.check_files import names_ray

    if names_ray(cluster):
        from flowrl.runtime.ray_pool import ray_pool

        return ray_pool(cluster)
    if cluster == "auto":
        from flowrl.cluster.discover import discover

        return discover()
    from flowrl.cluster.load import load_cluster

    return load_cluster(Path(cluster))


def _counts_accelerators(where: str, options: PlanCommand) -> ConfigError:
    asked = "--sweep" if options.sweep is not None else "--min-devices"
    return ConfigError(
        f"{asked} counts accelerators, and a CPU is none",
        where=where,
        hint="name an accelerator of configs/hardware with --device",
    )


def numbers_of(text: str, node_size: int) -> list[int]:
    """`devices=8:1024` doubles, up to the last and with it; `devices=8,24,64` is a list."""
    name, equals, value = text.partition("=")
    try:
        if name != "devices" or not equals:
            raise ValueError
        if ":" not in value:
            numbers = sorted({int(one) for one in value.split(",")})
        else:
            first, last = (int(one) for one in value.split(":"))
            numbers = []
            while 0 < first <= last and len(numbers) <= 64:
                numbers.append(first)
                first *= 2
            if numbers and numbers[-1] != last and last % node_size == 0:
                numbers.append(last)
        if not numbers or numbers[0] < 1:
            raise ValueError
    except ValueError:
        raise ConfigError(
            "not a range of numbers of devices",
            where="--sweep",
            found=text,
            expected="devices=8:1024 (doubling), or devices=8,24,64",
            hint="write the smallest and the largest with a colon, or all of them with commas",
        ) from None
    odd = [one for one in numbers if one > node_size and one % node_size]
    if odd:
        low = odd[0] // node_size * node_size
        raise FlowError(
            f"{odd[0]} devices are no whole nodes of {node_size}",
            where="--sweep",
            expected=f"{low} or {low + node_size}",
            found=text,
            hint=f"ask for {low} or {low + node_size} in its place"
            if low
            else f"ask for {node_size}",
        )
    return numbers
