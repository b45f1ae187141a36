"""`flowrl size`: how many devices a job needs, and what a step takes on more of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.cli.files import (
    given_options,
    is_plan,
    machine_words,
    offering_cluster,
    refuse_plan,
    refuse_together,
)
from flowrl.errors import ConfigError, FlowError

if TYPE_CHECKING:
    from flowrl.cluster.pool import DeviceGroup, ResourcePool
    from flowrl.config.load import LoadedConfig
    from flowrl.plan.sizing import Job, Size

LARGE = 1024
"""A pool of this many devices takes seconds to plan for, so its planning is announced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOptions:
    """The options of the command line; `flowrl.cli.app` describes each."""

    cluster: str | None = None
    device: str | None = None
    node_size: int | None = None
    sweep: str | None = None
    pin: Sequence[str] = ()
    json: bool = False


def run(config: Path, overrides: Sequence[str], options: SizeOptions) -> None:
    """Prints the fewest devices on which the last stage fits, or a table of several numbers.

    Raises:
        FlowError: The configuration is wrong, the devices are not known, or the job fits no number
            of them.
    """
    if is_plan(config):
        refuse_plan(config, "`flowrl size`", f"write flowrl size CONFIG, or flowrl plan {config}")
    _check_devices(options)
    words = [*overrides, *machine_words(options.cluster, options.pin, overrides)]
    with offering_cluster(config, words, "--cluster FILE"):
        _print_sizes(config, words, options)


def _check_devices(options: SizeOptions) -> None:
    """Refuses devices that are named twice or not at all, or that no node has."""
    refuse_together(given_options(options), "--device", "--cluster")
    if options.device is None and options.cluster is None:
        raise ConfigError(
            "`flowrl size` needs to know which devices are counted",
            where="command line",
            expected="--device NAME or --cluster FILE",
            hint="add --device NAME (configs/hardware) or --cluster FILE (configs/clusters)",
        )
    if options.node_size is not None and options.device is None:
        raise ConfigError(
            "--node-size belongs to --device; the nodes of a cluster have their own sizes",
            where="--node-size",
            hint="add --device NAME, or leave --node-size out",
        )


def _print_sizes(config: Path, words: Sequence[str], options: SizeOptions) -> None:
    """Prints the answer for each kind of device."""
    from flowrl import api
    from flowrl.config.load import load_config
    from flowrl.plan.groups import cost_of
    from flowrl.plan.problem_of import with_policies_apart
    from flowrl.plan.sizing import Job

    loaded = load_config(config, words)
    graph, request, measured = api.ask_for_plan(loaded)
    job = partial(
        Job,
        graph=graph,
        request=with_policies_apart(graph, request),
        cost=cost_of(request) if measured is None else measured,
        where="flowrl size" if options.sweep is None else "--sweep",
    )
    jobs = _jobs(job, options)
    found = [_sizes_of(job, options, loaded) for job in jobs]
    failed = [size for size in found if isinstance(size, FlowError)]
    if len(failed) == len(found):
        raise failed[0]
    if options.json:
        plain = [_plain(size) for size in found]
        names = [job.spec.name for job in jobs]
        print(
            json.dumps(
                plain[0] if len(jobs) == 1 else dict(zip(names, plain, strict=True)), indent=2
            )
        )
        return
    print("\n\n".join(_size_text(job, size) for job, size in zip(jobs, found, strict=True)))
    stages = loaded.config.stages
    if len(stages) > 1:
        print(f"of stage {stages[-1]}, the last of {' -> '.join(stages)}")


def _sizes_of(
    job: Job, options: SizeOptions, loaded: LoadedConfig
) -> Size | tuple[Size | int, ...] | FlowError:
    from flowrl.plan.sizing import fewest, sizes

    try:
        if options.sweep is None:
            return fewest(job)
        return sizes(job, numbers_of(options.sweep, job.node_size), _announce)
    except FlowError as error:
        error.where = loaded.located(error.where)
        return error


def _announce(devices: int) -> None:
    """Prints that a large pool is planned for, which takes seconds."""
    if devices >= LARGE:
        print(f"planning for {devices} devices ...", file=sys.stderr, flush=True)


def _plain(found: Size | tuple[Size | int, ...] | FlowError) -> object:
    if isinstance(found, FlowError):
        return {"fits": False, "error": str(found)}
    if not isinstance(found, tuple):
        return asdict(found)
    return [
        {"devices": size, "fits": False} if isinstance(size, int) else asdict(size)
        for size in found
    ]


def _size_text(job: Job, found: Size | tuple[Size | int, ...] | FlowError) -> str:
    from flowrl.plan.explain.top import fewest_lines, sweep_lines

    if isinstance(found, FlowError):
        return f"on {job.spec.name}: {found}"
    if isinstance(found, tuple):
        return "\n".join(sweep_lines(found, job))
    return "\n".join(fewest_lines(found, job))


def _jobs(job: Callable[..., Job], options: SizeOptions) -> list[Job]:
    """Returns a job for the named device, or for each kind of the cluster's devices.

    The job of a kind has the nodes that hold most of it.
    """
    from flowrl.cluster.hardware import device_spec
    from flowrl.plan.groups import host_share
    from flowrl.plan.names import RATES

    if options.device is not None:
        from flowrl.plan.sizing import NODE_SIZE

        spec = device_spec(options.device, where="--device")
        if spec.type == "cpu":
            raise _no_accelerator("--device")
        return [job(spec=spec, node_size=options.node_size or NODE_SIZE)]
    assert options.cluster is not None  # `_check_devices` has refused a command with neither
    cluster = options.cluster
    pool = _pool(cluster)
    if pool.types == {"cpu"}:
        raise _no_accelerator(f"--cluster {cluster}")
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
            f"warning: --cluster {cluster}: {name} is left out, because its times are unknown; "
            f"give its rates: {RATES}",
            file=sys.stderr,
        )
    largest: dict[str, DeviceGroup] = {}
    for group in groups:
        before = largest.get(group.device.name)
        if before is None or len(group.addresses) > len(before.addresses):
            largest[group.device.name] = group
    return [
        job(
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
    from flowrl.compiler.stage import pool_of

    return pool_of(cluster)


def _no_accelerator(where: str) -> ConfigError:
    return ConfigError(
        "`flowrl size` counts accelerators, and a CPU is none",
        where=where,
        hint="name an accelerator of configs/hardware with --device",
    )


def numbers_of(text: str, node_size: int) -> list[int]:
    """Returns the numbers of devices that `--sweep` names.

    `devices=8:1024` doubles from the first and ends with the last; `devices=8,24,64` is a list.

    Raises:
        ConfigError: The text is neither.
        FlowError: A number is more than a node and not whole nodes.
    """
    name, equals, value = text.partition("=")
    try:
        if name != "devices" or not equals:
            raise ValueError
        if ":" not in value:
            numbers = sorted({int(number) for number in value.split(",")})
        else:
            first, last = (int(number) for number in value.split(":"))
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
    odd = [number for number in numbers if number > node_size and number % node_size]
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
