"""Delivered batches, and the row of a step that learns from some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowrl.ids import SampleId
from flowrl.sim.report import SimStep
from flowrl.sim.workload import GroupDraw


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A delivered batch.

    Attributes:
        delivered: Groups to learn from, in order.
        filtered: Groups that were filtered.
        ages: Publications that each delivered sample is behind, counted.
        of_samples: The same of each delivered or filtered sample.
    """

    delivered: Sequence[GroupDraw]
    filtered: Sequence[GroupDraw]
    ages: Mapping[int, int]
    of_samples: Mapping[SampleId, int] = field(default_factory=dict)


def step_row(
    number: int,
    version: int,
    begin_s: float,
    end_s: float,
    seconds: Mapping[str, float],
    batches: Sequence[Batch],
) -> SimStep:
    """The row of a step.

    Args:
        batches: That it learned from.
    """
    delivered = [group for batch in batches for group in batch.delivered]
    filtered = [group for batch in batches for group in batch.filtered]
    lengths = [n for group in (*delivered, *filtered) for n in group.lengths]
    return SimStep(
        step=number,
        version=version,
        begin_s=begin_s,
        wall_s=end_s - begin_s,
        seconds=seconds,
        num_samples=sum(len(group.lengths) for group in delivered),
        num_filtered=sum(len(group.lengths) for group in filtered),
        num_tokens=sum(lengths),
        length_max=max(lengths, default=0),
        ages=sum((Counter(batch.ages) for batch in batches), Counter()),
    )
