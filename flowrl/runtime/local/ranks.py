"""A trainer that is several ranks, each a process of this machine.

    call -> every rank, the same -> rank 0's result, once all have returned

Each rank is a `TrainBackend` that its plug-in opens with `PolicyContext.rank`, by which the ranks
find each other and divide a batch. The ranks make the same calls in the same order.

An error that all ranks raise, such as one about a batch, is raised by the call, and they go on. A
rank that dies, or that alone raises an error, ends them all; every later call raises that first
cause, not the errors of the ranks that waited for it.
"""

from __future__ import annotations

import math
import pickle
import select
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from flowrl.backend.protocols import PolicyContext, Rank, TrainBackend
from flowrl.errors import FlowError, WorkerDied
from flowrl.runtime.channels import Message
from flowrl.runtime.local.process_channel import ProcessChannel
from flowrl.runtime.local.processes import Output

# How long a wait may take before it is asked whether the processes are there at all.
_LOOK_S = 1.0
# Seconds in which the others say what they know after a rank has failed.
_GRACE_S = 2.0
_CLOSE_S = 10.0
_METHODS = frozenset(name for name in vars(TrainBackend) if not name.startswith("_"))


def num_ranks(context: PolicyContext) -> int:
    """Returns how many ranks train a policy: one for each device of its layout."""
    return math.prod(size for kind, size in context.layout.items() if kind != "ep")


class RankProcesses:
    """See the module; it has the methods of `TrainBackend`.

    Lifecycle: it is open when all ranks are. They end with `close`, with the first rank that fails,
    and with this process.

    Args:
        plugin: Name of a plug-in that trains, or `module:attribute` of one.
        start_timeout_s: Seconds in which all ranks must be open.
        timeout_s: Seconds for which ranks may wait for one another, and for the others' answers
            when rank 0 has answered.
        output: Where ranks print; by default this process's standard error.

    Raises:
        FlowError: A rank cannot be opened.
    """

    def __init__(
        self,
        plugin: str,
        context: PolicyContext,
        *,
        start_timeout_s: float,
        timeout_s: float,
        output: Output | None = None,
    ) -> None:
        self._where = f"roles.{context.role}"
        self._timeout_s = timeout_s
        self._broken: FlowError | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="flowrl-ranks-")
        size, module = num_ranks(context), "flowrl.runtime.local.rank_worker"
        self._channels = [ProcessChannel(module, output) for _ in range(size)]
        try:
            for number, channel in enumerate(self._channels):
                rank = Rank(
                    number=number,
                    size=size,
                    rendezvous=Path(self._folder.name) / "rendezvous",
                    timeout_s=timeout_s,
                )
                channel.send(("open", plugin, replace(context, rank=rank)))
            self._result("open", time.monotonic() + start_timeout_s)
        except BaseException:
            self.close()
            raise

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method not in _METHODS:
            raise AttributeError(method)
        return partial(self._call, method)

    def _call(self, method: str, *arguments: object) -> object:
        if self._broken is not None:
            raise self._broken
        call = pickle.dumps((method, arguments), protocol=pickle.HIGHEST_PROTOCOL)  # once for all
        for channel in self._channels:
            channel.send(("call", call))
        return self._result(method, math.inf)

    def close(self) -> None:
        """Ends the ranks; idempotent."""
        grace_s = 0.0 if self._broken else _CLOSE_S
        self._broken = self._broken or WorkerDied("the trainer is closed", where=self._where)
        for channel in self._channels:
            channel.hang_up()  # all of them first: they wait for one another
        for channel in self._channels:
            channel.kill(grace_s)
        self._folder.cleanup()

    def _result(self, method: str, deadline: float) -> object:
        """Returns rank 0's result of a call, when all ranks have answered.

        Args:
            deadline: Monotonic time by which they must; infinite for `timeout_s` after rank 0,
                which may write files for longer than the others work.
        """
        answers: dict[int, Message] = {}
        everyone = set(range(len(self._channels)))
        while answers.keys() != everyone and time.monotonic() < deadline:
            self._wait(everyone - answers.keys(), deadline)
            for number in everyone - answers.keys():
                self._look(number, answers)
            if 0 in answers and deadline == math.inf:
                deadline = time.monotonic() + self._timeout_s
            if any(kind in ("died", "failed") for kind, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        kinds = {kind for kind, _ in answers.values()}
        if answers.keys() == everyone and kinds == {"returned"}:
            return answers[0][1]
        if answers.keys() == everyone and kinds == {"raised"}:
            raise cast(FlowError, answers[0][1])
        self._broken = self._cause(method, answers)
        self.close()
        raise self._broken

    def _wait(self, numbers: set[int], deadline: float) -> None:
        """Waits until one of these ranks may have answered."""
        poller = select.poll()
        for number in numbers:
            poller.register(self._channels[number].fileno(), select.POLLIN)
        poller.poll(1000 * max(0.0, min(_LOOK_S, deadline - time.monotonic())))

    def _look(self, number: int, answers: dict[int, Message]) -> None:
        """Adds a rank's answer, or its death, if there is one."""
        channel = self._channels[number]
        for answer in channel.receive(0.0):
            answers[number] = answer
        if number not in answers and (how := channel.ended()) is not None:
            found = f"rank {number} of {len(self._channels)}: {how}"
            answers[number] = ("died", WorkerDied("a rank died", where=self._where, found=found))

    def _cause(self, method: str, answers: dict[int, Message]) -> FlowError:
        """Returns the first cause: ranks that wait for a dead one fail too, and after it."""
        for wanted in ("died", "raised", "failed"):
            for kind, error in answers.values():
                if kind == wanted:
                    return cast(FlowError, error)
        silent = ", ".join(str(n) for n in range(len(self._channels)) if n not in answers)
        return WorkerDied(
            f"ranks did not {method} in time",
            where=self._where,
            found=f"nothing from rank {silent} of {len(self._channels)}",
            expected="an answer of each rank within runtime.start_timeout_s when they open, and "
            "later within runtime.stall_timeout_s after rank 0's",
        )
