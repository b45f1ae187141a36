"""When the groups of a rollout are complete, for those who read them as they come.

A group is there with its longest sample. Where all samples run at once, the first groups come late,
and the last ones have the most tokens; where all responses are equally long besides, everything
comes at the end. Where samples wait for slots, groups come while others run, and the end is a
tail of few.

Of a sample that starts at step s, the chance that it has ended at step t is F(t - s), F being the
distribution of lengths, and of a group with samples that start at s_1 ... s_g the product P(t) of
those. With C(x) the mean of a length where it is at most x, and 0 where it is not, the group counts

    P(t) sum_i (C(t - s_i) / F(t - s_i) + prompt)                    tokens

at t. The mean of P over the groups is the share of them that is there, the mean of the tokens their
part of the reader's work. Starts are those of any replica (`flowrl.cost.occupancy`), and steps go
on until the last one ends (`flowrl.cost.replicas`); they become seconds by `Estimate.clock`, so the
profile is of the same engine as the rollout's time.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from flowrl.cost.lengths import Lengths, quantiles
from flowrl.cost.occupancy import EngineBatch, Occupancy
from flowrl.cost.replicas import on_replicas
from flowrl.cost.spread import Floats

POINTS = 16
"""Equal parts of the groups that a profile tells of."""

STEPS = 64
"""Equal parts of the steps at which it is asked how many groups are there."""

MOST_GROUPS = 32
"""Of one engine; of more, these stand for all."""

MOST_MEMBERS = 4
"""Starts that are told apart in a group."""

QUANTILES = 512

CLOCK_PARTS = 32

_PARTS = np.linspace(0.0, 1.0, CLOCK_PARTS + 1)

AGES = 1024
"""Equal parts of the longest response in which the age of a sample is told."""


def clock_of(pieces: Occupancy, seconds: Floats, entering: float) -> tuple[float, ...]:
    """Shares of the seconds that have passed after equal parts of the decode steps.

    Args:
        entering: Share of the seconds in which prompts enter; where all samples start together, it
            comes first.
    """
    passed = np.zeros(CLOCK_PARTS + 1)
    for run in pieces.runs:
        steps, took = pieces.steps[run].cumsum(), seconds[run].cumsum()
        # Before the first end, time passes with steps.
        first = np.minimum(_PARTS * (steps[-1] / steps[0]), 1.0) * took[0]
        passed += np.maximum(first, np.interp(_PARTS * steps[-1], steps, took, left=0.0)) / took[-1]
    passed /= len(pieces.runs)
    if len(pieces.runs) == 1:
        passed = entering + (1 - entering) * passed
    return tuple(passed.tolist())


def rollout_arrivals(
    clock: tuple[float, ...],
    *,
    replicas: int,
    samples: int,
    group_size: int,
    prompt_tokens: float,
    lengths: Lengths,
    slots: int,
    kv_tokens: int,
) -> tuple[tuple[float, float], ...]:
    """For each sixteenth of the groups, as they become complete: the share of the rollout's time
    until they are there, and the share of all tokens that they have.

    Args:
        clock: Of the rollout's estimate.

    Raises:
        PlanError: the cache does not hold the longest sample, or there are no slots.
    """
    batch = EngineBatch(
        replicas=replicas,
        samples=samples,
        group_size=group_size,
        prompt_tokens=prompt_tokens,
        slots=slots,
        kv_tokens=kv_tokens,
    )
    engine = on_replicas(lengths, batch).pieces
    steps, tokens = _completions(engine, lengths, group_size, float(prompt_tokens))
    parts = np.linspace(0.0, 1.0, len(clock))
    ready = np.maximum.accumulate(np.interp(steps, parts, clock))
    return tuple(zip(ready.tolist(), tokens.tolist(), strict=True))


@lru_cache(maxsize=512)
def _completions(
    engine: Occupancy, lengths: Lengths, group_size: int, prompt_tokens: float
) -> tuple[Floats, Floats]:
    """At each part of the groups: shares of the steps and of the tokens, `[POINTS]` each."""
    wanted = np.arange(1, POINTS + 1) / POINTS
    found = np.zeros((2, POINTS))
    for run, starts in zip(engine.runs, engine.starts, strict=True):
        total = float(engine.steps[run].sum())
        at = np.linspace(0.0, total, STEPS + 1)
        members, each = _members(engine, starts, group_size)
        there, tokens = _there(lengths, at[:, None, None] - members, each, prompt_tokens)
        there[-1] = tokens[-1] = 1.0  # with the last sample, whatever was expected of it
        # Rising, so that each share has one place; where nothing comes for a while, its end.
        place = np.interp(wanted, there + 1e-9 * np.arange(STEPS + 1), np.arange(STEPS + 1.0))
        place[-1] = STEPS
        found[0] += place / STEPS
        found[1] += np.interp(place, np.arange(STEPS + 1.0), tokens)
    found /= len(engine.runs)
    # Shares rise, and to 1: rounding may differ in the last digit.
    found = np.minimum(np.maximum.accumulate(found, axis=1), 1.0)
    found.setflags(write=False)
    return found[0], found[1]


def _members(engine: Occupancy, starts: Floats, group_size: int) -> tuple[Floats, float]:
    """Steps at which samples of groups start, `[groups, members]`; and samples a member."""
    if not starts.any():
        return np.zeros((1, 1)), float(group_size)
    rows = len(starts)
    span = min(rows, math.ceil(group_size / engine.samples_a_row))
    groups = min(MOST_GROUPS, max(1, rows * engine.samples_a_row // group_size))
    first = np.linspace(0, rows - span, groups).round().astype(np.int64)
    members = min(span, MOST_MEMBERS)
    beside = np.linspace(0, span - 1, members).round().astype(np.int64)
    # A longer queue has more groups, and the samples of each come as near to each other.
    offset = (starts[first[:, None] + beside] - starts[first, None]) / engine.stretch
    return starts[first, None] + offset, group_size / members


def _there(
    lengths: Lengths, age: Floats, each: float, prompt_tokens: float
) -> tuple[Floats, Floats]:
    """Shares of groups and tokens that are there, by the age of samples at each step.

    Args:
        age: `[steps, groups, members]`.
        each: Samples that a member stands for.
    """
    ended, mean = _by_age(lengths)
    at = np.clip(age * (AGES / lengths.maximum) + 1, 0, AGES + 1).astype(np.int64)
    whole = ended[at].prod(axis=2)
    if each != 1:
        whole **= each
    samples = each * age.shape[2]
    tokens = whole * (each * mean[at].sum(axis=2) + samples * prompt_tokens)
    full = samples * (lengths.mean + prompt_tokens)
    return whole.mean(axis=1), tokens.mean(axis=1) / full


@lru_cache(maxsize=64)
def _by_age(lengths: Lengths) -> tuple[Floats, Floats]:
    """For samples that did not start yet, and then by age in equal parts of the longest: the share
    that has ended, and the mean tokens of those."""
    middle = (np.arange(QUANTILES) + 0.5) / QUANTILES
    values = np.array(quantiles(lengths, middle.tolist()), np.float64)
    ages = np.arange(AGES + 1) * (lengths.maximum / AGES)
    ages[-1] = np.inf
    # Of quantiles that are equal, all have ended at that age; of others, they end on the way.
    count = np.searchsorted(values, ages, side="right")
    ended = np.interp(ages, values, middle + 0.5 / QUANTILES, left=0.0, right=1.0)
    ended = np.maximum(ended, count / QUANTILES)
    sums = np.concatenate([[0.0], values.cumsum()])[count]
    mean = np.divide(sums, count, out=np.zeros(AGES + 1), where=count > 0)
    mean *= lengths.mean / mean[-1]
    return np.concatenate([[0.0], ended]), np.concatenate([[0.0], mean])
