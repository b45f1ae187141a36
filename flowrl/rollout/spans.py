"""Version spans: which weights made which tokens of a sample."""

from __future__ import annotations

from typing import TypeAlias

from flowrl.errors import SchedulerError
from flowrl.rollout.events import SampleEnd

__all__ = ["Spans", "attempt_spans", "joined"]

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""`(version, tokens)` in the order of tokens; neighbours have different versions."""


def attempt_spans(end: SampleEnd, kept_tokens: int) -> tuple[Spans, int]:
    """The spans of an attempt that began after `kept_tokens`, and how many tokens they are.

    Raises:
        SchedulerError: they do not add up.
    """
    spans, new_tokens = end.versions, end.num_tokens - kept_tokens
    if (
        new_tokens < 0
        or sum(count for _, count in spans) != new_tokens
        or (len(spans) > 1 and min(count for _, count in spans) < 1)
    ):
        raise SchedulerError(
            "an attempt's version spans do not add up to its tokens",
            where=f"sample {end.sample}, attempt {end.attempt}",
            found=f"{end.num_tokens} tokens in all, spans {spans}",
            expected=f"spans of {new_tokens} tokens beside the {kept_tokens} kept ones",
            hint="the engine reports the versions of this attempt's own tokens",
        )
    return spans, new_tokens


def joined(first: Spans, second: Spans) -> Spans:
    """Spans one after the other; neighbours of one version become one.

    >>> joined(((0, 5), (1, 2)), ((1, 3), (2, 1)))
    ((0, 5), (1, 5), (2, 1))
    """
    if first[-1][0] != second[0][0]:
        return first + second
    version, count = first[-1]
    return (*first[:-1], (version, count + second[0][1]), *second[1:])
