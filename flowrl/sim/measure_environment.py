"""Measures an environment through its protocol: what a call takes alone, and among many.

The time of one call alone is that of its thread and of what it waits for; calls that are made
together wait together and share the thread. So two sizes tell the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from flowrl.backend.environment import Action, EpisodeStart
from flowrl.errors import BackendError
from flowrl.ids import SampleId
from flowrl.sim.episodes import EnvironmentTimes
from flowrl.sim.measure import Timer, repeated
from flowrl.specs import FinishReason

_TOGETHER = 64
"""Episodes that play at once, beside one alone."""
_LIMIT_S = 60.0
"""Seconds that all answers of a round may take."""


class EpisodeCalls(Protocol):
    """What calls an environment for a run's episodes (`flowrl.runtime.environments.pool`)."""

    def start(self, start: EpisodeStart) -> None:
        """Begins an episode."""
        ...

    def submit(self, sample: SampleId, action: Action) -> None:
        """Hands a turn over."""
        ...

    def settle(self, timeout_s: float) -> bool:
        """Waits until every call is answered."""
        ...

    def poll(self) -> Sequence[object]:
        """Takes the answers."""
        ...

    def end(self, sample: SampleId) -> None:
        """Ends an episode."""
        ...


def measure_environment(
    calls: EpisodeCalls, starts: Sequence[EpisodeStart], words: Sequence[str], timer: Timer
) -> EnvironmentTimes:
    """What a reset or a step takes, on average of both.

    Args:
        starts: Episodes of real rows.
        words: What a turn says, in turn; what it is worth does not matter.

    Raises:
        BackendError: calls are not answered.
    """
    one = repeated(lambda: _play(calls, starts[:1], words, timer))
    many_starts = [starts[i % len(starts)] for i in range(_TOGETHER)]
    many = repeated(lambda: _play(calls, many_starts, words, timer))
    # Two calls an episode: a reset and a step.
    call_s = max(0.0, many - one) / (2 * (_TOGETHER - 1))
    return EnvironmentTimes(call_s=_short(call_s), wait_s=_short(max(0.0, one / 2 - call_s)))


def _play(
    calls: EpisodeCalls, starts: Sequence[EpisodeStart], words: Sequence[str], timer: Timer
) -> float:
    """Seconds of a reset and a step of these episodes, all at once."""
    samples = [SampleId(f"0/{i}/0") for i in range(len(starts))]
    began = timer()
    for sample, start in zip(samples, starts, strict=True):
        calls.start(replace(start, sample=sample))
    _settle(calls)
    for number, sample in enumerate(samples):
        calls.submit(
            sample,
            Action(
                text=words[number % len(words)],
                tokens=np.ones(1, np.int64),
                turn=0,
                finish=FinishReason.LENGTH,
            ),
        )
    _settle(calls)
    spent = timer() - began
    for sample in samples:
        calls.end(sample)
    return spent


def _settle(calls: EpisodeCalls) -> None:
    if not calls.settle(_LIMIT_S):
        raise BackendError(
            f"an environment has not answered for {_LIMIT_S:g} s, so it cannot be measured",
            where="flowrl profile",
            hint="look at what it waits for; a run would wait as long",
        )
    calls.poll()


def _short(seconds: float) -> float:
    return float(f"{seconds:.6g}")
