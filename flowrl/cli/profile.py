"""`flowrl profile`: measures the times of a stage's parts on this machine."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.cli.files import require_json

if TYPE_CHECKING:
    from flowrl.api import Compiled
    from flowrl.compiler import CompiledStage
    from flowrl.sim.profile import Profile


def run(config: Path, overrides: Sequence[str], output: Path | None, *, as_json: bool) -> None:
    """Measures the last stage of a configuration and writes its profile.

    Raises:
        FlowError: The configuration, its data or a backend is wrong.
    """
    from flowrl import api
    from flowrl.compiler.stage import require_here
    from flowrl.config.load import load_config, locating
    from flowrl.sim.profile import save_profile

    loaded = load_config(config, overrides)
    default = api.profile_path(loaded.config.runtime.runs, loaded.config.name)
    path = require_json(output, default, "--output")
    with locating(loaded), tempfile.TemporaryDirectory(prefix="flowrl-profile-") as scratch:
        compiled = api.compile(None, loaded, measured=False)
        stage = compiled.stages[-1]
        require_here(compiled.config, [stage])
        profile = _measured(compiled, stage, Path(scratch), _progress(quiet=as_json))
    save_profile(profile, path)
    if as_json:
        sys.stdout.write(path.read_text(encoding="utf-8"))
        return
    from flowrl.sim.profile_text import profile_text

    print(profile_text(profile), end="")
    print(f"written to {path}")


def _measured(
    compiled: Compiled, stage: CompiledStage, folder: Path, tell: Callable[[str], None]
) -> Profile:
    from flowrl.graph import Op
    from flowrl.runtime.driver.threads import BusyThread
    from flowrl.runtime.environments.pool import EnvironmentPool
    from flowrl.runtime.transfer.weight_folders import WeightFolders
    from flowrl.sim.calibrate import can_calibrate
    from flowrl.sim.measure_stage import measure_stage

    with closing(WeightFolders(folder)) as weights:
        profile = measure_stage(
            stage,
            compiled.config,
            folder,
            calls=EnvironmentPool,
            busy=BusyThread,
            weights=weights.root,
            tell=tell,
        )
    if not stage.graph.of_op(Op.GENERATE) or not can_calibrate(stage):
        return profile
    tell("a short run, for what the driver itself takes")
    return _calibrated(compiled, stage, profile, folder)


def _calibrated(
    compiled: Compiled, stage: CompiledStage, profile: Profile, folder: Path
) -> Profile:
    from flowrl import api
    from flowrl.observe.display import SilentDisplay
    from flowrl.observe.run_folder import RunFolder
    from flowrl.sim.calibrate import (
        Calibration,
        calibrated,
        calibration_of,
        calibration_reward_s,
        calibration_values,
        can_calibrate_apart,
    )

    def run(*, apart: bool) -> Calibration:
        values = calibration_values(compiled.config, stage, folder, apart=apart)
        with _no_warnings():  # the user's own configuration has been warned of before
            short = api.compile(None, values, measured=False)
        result = short.run(display=SilentDisplay())
        return calibration_of(list(RunFolder.open(result.folder).steps()))

    here = run(apart=False)
    apart = run(apart=True) if can_calibrate_apart(stage) else None
    reward_s = calibration_reward_s(compiled.config, stage, folder)
    return calibrated(profile, here, apart, reward_s=reward_s)


@contextmanager
def _no_warnings() -> Iterator[None]:
    log = logging.getLogger("flowrl.compiler")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _progress(*, quiet: bool) -> Callable[[str], None]:
    def show(text: str) -> None:
        if not quiet:
            print(f"measuring: {text}", file=sys.stderr)

    return show
