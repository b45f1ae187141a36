"""When groups of a rollout are complete, against engines whose every sample is drawn."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from flowrl.cost.arrivals import POINTS, rollout_arrivals
from flowrl.cost.lengths import ConstantLengths, EmpiricalLengths, Lengths, lognormal_before_cut
from flowrl.cost.rollout_time import rollout_estimate
from flowrl.cost.source import Estimate

PROMPT, GROUP, SAMPLES, MEAN, LONGEST = 100, 8, 1024, 300, 1500


def step_s(batch: float, context: float) -> float:
    return 3e-3 + 1e-5 * batch + 2e-9 * batch * context


def profile(
    lengths: Lengths,
    *,
    slots: int,
    replicas: int = 1,
    kv_tokens: int = 10**9,
):
    """Seconds of a rollout, and when its groups are there."""
    asked = {
        "replicas": replicas,
        "samples": SAMPLES,
        "group_size": GROUP,
        "prompt_tokens": PROMPT,
        "lengths": lengths,
        "slots": slots,
        "kv_tokens": kv_tokens,
    }
    found = rollout_estimate(
        lambda batch, context: Estimate(seconds=step_s(batch, context)),
        lambda rows, tokens: Estimate(seconds=0.0),
        **asked,
    )
    return found.seconds, rollout_arrivals(found.clock, **asked)


class Engine:
    """Rows that run at once, from one end to the next."""

    def __init__(self, lengths: np.ndarray, waiting: list[int], slots: int) -> None:
        self.lengths, self.waiting, self.slots = lengths, waiting, slots
        self.running: list[tuple[float, int]] = []
        self.began: dict[int, float] = {}
        self.now = self.step = 0.0

    def fill(self) -> float:
        """Takes what it has room for; the time of its next end."""
        while self.waiting and len(self.running) < self.slots:
            one = self.waiting.pop()
            self.began[one] = self.step
            heapq.heappush(self.running, (self.step + self.lengths[one], one))
        if not self.running:
            return np.inf
        steps = self.running[0][0] - self.step
        own = np.mean([self.step - self.began[one] for _, one in self.running]) + steps / 2
        self.next = self.now + steps * step_s(len(self.running), PROMPT + own)
        return self.next

    def end(self) -> list[int]:
        """Goes on to the next end; who ends there."""
        self.now, self.step = self.next, self.running[0][0]
        ended = []
        while self.running and self.running[0][0] == self.step:
            ended.append(heapq.heappop(self.running)[1])
        return ended


def drawn(lengths: Lengths, *, slots: int, replicas: int, seed: int) -> list[tuple[float, float]]:
    """Groups of a batch that engines take from one queue: when each is complete, its tokens."""
    chances = np.random.default_rng(seed).random(SAMPLES)
    own = np.maximum(1.0, np.rint([lengths.quantile(share) for share in chances]))
    waiting = list(range(SAMPLES))[::-1]
    engines = [Engine(own, waiting, slots) for _ in range(replicas)]
    ends = np.zeros(SAMPLES)
    events = [(engine.fill(), at) for at, engine in enumerate(engines)]
    heapq.heapify(events)
    while events[0][0] < np.inf:
        now, at = heapq.heappop(events)
        ends[engines[at].end()] = now
        heapq.heappush(events, (engines[at].fill(), at))
    tokens = own.reshape(-1, GROUP).sum(axis=1) + GROUP * PROMPT
    return sorted(zip(ends.reshape(-1, GROUP).max(axis=1), tokens, strict=True))


def served_s(groups: list[tuple[float, float]], read_s: float, chunks: int) -> float:
    """A reader that takes whole chunks of groups as they are there."""
    size = len(groups) // chunks
    tokens = sum(own for _, own in groups)
    now = 0.0
    for first in range(0, len(groups), size):
        chunk = groups[first : first + size]
        now = max(now, chunk[-1][0]) + read_s * sum(own for _, own in chunk) / tokens
    return now


def priced_s(points, generate_s: float, read_s: float, chunks: int) -> float:
    """The same by the profile."""
    there = [(0.0, 0.0), *points][:: POINTS // chunks]
    return max(
        ready * generate_s + (1 - before) * read_s
        for (ready, _), (_, before) in zip(there[1:], there, strict=False)
    )


@pytest.mark.parametrize("waves", [1, 2, 4, 16])
@pytest.mark.parametrize("sigma", [0.0, 0.8, 1.2])
def test_streams_take_as_long_as_from_engines_whose_samples_are_drawn(sigma, waves):
    lengths = lognormal_before_cut(mean=MEAN, sigma=sigma, maximum=LONGEST)
    for replicas in (1, 4):
        slots = SAMPLES // replicas // waves
        seconds, points = profile(lengths, slots=slots, replicas=replicas)
        batches = [drawn(lengths, slots=slots, replicas=replicas, seed=i) for i in range(3)]
        generate_s = np.mean([groups[-1][0] for groups in batches])
        for part in (0.3, 1.0, 2.0):
            for chunks in (4, 16):
                read_s = part * generate_s
                expected = np.mean([served_s(groups, read_s, chunks) for groups in batches])
                # The seconds themselves are compared in test_time_rollout.
                found = priced_s(points, generate_s, read_s, chunks)
                assert found == pytest.approx(expected, rel=0.03)
                assert priced_s(points, seconds, read_s, chunks) == pytest.approx(
                    expected, rel=0.06
                )


def test_equal_samples_that_run_at_once_are_all_there_at_the_end():
    _, points = profile(ConstantLengths(tokens=200), slots=SAMPLES)
    assert all(ready > 0.98 for ready, _ in points)
    assert points[-1] == (1.0, 1.0)


def test_equal_samples_in_waves_come_with_each_wave():
    _, points = profile(ConstantLengths(tokens=200), slots=SAMPLES // 4)
    quarters = points[POINTS // 4 - 1 :: POINTS // 4]
    assert [ready for ready, _ in quarters] == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.02)
    assert [work for _, work in quarters] == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.03)


def test_a_group_waits_for_its_longest_sample():
    # Of 8 samples all are short in 1 / 256 of the groups.
    _, points = profile(EmpiricalLengths(values=(100, 400)), slots=SAMPLES)
    assert all(ready > 0.97 for ready, _ in points)


def test_a_full_cache_lets_groups_come_as_slots_do():
    lengths = lognormal_before_cut(mean=MEAN, sigma=0.8, maximum=LONGEST)
    _, at_once = profile(lengths, slots=SAMPLES)
    held = MEAN * SAMPLES // 8
    _, full = profile(lengths, slots=SAMPLES, kv_tokens=held)
    _, queued = profile(lengths, slots=SAMPLES // 8)
    quarter = POINTS // 4 - 1
    assert full[quarter][0] < at_once[quarter][0] - 0.1
    assert full[quarter][0] == pytest.approx(queued[quarter][0], abs=0.1)
