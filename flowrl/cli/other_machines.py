"""Whoever forgot to name a cluster is told how: large jobs do not fit the machine at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flowrl.errors import FlowError

__all__ = ["offering_cluster"]


@contextmanager
def offering_cluster(config: Path, words: Sequence[str], option: str) -> Iterator[None]:
    """Errors of a configuration that is too large for this machine, or whose data is elsewhere,
    say how a cluster is named, where none is.

    Args:
        words: Overrides of the configuration.
        option: How this command names a cluster.
    """
    try:
        yield
    except FlowError as error:
        if option not in (error.hint or "") and (why := _why(error, config, words)) is not None:
            way = f"{why}: {option} (configs/clusters has some)"
            error.hint = f"{error.hint}; or {way}" if error.hint else way
        raise


def _why(error: FlowError, config: Path, words: Sequence[str]) -> str | None:
    """Why a cluster may be what is missing; None where it is not."""
    from flowrl.config.check_files import data_files_exist
    from flowrl.config.load import load_config
    from flowrl.plan.fit import DoesNotFit

    try:
        loaded = load_config(config, words)
    except FlowError:
        return None  # it is no configuration, or what is wrong is in it
    if loaded.config.cluster != "auto":
        return None
    if isinstance(error, DoesNotFit):
        return "name the cluster that is meant"
    if error.where in {problem.where for problem in data_files_exist(loaded)}:
        return "name the cluster that is meant, for which no data is read"
    return None
