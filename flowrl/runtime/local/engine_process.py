"""An engine in a process of its own: generation goes on while this process trains.

    submit, abort, load -> channel -> worker: engine.poll -> channel -> poll

The client is a `GenerateBackend`, so a driver uses it like an in-process engine. Only `poll` and
`wait_ready` wait, each no longer than its argument. Messages are handled in the order of sending,
between decode steps.

An engine that raises an error of flowrl's own (a user's mistake, with its way out) raises it here.
One that dies, or is silent for `silence_s` while it has requests, raises `WorkerDied`. All of its
requests are lost then; the driver restarts it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from flowrl.backend.protocols import (
    Finished,
    GenerateRequest,
    Loaded,
    PolicyContext,
    Progress,
    Weights,
    WeightsKind,
)
from flowrl.errors import BackendError, FlowError, WorkerDied
from flowrl.ids import EngineId, SampleId
from flowrl.runtime.channels import Bulk, Channel, Message, OpenChannel
from flowrl.runtime.local.engine_worker import (
    PackedEnds,
    PackedProgress,
    pack_requests,
    unpack_ends,
    unpack_progress,
)
from flowrl.runtime.local.process_channel import ProcessChannel
from flowrl.runtime.local.processes import Output

# Seconds that an idle engine may take to end by itself.
_CLOSE_S = 5.0
# How long a wait may take before it is asked whether the process is there at all: one that left
# children behind can die without closing its socket.
_LOOK_S = 1.0
# Seconds in which an engine that raised prints its traceback.
_TRACEBACK_S = 1.0


def open_engine_worker(output: Output | None = None) -> Channel:
    """Starts an engine's process on this machine.

    Args:
        output: Where it prints; by default this process's standard error.
    """
    return ProcessChannel("flowrl.runtime.local.engine_worker", output)


class EngineProcess:
    """See the module. Requests can be sent before the engine is ready.

    Args:
        name: Name of the engine, for messages.
        plugin: Name of a plug-in that generates, or `module:attribute` of one.
        context: Context of its engine, which loads its own copy of the weights.
        start_timeout_s: Seconds that it may take to be ready.
        silence_s: Seconds that an engine with requests may be silent.
        open_channel: Starts the process.
        core: Core to which the process is bound, by the number that the kernel gives it.
        shares_weights: The trainer is in that process, and the engine gets its weights there.
    """

    def __init__(
        self,
        name: EngineId,
        plugin: str,
        context: PolicyContext,
        *,
        start_timeout_s: float = 120.0,
        silence_s: float = 120.0,
        open_channel: OpenChannel = open_engine_worker,
        core: int | None = None,
        shares_weights: bool = False,
    ) -> None:
        self.name = name
        self._num_slots = context.num_slots
        self._shares_weights = shares_weights
        self._start_timeout_s = start_timeout_s
        self._silence_s = silence_s
        self._live: dict[SampleId, int] = {}  # the latest attempt
        self._ready = False
        self._closed = False
        self._death: WorkerDied | None = None
        self._raised: FlowError | None = None
        self._busy_s = 0.0
        self._outputs: list[Progress | Finished | Loaded] = []
        self._channel = open_channel()
        self._started = self._last_message_s = time.monotonic()
        model = self._channel.share(context.model)
        self._channel.send(("open", plugin, context, core, model, name))

    # What a driver calls

    @property
    def num_slots(self) -> int:
        """See `GenerateBackend`."""
        return self._num_slots

    @property
    def busy_s(self) -> float:
        """Seconds that the engine has spent generating, by its last message."""
        return self._busy_s

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `poll` has something to do.

        It does not show time limits: see `seconds_to_limit`.
        """
        return self._channel.fileno()

    def seconds_to_limit(self) -> float:
        """Seconds after which `poll` must be called to enforce the next limit."""
        now = time.monotonic()
        if not self._ready:
            return max(0.0, self._started + self._start_timeout_s - now)
        return (
            max(0.0, self._last_message_s + self._silence_s - now)
            if self._live
            else self._silence_s
        )

    @property
    def is_ready(self) -> bool:
        """True if the engine is open."""
        return self._ready

    @property
    def is_dead(self) -> bool:
        """True if the process is known to have ended, or was closed."""
        return self._closed or self._death is not None

    def silent_s(self) -> float:
        """Seconds without a message while it had requests; 0 before it is ready."""
        return time.monotonic() - self._last_message_s if self._ready and self._live else 0.0

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """See `GenerateBackend`. What the engine has against a request is raised by `poll`."""
        if not self._live:
            self._last_message_s = time.monotonic()
        self._live.update((request.sample, request.attempt) for request in requests)
        self._enqueue(("submit", pack_requests(requests)))

    def abort(self, samples: Sequence[SampleId]) -> None:
        """See `GenerateBackend`."""
        self._enqueue(("abort", tuple(samples)))

    def load(self, weights: Weights) -> None:
        """See `GenerateBackend`.

        Raises:
            BackendError: weights in place, which an engine in a process of its own cannot share.
        """
        if weights.kind is WeightsKind.IN_PLACE and not self._shares_weights:
            raise BackendError(
                "an engine in a process of its own cannot read a trainer's parameters in place",
                where=str(self.name),
                found=f"weights {weights.kind}",
                expected="buckets of weights",
            )
        self._enqueue(("load", weights))

    def sleep(self) -> None:
        """See `GenerateBackend`."""
        self._enqueue(("sleep",))

    def wake(self) -> None:
        """See `GenerateBackend`."""
        self._enqueue(("wake",))

    def poll(self, timeout_s: float) -> list[Progress | Finished | Loaded]:
        """See `GenerateBackend`.

        Raises:
            WorkerDied: the process died or is silent, and is not to be used again.
            FlowError: an error of the engine itself, or of the plug-in when it was opened.
        """
        end = time.monotonic() + timeout_s
        self._exchange(0.0)
        while not self._outputs and self._live and self._death is None:
            left = end - time.monotonic()
            if left <= 0:
                break
            if self._exchange(min(left, self.seconds_to_limit() + 0.001, _LOOK_S)):
                break
        self._check()
        outputs, self._outputs = self._outputs, []
        return outputs

    def wait_ready(self) -> None:
        """Waits until the engine is open, no longer than `start_timeout_s`.

        Raises what `poll` raises.
        """
        self._check()  # a dead engine sends no more messages
        while not self._ready:
            self._exchange(min(self.seconds_to_limit() + 0.001, _LOOK_S))
            self._check()

    def close(self) -> None:
        """Ends the process; requests without an end are forgotten. Idempotent."""
        # The worker sees between two polls that nothing more comes, and leaves by itself.
        self._close(_CLOSE_S if self._death is None and self._ready else 0.0)

    def kill(self) -> None:
        """Ends the process as `close` does, without waiting for it to leave by itself."""
        self._close(0.0)

    def _close(self, grace_s: float) -> None:
        if not self._closed:
            self._closed = True
            self._channel.close(grace_s)

    # Messages

    def _enqueue(self, message: Message) -> None:
        if self._closed:
            raise WorkerDied("the engine is closed", where=str(self.name))
        if self._death is None:  # else the next poll raises
            self._channel.send(message)

    def _exchange(self, timeout_s: float) -> bool:
        """Sends and receives; returns true if anything was received."""
        messages = self._channel.receive(timeout_s)
        if messages:
            self._last_message_s = time.monotonic()
        for message in messages:
            self._take(message)
        if self._death is None and (how := self._channel.ended()) is not None:
            self._mark_dead(how)
        return bool(messages)

    def _take(self, message: Message) -> None:
        match message:
            case ("ready",):
                self._ready = True
            case ("outputs", tuple(ends), Bulk() as tokens, tuple(progress), float(busy_s)):
                self._busy_s = busy_s
                finished = unpack_ends(cast("PackedEnds", ends), tokens)
                for end in finished:
                    if self._live.get(end.sample) == end.attempt:
                        del self._live[end.sample]
                self._outputs += finished
                self._outputs += unpack_progress(cast("PackedProgress", progress))
            case ("loaded", Loaded() as loaded):
                self._outputs.append(loaded)
            case ("broken" | "raised", FlowError() as error):
                self._raised = error
            case ("died", str(text)):
                # Its traceback is on the way to where it prints to.
                self._mark_dead(text, _TRACEBACK_S)
            case _:
                raise AssertionError(f"an engine sent {message!r}")

    # Ends

    def _check(self) -> None:
        if self._raised is not None:
            raise self._raised
        now = time.monotonic()
        if self._death is None:
            if not self._ready and now - self._started > self._start_timeout_s:
                limit = f"runtime.start_timeout_s={self._start_timeout_s:g}"
                self._mark_dead(f"not ready after {limit} seconds")
            elif self._live and self._ready and now - self._last_message_s > self._silence_s:
                limit = f"{self._silence_s:g} s, half of runtime.stall_timeout_s,"
                self._mark_dead(f"silent for {limit} with {len(self._live)} requests")
        if self._death is not None:
            raise self._death

    def _mark_dead(self, how: str, grace_s: float = 0.0) -> None:
        if self._death is None:
            self._death = WorkerDied("the engine's process died", where=str(self.name), found=how)
            self._channel.kill(grace_s)
