"""A process that generates: `python -m flowrl.runtime.local.engine_worker SOCKET PARENT`.

It is started by `flowrl.runtime.local.engine_process.EngineProcess` and dies with the process that
started it. Between two polls of its engine it handles the messages received meanwhile, in the order
of sending: so aborts and new weights reach the engine between decode steps, and a request that was
sent after new weights is sampled from them.

Everything that engine or plug-in print goes to standard error: standard output is the command's.

Messages are framed by `flowrl.runtime.local.processes`. Requests and ends cross as plain tuples and
whole arrays of many samples, because hundreds of them cross at once and each object costs
microseconds.

    client -> engine    ("open", plugin, PolicyContext, core or None), once
                        ("submit", [request, ...])   ("abort", (sample, ...))
                        ("publish", version, folder or None)
                        ("sleep",)  ("wake",)
    engine -> client    ("ready",) or ("broken", FlowError), once
                        ("outputs", ends, progress, busy_s)
                        ("published", version)
                        ("raised", FlowError), or ("died", text), and then nothing more
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from flowrl.backend.batch import Floats, Ints, KeptTokens
from flowrl.backend.protocols import (
    Finished,
    GenerateBackend,
    GenerateRequest,
    PolicyContext,
    Progress,
)
from flowrl.errors import BackendError, FlowError
from flowrl.ids import SampleId
from flowrl.runtime.local.processes import (
    FrameReader,
    Message,
    bind_to,
    die_with,
    first_messages,
    named_plugin,
    pack,
    received,
)
from flowrl.specs import FinishReason, Sampling

__all__ = [
    "PackedEnds",
    "PackedProgress",
    "RequestFields",
    "main",
    "pack_ends",
    "pack_progress",
    "pack_requests",
    "unpack_ends",
    "unpack_progress",
    "unpack_requests",
]


# How long a poll may decode before the socket is looked at again.
_POLL_S = 0.02
# Progress of running requests is reported no more often: there may be thousands of them.
_PROGRESS_S = 0.25
_MAX_TEXT = 300

RequestFields: TypeAlias = tuple[Any, ...]
"""The fields of a `GenerateRequest` in their order."""

PackedEnds: TypeAlias = tuple[
    tuple[str, ...],
    tuple[int, ...],
    tuple[str, ...],
    tuple[int, ...],
    Ints,
    Floats,
    tuple[tuple[tuple[int, int], ...], ...],
    tuple[KeptTokens | None, ...],
]
"""Samples, attempts, reasons, numbers of tokens; tokens and logprobs of all; versions, kept."""

PackedProgress: TypeAlias = tuple[tuple[str, int, int], ...]

_NO_INTS: Ints = np.zeros(0, np.int64)


_REQUEST = tuple(field.name for field in fields(GenerateRequest))
_request_fields = attrgetter(*_REQUEST)


def pack_requests(requests: Sequence[GenerateRequest]) -> list[RequestFields]:
    """Requests as they cross. Objects that they share stay shared within one message."""
    return list(map(_request_fields, requests))


def unpack_requests(
    packed: Sequence[RequestFields], samplings: dict[Sampling, Sampling]
) -> list[GenerateRequest]:
    """Unpacks the requests of `pack_requests`.

    Args:
        samplings: Options seen before, by themselves. Equal ones become one object again, by which
            engines see that rows have the same options.
    """
    requests = []
    for values in packed:
        named = dict(zip(_REQUEST, values, strict=True))
        named["sampling"] = samplings.setdefault(named["sampling"], named["sampling"])
        requests.append(GenerateRequest(**named))
    return requests


def pack_ends(ends: Sequence[Finished]) -> PackedEnds:
    """Ends as they cross: two arrays for the tokens and logprobs of all of them."""
    return (
        tuple(end.sample for end in ends),
        tuple(end.attempt for end in ends),
        tuple(end.reason.value for end in ends),
        tuple(len(end.tokens) for end in ends),
        np.concatenate([_NO_INTS, *(end.tokens for end in ends)]),
        np.concatenate([np.zeros(0, np.float32), *(end.logprobs for end in ends)]),
        tuple(end.versions for end in ends),
        tuple(end.kept for end in ends),
    )


def unpack_ends(packed: PackedEnds) -> list[Finished]:
    """Unpacks the ends of `pack_ends`."""
    samples, attempts, reasons, counts, tokens, logprobs, versions, kept = packed
    ends, begin = [], 0
    for i, sample in enumerate(samples):
        end = begin + counts[i]
        ends.append(
            Finished(
                sample=SampleId(sample),
                attempt=attempts[i],
                reason=FinishReason(reasons[i]),
                # Copies, so that one sample does not hold those of all others in memory.
                tokens=tokens[begin:end].copy(),
                logprobs=logprobs[begin:end].copy(),
                versions=versions[i],
                kept=kept[i],
            )
        )
        begin = end
    return ends


def pack_progress(progress: Sequence[Progress]) -> PackedProgress:
    """Progress as it crosses."""
    return tuple((p.sample, p.attempt, p.num_tokens) for p in progress)


def unpack_progress(packed: PackedProgress) -> list[Progress]:
    """Unpacks the progress of `pack_progress`."""
    return [
        Progress(sample=SampleId(sample), attempt=attempt, num_tokens=num_tokens)
        for sample, attempt, num_tokens in packed
    ]


class _Worker:
    """An open engine and the socket of its client."""

    def __init__(self, sock: socket.socket, engine: GenerateBackend) -> None:
        self._sock = sock
        self._engine = engine
        self._samplings: dict[Sampling, Sampling] = {}
        # The latest attempt: the end of an aborted one is reported after the next was sent.
        self._live: dict[SampleId, int] = {}
        self._busy_s = 0.0
        self._reported_at = time.monotonic()

    def run(self, incoming: FrameReader, messages: Sequence[Message]) -> None:
        """Works until the client closes the socket.

        Args:
            messages: Messages that came together with the one that opened the engine.
        """
        for message in messages:
            self._handle(message)
        while True:
            # An engine that has nothing to do waits for the client, and for nothing else.
            readable, _, _ = select.select([self._sock], [], [], 0.0 if self._live else None)
            if readable:
                data = received(self._sock, 1 << 18)
                if not data:
                    self._engine.close()
                    return
                for message in incoming.feed(data):
                    self._handle(message)
            if self._live:
                self._poll()

    def _handle(self, message: Message) -> None:
        match message:
            case ("submit", list(packed)):
                requests = unpack_requests(cast("list[RequestFields]", packed), self._samplings)
                self._live.update((request.sample, request.attempt) for request in requests)
                self._engine.submit(requests)
            case ("abort", tuple(samples)):
                self._engine.abort(cast("tuple[SampleId, ...]", samples))
            case ("publish", int(version), folder):
                assert folder is None or isinstance(folder, str)
                self._engine.publish(version, None if folder is None else Path(folder))
                self._send(("published", version))
            case ("sleep",):
                self._engine.sleep()
            case ("wake",):
                self._engine.wake()
            case _:
                raise AssertionError(f"an engine received {message!r}")

    def _poll(self) -> None:
        began = time.monotonic()
        outputs = self._engine.poll(_POLL_S)
        now = time.monotonic()
        self._busy_s += now - began
        ends = [output for output in outputs if isinstance(output, Finished)]
        for end in ends:
            if self._live.get(end.sample) == end.attempt:
                del self._live[end.sample]
        progress: list[Progress] = []
        if ends or now - self._reported_at > _PROGRESS_S:
            progress = [output for output in outputs if isinstance(output, Progress)]
            self._reported_at = now
            self._send(("outputs", pack_ends(ends), pack_progress(progress), self._busy_s))

    def _send(self, message: Message) -> None:
        try:
            self._sock.sendall(pack(message))
        except OSError:
            # The client is gone.
            os._exit(0)


def main(arguments: list[str]) -> None:
    """Runs a worker on an inherited socket."""
    sock_fd, parent = map(int, arguments)
    die_with(parent)
    # What libraries print must not mix with the command's own output.
    sys.stdout = sys.stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=sock_fd)
    incoming = FrameReader()
    messages = first_messages(sock, incoming)
    if not messages:
        return
    _, plugin, context, core = messages[0]
    if core is not None:
        bind_to(cast(int, core))  # before any thread of a library is there
    try:
        engine = named_plugin(str(plugin)).open_generate(cast(PolicyContext, context), None)
    except FlowError as reason:
        sock.sendall(pack(("broken", reason)))
        return
    except BaseException as reason:
        sock.sendall(pack(("broken", _unopened(context, reason))))
        raise
    sock.sendall(pack(("ready",)))
    try:
        _Worker(sock, engine).run(incoming, messages[1:])
    except FlowError as reason:
        sock.sendall(pack(("raised", reason)))
    except BaseException as reason:
        sock.sendall(pack(("died", _described(reason))))
        raise


def _described(reason: BaseException) -> str:
    return " ".join(traceback.format_exception_only(reason)[-1].split())[:_MAX_TEXT]


def _unopened(context: object, reason: BaseException) -> BackendError:
    role = context.role if isinstance(context, PolicyContext) else "?"
    return BackendError(
        "the engine could not be opened",
        where=f"roles.{role}",
        found=_described(reason),
        hint="its traceback is on standard error",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
