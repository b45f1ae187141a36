"""A rollout driver that stops between drawing and scoring, for programs that run line by line.

    draw -> every sample is there, none is scored -> release -> scored, judged, delivered

What the scheduler asks to be scored is held until `release`. So the lines of a program that score,
map and filter can show what they give before the batch is delivered; the batch itself is made by
the same scheduler, in the same order of samples, as in a compiled run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.backend.protocols import Finished, ScoreResult
from flowrl.data import PromptItem
from flowrl.errors import SchedulerError
from flowrl.ids import RoleName, SampleId, sample_id
from flowrl.rollout import BatchAsked, Score
from flowrl.runtime.driver.payloads import Payload
from flowrl.runtime.driver.rollout_driver import (
    Collected,
    RolloutDriver,
    Scorers,
    Seconds,
    score_request,
)
from flowrl.runtime.driver.sample_set import GroupRows
from flowrl.runtime.scoring.in_process import InlineScorer
from flowrl.runtime.scoring.pool import ScoreFailure

__all__ = ["HeldDriver"]

_POLL_S = 0.25
_ABANDON_S = 10.0
"""Seconds that engines may take to report the ends of aborted samples."""


class HeldDriver(RolloutDriver):
    """See the module; the arguments are those of `RolloutDriver`, the scorers `InlineScorer`s."""

    def __init__(self, *, scorers: Mapping[RoleName, Scorers], **arguments: Any) -> None:
        self._held: list[Score] = []
        self._holding = False
        self._spent = Seconds()
        self._inline: dict[RoleName, InlineScorer] = {}
        for role, scorer in scorers.items():
            assert isinstance(scorer, InlineScorer)
            self._inline[role] = scorer.apart()
        super().__init__(scorers=self._inline, **arguments)

    def draw(self, batch: int, groups: int) -> None:
        """Asks for a batch and runs the engines until all of its samples are drawn.

        Raises:
            SchedulerError: nothing moved for the stall timeout.
            KeyboardInterrupt: `stop` said so.
        """
        for scorer in self._inline.values():
            scorer.forget()
        self._holding = True
        self._spent = Seconds()
        self._emit(BatchAsked(id=self._next(), batch=batch, groups=groups))
        self._run(lambda: not any(self._running.values()), self._spent)

    def drawn(self, items: Sequence[PromptItem]) -> list[GroupRows]:
        """The groups of `items` that are whole: no episode of theirs broke off, no reward failed.

        They can be asked for between `draw` and `release`.
        """
        found: list[GroupRows] = []
        for item in items:
            names = [sample_id(item.group, member) for member in range(self._group_size)]
            payloads = [self.store.get(name) for name in names]
            members = [
                (name, payload)
                for name, payload in zip(names, payloads, strict=True)
                if payload is not None and payload.broken is None
            ]
            if len(members) == len(names):
                found.append((item.group, members))
        return found

    def score_ahead(
        self, role: RoleName, sample: SampleId, payload: Payload
    ) -> tuple[ScoreResult | ScoreFailure, BaseException | None]:
        """What a role gives a sample, and what its reward raised; `release` asks no second time."""
        scorer = self._inline[role]
        return scorer.ahead(score_request(sample, payload)), scorer.cause(sample)

    def release(self, batch: int) -> Collected:
        """Has everything scored and judged that is not yet, and takes the batch.

        Raises:
            RewardError: more rewards failed than allowed.
        """
        self._holding = False
        held, self._held = self._held, []
        for action in held:
            self._score(action)
        self._settle()
        self._run(lambda: self._is_delivered(batch), self._spent)
        collected = self._outcomes.batches.pop(batch)
        collected.seconds = self._spent
        return collected

    def abandon(self) -> None:
        """Empties the engines of a step that is given up; the driver is of no use after that.

        Raises:
            SchedulerError: an engine does not let go of its samples.
        """
        for engine_id, engine in self._engines.items():
            live = set(self._running[engine_id])
            engine.abort(tuple(live))
            end = self._clock() + _ABANDON_S
            while live:
                for output in engine.poll(_POLL_S):
                    if isinstance(output, Finished):
                        live.discard(output.sample)
                if live and self._clock() > end:
                    raise SchedulerError(
                        "the engine does not let go of a step that was given up",
                        where=f"engine {engine_id}",
                        found=f"{len(live)} samples after {_ABANDON_S:g} s",
                    )
            self._running[engine_id].clear()

    def _score(self, action: Score) -> None:
        if not self._holding:
            super()._score(action)
            return
        payloads = [self.store[sample] for sample in action.samples]
        self._decode([payload for payload in payloads if not payload.is_episode])
        self._held.append(action)
