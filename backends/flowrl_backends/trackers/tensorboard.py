"""Writes a run's numbers as TensorBoard event files, `RUN/tensorboard/STAGE`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flowrl.errors import ConfigError
from flowrl.observe.trackers import TrackerContext

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoard:
    """One event folder a stage, so that TensorBoard shows each stage as a run of its own.

    A resumed run hides what an earlier part of it logged after the checkpoint (`purge_step`).

    Args:
        context: The run; `options` has no keys.

    Raises:
        ConfigError: TensorBoard is not installed, or an option is given.
    """

    def __init__(self, context: TrackerContext) -> None:
        if context.options:
            raise ConfigError(
                "this tracker has no options",
                where="tracking.options.tensorboard",
                found=", ".join(sorted(context.options)),
                hint="remove them",
            )
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as reason:
            raise ConfigError(
                "the tracker tensorboard needs the package tensorboard",
                where="tracking.to",
                found=str(reason),
                hint="pip install 'flowrl[torch,tensorboard]'",
            ) from reason
        self._make = SummaryWriter
        self._context = context
        self._writers: dict[str, SummaryWriter] = {}

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Writes each value as a scalar of its name."""
        if stage not in self._writers:
            resumed = self._context.resumed_at
            self._writers[stage] = self._make(
                log_dir=str(self._context.folder / "tensorboard" / stage),
                purge_step=resumed[1] + 1 if resumed and resumed[0] == stage else None,
            )
        for name, value in values.items():
            self._writers[stage].add_scalar(name, value, global_step=step)

    def close(self) -> None:
        """Writes what is buffered; idempotent."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
