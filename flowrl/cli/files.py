"""The files of commands: plans and clusters that they read, and outputs that they write."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import yaml

from flowrl.errors import ConfigError, FlowError, raise_all
from flowrl.files import require_writable, write_result
from flowrl.wording import listing, one_of_them

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from flowrl.api import Compiled
    from flowrl.config.load import LoadedConfig
    from flowrl.plan import PlacementPlan


def is_plan(path: Path) -> bool:
    """True if a file is a plan's, by its name or by its keys."""
    if path.name.endswith((".json", ".plan.yaml", ".plan.yml")):
        return True
    try:
        text = path.read_text(encoding="utf-8")
        # No config has the word placements, so no config is parsed here.
        raw = yaml.safe_load(text) if "placements" in text else None
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False  # the reader of configs reports it
    return isinstance(raw, dict) and {"version", "placements"} <= raw.keys()


def given_options(options: DataclassInstance) -> list[str]:
    """Returns the options of a command that the command line gives: `--cluster`, `--pin`."""
    return [
        f"--{field.name.replace('_', '-')}"
        for field in fields(options)
        if getattr(options, field.name) not in (None, False, ())
    ]


def refuse_together(given: Sequence[str], option: str, *others: str) -> None:
    """Raises ConfigError where `option` is given together with another one, which it excludes."""
    for other in others:
        if option in given and other in given:
            raise ConfigError(
                f"{option} and {other} do not go together",
                where=other,
                hint=f"leave {option} or {other} out",
            )


def refuse_plan(path: Path, needs: str, hint: str) -> NoReturn:
    """Raises ConfigError for a plan's file where `needs`, an option or command, needs a config."""
    raise ConfigError(
        f"this is a plan's file, and {needs} needs a configuration", where=str(path), hint=hint
    )


def machine_words(
    cluster: str | None, pins: Sequence[str], overrides: Sequence[str] = ()
) -> list[str]:
    """Returns `--cluster` and `--pin` as overrides.

    Args:
        overrides: Overrides of the command, which may be pins as keys of the configuration.

    Raises:
        ConfigError: Pins are malformed, or contradict each other; one error has all of them.
    """
    words = [] if cluster is None else [f"cluster={cluster}"]
    keys = [word.removeprefix("plan.pins.") for word in overrides if word.startswith("plan.pins.")]
    said = {key.partition("=")[0]: key for key in keys}
    problems: list[ConfigError] = []
    for pin in pins:
        name, _, value = pin.partition("=")
        if "." not in name or not value:
            hint = "`flowrl plan CONFIG --explain` shows what there is"
            wrong = ConfigError(
                "a pin says a number or devices of a part of the plan, as WHAT.FIELD=VALUE",
                where=f"--pin {pin}",
                expected="for example rollout.tp=2 or actor.devices=0-31",
                hint=hint,
            )
            problems.append(wrong)
            continue
        before = said.setdefault(name, pin)
        if before != pin:
            both = f"{before} and {pin} contradict each other"
            problems.append(ConfigError(both, where="--pin", hint="take one of them out"))
        words.append(f"plan.pins.{name}={value}")
    raise_all(problems)
    return words


@contextmanager
def offering_cluster(config: Path, words: Sequence[str], option: str) -> Iterator[None]:
    """Adds a hint about `--cluster` to errors of jobs that are not meant for this machine.

    These are jobs that do not fit it, or whose data is not on it, where no cluster is named.

    Args:
        words: Overrides of the configuration.
        option: The form in which this command names a cluster.
    """
    try:
        yield
    except FlowError as error:
        if option not in (error.hint or "") and (why := _why(error, config, words)) is not None:
            way = f"{why}: {option} (configs/clusters has some)"
            error.hint = f"{error.hint}; or {way}" if error.hint else way
        raise


def _why(error: FlowError, config: Path, words: Sequence[str]) -> str | None:
    """Returns why a cluster may be missing; None where it is not."""
    from flowrl.config.check_files import data_files_exist
    from flowrl.config.load import load_config
    from flowrl.plan.fit import DoesNotFit

    try:
        loaded = load_config(config, words)
    except FlowError:
        return None  # the error is in the configuration
    if loaded.config.cluster != "auto":
        return None
    if isinstance(error, DoesNotFit):
        return "name the cluster that is meant"
    if error.where in {problem.where for problem in data_files_exist(loaded)}:
        return "name the cluster that is meant, for which no data is read"
    return None


def compiled_by(loaded: LoadedConfig, path: Path) -> Compiled:
    """Returns the configuration compiled with a plan's file.

    A plan over many devices is evaluated from its decisions; where the file has other values,
    warnings on standard error say so.

    Raises:
        ConfigError: The file is no plan, or of no stage of the configuration.
        PlanError: Its decisions contradict each other, or do not fit.
    """
    from flowrl import api
    from flowrl.plan import load_plan

    given = load_plan(path, alone=False)
    if given.schedule is not None:
        return _priced(loaded, given, path)
    return run_by(api.compile(None, loaded), path)


def run_by(compiled: Compiled, path: Path) -> Compiled:
    """Returns what was compiled for this machine with a plan's file for one device.

    What follows from edits of the file is computed again, with warnings on standard error.

    Raises:
        ConfigError: The file is no plan, or of no stage of the configuration.
        PlanError: Its parts contradict each other, or the executor cannot run it.
    """
    from flowrl import api
    from flowrl.plan import load_plan
    from flowrl.plan.priced.changes import local_changes

    given = load_plan(path, alone=False)
    stages = [stage for stage in compiled.stages if stage.graph.name == given.graph]
    if not stages or stages[-1].local is None:
        return compiled.with_plan(path)
    is_last = stages[-1] is compiled.stages[-1]
    plan = api.by_file(compiled.config, stages, given, path, timed=is_last)
    for line in local_changes(given, plan, path):
        print(f"warning: {line}", file=sys.stderr)
    return compiled.with_plan(plan)


def stage_named(names: Sequence[str], name: str | None, config: str | Path) -> str:
    """Returns the stage that `--stage` names; without a name the last one.

    Raises:
        ConfigError: The configuration has no such stage.
    """
    if name is None:
        return names[-1]
    if name not in names:
        raise ConfigError(
            f"{config} has no stage {name!r}",
            where=f"--stage {name}",
            expected=f"one of {listing(names)}",
            hint=one_of_them(name, names),
        )
    return name


def refuse_many_devices(path: Path) -> None:
    """Raises PlanError for a plan's file over many devices, which this machine cannot run."""
    from flowrl.plan import load_plan
    from flowrl.runtime.local.plan_checks import require_plan_for_one

    require_plan_for_one(load_plan(path, alone=False), str(path))


def _priced(loaded: LoadedConfig, given: PlacementPlan, path: Path) -> Compiled:
    from flowrl import api
    from flowrl.plan.check.file_lines import lines_of
    from flowrl.plan.priced.changes import changes

    with lines_of(path):
        compiled = api.compile(None, loaded, plan=given)
    for stage in compiled.stages:
        for line in changes(given, stage.plan):
            print(f"warning: {_located(path, line)}", file=sys.stderr)
    return compiled


def _located(path: Path, line: str) -> str:
    """Returns a difference of a file, with the line of its key where it begins with one."""
    from flowrl.plan.check.file_lines import at_line, line_of

    key, colon, rest = line.partition(": ")
    is_key = colon and line_of(path.read_text(encoding="utf-8"), key) is not None
    return f"{at_line(path, key)}: {rest}" if is_key else f"{path}: {line}"


# Output files; their paths are checked before the work, which may take long.

_F = TypeVar("_F")


def format_of(
    path: Path, formats: Mapping[str, _F], default: _F | None = None, option: str = "--output"
) -> _F:
    """Returns the format that the suffix of a file's name means.

    Args:
        formats: The formats by suffix: `{".json": "json"}`.
        default: The format of a name without a suffix; None refuses such a name.
        option: The option that names the file.

    Raises:
        ConfigError: The suffix is none of the formats'.
    """
    format = formats.get(path.suffix, None if path.suffix else default)  # noqa: A001
    if format is not None:
        return format
    ends = list(formats)
    raise ConfigError(
        "the end of the file's name says its format, and this one is not offered",
        where=option,
        found=str(path),
        expected=f"a name that ends in {' or '.join(ends)}",
        hint=f"{option} {path.with_suffix(ends[0])}",
    )


def require_output(path: Path, option: str = "--output") -> None:
    """Checks before the work begins that a file can be written.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        require_writable(path)
    except OSError as error:
        raise _not_written(path, option, error) from error


def require_json(given: Path | None, default: Path, option: str) -> Path:
    """Returns the path of a JSON file, checked before the work begins.

    Args:
        given: The path that the option gives; its folder must exist.
        default: The path where the option is not given; its folder is made.

    Raises:
        ConfigError: It cannot be written, or its suffix is that of another format.
    """
    if given is None:
        try:
            default.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_written(default, option, error) from error
    else:
        format_of(given, {".json": "json"}, "json", option)
    require_output(given or default, option)
    return given or default


def write_output(path: Path, content: str | bytes, what: str | None = None) -> None:
    """Writes a file as a whole, or into a device or pipe.

    Args:
        what: The contents, which are named on standard error; None prints nothing.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        write_result(path, content)
    except OSError as error:
        raise _not_written(path, "--output", error) from error
    if what is not None and path.is_file():  # the reader of a pipe sees the contents
        print(f"written to {path}: {what}", file=sys.stderr)


def _not_written(path: Path, option: str, error: OSError) -> ConfigError:
    missing = not path.parent.is_dir()
    return ConfigError(
        f"the {option.lstrip('-')} cannot be written",
        where=option,
        found=f"no folder {path.parent}" if missing else f"{path}: {error.strerror}",
        hint=f"make the folder first: mkdir -p {path.parent}"
        if missing
        else f"name a file that may be written: {option} FILE",
    )
