"""An executor is one class and one entry, and a run opens all that is placed through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.config.executors import EXECUTORS, ExecutorKind
from flowrl.runtime.local.executor import LocalExecutor
from tests.runtime.many_programs import games_of
from tests.runtime.tiny_runs import WatchedDisplay

CALLED: list[str] = []


class WatchedExecutor(LocalExecutor):
    """Notes what is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        CALLED.append(name)
        return super().__getattribute__(name)

    def close(self) -> None:
        CALLED.append("closed")


def test_all_that_a_run_opens_is_opened_by_the_executor_that_its_configuration_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kind = ExecutorKind(target=f"{__name__}:WatchedExecutor", engines="anywhere")
    monkeypatch.setitem(EXECUTORS, "watched", kind)  # type: ignore[arg-type]
    config = games_of(tmp_path)
    config["roles"]["actor"]["num_engines"] = 2
    CALLED.clear()
    fl.run(None, config, display=WatchedDisplay(), executor="watched")
    assert CALLED[0] == "require_runnable"
    assert {"open_policy", "open_fleet", "open_environment"} <= set(CALLED)
    assert CALLED[-1] == "closed"
