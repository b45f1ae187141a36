"""The generation engine: continuous batching over KV slots.

A request waits, takes a slot, has its prompt (and kept response) prefilled, and then gains one
token a step until it stops. Finished rows leave the batch at once, the last row moves into the
gap, and waiting requests are appended; the rows in use are always 0 to n-1. A request whose prompt
is already in a running row copies the keys from it (`Prefill`); rows of very unequal length attend
in two parts (`RowOrder`).

    submit -> waiting -> running -> ended -> reported by poll
                  \\---------\\--> abort --/

Invariants:

- Rows are independent: options, random stream and stop conditions are each row's own. Tokens do
  not depend on the batch, up to the rounding of the device's matrix products.
- The host waits for the device once a step, for one boolean: true if any row sampled a stop token.
  Lengths are known to the host.
- After a publication, keys and values of earlier tokens remain those of the old weights; the
  version spans record the weights that sampled each token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from flowrl.backend.protocols import (
    Finished,
    GenerateRequest,
    Loaded,
    PolicyContext,
    Progress,
    Weights,
    WeightsKind,
)
from flowrl.errors import BackendError
from flowrl.ids import SampleId
from flowrl.specs import FinishReason
from flowrl_backends.torch.admission import (
    check_request,
    check_stops,
    same_context,
    takes_no_token,
)
from flowrl_backends.torch.attention import ModelDecoder
from flowrl_backends.torch.fused import FusedDecoder, is_llama_like
from flowrl_backends.torch.grammar import Grammars, forbidden_by
from flowrl_backends.torch.order import RowOrder
from flowrl_backends.torch.prefill import Prefill
from flowrl_backends.torch.rows import RowTable, Run
from flowrl_backends.torch.sampler import RowOptions, draw
from flowrl_backends.torch.selfcheck import check_decoder
from flowrl_backends.torch.slots import KVSlots
from flowrl_backends.torch.stop_texts import StopTexts
from flowrl_backends.torch.weights import load_weights

_STEPS_PER_POLL = 32
_STEPS_AFTER_END = 8
"""Decode steps that a poll goes on once a request has ended: each return costs the driver a round
of scheduling, and in a large batch nearly every step ends some request."""


class TorchEngine:
    """A `GenerateBackend` over a Transformers model in this process.

    `submit` only queues; `poll` does the work. The KV memory is allocated when it is needed and
    freed by `sleep` and `close`.

    Args:
        context: The role's context.
        model: The model, decoded on its device; with `shares_weights` it belongs to a trainer, and
            `load` takes no others.
        shares_weights: True if the model is a trainer's.

    Raises:
        BackendError: The architecture cannot be decoded from KV slots.
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
        self._waiting: deque[GenerateRequest] = deque()
        self._ended: list[Finished] = []
        self._loaded: list[Loaded] = []
        self._live: set[SampleId] = set()
        self._vocab_size = int(model.config.vocab_size)
        self._device = torch.device(context.device)
        self._rows = RowTable(context.num_slots, self._vocab_size, self._device)
        self._prefill = Prefill(self._decoder, self._device)
        self._order = RowOrder()
        self._stops: Tensor | None = None
        if context.stop_token_ids:
            check_stops(context, self._vocab_size)
            self._stops = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            self._stops[list(context.stop_token_ids)] = True
        self._grammars: Grammars | None = None
        self._stop_texts: StopTexts | None = None
        # Derived from the rows; `_rows_changed` makes them.
        self._options = RowOptions()
        self._longest = 0
        self._equal = True
        self._until_limit = 0
        self._forbid_until = 0
        self._constrained = False
        self._ends_by_text = False

    @property
    def num_slots(self) -> int:
        """See `GenerateBackend`."""
        return self._context.num_slots

    @property
    def kv_nbytes(self) -> int:
        """The current size of keys and values in bytes."""
        return self._slots.nbytes

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """See `GenerateBackend`.

        Raises:
            BackendError: A prompt is empty or too long, a token is outside the vocabulary, a sample
                is already in the engine, or a grammar is not supported; then no request of the call
                is accepted.
        """
        self._open()
        new: set[SampleId] = set()
        before: GenerateRequest | None = None
        for request in requests:
            # Members of a group come one after the other with the same prompt: one check for all.
            if before is None or not same_context(before, request):
                check_request(request, self._context, self._vocab_size)
                if request.grammar is not None:
                    self._grammars = self._grammars or Grammars(self._context, self._vocab_size)
                    self._grammars.check(request.grammar)
                if request.sampling.stop:
                    self._stop_texts = self._stop_texts or StopTexts(self._context.model)
            before = request
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
                self._end(Run(request).finish(FinishReason.ABORT))
            else:
                kept.append(request)
        self._waiting = kept
        rows = [row for row, run in enumerate(self._rows.runs) if run.request.sample in wanted]
        if rows:
            with self._no_grad():
                self._leave(rows, [FinishReason.ABORT] * len(rows))

    def poll(self, timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        """See `GenerateBackend`; at most 32 decode steps, and 8 after the first end."""
        self._open()
        if self._loaded:
            loaded, self._loaded = self._loaded, []
            return loaded
        if (self._waiting or len(self._rows)) and not self._ended:
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
                for run, count in zip(self._rows.runs, self._rows.count, strict=False)
            ]
        return ended

    def load(self, weights: Weights) -> None:
        """See `GenerateBackend`; returns when they are loaded.

        Raises:
            BackendError: The engine shares the trainer's weights and gets others, or the weights
                are not those of this model.
        """
        self._open()
        with self._no_grad():
            self._rows.read_window()
        checksum = ""
        if weights.kind is not WeightsKind.IN_PLACE:
            if self._shares_weights:
                raise BackendError(
                    "the engine reads the trainer's parameters in place and loads no others",
                    where=f"role {self._context.role}",
                    found=f"weights by {weights.kind}",
                    expected=f"weights {WeightsKind.IN_PLACE}",
                )
            checksum = load_weights(self._model, weights.handle, role=self._context.role)
        self._decoder.refresh()
        self._rows.version = weights.version
        self._loaded.append(Loaded(version=weights.version, checksum=checksum))

    def sleep(self) -> None:
        """See `GenerateBackend`.

        Raises:
            BackendError: A request is running.
        """
        if len(self._rows):
            raise BackendError(
                "the engine cannot sleep while requests run",
                where=f"role {self._context.role}",
                found=f"{len(self._rows)} running requests",
                hint="abort them or poll until they end",
            )
        self._slots.release()
        self._prefill.forget()
        self._rows.seen = None
        if isinstance(self._decoder, FusedDecoder):
            self._decoder.release()
        self._asleep = True

    def wake(self) -> None:
        """See `GenerateBackend`; memory is allocated again with the next request."""
        self._open()
        self._asleep = False

    def close(self) -> None:
        """See `GenerateBackend`."""
        self._rows.runs, self._live, self._ended = [], set(), []
        self._waiting.clear()
        self.sleep()
        self._closed = True

    def _open(self) -> None:
        if self._closed:
            raise BackendError("the engine is closed", where=f"role {self._context.role}")

    def _no_grad(self) -> torch.inference_mode | torch.no_grad:
        """Returns the cheapest mode without gradients that the trainer's modules allow."""
        return torch.inference_mode() if self._fast else torch.no_grad()

    # The loop.

    def _work(self, deadline: float) -> None:
        training = self._model.training
        if training:
            self._model.eval()
        try:
            with self._no_grad(), self._decoder.active():
                if not self._checked:
                    check_decoder(self._model, self._decoder, self._slots)
                    self._checked = True
                left = _STEPS_PER_POLL
                while left > 0:
                    if self._waiting and self._wants_more():
                        self._admit()
                    if len(self._rows):
                        self._step()
                    left -= 1
                    if self._ended:
                        left = min(left, _STEPS_AFTER_END)
                    idle = not len(self._rows) and not self._waiting
                    if idle or time.monotonic() >= deadline:
                        break
        finally:
            if training:
                self._model.train()

    def _wants_more(self) -> bool:
        """Returns True to prefill now. It waits for a few free slots, to prefill them together."""
        free = self.num_slots - len(self._rows)
        return free >= min(len(self._waiting), max(1, self.num_slots // 16))

    def _step(self) -> None:
        """Decodes one token for every row."""
        rows, n = self._rows, len(self._rows)
        uniform = rows.uniform()
        self._slots.reserve(n, self._longest + 1)
        logits = self._decoder.decode(
            rows.last[:n], rows.length[:n], self._longest + 1, self._equal, self._order.step(n)
        )
        tokens, logprobs = self._draw(logits, range(n), uniform)
        rows.write(tokens, logprobs)
        self._longest += 1
        self._until_limit -= 1
        stopped = self._stopped(range(n), tokens)
        if self._until_limit == 0 or (stopped is not None and bool(stopped.any())):
            self._finish_rows(range(n), stopped)

    def _draw(self, logits: Tensor, drawn: range, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Samples tokens and logprobs of consecutive rows, with the options `self._options`."""
        options, rows, forbidden, seen = self._options, self._rows, None, None
        span = slice(drawn.start, drawn.stop)
        if options.penalty is not None:
            assert rows.seen is not None
            seen = rows.seen[span]
        if options.min_tokens is not None and self._stops is not None and self._forbid_until > 0:
            count = torch.from_numpy(rows.count[span].copy()).to(self._device)
            forbidden = (count < options.min_tokens)[:, None] & self._stops
            self._forbid_until -= 1
        if self._constrained:
            held = forbidden_by([run.grammar for run in rows.runs[span]], self._vocab_size)
            outside = torch.from_numpy(held).to(self._device)
            forbidden = outside if forbidden is None else forbidden | outside
        tokens, logprobs, left = draw(logits, options, uniform, seen=seen, forbidden=forbidden)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        if left is not None:
            rows.keep(drawn, left)
        if self._constrained:
            for run, token in zip(rows.runs[span], tokens.tolist(), strict=True):
                if run.grammar is not None:
                    run.grammar.take(token)
        return tokens, logprobs

    def _stopped(self, drawn: range, tokens: Tensor) -> Tensor | None:
        """Returns bool `[n]`, true at rows that end with these tokens; None where none can."""
        stopped = None if self._stops is None else self._stops[tokens]
        if not self._ends_by_text:
            return stopped
        runs = self._rows.runs[drawn.start : drawn.stop]
        complete = [
            run.stop is not None and run.stop.take(token)
            for run, token in zip(runs, tokens.tolist(), strict=True)
        ]
        by_text = torch.tensor(complete, device=self._device)
        return by_text if stopped is None else stopped | by_text

    def _finish_rows(self, rows: range, stopped: Tensor | None) -> None:
        """Ends those of `rows` that have `stopped` or reached their maximum length."""
        span = slice(rows.start, rows.stop)
        full = self._rows.count[span] >= self._rows.limit[span]
        stop = np.zeros_like(full) if stopped is None else stopped.cpu().numpy()
        done = np.flatnonzero(full | stop)
        if len(done):
            reasons = [FinishReason.STOP if stop[i] else FinishReason.LENGTH for i in done]
            self._leave([rows.start + int(i) for i in done], reasons)

    # Rows come and go.

    def _admit(self) -> None:
        """Moves waiting requests into free slots, prefills them and samples their first tokens."""
        taken: list[GenerateRequest] = []
        while self._waiting and len(self._rows) + len(taken) < self.num_slots:
            request = self._waiting.popleft()
            reason = takes_no_token(request, self._context.stop_token_ids)
            if reason is not None:
                self._end(Run(request).finish(reason))
            else:
                taken.append(request)
        if not taken:
            return
        rows, uniform = self._rows.enter(taken)
        self._begin_texts(rows)
        logits = self._prefill.fill(self._rows.runs, rows)
        self._options = self._rows.options(rows)
        self._forbid_until = 1
        tokens, logprobs = self._draw(logits, rows, uniform)
        self._rows.begin(rows, tokens, logprobs)
        self._rows_changed()
        self._finish_rows(rows, self._stopped(rows, tokens))

    def _begin_texts(self, rows: range) -> None:
        """Advances grammars and stop texts of new rows by their kept responses."""
        self._constrained = False
        for row in rows:
            run = self._rows.runs[row]
            request = run.request
            if request.grammar is not None:
                assert self._grammars is not None  # `submit` has compiled it
                own = request.response[request.grammar_from :]
                run.grammar = self._grammars.begin(request.grammar, own, f"sample {request.sample}")
                self._constrained = True
            if self._stop_texts is not None:
                run.stop = self._stop_texts.begin(request)

    def _leave(self, rows: list[int], reasons: Sequence[FinishReason]) -> None:
        ends, sources, targets = self._rows.leave(rows, reasons)
        for end in ends:
            self._end(end)
        if targets:
            self._slots.copy_rows(sources, targets, int(self._rows.stored[targets].max()))
        if len(self._rows):
            self._reorder()
        else:
            # Nothing of what was may change what comes: a resumed run begins without rows, too.
            self._prefill.forget()
            self._order = RowOrder()
        self._rows_changed()

    def _reorder(self) -> None:
        """Moves the longest rows to the front if that saves time."""
        stored = self._rows.stored[: len(self._rows)]
        sources, targets = self._order.moves(stored, self._slots.token_nbytes)
        if targets:
            self._rows.move(sources, targets)
            self._slots.copy_rows(sources, targets, int(stored[targets].max()))

    def _end(self, end: Finished) -> None:
        self._ended.append(end)
        self._live.discard(end.sample)

    def _rows_changed(self) -> None:
        """Recomputes the state of a step that depends on the rows in use."""
        n = len(self._rows)
        if n == 0:
            return
        stored, count, limit = self._rows.stored[:n], self._rows.count[:n], self._rows.limit[:n]
        self._longest = int(stored.max())
        self._equal = self._longest == int(stored.min())
        if self._device.type == "cpu" and not self._equal:
            self._order.follow(stored, self._slots.token_nbytes)
        else:
            self._order.follow(stored, 0)
        self._until_limit = int((limit - count).min())
        self._options = self._rows.options(range(n))
        self._constrained = any(run.grammar is not None for run in self._rows.runs)
        self._ends_by_text = any(run.stop is not None for run in self._rows.runs)
        self._forbid_until = 0
        if self._options.min_tokens is not None:
            left = self._options.min_tokens.cpu().numpy() - count
            self._forbid_until = int(left.max())
