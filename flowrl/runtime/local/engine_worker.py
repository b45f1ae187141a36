"""A process that generates: `python -m flowrl.runtime.local.engine_worker SOCKET PARENT`.

It is started by `flowrl.runtime.local.engine_process.EngineProcess` and dies with the process that
started it. Between two polls of its engine it handles the messages received meanwhile, in the order
of sending: so aborts and new weights reach the engine between decode steps, and a request that was
sent after new weights is sampled from them.

Everything that engine or plug-in print goes to standard error: standard output is the command's.

`model` is a shared folder (`Channel.share`). Requests and ends cross as plain tuples
and whole arrays of many samples, because hundreds of them cross at once and each object costs
microseconds. `tokens` is the `Bulk` of the ends' `AttemptTokens`, which may stay in a store.

    client -> engine    ("open", plugin, PolicyContext, core or None, model, name), once
                        ("submit", [request, ...])   ("abort", (sample, ...))
                        ("load", Weights)
                        ("sleep",)  ("wake",)
    engine -> client    ("ready",) or ("broken", FlowError), once
                        ("outputs", ends, tokens, progress, busy_s)
                        ("loaded", Loaded)
                        ("raised", FlowError), or ("died", text), and then nothing more
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, TypeAlias, cast

from flowrl.backend.protocols import (
    Finished,
    GenerateBackend,
    GenerateRequest,
    Loaded,
    PolicyContext,
    Progress,
    Weights,
)
from flowrl.errors import BackendError, FlowError
from flowrl.ids import SampleId
from flowrl.runtime.channels import Bulk, Mailbox, Message
from flowrl.runtime.local.process_channel import SocketMailbox
from flowrl.runtime.local.processes import bind_to, named_plugin
from flowrl.runtime.spans import SPANS
from flowrl.runtime.stored_tokens import AttemptTokens, StoredEnd, StoredSpan
from flowrl.runtime.user_errors import described
from flowrl.specs import FinishReason, Sampling

# How long a poll may decode before the socket is looked at again.
_POLL_S = 0.02
# Progress of running requests is reported no more often: there may be thousands of them.
_PROGRESS_S = 0.25

RequestFields: TypeAlias = tuple[Any, ...]
"""The fields of a `GenerateRequest` in their order."""

PackedEnds: TypeAlias = tuple[
    tuple[str, ...],
    tuple[int, ...],
    tuple[str, ...],
    tuple[int, ...],
    tuple[tuple[tuple[int, int], ...], ...],
    tuple[bool, ...],
]
"""Samples, attempts, reasons, numbers of tokens, versions, and which report what they kept."""

PackedProgress: TypeAlias = tuple[tuple[str, int, int], ...]

_REQUEST = tuple(field.name for field in fields(GenerateRequest))
_request_fields = attrgetter(*_REQUEST)
_END = tuple(field.name for field in fields(Finished))


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


def pack_ends(ends: Sequence[Finished]) -> tuple[PackedEnds, Bulk]:
    """Ends as they cross, and the tokens of all of them."""
    packed = (
        tuple(end.sample for end in ends),
        tuple(end.attempt for end in ends),
        tuple(end.reason.value for end in ends),
        tuple(len(end.tokens) for end in ends),
        tuple(end.versions for end in ends),
        tuple(end.kept is not None for end in ends),
    )
    return packed, Bulk(AttemptTokens.joined(ends))


def unpack_ends(packed: PackedEnds, bulk: Bulk) -> list[Finished]:
    """Unpacks what `pack_ends` gave."""
    ends: list[Finished] = []
    samples, attempts, reasons, counts, versions, has_kept = packed
    for i, (part, places) in enumerate(cast(AttemptTokens, bulk.value).parts(counts)):
        if bulk.handle is None:
            part = part.copy()  # so that one sample does not hold those of all others in memory
        end = Finished(
            sample=SampleId(samples[i]),
            attempt=attempts[i],
            reason=FinishReason(reasons[i]),
            tokens=part.tokens,
            logprobs=part.logprobs,
            versions=versions[i],
            kept=part.kept if has_kept[i] else None,
        )
        if bulk.handle is not None:
            span = StoredSpan(
                handle=bulk.handle, tokens=places[0], ids=places[1] if has_kept[i] else None
            )
            end = StoredEnd(**{name: getattr(end, name) for name in _END}, span=span)
        ends.append(end)
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


class EngineServer:
    """An open engine and the mailbox of its client."""

    def __init__(self, mailbox: Mailbox, engine: GenerateBackend, name: str) -> None:
        self._mailbox = mailbox
        self._name = name
        self._engine = engine
        self._samplings: dict[Sampling, Sampling] = {}
        # The latest attempt: the end of an aborted one is reported after the next was sent.
        self._live: dict[SampleId, int] = {}
        # Response tokens of running attempts when they were last reported.
        self._num_tokens: dict[tuple[SampleId, int], int] = {}
        self._num_loading = 0
        self._busy_s = 0.0
        self._reported_at = time.monotonic()

    def run(self, messages: Sequence[Message]) -> None:
        """Works until the client has closed its end.

        Args:
            messages: Messages that came together with the one that opened the engine.
        """
        for message in messages:
            self.handle(message)
        while True:
            # An engine that has nothing to do waits for the client, and for nothing else.
            with nullcontext() if self.is_busy else SPANS.waiting(self._name, "requests"):
                limit_s = 0.0 if self.is_busy else None
                readable, _, _ = select.select([self._mailbox], [], [], limit_s)
            if readable:
                received = self._mailbox.receive()
                if received is None:
                    self._engine.close()
                    return
                for message in received:
                    self.handle(message)
            if self.is_busy:
                self.poll()

    @property
    def is_busy(self) -> bool:
        """True while it has requests, or weights to load."""
        return bool(self._live) or self._num_loading > 0

    def handle(self, message: Message) -> None:
        """Does what a message asks for."""
        match message:
            case ("submit", list(packed)):
                requests = unpack_requests(cast("list[RequestFields]", packed), self._samplings)
                self._live.update((request.sample, request.attempt) for request in requests)
                self._num_tokens.update(
                    ((request.sample, request.attempt), len(request.response))
                    for request in requests
                )
                self._engine.submit(requests)
            case ("abort", tuple(samples)):
                self._engine.abort(cast("tuple[SampleId, ...]", samples))
            case ("load", Weights() as weights):
                self._num_loading += 1
                with SPANS.of(self._name, "load weights"):
                    self._engine.load(weights)
            case ("sleep",):
                self._engine.sleep()
            case ("wake",):
                self._engine.wake()
            case _:
                raise AssertionError(f"an engine received {message!r}")

    def poll(self) -> None:
        """Decodes for a moment, and sends what came of it.

        Sends nothing where no request has gone on: its client takes silence for a hang.
        """
        began = time.monotonic()
        with SPANS.of(self._name, "generate"):
            outputs = self._engine.poll(_POLL_S)
        now = time.monotonic()
        self._busy_s += now - began
        for output in outputs:
            if isinstance(output, Loaded):
                # One that was restarted in its trainer's process reports what nobody sent here.
                self._num_loading = max(0, self._num_loading - 1)
                self._mailbox.send(("loaded", output))
        ends = [output for output in outputs if isinstance(output, Finished)]
        for end in ends:
            self._num_tokens.pop((end.sample, end.attempt), None)
            if self._live.get(end.sample) == end.attempt:
                del self._live[end.sample]
        is_due = bool(ends) or now - self._reported_at > _PROGRESS_S
        progress = self._progress(outputs) if is_due else []
        if ends or progress:
            self._reported_at = now
            packed, tokens = pack_ends(ends)
            self._mailbox.send(("outputs", packed, tokens, pack_progress(progress), self._busy_s))

    def _progress(self, outputs: Sequence[Progress | Finished | Loaded]) -> list[Progress]:
        """Returns the progress of running requests that have more tokens than last reported."""
        progress = []
        for output in outputs:
            if isinstance(output, Progress):
                key = output.sample, output.attempt
                if self._num_tokens.get(key) not in (None, output.num_tokens):
                    self._num_tokens[key] = output.num_tokens
                    progress.append(output)
        return progress


def main(arguments: list[str]) -> None:
    """Runs a worker on an inherited socket."""
    run_engine(SocketMailbox.inherited(arguments))


def run_engine(mailbox: Mailbox) -> None:
    """Opens the engine of the first message and runs it until nothing more comes."""
    messages = mailbox.receive()
    if not messages:
        return
    _, plugin, context, core, model, name = messages[0]
    assert isinstance(context, PolicyContext)
    if core is not None:
        bind_to(cast(int, core))  # before any thread of a library is there
    with mailbox.folder(model) as folder:
        context = replace(context, model=folder)
        try:
            engine = named_plugin(str(plugin)).open_generate(context, None)
        except FlowError as reason:
            mailbox.send(("broken", reason))
            return
        except BaseException as reason:
            mailbox.send(("broken", _unopened(context, reason)))
            raise
    mailbox.send(("ready",))
    try:
        EngineServer(mailbox, engine, str(name)).run(messages[1:])
    except FlowError as reason:
        mailbox.send(("raised", reason))
    except BaseException as reason:
        mailbox.send(("died", described(reason)))
        raise


def _unopened(context: PolicyContext, reason: BaseException) -> BackendError:
    return BackendError(
        "the engine could not be opened",
        where=f"roles.{context.role}",
        found=described(reason),
        hint="its traceback is on standard error",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
