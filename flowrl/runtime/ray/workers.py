"""Workers that a Ray actor hosts for a run: the scorer processes of a role, an environment."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import cast

from flowrl.backend.environment import EnvironmentContext
from flowrl.backend.protocols import ScoreContext, ScoreRequest
from flowrl.backend.registry import find
from flowrl.config.rewards import RewardsConfig
from flowrl.errors import FlowError
from flowrl.ids import SampleId
from flowrl.runtime.channels import Mailbox
from flowrl.runtime.environments.loop import Call, Reply
from flowrl.runtime.environments.pool import open_loop_here
from flowrl.runtime.scoring.pool import ScoringPool
from flowrl.runtime.workers import wait_for_any

__all__ = ["run_environment", "run_scorers"]

_LOOK_S = 0.5
_CLOSE_S = 5.0


def run_scorers(mailbox: Mailbox) -> None:
    """Scores samples in processes of this node.

    run -> scorers    ("open", backend, ScoreContext, RewardsConfig, workers), once
                      ("score", [ScoreRequest, ...])
    scorers -> run    ("ready",), or ("broken", FlowError) and then nothing more
                      ("scores", [ScoreResult or ScoreFailure, ...])
    """
    messages = mailbox.receive()
    if messages is None:
        return
    _, backend, context, rewards, workers = messages.pop(0)
    rewards = cast(RewardsConfig, rewards)
    try:
        with ScoringPool(
            cast(str, backend),
            cast(ScoreContext, context),
            timeout_s=rewards.timeout_s,
            workers=cast(int, workers),
            memory_gb=rewards.memory_gb,
        ) as pool:
            mailbox.send(("ready",))
            while messages is not None:
                for _, requests in messages:
                    pool.submit(cast("Sequence[ScoreRequest]", requests))
                wait_for_any([pool], _LOOK_S, mailbox.fileno())
                if results := pool.poll():
                    mailbox.send(("scores", results))
                messages = mailbox.receive() if _is_readable(mailbox, 0.0) else []
    except FlowError as reason:
        mailbox.send(("broken", reason))


class _Replies:
    """Sends an environment's answers on."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def put(self, replies: list[Reply]) -> None:
        self._mailbox.send(("replies", replies))


def run_environment(mailbox: Mailbox) -> None:
    """Runs an environment for a run's `EnvironmentPool`.

    run -> environment    ("open", backend, EnvironmentContext, concurrency), once
                          ("orders", [Call or SampleId, ...])
    environment -> run    ("ready",), or ("broken", FlowError) and then nothing more
                          ("replies", [Reply, ...])
                          ("blocked", ticket or None, EpisodeFailure or None), and ("free",)
    """
    messages = mailbox.receive()
    if messages is None:
        return
    _, backend, context, concurrency = messages.pop(0)
    context = cast(EnvironmentContext, context)
    try:
        opening = find(cast(str, backend)).open_environment
        loop = open_loop_here(opening, context, cast(int, concurrency), _Replies(mailbox))
    except FlowError as reason:
        mailbox.send(("broken", reason))
        return
    mailbox.send(("ready",))
    blocked = False
    while messages is not None:
        for _, orders in messages:
            loop.send(cast("Sequence[Call | SampleId]", orders))
        messages = mailbox.receive() if _is_readable(mailbox, _LOOK_S) else []
        if loop.is_blocked(context.timeout_s) != blocked:
            blocked = not blocked
            call, failure = loop.blocking()
            ticket = None if call is None else call.ticket
            mailbox.send(("blocked", ticket, failure) if blocked else ("free",))
    loop.stop(0.0 if blocked else _CLOSE_S)


def _is_readable(mailbox: Mailbox, timeout_s: float) -> bool:
    return bool(select.select([mailbox], [], [], timeout_s)[0])
