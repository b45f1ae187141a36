"""The generation engine: continuous batching over KV slots.

A request waits, takes a slot, has its prompt (and kept response) prefilled, and then gains one
token a step until it stops. Finished rows leave the batch at once, the last row moves into the
hole, and waiting requests enter behind; the rows in use are always 0 to n-1.

    submit -> waiting -> running -> ended -> reported by poll
                  \\---------\\--> abort --/

Invariants:

- Rows are independent: options, random stream and stop conditions are each row's own. Tokens do
  not depend on the batch, up to the rounding of the device's matrix products.
- Tokens and logprobs of the current window of steps lie in tensors `[slots, window]`; column c is
  step c of the window for every row, so a step writes one column and the host reads whole windows.
- The host waits for the device once a step, for one truth value: whether any row drew a stop token.
  Lengths are known to the host.
- After a publication, keys and values of earlier tokens stay as the old weights made them; the
  version spans say which weights drew each token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from flowrl.backend.batch import Floats, Ints
from flowrl.backend.protocols import Finished, GenerateRequest, PolicyContext, Progress
from flowrl.errors import BackendError
from flowrl.ids import SampleId
from flowrl.specs import FinishReason
from flowrl_backends.torch.admission import check_request, gather_prompts, takes_no_token
from flowrl_backends.torch.attention import ModelDecoder
from flowrl_backends.torch.fused import FusedDecoder, is_llama_like
from flowrl_backends.torch.noise import uniforms
from flowrl_backends.torch.sampler import RowOptions, draw, row_options
from flowrl_backends.torch.selfcheck import check_decoder
from flowrl_backends.torch.slots import KVSlots
from flowrl_backends.torch.weights import load_weights

__all__ = ["TorchEngine"]

_WINDOW = 64
"""Steps whose tokens stay on the device before the host reads them."""

_STEPS_PER_POLL = 32
_PREFILL_TOKENS = 8192
"""Padded tokens in one prefill call; bounds its activations."""


@dataclass(slots=True)
class _Run:
    """A request in a row.

    Attributes:
        start: Column of the window where its unread tokens begin.
        spans: `[version, tokens]` of what was read.
    """

    request: GenerateRequest
    start: int
    tokens: list[Ints] = field(default_factory=list)
    logprobs: list[Floats] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)

    def add(self, tokens: Ints, logprobs: Floats, version: int) -> None:
        if not len(tokens):
            return
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][1] += len(tokens)
        else:
            self.spans.append([version, len(tokens)])

    def finish(self, reason: FinishReason) -> Finished:
        some = len(self.tokens) > 0
        return Finished(
            sample=self.request.sample,
            attempt=self.request.attempt,
            reason=reason,
            tokens=np.concatenate(self.tokens) if some else np.zeros(0, np.int64),
            logprobs=np.concatenate(self.logprobs) if some else np.zeros(0, np.float32),
            versions=tuple((version, count) for version, count in self.spans),
        )


class TorchEngine:
    """A `GenerateBackend` over a Transformers model in this process.

    `submit` only queues; `poll` does the work. The KV memory is taken when it is needed and given
    back by `sleep` and `close`.

    Args:
        model: Decoded as it is, on its device; with `shares_weights` it belongs to a trainer, and
            `publish` takes no folder.

    Raises:
        BackendError: the architecture cannot be decoded from KV slots.
    """

    def __init__(
        self, context: PolicyContext, model: PreTrainedModel, *, shares_weights: bool
    ) -> None:
        self._context = context
        self._model = model
        self._shares_weights = shares_weights
        self._slots = KVSlots(num_slots=context.num_slots, max_length=context.max_length)
        self._decoder: ModelDecoder | FusedDecoder
        self._fast = is_llama_like(model)
        if self._fast:
            self._decoder = FusedDecoder(model, self._slots)
        else:
            self._decoder = ModelDecoder(model, self._slots)
        self._checked = False
        self._asleep = False
        self._closed = False
        self._version = 0
        self._waiting: deque[GenerateRequest] = deque()
        self._ended: list[Finished] = []
        self._runs: list[_Run] = []
        self._live: set[SampleId] = set()
        self._vocab_size = int(model.config.vocab_size)
        self._device = torch.device(context.device)
        n = context.num_slots
        self._count = np.zeros(n, np.int64)  # response tokens of each row, kept ones included
        self._limit = np.zeros(n, np.int64)  # max_tokens of each row
        self._host_length = np.zeros(n, np.int64)  # tokens whose keys are stored, each row
        self._last = torch.zeros(n, dtype=torch.int64, device=self._device)
        self._length = torch.zeros(n, dtype=torch.int64, device=self._device)
        self._tokens = torch.zeros(n, _WINDOW, dtype=torch.int64, device=self._device)
        self._logprobs = torch.zeros(n, _WINDOW, device=self._device)
        self._uniform = torch.zeros(n, _WINDOW, device=self._device)
        self._seen: torch.Tensor | None = None  # bool [slots, V], only once a penalty is asked for
        self._stops: torch.Tensor | None = None
        if context.stop_token_ids:
            self._stops = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            self._stops[list(context.stop_token_ids)] = True
        self._column = 0
        # Derived from the rows; `_rows_changed` makes them.
        self._options = RowOptions()
        self._longest = 0
        self._equal = True
        self._until_limit = 0
        self._forbid_until = 0

    @property
    def num_slots(self) -> int:
        """See `GenerateBackend`."""
        return self._context.num_slots

    @property
    def kv_nbytes(self) -> int:
        """Bytes of keys and values held now."""
        return self._slots.nbytes

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """See `GenerateBackend`.

        Raises:
            BackendError: an empty or too long prompt, a token outside the vocabulary, or a sample
                that is here already; no request of the call is taken then.
        """
        self._open()
        new: set[SampleId] = set()
        for request in requests:
            check_request(request, self._context, self._vocab_size)
            if request.sample in self._live or request.sample in new:
                raise BackendError(
                    "the sample is being generated already",
                    where=f"sample {request.sample}",
                    found=f"attempt {request.attempt}",
                    hint="abort the earlier attempt first",
                )
            new.add(request.sample)
        self._live |= new
        self._waiting.extend(requests)

    def abort(self, samples: Sequence[SampleId]) -> None:
        """See `GenerateBackend`; the ends are reported by the next `poll`."""
        wanted = set(samples) & self._live
        if not wanted:
            return
        kept: deque[GenerateRequest] = deque()
        for request in self._waiting:
            if request.sample in wanted:
                self._end(_Run(request, 0), FinishReason.ABORT)
            else:
                kept.append(request)
        self._waiting = kept
        rows = [row for row, run in enumerate(self._runs) if run.request.sample in wanted]
        if rows:
            with self._no_grad():
                self._leave(rows, [FinishReason.ABORT] * len(rows))

    def poll(self, timeout_s: float) -> list[Progress | Finished]:
        """See `GenerateBackend`; at most 32 decode steps."""
        self._open()
        if (self._waiting or self._runs) and not self._ended:
            if self._asleep:
                raise BackendError(
                    "requests for an engine that sleeps",
                    where=f"role {self._context.role}",
                    found=f"{len(self._waiting)} requests",
                    hint="wake the engine before polling it",
                )
            self._work(time.monotonic() + timeout_s)
        ended: list[Progress | Finished] = list(self._ended)
        self._ended = []
        if not ended:
            ended = [
                Progress(
                    sample=run.request.sample, attempt=run.request.attempt, num_tokens=int(count)
                )
                for run, count in zip(self._runs, self._count, strict=False)
            ]
        return ended

    def publish(self, version: int, weights: Path | None) -> None:
        """See `GenerateBackend`.

        Raises:
            BackendError: a folder for an engine that shares the trainer's weights, or weights that
                are not this model's.
        """
        self._open()
        with self._no_grad():
            self._read_window()
        if weights is not None:
            if self._shares_weights:
                raise BackendError(
                    "the engine reads the trainer's parameters in place and loads no others",
                    where=f"role {self._context.role}",
                    found=str(weights),
                    expected="weights=None",
                )
            load_weights(self._model, weights, role=self._context.role)
        if isinstance(self._decoder, FusedDecoder):
            self._decoder.refresh()
        self._version = version

    def sleep(self) -> None:
        """See `GenerateBackend`.

        Raises:
            BackendError: a request is running.
        """
        if self._runs:
            raise BackendError(
                "the engine cannot sleep while requests run",
                where=f"role {self._context.role}",
                found=f"{len(self._runs)} running requests",
                hint="abort them or poll until they end",
            )
        self._slots.release()
        self._seen = None
        if isinstance(self._decoder, FusedDecoder):
            self._decoder.release()
        self._asleep = True

    def wake(self) -> None:
        """See `GenerateBackend`; memory is taken again with the next request."""
        self._open()
        self._asleep = False

    def close(self) -> None:
        """See `GenerateBackend`."""
        self._runs, self._live, self._ended = [], set(), []
        self._waiting.clear()
        self.sleep()
        self._closed = True

    def _open(self) -> None:
        if self._closed:
            raise BackendError("the engine is closed", where=f"role {self._context.role}")

    def _no_grad(self) -> torch.inference_mode | torch.no_grad:
        """The cheaper mode where no module runs: a module may keep a tensor that training meets."""
        return torch.inference_mode() if self._fast else torch.no_grad()

    # The loop.

    def _work(self, deadline: float) -> None:
        training = self._model.training
        if training:
            self._model.eval()
        try:
            with self._no_grad():
                if not self._checked:
                    check_decoder(self._model, self._decoder, self._slots)
                    self._checked = True
                if isinstance(self._decoder, FusedDecoder):
                    self._decoder.prepare()
                for _ in range(_STEPS_PER_POLL):
                    if self._waiting and self._wants_more():
                        self._admit()
                    if self._runs:
                        self._step()
                    if self._ended or not self._runs or time.monotonic() >= deadline:
                        break
        finally:
            if training:
                self._model.train()

    def _wants_more(self) -> bool:
        """Whether to prefill now. A few free slots are awaited, so that prefills come together."""
        free = self.num_slots - len(self._runs)
        return free >= min(len(self._waiting), max(1, self.num_slots // 16))

    def _step(self) -> None:
        """One token for every row."""
        n = len(self._runs)
        if self._column == _WINDOW:
            self._read_window()
        self._slots.reserve(n, self._longest + 1)
        last, length, column = self._last[:n], self._length[:n], self._column
        logits = self._decoder.decode(last, length, self._longest + 1, self._equal)
        tokens, logprobs = self._draw(logits, slice(0, n), self._uniform[:n, column])
        self._tokens[:n, column] = tokens
        self._logprobs[:n, column] = logprobs
        last.copy_(tokens)
        length.add_(1)
        self._host_length[:n] += 1
        self._count[:n] += 1
        self._longest += 1
        self._column += 1
        self._until_limit -= 1
        stopped = self._stops[tokens] if self._stops is not None else None
        if self._until_limit == 0 or (stopped is not None and bool(stopped.any())):
            self._finish_rows(range(n), stopped)

    def _draw(
        self, logits: torch.Tensor, rows: slice, uniform: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and logprobs of consecutive rows; `self._options` are theirs."""
        options, forbidden, seen = self._options, None, None
        if options.penalty is not None:
            assert self._seen is not None
            seen = self._seen[rows]
        if options.min_tokens is not None and self._stops is not None and self._forbid_until > 0:
            count = torch.from_numpy(self._count[rows].copy()).to(self._device)
            forbidden = (count < options.min_tokens)[:, None] & self._stops
            self._forbid_until -= 1
        tokens, logprobs = draw(logits, options, uniform, seen=seen, forbidden=forbidden)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        return tokens, logprobs

    def _finish_rows(self, rows: range, stopped: torch.Tensor | None) -> None:
        """Ends those of `rows` that drew a stop token or have all their tokens."""
        span = slice(rows.start, rows.stop)
        full = self._count[span] >= self._limit[span]
        stop = np.zeros_like(full) if stopped is None else stopped.cpu().numpy()
        done = [rows.start + int(i) for i in np.flatnonzero(full | stop)]
        if not done:
            return
        self._leave(
            done,
            [FinishReason.STOP if stop[r - rows.start] else FinishReason.LENGTH for r in done],
        )

    # Rows come and go.

    def _admit(self) -> None:
        """Moves waiting requests into free slots, prefills them and draws their first tokens."""
        taken: list[GenerateRequest] = []
        while self._waiting and len(self._runs) + len(taken) < self.num_slots:
            request = self._waiting.popleft()
            reason = takes_no_token(request, self._context.stop_token_ids)
            if reason is not None:
                self._end(_Run(request, 0), reason)
            else:
                taken.append(request)
        if not taken:
            return
        if self._column == _WINDOW:
            self._read_window()
        before = len(self._runs)
        rows = range(before, before + len(taken))
        for row, request in zip(rows, taken, strict=True):
            self._runs.append(_Run(request, self._column))
            self._count[row] = len(request.response)
            self._limit[row] = request.sampling.max_tokens
            self._host_length[row] = len(request.prompt) + len(request.response)
        logits = self._prefill(rows)
        span = slice(rows.start, rows.stop)
        self._length[span] = torch.from_numpy(self._host_length[span]).to(self._device)
        drawn = self._uniforms(rows, _WINDOW - self._column + 1)
        self._uniform[span, self._column :] = drawn[:, 1:]
        self._note_seen(rows)
        self._options = self._make_options(rows)
        self._forbid_until = 1
        tokens, logprobs = self._draw(logits, span, drawn[:, 0])
        self._last[span] = tokens
        host_tokens, host_logprobs = tokens.cpu().numpy(), logprobs.cpu().numpy()
        self._check_finite(rows, host_logprobs[:, None], 0)
        for i, row in enumerate(rows):
            self._runs[row].add(host_tokens[i : i + 1], host_logprobs[i : i + 1], self._version)
        self._count[span] += 1
        self._rows_changed()
        self._finish_rows(rows, None if self._stops is None else self._stops[tokens])

    def _prefill(self, rows: range) -> torch.Tensor:
        """Fills the rows from their prompts and kept responses; float32 logits `[len(rows), V]`.

        A prompt that several rows share is computed for the first of them and copied to the others.
        """
        runs = [self._runs[row] for row in rows]
        contexts, members = gather_prompts([run.request for run in runs])
        longest = max(len(context) for context in contexts)
        self._slots.reserve(rows.stop, longest)
        order = sorted(range(len(contexts)), key=lambda i: len(contexts[i]))
        results: dict[int, torch.Tensor] = {}
        batch: list[int] = []
        for place, index in enumerate(order):
            batch.append(index)
            following = order[place + 1] if place + 1 < len(order) else None
            if following is None or (len(batch) + 1) * len(contexts[following]) > _PREFILL_TOKENS:
                lengths = [len(contexts[i]) for i in batch]
                padded = np.zeros((len(batch), lengths[-1]), np.int64)
                for i, context in enumerate(batch):
                    padded[i, : lengths[i]] = contexts[context]
                logits = self._decoder.prefill(
                    torch.from_numpy(padded).to(self._device),
                    torch.tensor(lengths, device=self._device),
                    torch.tensor([rows.start + members[i][0] for i in batch], device=self._device),
                )
                results.update(zip(batch, logits, strict=True))
                batch = []
        sources = [rows.start + group[0] for group in members for _ in group[1:]]
        targets = [rows.start + member for group in members for member in group[1:]]
        shared = max((len(contexts[i]) for i, g in enumerate(members) if len(g) > 1), default=0)
        self._slots.copy_rows(sources, targets, shared)
        owner = {member: i for i, group in enumerate(members) for member in group}
        return torch.stack([results[owner[i]] for i in range(len(rows))])

    def _leave(self, rows: list[int], reasons: list[FinishReason]) -> None:
        """Ends the requests in `rows` (ascending) and closes the holes with the last rows."""
        column = self._column
        index = torch.tensor(rows, device=self._device)
        tokens = self._tokens[index, :column].cpu().numpy()
        logprobs = self._logprobs[index, :column].cpu().numpy()
        self._check_finite(rows, logprobs, column)
        for i, (row, reason) in enumerate(zip(rows, reasons, strict=True)):
            run = self._runs[row]
            run.add(tokens[i, run.start :], logprobs[i, run.start :], self._version)
            self._end(run, reason)
        kept = len(self._runs) - len(rows)
        gone = set(rows)
        targets = [row for row in rows if row < kept]
        sources = [row for row in range(kept, len(self._runs)) if row not in gone]
        if targets:
            self._move(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            self._runs[target] = self._runs[source]
        del self._runs[kept:]
        self._rows_changed()

    def _move(self, sources: list[int], targets: list[int]) -> None:
        self._slots.copy_rows(sources, targets, int(self._host_length[sources].max()))
        for array in (self._count, self._limit, self._host_length):
            array[targets] = array[sources]
        to = torch.tensor(targets, device=self._device)
        of = torch.tensor(sources, device=self._device)
        tensors = [self._last, self._length, self._tokens, self._logprobs, self._uniform]
        for tensor in tensors if self._seen is None else [*tensors, self._seen]:
            tensor[to] = tensor[of]

    def _end(self, run: _Run, reason: FinishReason) -> None:
        self._ended.append(run.finish(reason))
        self._live.discard(run.request.sample)

    def _rows_changed(self) -> None:
        """Derives what a step needs from the rows in use."""
        n = len(self._runs)
        if n == 0:
            self._column = 0
            return
        lengths = self._host_length[:n]
        self._longest = int(lengths.max())
        self._equal = self._longest == int(lengths.min())
        self._until_limit = int((self._limit[:n] - self._count[:n]).min())
        self._options = self._make_options(range(n))
        self._forbid_until = max(
            run.request.sampling.min_tokens - int(count)
            for run, count in zip(self._runs, self._count, strict=False)
        )

    def _make_options(self, rows: range) -> RowOptions:
        samplings = [self._runs[row].request.sampling for row in rows]
        first = samplings[0]
        if all(sampling is first or sampling == first for sampling in samplings):
            samplings = [first] * len(samplings)
        return row_options(samplings, self._vocab_size, self._device)

    def _uniforms(self, rows: range, count: int) -> torch.Tensor:
        """float32 `[len(rows), count]`, draws of the next tokens of consecutive rows."""
        seeds = [self._runs[row].request.seed for row in rows]
        first = self._count[rows.start : rows.stop].tolist()
        return torch.from_numpy(uniforms(seeds, first, count)).to(self._device)

    def _note_seen(self, rows: range) -> None:
        """Marks the tokens of prompts and kept responses for the repetition penalty."""
        asked = any(self._runs[row].request.sampling.repetition_penalty != 1.0 for row in rows)
        if self._seen is None and asked:
            self._seen = torch.zeros(
                self.num_slots, self._vocab_size, dtype=torch.bool, device=self._device
            )
        if self._seen is None:
            return
        for row in rows:
            request = self._runs[row].request
            self._seen[row] = False
            tokens = np.concatenate([request.prompt, request.response])
            self._seen[row, torch.from_numpy(tokens).to(self._device)] = True

    def _check_finite(self, rows: Sequence[int], logprobs: Floats, column: int) -> None:
        """Refuses logprobs that are no numbers; a row's columns before its start are another's."""
        finite = np.isfinite(logprobs)
        if finite.all():
            return
        for i, row in enumerate(rows):
            run = self._runs[row]
            part = slice(run.start if column else 0, None)
            wrong = logprobs[i, part][~finite[i, part]]
            if len(wrong):
                raise BackendError(
                    "the model's logits are not finite",
                    where=f"sample {run.request.sample}",
                    found=f"logprob {wrong[0]}, weights version {self._version}",
                    hint="training diverged: lower the learning rate, or clip gradients",
                )

    def _read_window(self) -> None:
        """Reads the window's tokens into the runs and begins a new one, with its draws."""
        n, column = len(self._runs), self._column
        if n and column:
            tokens = self._tokens[:n, :column].cpu().numpy().copy()
            logprobs = self._logprobs[:n, :column].cpu().numpy().copy()
            self._check_finite(range(n), logprobs, column)
            for row, run in enumerate(self._runs):
                run.add(tokens[row, run.start :], logprobs[row, run.start :], self._version)
                run.start = 0
            self._uniform[:n] = self._uniforms(range(n), _WINDOW)
        self._column = 0
