"""What `flowrl plan` is asked for, and which options go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from flowrl.errors import ConfigError, combine

__all__ = ["PlanCommand", "as_overrides", "is_plan", "machine_words", "refuse_ignored"]


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
        plan: One that was written and perhaps edited: its decisions are priced, none is made.
        routes: A pattern of parameters whose ways from device to device are printed.
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
    plan: Path | None = None
    routes: str | None = None


MOST_OF_A_NODE = 1024
"""Devices that `--node-size` may ask for; searching takes the longer the more there are."""

_EXCLUDES = {
    "--routes": (
        *("--sweep", "--min-devices", "--device"),
        *("--diff", "--output", "--top", "--explain"),
    ),
    "--sweep": ("--min-devices", "--diff", "--output", "--top", "--explain"),
    "--min-devices": ("--diff", "--output", "--top", "--explain"),
    "--diff": ("--device", "--output", "--top", "--explain"),
    "--plan": ("--cluster", "--pin", "--device", "--min-devices", "--sweep", "--top"),
    "--output": ("--json", "--explain"),
    "--json": ("--explain",),
}
"""What an option has no use for."""

_CHANGES = ("--cluster", "--pin", "--device", "--min-devices", "--sweep")
"""Options that ask for another plan than the one that was written."""


def refuse_ignored(config: Path, overrides: Sequence[str], options: PlanCommand) -> None:
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
        "--plan": options.plan is not None,
        "--routes": options.routes is not None,
        "--json": options.as_json,
    }
    for one, others in _EXCLUDES.items():
        for other in others:
            if given[one] and given[other]:
                written = other == "--explain" and one in ("--output", "--json")
                raise ConfigError(
                    f"{one} and {other} do not go together",
                    where=other,
                    hint="leave --explain out: what is written has every reason and size anyway"
                    if written
                    else f"leave {one} or {other} out",
                )
    _refuse_machines(given, options)
    if is_plan(config):
        _refuse_plan(config, given, overrides, options)


def _refuse_machines(given: Mapping[str, bool], options: PlanCommand) -> None:
    """Devices that are named twice, or that no node has."""
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


def _refuse_plan(
    config: Path, given: Mapping[str, bool], overrides: Sequence[str], options: PlanCommand
) -> None:
    """A plan in the place of the configuration, with what only a configuration takes."""
    if options.plan is not None:
        raise ConfigError(
            "a plan is priced with the configuration that it was made of",
            where=str(config),
            found="a plan that was written",
            expected="flowrl plan CONFIG --plan FILE",
            hint=f"name the configuration in the place of {config}; or compare two plans with "
            f"flowrl plan {config} --diff {options.plan}",
        )
    if options.routes is not None:
        raise ConfigError(
            "a plan has no sizes of parameters, which the configuration's models say",
            where=str(config),
            found="a plan that was written",
            expected="flowrl plan CONFIG --plan FILE --routes GLOB",
            hint=f"write flowrl plan CONFIG --plan {config} --routes '{options.routes}'",
        )
    if options.diff is None or is_plan(options.diff):
        changes = [*(name for name in _CHANGES if given[name]), *overrides]
        if changes:
            raise ConfigError(
                f"{config} is a plan that was written, which {changes[0]} does not change",
                where=changes[0],
                hint=f"give the config in the plan's place, or leave {changes[0]} out",
            )


def machine_words(
    cluster: str | None, pins: Sequence[str], overrides: Sequence[str] = ()
) -> list[str]:
    """`--cluster` and `--pin` as overrides.

    Args:
        overrides: Other words of the command, which may be pins as keys of the configuration.

    Raises:
        ConfigError: pins that say nothing, or contradict each other; one error for all of them.
    """
    words = [] if cluster is None else [f"cluster={cluster}"]
    keys = [word.removeprefix("plan.pins.") for word in overrides if word.startswith("plan.pins.")]
    said = {key.partition("=")[0]: key for key in keys}
    problems: list[ConfigError] = []
    for pin in pins:
        name, equals, value = pin.partition("=")
        if not equals or "." not in name or not value:
            wrong = ConfigError(
                "a pin says a number or devices of a part of the plan",
                where=f"--pin {pin}",
                found=pin,
                expected="for example rollout.tp=2 or actor.devices=0-31",
                hint="write WHAT.FIELD=VALUE; `flowrl plan CONFIG --explain` shows what there is",
            )
            problems.append(wrong)
            continue
        before = said.setdefault(name, pin)
        if before != pin:
            both = f"{before} and {pin} contradict each other"
            problems.append(ConfigError(both, where="--pin", hint="take one of them out"))
        words.append(f"plan.pins.{name}={value}")
    if problems:
        raise combine(problems)
    return words


def as_overrides(options: PlanCommand, overrides: Sequence[str] = ()) -> list[str]:
    """`--cluster`, `--pin`, `--top` and `--explain` as overrides, beside others of the command.

    Raises:
        ConfigError: pins as in `machine_words`, or a number of plans that is out of bounds.
    """
    words = machine_words(options.cluster, options.pins, overrides)
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
    if options.explain and not any(one.startswith("plan.try_batches=") for one in overrides):
        words.append("plan.try_batches=true")
    return words


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
