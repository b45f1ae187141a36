"""The table of the running requests: one row each, rows 0 to n-1 in use, without gaps.

Tokens and logprobs of the current window of steps stay on the device, in `[slots, WINDOW]`; column
c is step c of the window for every row, so a step writes one column, the random numbers of a step
are one column, and the host reads whole windows. A row that was added in the middle of a window
begins at its `start` column; its earlier columns belong to another request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flowrl.backend.batch import Floats, Ints, KeptTokens
from flowrl.backend.protocols import Finished, GenerateRequest
from flowrl.errors import BackendError
from flowrl.specs import FinishReason, Sampling
from flowrl_backends.torch.grammar import GrammarState
from flowrl_backends.torch.noise import uniforms
from flowrl_backends.torch.sampler import RowOptions, row_options
from flowrl_backends.torch.stop_texts import StopText

WINDOW = 64
"""Steps whose tokens stay on the device before the host reads them."""


@dataclass(slots=True)
class Run:
    """A request in a row.

    Attributes:
        start: The column of the window where its unread tokens begin.
        spans: The `[version, tokens]` of the tokens that were read.
        kept: The tokens that the sampler kept at each token, unread ones included; empty at a token
            where all were kept. Only for requests that report them.
        grammar: The state of the grammar; None without a grammar.
        stop: What its text is looked for; None where no text ends it.
        filled: The weights that computed the prompt's keys; see `Decoder.weights_seen`.
    """

    request: GenerateRequest
    start: int = 0
    tokens: list[Ints] = field(default_factory=list)
    logprobs: list[Floats] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    kept: list[npt.NDArray[np.int32]] = field(default_factory=list)
    grammar: GrammarState | None = None
    stop: StopText | None = None
    filled: int = -1

    def add(self, tokens: Ints, logprobs: Floats, version: int) -> None:
        """Appends tokens sampled from weights `version`."""
        if not len(tokens):
            return
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][1] += len(tokens)
        else:
            self.spans.append([version, len(tokens)])

    def finish(self, reason: FinishReason) -> Finished:
        """Returns the end of the request."""
        some = len(self.tokens) > 0
        return Finished(
            sample=self.request.sample,
            attempt=self.request.attempt,
            reason=reason,
            tokens=np.concatenate(self.tokens) if some else np.zeros(0, np.int64),
            logprobs=np.concatenate(self.logprobs) if some else np.zeros(0, np.float32),
            versions=tuple((version, count) for version, count in self.spans),
            kept=KeptTokens.of_places(self.kept) if self.request.sampling.reports_kept else None,
        )


class RowTable:
    """Rows, their counters, and the window of tokens.

    Attributes:
        runs: The n requests in use, by row.
        count: int64 `[slots]`, response tokens of each row, kept ones included.
        limit: int64 `[slots]`, `max_tokens` of each row.
        stored: int64 `[slots]`, tokens whose keys are stored, on the host.
        length: The same on the device.
        last: int64 `[slots]`, each row's newest token, whose keys are not stored yet.
        seen: bool `[slots, V]`, tokens of prompt and response; only once a penalty is asked for.
        column: The window's column that the next step writes.
        version: Of the weights that draw tokens now.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.runs: list[Run] = []
        self.count = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)
        self.stored = np.zeros(num_slots, np.int64)
        self.length = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.last = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.seen: Tensor | None = None
        self.column = 0
        self.version = 0
        # Options that rows have had since the table was last empty; mostly one for all.
        self._kinds: set[Sampling] = set()
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._device = device
        self._tokens = torch.zeros(num_slots, WINDOW, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(num_slots, WINDOW, device=device)
        self._uniform = torch.zeros(num_slots, WINDOW, device=device)

    def __len__(self) -> int:
        return len(self.runs)

    def enter(self, requests: Sequence[GenerateRequest]) -> tuple[range, Tensor]:
        """Appends requests as new rows.

        Returns:
            The rows, and float32 `[len(requests)]` draws of their first new tokens, which come
            from the prefill and lie in no column.
        """
        if self.column == WINDOW:
            self.read_window()
        rows = range(len(self.runs), len(self.runs) + len(requests))
        for row, request in zip(rows, requests, strict=True):
            self.runs.append(Run(request, self.column))
            self.count[row] = len(request.response)
            self.limit[row] = request.sampling.max_tokens
            self.stored[row] = len(request.prompt) + len(request.response)
        self._kinds |= set({id(r.sampling): r.sampling for r in requests}.values())
        span = slice(rows.start, rows.stop)
        self.length[span] = torch.from_numpy(self.stored[span]).to(self._device)
        drawn = self._uniforms(rows, WINDOW - self.column + 1)
        self._uniform[span, self.column :] = drawn[:, 1:]
        self._note_seen(rows)
        return rows, drawn[:, 0]

    def begin(self, rows: range, tokens: Tensor, logprobs: Tensor) -> None:
        """Records the tokens that prefill gave to new rows."""
        span = slice(rows.start, rows.stop)
        self.last[span] = tokens
        self.count[span] += 1
        host_tokens, host_logprobs = tokens.cpu().numpy(), logprobs.cpu().numpy()
        self._check_finite(rows, [0] * len(rows), host_logprobs[:, None])
        for i, row in enumerate(rows):
            self.runs[row].add(host_tokens[i : i + 1], host_logprobs[i : i + 1], self.version)

    def uniform(self) -> Tensor:
        """Returns float32 `[n]`, the random numbers of the next step."""
        if self.column == WINDOW:
            self.read_window()
        return self._uniform[: len(self.runs), self.column]

    def keep(self, rows: range, left: Tensor) -> None:
        """Records the tokens that the sampler kept: bool `[len(rows), V]`."""
        counts = left.sum(1).cpu().numpy()
        ids = left.nonzero()[:, 1].cpu().numpy().astype(np.int32)
        end = 0
        for row, count in zip(rows, counts.tolist(), strict=True):
            begin, end = end, end + count
            run = self.runs[row]
            if run.request.sampling.reports_kept:
                # A copy, so that a token does not hold those of all other rows in memory.
                run.kept.append(ids[begin : begin if count == self._vocab_size else end].copy())

    def write(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Records one step of every row: `tokens` and `logprobs` `[n]`."""
        n = len(self.runs)
        self._tokens[:n, self.column] = tokens
        self._logprobs[:n, self.column] = logprobs
        self.last[:n].copy_(tokens)
        self.length[:n].add_(1)
        self.stored[:n] += 1
        self.count[:n] += 1
        self.column += 1

    def leave(
        self, rows: list[int], reasons: Sequence[FinishReason]
    ) -> tuple[list[Finished], list[int], list[int]]:
        """Ends the requests in `rows` (ascending) and fills the gaps with the last rows.

        Returns:
            The ends, and the rows that moved: from, to. The caller moves their keys, up to
            `stored[to]`.
        """
        index = torch.tensor(rows, device=self._device)
        tokens = self._tokens[index, : self.column].cpu().numpy()
        logprobs = self._logprobs[index, : self.column].cpu().numpy()
        starts = [self.runs[row].start for row in rows]
        self._check_finite(rows, starts, logprobs)
        ends = []
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            run = self.runs[row]
            run.add(tokens[i, start:], logprobs[i, start:], self.version)
            ends.append(run.finish(reasons[i]))
        kept, gone = len(self.runs) - len(rows), set(rows)
        targets = [row for row in rows if row < kept]
        sources = [row for row in range(kept, len(self.runs)) if row not in gone]
        if targets:
            self.move(sources, targets)
        del self.runs[kept:]
        if not self.runs:
            self.column = 0
            self._kinds.clear()
        return ends, sources, targets

    def read_window(self) -> None:
        """Reads the window's tokens into the runs and begins a new one, with its draws."""
        n = len(self.runs)
        if n and self.column:
            tokens = self._tokens[:n, : self.column].cpu().numpy().copy()
            logprobs = self._logprobs[:n, : self.column].cpu().numpy().copy()
            starts = [run.start for run in self.runs]
            self._check_finite(range(n), starts, logprobs)
            for row, run in enumerate(self.runs):
                run.add(tokens[row, run.start :], logprobs[row, run.start :], self.version)
                run.start = 0
            self._uniform[:n] = self._uniforms(range(n), WINDOW)
        self.column = 0

    def options(self, rows: range) -> RowOptions:
        """Returns the sampling options of consecutive rows."""
        if len(self._kinds) == 1:
            kinds = list(self._kinds)
            return row_options(kinds, self._vocab_size, self._device, count=len(rows))
        samplings = [self.runs[row].request.sampling for row in rows]
        return row_options(samplings, self._vocab_size, self._device)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copies rows, all of them read before any is written; their keys are the caller's."""
        for array in (self.count, self.limit, self.stored):
            array[targets] = array[sources]
        to = torch.tensor(targets, device=self._device)
        of = torch.tensor(sources, device=self._device)
        tensors = [self.last, self.length, self._tokens, self._logprobs, self._uniform]
        for tensor in tensors if self.seen is None else [*tensors, self.seen]:
            tensor[to] = tensor[of]
        runs = [self.runs[source] for source in sources]
        for target, run in zip(targets, runs, strict=True):
            self.runs[target] = run

    def _uniforms(self, rows: range, count: int) -> Tensor:
        seeds = [self.runs[row].request.seed for row in rows]
        first = self.count[rows.start : rows.stop].tolist()
        return torch.from_numpy(uniforms(seeds, first, count)).to(self._device)

    def _note_seen(self, rows: range) -> None:
        """Marks the tokens of prompts and kept responses for the repetition penalty."""
        asked = any(self.runs[row].request.sampling.repetition_penalty != 1.0 for row in rows)
        if self.seen is None and asked:
            shape = (self._num_slots, self._vocab_size)
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
        if self.seen is None:
            return
        for row in rows:
            request = self.runs[row].request
            self.seen[row] = False
            tokens = np.concatenate([request.prompt, request.response])
            self.seen[row, torch.from_numpy(tokens).to(self._device)] = True

    def _check_finite(self, rows: Sequence[int], starts: Sequence[int], logprobs: Floats) -> None:
        """Refuses logprobs `[len(rows), columns]` that are not finite."""
        finite = np.isfinite(logprobs)
        if finite.all():
            return
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            wrong = logprobs[i, start:][~finite[i, start:]]
            if len(wrong):
                raise BackendError(
                    "the model's logits are not finite",
                    where=f"sample {self.runs[row].request.sample}",
                    found=f"logprob {wrong[0]}, weights version {self.version}",
                    hint="training diverged: lower the learning rate, or clip gradients",
                )
