"""Calls of a trainer of several ranks, and what remains of the ranks that fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import BackendError, WorkerDied
from flowrl.runtime.local.ranks import RankProcesses
from tests.policy_contexts import policy_context


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    found: list[RankProcesses] = []

    def open_ranks(size: int = 2, timeout_s: float = 60.0, **changes: Any) -> RankProcesses:
        context = policy_context(tmp_path, layout={"dp": size}, **changes)
        plugin = "tests.runtime.rank_plugin:plugin"
        found.append(RankProcesses(plugin, context, start_timeout_s=60.0, timeout_s=timeout_s))
        return found[-1]

    yield open_ranks
    for ranks in found:
        ranks.close()


def _pids(ranks: Any, folder: Path) -> list[int]:
    ranks.export(folder)
    return [int((folder / str(n)).read_text(encoding="utf-8")) for n in range(2)]


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_rank_makes_a_call_and_rank_0_answers(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    ranks = opened()
    assert ranks.logprobs("answer", 0) == "0 of 2"
    first, second = _pids(ranks, tmp_path)
    assert first != second
    ranks.close()
    ranks.close()
    assert (tmp_path / "closed-0").exists()
    assert (tmp_path / "closed-1").exists()
    assert not _is_there(first)
    assert not _is_there(second)


def test_an_error_of_all_ranks_is_raised_and_they_go_on(opened: Callable[..., Any]) -> None:
    ranks = opened()
    with pytest.raises(BackendError, match="a bad batch"):
        ranks.logprobs("raise", 0)
    assert ranks.logprobs("answer", 0) == "0 of 2"


@pytest.mark.parametrize(
    ("wanted", "cause"),
    [
        ("die", "rank 1 of 2: signal SIGKILL"),
        ("raise alone", "a bad rank"),
        ("fail alone", "by rank 1"),
    ],
)
def test_a_rank_that_fails_alone_ends_all_and_is_the_cause_from_then_on(
    opened: Callable[..., Any], tmp_path: Path, wanted: str, cause: str
) -> None:
    ranks = opened()
    pids = _pids(ranks, tmp_path)
    for call in (wanted, "answer"):
        with pytest.raises(BackendError, match=cause):
            ranks.logprobs(call, 1)
    assert not any(map(_is_there, pids))


def test_a_rank_that_keeps_silent_after_rank_0_has_answered_ends_all(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    ranks = opened(timeout_s=0.3)
    pids = _pids(ranks, tmp_path)
    with pytest.raises(WorkerDied, match="nothing from rank 1 of 2"):
        ranks.logprobs("silence", 1)
    assert not any(map(_is_there, pids))


def test_ranks_that_cannot_be_opened_say_why(opened: Callable[..., Any]) -> None:
    with pytest.raises(BackendError, match="no such device"):
        opened(device="npu")
