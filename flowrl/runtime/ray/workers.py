"""Workers that a Ray actor hosts for a run: the scorer processes of a role, an environment."""

from __future__ import annotations

import select
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np

from flowrl.backend.environment import EnvironmentContext
from flowrl.backend.plugin import Plugin
from flowrl.backend.protocols import (
    PolicyContext,
    ScoreContext,
    ScoreRequest,
    Service,
    TrainBackend,
)
from flowrl.backend.registry import find
from flowrl.config.rewards import RewardsConfig
from flowrl.errors import BackendError, FlowError
from flowrl.ids import SampleId
from flowrl.runtime.channels import Bulk, Mailbox, Message
from flowrl.runtime.environments.loop import Call, Reply
from flowrl.runtime.environments.pool import open_loop_here
from flowrl.runtime.groups import performed, resolved
from flowrl.runtime.local.engine_in_place import EngineInPlace
from flowrl.runtime.local.engine_worker import EngineServer
from flowrl.runtime.ray.actor import from_store
from flowrl.runtime.scoring.pool import ScoringPool
from flowrl.runtime.spans import SPANS
from flowrl.runtime.user_errors import described
from flowrl.runtime.workers import require, wait_for_any

_LOOK_S = 0.5
_CLOSE_S = 5.0


def run_scorers(mailbox: Mailbox) -> None:
    """Scores samples in processes of this node.

    run -> scorers    ("open", backend, ScoreContext, RewardsConfig, workers, start_timeout_s), once
                      ("score", [ScoreRequest, ...])
    scorers -> run    ("ready",), or ("broken", FlowError) and then nothing more
                      ("scores", [ScoreResult or ScoreFailure, ...])
    """
    messages = mailbox.receive()
    if messages is None:
        return
    _, backend, context, rewards, workers, start_timeout_s = messages.pop(0)
    rewards = cast(RewardsConfig, rewards)
    try:
        with ScoringPool(
            cast(str, backend),
            cast(ScoreContext, context),
            timeout_s=rewards.timeout_s,
            workers=cast(int, workers),
            memory_gb=rewards.memory_gb,
            start_timeout_s=cast(float, start_timeout_s),
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


class _EngineMailbox:
    """What an engine sends to its client, among the answers of its trainer."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.fileno, self.receive, self.folder = mailbox.fileno, mailbox.receive, mailbox.folder

    def send(self, message: Message) -> None:
        self._mailbox.send(("engine", *message))


class _Policy:
    """A trainer, and the engine next to it once that is opened."""

    def __init__(
        self, mailbox: Mailbox, plugin: Plugin, context: PolicyContext, train: TrainBackend
    ) -> None:
        self._mailbox = mailbox
        self._engine_mailbox = _EngineMailbox(mailbox)
        self._opening = plugin, context, train
        self._train = train
        self._name = f"{context.role}.train"
        self._engine: EngineInPlace | None = None
        self._server: EngineServer | None = None

    @property
    def is_busy(self) -> bool:
        return self._server is not None and self._server.is_busy

    def handle(self, message: Message) -> None:
        match message:
            case ("call", int(number), str(method), arguments):
                try:
                    with SPANS.of(self._name, method):
                        found = cast("list[object]", resolved(arguments, from_store))
                        result = performed(self._train, method, found)
                    sent = Bulk(result) if isinstance(result, np.ndarray) else result
                    answer: Message = ("returned", number, sent)
                except Exception as reason:
                    if not isinstance(reason, FlowError):
                        traceback.print_exc()
                        reason = BackendError(f"{method} failed", found=described(reason))
                    answer = ("raised", number, reason)
                self._mailbox.send(answer)
            case ("engine", ("open", *_, str(name))):
                self._guarded(partial(self._open, name))
            case ("engine", tuple(asked)):
                if self._server is not None:
                    self._guarded(partial(self._server.handle, asked))
            case _:
                raise AssertionError(f"a trainer received {message!r}")

    def poll(self) -> None:
        if self._server is not None and self._server.is_busy:
            self._guarded(self._server.poll)

    def received(self) -> list[Message] | None:
        """Returns new messages; where there is nothing else to do, waits for some."""
        if self.is_busy:
            return self._mailbox.receive() if _is_readable(self._mailbox, 0.0) else []
        with SPANS.waiting(self._name, "calls"):
            is_readable = _is_readable(self._mailbox, _LOOK_S)
        return self._mailbox.receive() if is_readable else []

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._train.close()

    def _open(self, name: str) -> None:
        if self._engine is None:
            self._engine = EngineInPlace(*self._opening)
        else:
            self._engine.restart()  # its client opens another one where it broke
        self._server = EngineServer(self._engine_mailbox, self._engine, name)
        self._engine_mailbox.send(("ready",))

    def _guarded(self, act: Callable[[], None]) -> None:
        """Does something with the engine, which may break without its trainer."""
        try:
            act()
        except FlowError as reason:
            self._server = None
            self._engine_mailbox.send(("raised", reason))
        except Exception as reason:
            traceback.print_exc()
            self._server = None
            self._engine_mailbox.send(("died", described(reason)))


def run_policy(mailbox: Mailbox) -> None:
    """Trains a role's model for a run's `ActorGroup`, and generates with it.

    run -> policy    ("open", backend, PolicyContext), once
                     ("call", number, method, arguments); batches are objects of Ray's store
                     ("engine", message), as the engine's client sends it
    policy -> run    ("ready",), or ("broken", FlowError) and then nothing more
                     ("returned", number, result or Bulk) or ("raised", number, FlowError)
                     ("engine", *message)
    """
    messages = mailbox.receive()
    if messages is None:
        return
    _, backend, context = messages.pop(0)
    context = cast(PolicyContext, context)
    try:
        plugin = require(cast(str, backend), Service.TRAIN, context)
        policy = _Policy(mailbox, plugin, context, plugin.open_train(context))
    except FlowError as reason:
        mailbox.send(("broken", reason))
        return
    mailbox.send(("ready",))
    while messages is not None:
        for message in messages:
            policy.handle(message)
        policy.poll()
        messages = policy.received()
    policy.close()


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
