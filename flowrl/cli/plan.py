"""`flowrl plan`: where every role runs, memory by role and phase, what a step does and takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from flowrl.cli.output import write_output
from flowrl.errors import ConfigError, FlowError

if TYPE_CHECKING:
    from flowrl.cluster.hardware import DeviceSpec
    from flowrl.cluster.pool import DeviceGroup, ResourcePool
    from flowrl.config.load import LoadedConfig
    from flowrl.plan import PlacementPlan
    from flowrl.plan.sizing import Job, Size

__all__ = ["PlanCommand", "is_plan", "machine_words", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommand:
    """The options of the command line.

    Attributes:
        cluster: Takes the place of the configuration's.
        explain: Tells every choice that was not made.
        top: How many plans are listed, best first.
        device: Of the catalogue, for `min_devices` and `sweep`.
        node_size: Devices of a node, with `device`.
        min_devices: Tells how many devices the job needs.
        sweep: Numbers of devices: `devices=8:1024`.
        pins: Decisions to keep, `rollout.tp=2`.
        diff: A plan that is compared with the first one.
    """

    output: Path | None = None
    as_json: bool = False
    cluster: str | None = None
    explain: bool = False
    top: int | None = None
    device: str | None = None
    node_size: int | None = None
    min_devices: bool = False
    sweep: str | None = None
    pins: Sequence[str] = ()
    diff: Path | None = None


def run(config: Path, overrides: Sequence[str], options: PlanCommand) -> None:
    """Compiles a configuration and prints or writes the plan of its last stage.

    Raises:
        FlowError: anything that is wrong with the configuration, or a job that does not fit.
    """
    _refuse_ignored(config, overrides, options)
    words = [*overrides, *_as_overrides(options)]
    if options.diff is not None:
        _print_diff(*_plans_of(config, options.diff, words), options)
    elif options.min_devices or options.sweep is not None:
        _print_sizes(config, words, options)
    elif options.device is not None:
        raise _device_without_sizes(options)
    else:
        _print_plan(config, words, options)


def _device_without_sizes(options: PlanCommand) -> ConfigError:
    """Of a device that is named where no number of devices is looked for."""
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


MOST_OF_A_NODE = 1024
"""Devices that `--node-size` may ask for; searching takes the longer the more there are."""

_EXCLUDES = {
    "--sweep": ("--min-devices", "--diff", "--output", "--top", "--explain"),
    "--min-devices": ("--diff", "--output", "--top", "--explain"),
    "--diff": ("--device", "--output", "--top", "--explain"),
    "--output": ("--json",),
}
"""What an option has no use for."""

LARGE = 1024
"""Devices of a pool whose plans are told of as they are made."""

_CHANGES = ("--cluster", "--pin", "--device", "--min-devices", "--sweep")
"""Options that ask for another plan than the one that was written."""


def _refuse_ignored(config: Path, overrides: Sequence[str], options: PlanCommand) -> None:
    """Nothing that is asked for is left out silently."""
    given = {
        "--sweep": options.sweep is not None,
        "--min-devices": options.min_devices,
        "--diff": options.diff is not None,
        "--output": options.output is not None,
        "--top": options.top is not None,
        "--explain": options.explain,
        "--device": options.device is not None,
        "--cluster": options.cluster is not None,
        "--pin": bool(options.pins),
        "--json": options.as_json,
    }
    for one, others in _EXCLUDES.items():
        for other in others:
            if given[one] and given[other]:
                raise ConfigError(
                    f"{one} and {other} do not go together",
                    where=other,
                    hint=f"leave {one} or {other} out",
                )
    asked = next((one for one in ("--min-devices", "--sweep") if given[one]), None)
    if asked is not None and given["--device"] and given["--cluster"]:
        raise ConfigError(
            f"{asked} takes each kind of device of the cluster, or the one that is named",
            where="--device and --cluster",
            found=f"{options.device} beside {options.cluster}",
            hint="leave one of them out",
        )
    if options.node_size is not None and options.device is None:
        raise ConfigError(
            "--node-size is of --device, and a cluster has nodes of its own",
            where="--node-size",
            hint="add --device NAME, or leave --node-size out",
        )
    if options.node_size is not None and options.node_size > MOST_OF_A_NODE:
        raise ConfigError(
            "no node has so many devices",
            where="--node-size",
            found=str(options.node_size),
            expected=f"at most {MOST_OF_A_NODE:,}",
            hint="give the devices of one node, 8 in most machines",
        )
    if is_plan(config) and (options.diff is None or is_plan(options.diff)):
        changes = [*(name for name in _CHANGES if given[name]), *overrides]
        if changes:
            raise ConfigError(
                f"{config} is a plan that was written, which {changes[0]} does not change",
                where=changes[0],
                hint=f"give the config in the plan's place, or leave {changes[0]} out",
            )


def machine_words(cluster: str | None, pins: Sequence[str]) -> list[str]:
    """`--cluster` and `--pin` as overrides.

    Raises:
        ConfigError: a pin that says nothing, or two that contradict each other.
    """
    words = [] if cluster is None else [f"cluster={cluster}"]
    said: dict[str, str] = {}
    for pin in pins:
        name, equals, value = pin.partition("=")
        if not equals or "." not in name or not value:
            raise ConfigError(
                "a pin says a number or devices of a part of the plan",
                where="--pin",
                found=pin,
                expected="for example rollout.tp=2 or actor.devices=0-31",
                hint="write WHAT.FIELD=VALUE; `flowrl plan CONFIG --explain` shows what there is",
            )
        before = said.setdefault(name, pin)
        if before != pin:
            raise ConfigError(
                f"{before} and {pin} contradict each other",
                where="--pin",
                hint="take one of them out",
            )
        words.append(f"plan.pins.{name}={value}")
    return words


def _as_overrides(options: PlanCommand) -> list[str]:
    words = machine_words(options.cluster, options.pins)
    if options.top is not None:
        if options.top < 1:
            raise ConfigError(
                "too small a number of plans",
                where="--top",
                found=str(options.top),
                expected="at least 1",
                hint="write --top 1 for the best plan alone, --top 5 for the best five",
            )
        from flowrl.config.plan import MOST_ALTERNATIVES

        most = 1 + MOST_ALTERNATIVES
        if options.top > most:
            raise ConfigError(
                "too large a number of plans",
                where="--top",
                found=str(options.top),
                expected=f"at most {most}",
                hint=f"write --top {most} for as many as there may be",
            )
        words.append(f"plan.alternatives={options.top - 1}")
    return words


def _print_plan(config: Path, words: Sequence[str], options: PlanCommand) -> None:
    if is_plan(config):
        plans = [_plan_of(config, words)]
        _warn_of_name(plans[0], config)
    else:
        from flowrl import api

        plans = [stage.plan for stage in api.compile(None, config, overrides=words).stages]
    last = plans[-1]
    if options.output is not None:
        _write(last, options.output)
    elif options.as_json:
        sys.stdout.write(last.to_json())
    elif options.top is not None:
        print(_top(last, options.top))
        if options.explain:
            from flowrl.plan.render import plan_text

            print("\n" + plan_text(last, explain=True))
    else:
        from flowrl.plan.render import plan_renderable, plan_text

        for plan in plans:
            if sys.stdout.isatty():
                from rich.console import Console

                Console(highlight=False).print(plan_renderable(plan, explain=options.explain))
            else:
                print(plan_text(plan, explain=options.explain))
        if is_plan(config) and last.schedule is not None:
            anew = f"flowrl simulate CONFIG --plan {config}"
            print(f"\ntimes and memory are the file's; its decisions are priced anew by: {anew}")


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


def _write(plan: PlacementPlan, output: Path) -> None:
    if output.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(
            "a plan is written as JSON or YAML",
            where="--output",
            found=str(output),
            expected="a name that ends in .json or .yaml",
            hint=f"--output {output.with_suffix('.json')}",
        )
    write_output(output, plan.to_json() if output.suffix == ".json" else plan.to_yaml())


def is_plan(path: Path) -> bool:
    """Whether a file is a plan that was written: by its name, or by the keys that it has."""
    if path.name.endswith((".json", ".plan.yaml", ".plan.yml")):
        return True
    try:
        text = path.read_text(encoding="utf-8")
        # No config says placements, so that of configs nothing is parsed here.
        raw = yaml.safe_load(text) if "placements" in text else None
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False  # what reads it as a config says what is wrong
    return isinstance(raw, dict) and {"version", "placements"} <= raw.keys()


def _plan_of(path: Path, words: Sequence[str]) -> PlacementPlan:
    """A plan that was written, or the one of a configuration."""
    if is_plan(path):
        from flowrl.plan import load_plan

        return load_plan(path)
    from flowrl import api

    return api.compile(None, path, overrides=words).plan


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
            plans.append(_plan_of(path, words))
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


def _top(plan: PlacementPlan, most: int) -> str:
    """The best plans, one line each."""
    from flowrl.plan.explain_top import top_lines

    return "\n".join(top_lines(plan, most))


def _print_diff(old: PlacementPlan, new: PlacementPlan, options: PlanCommand) -> None:
    from flowrl.plan.diff import diff_plans

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


def _sizes_of(
    job: Job, options: PlanCommand, loaded: LoadedConfig
) -> Size | tuple[Size | int, ...] | FlowError:
    from flowrl.plan.sizing import fewest, sizes

    try:
        if options.sweep is None:
            return fewest(job)
        return sizes(job, _numbers(options.sweep, job.node_size), _tell_of_large)
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
    from flowrl.plan.explain_top import fewest_lines, sweep_lines

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


def _numbers(text: str, node_size: int) -> list[int]:
    """`devices=8:1024` doubles; `devices=8,24,64` is a list."""
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
