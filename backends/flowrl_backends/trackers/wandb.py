"""Logs a run's numbers to Weights & Biases, or into `RUN/wandb` to be uploaded later."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

from flowrl.errors import ConfigError
from flowrl.files import write_text_atomic
from flowrl.observe.trackers import TrackerContext

_MODES = ("offline", "online")
_LIMIT_S = 90.0
"""Seconds that the beginning and the end of a run may wait for its server."""


class WandB:
    """One run of Weights & Biases for one run of flowrl.

    Each name has its stage in front (`grpo/reward_mean`), and `STAGE/step` is the axis of that
    stage's numbers. A resumed run continues the same run by its id.

    Args:
        context: The run. `options` may have `project` (by default `flowrl`), `entity`, `group`,
            and `mode`: `offline` (the default) writes files that `wandb sync RUN/wandb/offline-*`
            uploads, `online` uploads at once.

    Raises:
        ConfigError: wandb is not installed, or an option is unknown.
    """

    def __init__(self, context: TrackerContext) -> None:
        options = {"project": "flowrl", "mode": "offline", **context.options}
        unknown = sorted(set(options) - {"project", "entity", "group", "mode"})
        if unknown or options["mode"] not in _MODES:
            raise ConfigError(
                "this option of the tracker wandb is unknown",
                where="tracking.options.wandb",
                found=", ".join(unknown) or f"mode: {options['mode']}",
                expected=f"project, entity, group, or mode: {' or '.join(_MODES)}",
            )
        try:
            import wandb
        except ImportError as reason:
            raise ConfigError(
                "the tracker wandb needs the package wandb",
                where="tracking.to",
                found=str(reason),
                hint="pip install 'flowrl[wandb]'",
            ) from reason
        identity = context.folder / "wandb" / "run_id"
        if not identity.exists():
            identity.parent.mkdir(exist_ok=True)
            write_text_atomic(identity, uuid4().hex)
        self._run = wandb.init(
            **{key: str(value) for key, value in options.items()},  # type: ignore[arg-type]
            name=context.name,
            id=identity.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(context.folder),
            config=dict(context.config),
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=_LIMIT_S,
                finish_timeout=_LIMIT_S,
                finish_timeout_raises=True,
            ),
        )
        self._teardown = wandb.teardown
        self._stages: set[str] = set()

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Logs the values with the stage in front of their names."""
        axis = f"{stage}/step"
        if stage not in self._stages:
            self._run.define_metric(f"{stage}/*", step_metric=axis)
            self._stages.add(stage)
        self._run.log({axis: step, **{f"{stage}/{name}": v for name, v in values.items()}})

    def close(self) -> None:
        """Ends the run of Weights & Biases and waits for its files; idempotent."""
        try:
            self._run.finish()
        finally:
            self._teardown()  # in offline mode `finish` returns before its service wrote the file
