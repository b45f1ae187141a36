"""A `GenerateBackend` over an HTTP server: each request is a coroutine on a loop in a thread.

    submit, abort, load -> loop: requests and control calls, in the order of the calls -> poll

Requests wait for the weights that were sent before them. Those that are running go on across a
publication: the server says which version each token is of. A server that is gone, or that sends
nothing for `silence_s` while it has requests, raises `WorkerDied` from `poll`.

Stop texts are looked for here, because servers get tokens and have no tokenizer: the request is
aborted at the server, and the tokens that it sampled after the text are dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flowrl.backend.protocols import (
    Finished,
    FinishReason,
    GenerateRequest,
    Loaded,
    PolicyContext,
    Progress,
    Weights,
)
from flowrl.backend.weights import FileBuckets, checksum_of
from flowrl.errors import BackendError, WorkerDied
from flowrl.ids import SampleId
from flowrl_backends.servers.model_folder import linked_model
from flowrl_backends.torch.admission import check_request, check_stops
from flowrl_backends.torch.stop_texts import StopText, StopTexts

__all__ = ["Piece", "Server", "ServerEngine"]

# A server may ignore an abort of what it has not admitted yet.
_ABORT_AGAIN_S = 0.05
# The outputs of one decode step come one by one; they are reported together.
_TOGETHER_S = 0.002
# Polls one after the other without a wait would keep the loop's thread from running.
_LEAST_WAIT_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens of a request as they come.

    Attributes:
        logprobs: Of the temperature-scaled logits before any truncation.
        reason: The end of the request; None before.
        versions: The weights of all its tokens, as in `Finished`; at the end.
    """

    tokens: list[int]
    logprobs: list[float]
    reason: FinishReason | None = None
    versions: tuple[tuple[int, int], ...] = ()


class Server(Protocol):
    """One kind of server. Its coroutines run on the loop of the engine.

    An `OSError` means that the server is gone or hangs.
    """

    async def start(self, model: Path) -> None:
        """Starts it, or connects to it, and waits until it serves version 0."""
        ...

    def generate(self, request: GenerateRequest, name: str) -> AsyncIterator[Piece]:
        """Yields what follows prompt and kept response; the last piece has a reason.

        Args:
            name: The request's, for `abort`; no other one ever has it.
        """
        ...

    async def abort(self, name: str) -> None:
        """Ends a request with the tokens that it has; another name is ignored."""
        ...

    async def load(self, folder: Path, version: int) -> None:
        """Serves the weights of a folder; running requests go on with them.

        Keys and values that older weights made are not used for later requests.
        """
        ...

    def last_words(self) -> str:
        """Returns the end of the server's output, for messages."""
        ...

    async def stop(self) -> None:
        """Ends what was started; idempotent."""
        ...


@dataclass(slots=True, eq=False)
class _Live:
    """A request that has not ended, under its name at the server.

    Attributes:
        stop: What looks for its stop texts; None where it has none.
        stopped: One of them is complete.
    """

    request: GenerateRequest
    name: str
    stop: StopText | None = None
    stopped: bool = False
    aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class ServerEngine:
    """See the module. A server of a fresh model starts with the first weights that are published.

    Args:
        server: What requests are sent to; ended by `close`.
        silence_s: Seconds in which a server with requests must send something.
    """

    def __init__(self, context: PolicyContext, server: Server, *, silence_s: float) -> None:
        self.num_slots = context.num_slots
        self._context = context
        config = json.loads((context.model / "config.json").read_text())
        self._vocab_size = int(config.get("text_config", config)["vocab_size"])
        check_stops(context, self._vocab_size)
        self._server, self._silence_s = server, silence_s
        self._stop_texts: StopTexts | None = None
        self._numbers = itertools.count()
        self._closed = False
        # Shared with the loop's thread, under the condition.
        self._changed = threading.Condition()
        self._live: dict[tuple[SampleId, int], _Live] = {}
        self._num_loading = 0
        self._outputs: list[Finished | Loaded] = []
        self._progress: dict[SampleId, Progress] = {}
        self._error: BaseException | None = None
        self._heard_s = time.monotonic()
        # Of the loop's thread alone.
        self._tasks: set[asyncio.Task[None]] = set()
        self._weights: asyncio.Task[None] | None = None
        self._started = False
        self._scratch = Path(tempfile.mkdtemp(prefix="flowrl-server-"))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        if not context.fresh:
            starting = asyncio.run_coroutine_threadsafe(self._start(None), self._loop)
            try:
                starting.result()
            except BaseException:
                starting.cancel()
                self.close()
                raise

    # What a driver calls

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """See `GenerateBackend`; nothing is accepted if one request is refused."""
        for request in requests:
            check_request(request, self._context, self._vocab_size)
        if self._stop_texts is None and any(request.sampling.stop for request in requests):
            self._stop_texts = StopTexts(self._context.model)
        # A server may last longer than this engine, so names are of the engine too.
        prefix = self._scratch.name
        texts = self._stop_texts
        started = [
            _Live(one, f"{prefix}-{next(self._numbers)}", texts.begin(one) if texts else None)
            for one in requests
        ]
        with self._changed:
            self._live |= {(one.request.sample, one.request.attempt): one for one in started}
            self._heard_s = time.monotonic()
        self._loop.call_soon_threadsafe(self._begin, started)

    def abort(self, samples: Sequence[SampleId]) -> None:
        """See `GenerateBackend`."""
        wanted = set(samples)
        with self._changed:
            aborted = [one for (sample, _), one in self._live.items() if sample in wanted]
        if aborted:
            self._loop.call_soon_threadsafe(self._abort, aborted)

    def poll(self, timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        """See `GenerateBackend`."""
        with self._changed:
            if (self._live or self._num_loading) and not self._has_output():
                if self._changed.wait_for(self._has_output, max(timeout_s, _LEAST_WAIT_S)):
                    self._changed.wait_for(lambda: self._error is not None, _TOGETHER_S)
                elif self._live and not self._num_loading:
                    self._require_heard()
            if self._error is not None:
                raise self._error
            outputs: list[Progress | Finished | Loaded] = [*self._progress.values()]
            self._progress.clear()
            # Weights that are being loaded are reported by the next end.
            if not self._num_loading:
                outputs += self._outputs
                self._outputs.clear()
        return outputs

    def load(self, weights: Weights) -> None:
        """See `GenerateBackend`."""
        with self._changed:
            self._num_loading += 1
        self._loop.call_soon_threadsafe(self._begin_loading, weights)

    def sleep(self) -> None:
        """Keeps everything: a server's memory is its own, and `Capabilities.sleep` is False."""

    def wake(self) -> None:
        """Does nothing; see `sleep`."""

    def close(self) -> None:
        """See `GenerateBackend`."""
        if self._closed:
            return
        self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _has_output(self) -> bool:
        ends = self._outputs and not self._num_loading
        return bool(ends or self._progress) or self._error is not None

    def _require_heard(self) -> None:
        silent_s = time.monotonic() - self._heard_s
        if silent_s > self._silence_s:
            self._error = WorkerDied(
                f"a server with {len(self._live)} requests has sent nothing for {silent_s:.0f} s",
                where=f"roles.{self._context.role}",
                found=self._server.last_words(),
                hint="raise silence_s in the engine's options where a step takes that long",
            )

    # On the loop

    def _begin(self, started: Sequence[_Live]) -> None:
        for live in started:
            self._run(self._generate(live, self._weights))

    def _begin_loading(self, weights: Weights) -> None:
        self._weights = self._run(self._load(weights, self._weights))

    def _abort(self, aborted: Sequence[_Live]) -> None:
        for live in aborted:
            if not live.aborted:
                live.aborted = True
                self._run(self._repeat_abort(live))

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(self._guarded(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Keeps an exception for `poll`."""
        try:
            await coroutine
        except OSError as reason:
            # What else fails is a consequence.
            self._fail(
                WorkerDied(
                    "a server does not answer any more",
                    where=f"roles.{self._context.role}",
                    found=self._server.last_words() or f"{type(reason).__name__}: {reason}",
                )
            )
        except Exception as reason:
            self._fail(reason)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify()

    async def _start(self, weights: Path | None) -> None:
        folder, context = self._scratch / "model", self._context
        model = linked_model(folder, context.model, context.stop_token_ids, weights)
        await self._server.start(model)
        self._started = True

    async def _load(self, weights: Weights, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        folder, checksum = await asyncio.to_thread(self._folder_of, weights)
        if not self._started:
            await self._start(folder)
        await self._server.load(folder, weights.version)
        if folder.parent == self._scratch:
            shutil.rmtree(folder)
        with self._changed:
            self._num_loading -= 1
            self._outputs.append(Loaded(version=weights.version, checksum=checksum))
            self._heard_s = time.monotonic()
            self._changed.notify()

    def _folder_of(self, weights: Weights) -> tuple[Path, str]:
        """Returns a folder with weights, and their checksum."""
        if isinstance(weights.handle, FileBuckets):
            return weights.handle.folder, checksum_of(weights.handle)
        folder, checksum = self._scratch / f"weights-{weights.version}", ""
        linked_model(folder, self._context.model, self._context.stop_token_ids, weights=folder)
        for number, bucket in enumerate(weights.handle):
            bucket.tofile(folder / f"model-{number:05d}.safetensors")
            checksum = checksum_of([bucket], checksum)
        return folder, checksum

    async def _generate(self, live: _Live, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        request, kept = live.request, len(live.request.response)
        if live.aborted or kept >= request.sampling.max_tokens:
            self._finish(live, FinishReason.ABORT if live.aborted else FinishReason.LENGTH, ())
            return
        reason: FinishReason | None = None
        versions: tuple[tuple[int, int], ...] = ()
        async for piece in self._server.generate(request, live.name):
            self._take(live, piece)
            reason, versions = piece.reason, piece.versions
            with self._changed:
                self._heard_s = time.monotonic()
                self._progress[request.sample] = Progress(
                    sample=request.sample,
                    attempt=request.attempt,
                    num_tokens=kept + len(live.tokens),
                )
                self._changed.notify()
        self._finish(live, self._required_end(live, reason), versions)

    def _take(self, live: _Live, piece: Piece) -> None:
        """Keeps tokens up to the end of a stop text, where the request is aborted."""
        if live.stopped:
            return
        end = None
        if live.stop is not None:
            end = next((n for n, one in enumerate(piece.tokens, 1) if live.stop.take(one)), None)
        live.tokens += piece.tokens[:end]
        live.logprobs += piece.logprobs[:end]
        live.stopped = end is not None
        if live.stopped and piece.reason is None:
            self._run(self._repeat_abort(live))

    def _finish(
        self, live: _Live, reason: FinishReason, versions: tuple[tuple[int, int], ...]
    ) -> None:
        request, left, kept = live.request, len(live.tokens), []
        for version, count in versions:
            kept.append((version, min(count, left)))
            left -= kept[-1][1]
        end = Finished(
            sample=request.sample,
            attempt=request.attempt,
            reason=reason,
            tokens=np.array(live.tokens, np.int64),
            logprobs=np.array(live.logprobs, np.float32),
            versions=tuple((version, count) for version, count in kept if count),
        )
        with self._changed:
            del self._live[request.sample, request.attempt]
            self._progress.pop(request.sample, None)
            self._outputs.append(end)
            self._changed.notify()

    async def _repeat_abort(self, live: _Live) -> None:
        key = live.request.sample, live.request.attempt
        while self._live.get(key) is live:
            await self._server.abort(live.name)
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop()

    def _required_end(self, live: _Live, reason: FinishReason | None) -> FinishReason:
        """Returns the reason of an end.

        Raises:
            WorkerDied: There is none, or an abort that nobody asked for.
            BackendError: The end is not that of the run's own options.
        """
        sample, role = f"sample {live.request.sample}", self._context.role
        asked = live.aborted or live.stopped
        if reason is None or (reason is FinishReason.ABORT and not asked):
            raise WorkerDied(
                "the server ended a request that nobody aborted",
                where=sample,
                found=self._server.last_words(),
            )
        if live.stopped:
            return FinishReason.STOP
        stops = self._context.stop_token_ids
        if reason is FinishReason.STOP and live.tokens[-1] not in stops:
            raise BackendError(
                f"the server of role {role} ended a response at a token that is no stop token",
                where=sample,
                found=f"token {live.tokens[-1]}",
                expected=f"one of {list(stops)}",
                hint="its model names other end tokens; give it a folder with those of the run",
            )
        total = len(live.request.response) + len(live.tokens)
        if reason is FinishReason.LENGTH and total < live.request.sampling.max_tokens:
            raise BackendError(
                f"the server of role {role} has no place for a whole response",
                where=sample,
                found=f"it ended after {total} tokens",
                expected=f"max_tokens={live.request.sampling.max_tokens}",
                hint="raise the server's context length and its KV cache",
            )
        return reason
