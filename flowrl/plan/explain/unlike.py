"""What sets two schedules apart that have the same layouts on the same numbers of devices."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.plan.assign import schedule_step
from flowrl.plan.many import Chosen
from flowrl.plan.many_form import ScheduleStep
from flowrl.plan.names import cache_words
from flowrl.plan.ways.candidate import Candidate


def unlike(one: Chosen, other: Chosen) -> str:
    """`actor.update recomputes full; 4 chunks`: what the first has otherwise than the second."""
    words = list(_ways(one, other))
    mine, its = (schedule_step(each.posed.problem, each.schedule) for each in (one, other))
    if list(_chunks(mine)) != list(_chunks(its)):
        words.append(" and ".join(map(str, _chunks(mine))) + " chunks")
    elif _shape(mine) != _shape(its):
        words.append(_shape(mine))
    if not words and one.numbers != other.numbers:
        words.append("on other devices")
    return "; ".join(words) or "in another order"


def _ways(one: Chosen, other: Chosen) -> Iterator[str]:
    for name, way in one.ways.items():
        before = other.ways.get(name)
        if before is not None:
            yield from (f"{name} {words}" for words in _of_way(way, before))


def _of_way(way: Candidate, before: Candidate) -> Iterator[str]:
    if way.recompute != before.recompute:
        yield "recomputes nothing" if way.recompute == "none" else f"{way.recompute} recompute"
    if way.offload != before.offload:
        yield f"offload {'+'.join(way.offload) or 'none'}"
    if way.micro_tokens != before.micro_tokens:
        yield f"micro-batches of {way.micro_tokens:,} tokens"
    if (way.kv_tokens, way.slots) != (before.kv_tokens, before.slots):
        yield cache_words(way.kv_tokens, way.slots)
    split = None if way.played is None else way.played.split
    if split is not None and before.played is not None and split != before.played.split:
        yield f"environment {split.mode}"


def _chunks(step: ScheduleStep) -> Iterator[int]:
    """Of each step whose parts work at once."""
    if step.kind == "spatial":
        yield step.chunks
    for part in step.parts:
        yield from _chunks(part)


def _shape(step: ScheduleStep) -> str:
    """The tree in a line: `temporal(actor.generate, reference.logprobs)`."""
    if step.node is not None:
        return step.node
    return f"{step.kind}({', '.join(map(_shape, step.parts))})"
