"""Rule rewards in this process, so that their breakpoints stop at the user's terminal.

Without a process there is no time limit: a reward that never returns is ended by Ctrl-C. An error
of a reward is a `ScoreFailure`, as in a scorer process, and the exception itself is kept.
"""

from __future__ import annotations

import traceback
from bdb import BdbQuit
from collections.abc import Sequence
from pathlib import Path

from flowrl.backend.protocols import (
    NamesTerms,
    ScoreBackend,
    ScoreContext,
    ScoreRequest,
    ScoreResult,
    Service,
)
from flowrl.errors import FlowError
from flowrl.ids import SampleId
from flowrl.runtime.scoring.pool import FailureKind, ScoreFailure, failure_message
from flowrl.runtime.scoring.worker import checked_score, classified, package_folders, unloadable
from flowrl.runtime.user_errors import library_folders, user_frames
from flowrl.runtime.workers import require


class InlineScorer:
    """Scores samples when they are submitted, one after the other; or `prefetch` of that.

    Args:
        scorer: A role's reward terms.
        own: Folders whose code is not the user's, for messages.
    """

    def __init__(self, scorer: ScoreBackend, own: Sequence[Path]) -> None:
        self._scorer: ScoreBackend | None = scorer
        self._own = tuple(own)
        self._prefetched: dict[SampleId, ScoreResult | ScoreFailure] = {}
        self._raised: dict[SampleId, BaseException] = {}
        self._done: list[ScoreResult | ScoreFailure] = []
        self._term = ""

    def for_rollout(self) -> InlineScorer:
        """Returns a scorer of the same rewards with its own results, for samples with equal ids.

        It is open as long as this one is, and closed with it.
        """
        assert self._scorer is not None
        return InlineScorer(self._scorer, self._own)

    def prefetch(self, request: ScoreRequest) -> ScoreResult | ScoreFailure:
        """Scores a request before it is submitted; `submit` uses the same answer."""
        if request.sample not in self._prefetched:
            self._prefetched[request.sample] = self._score(request)
        return self._prefetched[request.sample]

    def cause(self, sample: SampleId) -> BaseException | None:
        """Returns the exception that the reward raised for a sample."""
        return self._raised.get(sample)

    def forget(self) -> None:
        """Drops all answers: another step's samples may have the same ids."""
        self._prefetched.clear()
        self._raised.clear()
        self._done.clear()

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        """See `Scorers`; scores them now."""
        for request in requests:
            self._done.append(self.prefetch(request))
            del self._prefetched[request.sample]

    def poll(self) -> list[ScoreResult | ScoreFailure]:
        done, self._done = self._done, []
        return done

    def wait(self, timeout_s: float) -> bool:
        """See `Scorers`; never waits, for submitted samples are scored already."""
        return bool(self._done)

    def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None
        self.forget()

    def _score(self, request: ScoreRequest) -> ScoreResult | ScoreFailure:
        assert self._scorer is not None
        self._term = ""
        if isinstance(self._scorer, NamesTerms):
            self._scorer.on_term = self._enter
        try:
            score, terms = checked_score(self._scorer.score(request))
        except BdbQuit:
            # Who leaves the debugger stops the run; it is no fault of the reward.
            raise KeyboardInterrupt("the debugger was left") from None
        except (Exception, SystemExit) as reason:
            self._raised[request.sample] = reason
            return self._failure(request.sample, reason)
        return ScoreResult(sample=request.sample, score=score, terms=terms)

    def _enter(self, term: str) -> None:
        self._term = term

    def _failure(self, sample: SampleId, reason: BaseException) -> ScoreFailure:
        name, text = classified(reason)
        kind = FailureKind(name)
        frames: tuple[str, ...] = ()
        if kind in (FailureKind.RAISED, FailureKind.MEMORY):
            frames = user_frames(traceback.extract_tb(reason.__traceback__), self._own)
        message = failure_message(kind, text, frames, term=self._term)
        return ScoreFailure(
            sample=sample, kind=kind, message=message, frames=frames, term=self._term
        )


def open_inline_scoring(backend: str, context: ScoreContext) -> InlineScorer:
    """Opens a role's scorer in this process.

    Raises:
        RewardError: the reward cannot be loaded; with the user's own file and line.
        FlowError: an error of the plug-in about its configuration.
    """
    plugin = require(backend, Service.SCORE, context)
    own = (*library_folders(), *package_folders(plugin))
    try:
        scorer = plugin.open_score(context)
    except (FlowError, KeyboardInterrupt):
        raise
    # Importing a user's file can raise anything; they get their own frames.
    except BaseException as reason:
        raise unloadable(reason, own) from reason
    return InlineScorer(scorer, own)
