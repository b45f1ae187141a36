"""Backends whose work takes no time but moves a clock by what they say it takes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flowrl.backend.protocols import Finished, Progress
from flowrl.specs import FinishReason

__all__ = ["PretendEngine", "PretendTrainer", "Timer"]


@dataclass
class Timer:
    """A clock that its owners move."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class _Row:
    request: object
    context: int
    left: int
    drawn: int = 0


@dataclass
class PretendEngine:
    """Continuous batching with times that are lines.

    Attributes:
        longest_share: How far a step goes by its longest row.
        steps, after_end: As in `PollRule`.
    """

    timer: Timer
    num_slots: int = 64
    call_s: float = 0.002
    row_s: float = 0.0001
    token_s: float = 0.00002
    step_s: float = 0.001
    step_row_s: float = 0.0002
    context_s: float = 0.000001
    longest_share: float = 0.0
    leave_s: float = 0.0
    load_s: float = 0.0
    steps: int = 16
    after_end: int = 4
    waiting: list = field(default_factory=list)
    rows: list[_Row] = field(default_factory=list)
    ended: list[Finished] = field(default_factory=list)
    loading: bool = False

    def submit(self, requests) -> None:
        self.waiting += [
            _Row(
                request=r,
                context=len(r.prompt) + len(r.response),
                left=r.sampling.max_tokens - len(r.response),
            )
            for r in requests
        ]

    def abort(self, samples) -> None:
        for row in [row for row in self.rows if row.request.sample in samples]:
            self.rows.remove(row)
            self.end(row, FinishReason.ABORT)

    def poll(self, timeout_s: float):
        left = self.steps
        while left > 0 and (self.waiting or self.rows) and not (self.ended and left > 99):
            before = len(self.ended)
            self.admit()
            if self.rows:
                self.step()
            left -= 1
            if len(self.ended) > before:
                left = min(left, self.after_end)
        ended, self.ended = self.ended, []
        return ended or [
            Progress(sample=r.request.sample, attempt=0, num_tokens=r.drawn) for r in self.rows
        ]

    def admit(self) -> None:
        entering = []
        while self.waiting and len(self.rows) < self.num_slots:
            row = self.waiting.pop(0)
            entering.append(row)
            self.rows.append(row)
        if entering:
            contexts = {(r.request.shares_prompt, r.context): r.context for r in entering}
            self.timer.now += (
                self.call_s + self.row_s * len(entering) + self.token_s * sum(contexts.values())
            )
            if self.loading:
                self.timer.now += self.load_s
                self.loading = False
            self.draw(entering)

    def step(self) -> None:
        contexts = [row.context for row in self.rows]
        mean = sum(contexts) / len(contexts)
        context = mean + self.longest_share * (max(contexts) - mean)
        rows = len(contexts)
        self.timer.now += self.step_s + rows * (self.step_row_s + self.context_s * context)
        self.draw(self.rows)

    def draw(self, rows: list[_Row]) -> None:
        for row in rows:
            row.context += 1
            row.left -= 1
            row.drawn += 1
        done = [row for row in self.rows if row.left == 0]
        if done:
            self.timer.now += self.leave_s
        for row in done:
            self.rows.remove(row)
            self.end(row, FinishReason.LENGTH)

    def end(self, row: _Row, reason: FinishReason) -> None:
        self.ended.append(
            Finished(
                sample=row.request.sample,
                attempt=0,
                reason=reason,
                tokens=np.zeros(row.drawn, np.int64),
                logprobs=np.zeros(row.drawn, np.float32),
                versions=((0, row.drawn),),
            )
        )

    def load(self, weights) -> None:
        self.loading = True

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class PretendTrainer:
    """A trainer that computes common beginnings once, or every token."""

    timer: Timer
    shares: bool = True
    call_s: float = 0.003
    pass_s: float = 0.002
    row_s: float = 0.0001
    token_s: float = 0.00005
    updates: int = 0

    def update(self, batch, spec):
        self.updates += 1
        for rows in spec.mini_batches:
            passes = -(-len(rows) // spec.micro_batch)
            sequences = batch.sequences.select(rows)
            tokens = self.tree(sequences) if self.shares else len(sequences.tokens)
            self.timer.now += (
                self.call_s + self.pass_s * passes + self.row_s * len(rows) + self.token_s * tokens
            )
        assert batch.advantages is None or np.all(batch.advantages[sequences.response_mask] != 0)
        return []

    def logprobs(self, batch, temperature):
        self.timer.now += self.call_s + self.token_s * len(batch.tokens)
        return np.zeros(len(batch.tokens), np.float32)

    @staticmethod
    def tree(sequences) -> int:
        """Tokens of the prefix trees of all groups, without the last of each row."""
        nodes = set()
        for i in range(len(sequences)):
            tokens = sequences.tokens[sequences.offsets[i] : sequences.offsets[i + 1] - 1].tolist()
            for end in range(1, len(tokens) + 1):
                nodes.add((int(sequences.groups[i]), tuple(tokens[:end])))
        return len(nodes)
