"""However a run on this machine ends, nothing of it is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.watched_processes import ENDINGS, started

ALL = [pytest.param(name, marks=() if name == "SIGKILL" else pytest.mark.slow) for name in ENDINGS]


@pytest.mark.parametrize("ending", ALL)
def test_no_process_and_nothing_in_shared_memory_is_left_of_a_run(tmp_path: Path, ending: str):
    command = started(tmp_path, "local", ending)
    try:
        command.first_step()
        assert len(command.processes()) >= 4  # the run, two engines, scorers
        assert command.shared()
        number, codes = ENDINGS[ending]
        assert command.end(number) in codes
        assert command.shared() == set()
    finally:
        command.kill()
