"""The run's side of scorers and environments in Ray actors."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from flowrl.backend.protocols import ScoreRequest, ScoreResult
from flowrl.errors import FlowError, WorkerDied
from flowrl.ids import SampleId
from flowrl.runtime.channels import Channel, Message
from flowrl.runtime.environments.loop import Call, Replies
from flowrl.runtime.environments.transcript import EpisodeFailure
from flowrl.runtime.ray import ENDED
from flowrl.runtime.ray.channel import ActorChannel
from flowrl.runtime.scoring.pool import ScoreFailure

_log = logging.getLogger(__name__)

_CLOSE_S = 5.0
_NOT_READY = "see what it prints in logs/ of the run folder; is it slow, or without memory?"
_MAX_DEATHS = 3
"""Actors that die one after another without having scored anything."""


class ActorScorers:
    """Scorer processes that an actor hosts; see `Scorers`.

    An actor that dies is replaced, and what it had not answered is scored again.

    Args:
        open_channel: Starts an actor with `run_scorers`.
        opening: Its first message.
        start_timeout_s: Seconds that the actor and its processes may take to be ready.
    """

    def __init__(
        self, open_channel: Callable[[], Channel], opening: Message, start_timeout_s: float
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self._open_channel = open_channel
        self._opening = opening
        self._pending: dict[SampleId, list[ScoreRequest]] = {}
        self._done: list[ScoreResult | ScoreFailure] = []
        self._num_deaths = 0
        self._was_ready = False  # any actor
        self._open()
        try:
            while not self._was_ready:
                self._exchange(_CLOSE_S)
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        """See `Scorers`."""
        for request in requests:
            self._pending.setdefault(request.sample, []).append(request)
        self._channel.send(("score", list(requests)))

    def poll(self) -> list[ScoreResult | ScoreFailure]:
        """See `Scorers`.

        Raises:
            WorkerDied: actors die without having scored anything.
            FlowError: an error of the plug-in.
        """
        self._exchange(0.0)
        done, self._done = self._done, []
        return done

    def wait(self, timeout_s: float) -> bool:
        """See `Scorers`."""
        end = time.monotonic() + timeout_s
        while not self._done:
            left = end - time.monotonic()
            if left <= 0 or not self._pending:
                return False
            self._exchange(left)
        return True

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `poll` should be called."""
        return self._channel.fileno()

    def seconds_to_limit(self) -> float:
        """Seconds after which `poll` must be called; the actor's own pool enforces other limits."""
        return min(_CLOSE_S, max(0.0, self._ready_by - time.monotonic()))

    def close(self) -> None:
        """See `Scorers`."""
        self._channel.close(_CLOSE_S)

    def _open(self) -> None:
        self._channel = self._open_channel()
        self._ready_by = time.monotonic() + self._start_timeout_s
        self._channel.send(self._opening)

    def _exchange(self, timeout_s: float) -> None:
        for message in self._channel.receive(min(timeout_s, self.seconds_to_limit())):
            self._take(message)
        if (how := self._channel.ended()) is None and time.monotonic() >= self._ready_by:
            how = f"not ready after runtime.start_timeout_s={self._start_timeout_s:g} seconds"
        if how is not None:
            self._replace(how)

    def _take(self, message: Message) -> None:
        match message:
            case ("scores", list(results)):
                self._num_deaths = 0
                for result in results:
                    requests = self._pending[result.sample]
                    requests.pop(0)
                    if not requests:
                        del self._pending[result.sample]
                self._done += results
            case ("broken", FlowError() as error):
                raise error
            case ("ready",):
                self._was_ready, self._ready_by = True, math.inf
            case _:
                raise AssertionError(f"scorers sent {message!r}")

    def _replace(self, how: str) -> None:
        if not self._was_ready:
            raise WorkerDied(
                "the scorers' actor died before it was ready", found=how, hint=_NOT_READY
            )
        self._num_deaths += 1
        if self._num_deaths >= _MAX_DEATHS:
            raise WorkerDied(
                "actors of scorers die before they score anything",
                found=f"{self._num_deaths} in a row, the last: {how}",
                hint=_NOT_READY,
            )
        _log.warning("the scorers' actor died and is replaced: %s", how)
        self._channel.close(0.0)
        self._open()
        requests = [request for group in self._pending.values() for request in group]
        if requests:
            self._channel.send(("score", requests))


def late(who: str, where: str | None, limit_s: float) -> WorkerDied:
    """Returns the error of an actor that is not ready after `limit_s` seconds."""
    found = f"more than runtime.start_timeout_s={limit_s:g} seconds"
    return WorkerDied(f"{who} was not ready in time", where=where, found=found, hint=_NOT_READY)


class OpenActor(Protocol):
    """Starts an actor whose messages go to `deliver`."""

    def __call__(self, *, deliver: Callable[[list[Message]], None]) -> ActorChannel: ...


class ActorLoop:
    """An environment that an actor hosts, for an `EnvironmentPool`.

    An actor that has died counts as blocked, so that the pool goes on with another one.

    Args:
        open_channel: Starts an actor with `run_environment`.
        opening: Its first message.
        replies: Receives the answers.
        start_timeout_s: Seconds that it may take to be ready.

    Raises:
        FlowError: the environment cannot be opened.
    """

    def __init__(
        self, open_channel: OpenActor, opening: Message, replies: Replies, start_timeout_s: float
    ) -> None:
        self._replies = replies
        self._calls: dict[int, Call] = {}
        self._blocked: tuple[int | None, EpisodeFailure | None] | None = None
        self._error: FlowError | None = None
        self._ready = threading.Event()
        self._channel = open_channel(deliver=self._take)
        self._channel.send(opening)
        if not self._ready.wait(start_timeout_s):
            self._error = late("the environment's actor", None, start_timeout_s)
        if self._error is not None:
            self._channel.close(0.0)
            raise self._error

    def send(self, orders: Sequence[Call | SampleId]) -> None:
        """See `EnvironmentLoop`."""
        now = time.monotonic()
        for order in orders:
            if isinstance(order, Call):
                order.begun = now  # but for the few that wait for a place in the actor
                self._calls[order.ticket] = order
        self._channel.send(("orders", list(orders)))

    def is_blocked(self, limit_s: float) -> bool:
        """See `EnvironmentLoop`; the actor watches the limit."""
        return self._blocked is not None

    def blocking(self) -> tuple[Call | None, EpisodeFailure | None]:
        """See `EnvironmentLoop`."""
        ticket, failure = self._blocked or (None, None)
        return (None if ticket is None else self._calls.get(ticket)), failure

    def stop(self, timeout_s: float) -> bool:
        """See `EnvironmentLoop`."""
        self._channel.close(timeout_s)
        return True

    def _take(self, messages: list[Message]) -> None:
        """Takes messages, in the channel's thread."""
        for message in messages:
            match message:
                case ("ready",):
                    self._ready.set()
                case ("replies", list(replies)):
                    for reply in replies:
                        self._calls.pop(reply.ticket, None)
                    self._replies.put(replies)
                case ("blocked", (int() | None) as ticket, failure):
                    assert failure is None or isinstance(failure, EpisodeFailure)
                    self._blocked = (ticket, failure)
                case ("free",):
                    self._blocked = None
                case ("broken", FlowError() as error):
                    self._error = error
                    self._ready.set()
                case (kind, how) if kind == ENDED:
                    self._blocked = self._blocked or (None, None)
                    if not self._ready.is_set():
                        self._error = self._error or WorkerDied(
                            "the environment's actor died before it was ready",
                            found=str(how),
                            hint=_NOT_READY,
                        )
                        self._ready.set()
                case _:
                    raise AssertionError(f"an environment sent {message!r}")
