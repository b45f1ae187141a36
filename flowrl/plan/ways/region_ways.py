"""The ways of a task whose samples are episodes: those of its policy, each with the environment.

See `flowrl.plan.ways.regions` for what there is to choose, `flowrl.cost.episode_time` for the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from flowrl.cost.efficiency import PREFILL_CHUNK_TOKENS
from flowrl.cost.episode_time import Pace, PlayedEstimate, play
from flowrl.cost.episodes import CallSeconds, EnvironmentCost
from flowrl.cost.layout import Layout
from flowrl.cost.occupancy import EngineBatch
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.candidates import Candidates
from flowrl.plan.ways.pin_filter import Filter
from flowrl.plan.ways.regions import Played, Split, splits
from flowrl.plan.ways.tasks import Region, TaskWork

Drawn: TypeAlias = dict[tuple[str, int], tuple[Candidate, ...]]
"""Ways of a policy alone, by task and devices."""


def ways_of(
    made: Candidates,
    task: TaskWork,
    num_devices: int,
    only: Filter,
    *,
    shared: bool,
    counts: Sequence[int],
    drawn: Drawn,
) -> tuple[Candidate, ...]:
    """The ways to run a task on `num_devices` that fit the devices alone, fastest first.

    Args:
        shared: Another task holds the same parameters, so it matters in which form.
        counts: Sizes that blocks may have.
        drawn: What was found of policies alone, which is asked for again with other environments.
    """
    if task.region is None:
        return made.of_task(task, num_devices, only, shared=shared)
    found = list(
        region_ways(made, task, num_devices, only, shared=shared, counts=counts, drawn=drawn)
    )
    return made.worth_having(found, task, shared=shared)


def region_ways(
    made: Candidates,
    task: TaskWork,
    num_devices: int,
    only: Filter,
    *,
    shared: bool,
    counts: Sequence[int],
    drawn: Drawn,
) -> Iterator[Candidate]:
    """Those of a task of episodes, with its environment together and apart."""
    assert task.region is not None
    for split in splits(
        made.group,
        num_devices,
        counts,
        task.region.environment,
        outside=made.outside.get(task.id),
        sharers=task.region.sharers,
    ):
        if not only.takes_split(split):
            continue
        key = (task.id, split.policy)
        if key not in drawn:
            drawn[key] = made.of_task(task, split.policy, only, shared=shared)
        for drawing in drawn[key]:
            played = with_split(made, task, drawing, split)
            if played is not None:
                yield played


def like(
    made: Candidates, task: TaskWork, layout: Layout, only: Filter, way: Candidate
) -> Iterator[Candidate]:
    """All ways in one layout, with the environment where `way` has it."""
    for one in made.of_layout(task, layout, only):
        played = one if way.played is None else with_split(made, task, one, way.played.split)
        if played is not None:
            yield played


def with_split(
    made: Candidates, task: TaskWork, drawing: Candidate, split: Split
) -> Candidate | None:
    """A way to draw, with an environment; None where the devices or hosts do not hold both."""
    assert task.region is not None
    resident, peak = _bytes_with(drawing, split)
    host = drawing.host + split.host
    if peak > made.budget or not made.host_holds(host):
        return None
    calls = _calls(task.region, made)
    found = _play(made, task, task.region, drawing, split, calls)
    return replace(
        drawing,
        estimate=found.estimate,
        resident=resident,
        peak=peak,
        # Beside an environment its parameters are on other devices than a trainer's.
        weight_bytes=0 if split.own else drawing.weight_bytes,
        form=f"{drawing.form}{_beside(split)}",
        host=host,
        played=Played(
            split=split,
            calls=calls,
            policy_s=found.policy_s,
            environment_s=found.environment_s,
            bound=found.bound,
        ),
    )


def _bytes_with(drawing: Candidate, split: Split) -> tuple[int, int]:
    """Resident and peak bytes of the fullest device, with the environment where it is."""
    if split.elsewhere:  # `splits` has looked at those devices
        return drawing.resident, drawing.peak
    if split.own:
        return max(drawing.resident, split.nbytes), max(drawing.peak, split.nbytes)
    return drawing.resident + split.nbytes, drawing.peak + split.nbytes


def _beside(split: Split) -> str:
    """The devices of an environment alone, in the name of a way's form."""
    if split.elsewhere:
        return f", beside {split.elsewhere} {split.kind} of its environment"
    return f", beside {split.own} of its environment" if split.own else ""


def _play(
    made: Candidates,
    task: TaskWork,
    region: Region,
    drawing: Candidate,
    split: Split,
    calls: CallSeconds,
) -> PlayedEstimate:
    """What the episodes of a task take where a policy draws so and calls take so long."""
    options, cost, layout = made.options, made.cost, drawing.layout
    # The environment answers each of the policies, and an episode waits for all of it.
    step_s, wait_s = (region.players * seconds for seconds in (calls.step_s, calls.wait_s))
    where = (task.shape, layout, made.machine)
    first, last = options.prompt_tokens + 1, options.prompt_tokens + options.lengths.maximum
    return play(
        drawing.estimate,
        EngineBatch(
            replicas=layout.dp,
            samples=task.samples,
            group_size=task.group_size,
            prompt_tokens=options.prompt_tokens,
            slots=drawing.slots,
            kv_tokens=drawing.kv_tokens,
        ),
        pace=Pace(
            lambda rows, context: cost.decode_step(*where, batch=rows, context=context).seconds,
            drawing.slots,
            (first, last),
        ),
        chunk_s=cost.prefill(*where, rows=1, tokens=PREFILL_CHUNK_TOKENS).seconds,
        chunk_tokens=PREFILL_CHUNK_TOKENS,
        lengths=options.lengths,
        episodes=region.episodes.of_one(region.players, options.lengths),
        calls=replace(calls, step_s=step_s, wait_s=wait_s),
        at_once=split.at_once,
        takes_turns=split.takes_turns,
    )


def _calls(region: Region, made: Candidates) -> CallSeconds:
    """What calls take: what the configuration says, else what was measured."""
    if region.environment.calls is not None:
        return region.environment.calls
    measured = None
    if isinstance(made.cost, EnvironmentCost):
        measured = made.cost.environment(region.role)
    return CallSeconds(source="unknown") if measured is None else measured
