"""How fast the rollout scheduler is, and how much memory a sample takes.

    python benchmarks/scheduler.py [--in-flight 1000 10000 100000] [--output FILE]

So many samples are in flight at once (offered and not yet consumed), in groups of 8 on engines
that hold half of them. Each round one engine reports progress of all it runs, ends a part of them,
and their scores come back; batches are asked for as they fill. The validator is off.

A lifecycle event is one transition of one sample; a sample that nothing goes wrong with has six
(admitted, running, generated, scoring, ready, consumed). Progress reports are counted apart. Time
is the processor time of `step` alone; `with_caller` adds making the events and reading the actions.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
import tracemalloc
from collections import deque
from pathlib import Path

from flowrl.ids import EngineId, GroupId, SampleId, group_id
from flowrl.rollout import (
    BatchAsked,
    Deliver,
    Dispatch,
    EngineJoined,
    Event,
    GroupsJudged,
    Judge,
    Progressed,
    PromptsOffered,
    RolloutScheduler,
    SampleEnd,
    SamplesFinished,
    SamplesScored,
    SchedulerSettings,
    Score,
    Submit,
)
from flowrl.specs import FinishReason

GROUP_SIZE = 8
NUM_ENGINES = 16
NUM_TOKENS = 64


class Load:
    """Keeps a scheduler full of samples."""

    def __init__(self, in_flight: int, end_batch: int) -> None:
        self.scheduler = RolloutScheduler(
            SchedulerSettings(group_size=GROUP_SIZE, max_staleness=4, judges_groups=True)
        )
        self.num_groups = in_flight // GROUP_SIZE
        self.end_batch = end_batch
        self.running: dict[EngineId, deque[Dispatch]] = {}
        self.scores: list[SampleId] = []
        self.judges: list[GroupId] = []
        self.next_id = 0
        self.next_group = 0
        self.step_s = 0.0
        self.num_consumed = 0
        self.num_progress = 0
        for number in range(NUM_ENGINES):
            engine = EngineId(f"engine[{number}]")
            self.running[engine] = deque()
            capacity = max(1, in_flight // 2 // NUM_ENGINES)
            self.tell(EngineJoined(id=self._id(), engine=engine, capacity=capacity))
        self.offer(self.num_groups)

    def _id(self) -> int:
        self.next_id += 1
        return self.next_id

    def offer(self, num_groups: int) -> None:
        """Offers fresh groups."""
        groups = range(self.next_group, self.next_group + num_groups)
        self.next_group += num_groups
        self.tell(PromptsOffered(id=self._id(), groups=tuple(group_id(0, n) for n in groups)))

    def tell(self, event: Event) -> None:
        """Steps one event, timed, and remembers what the actions ask for."""
        began = time.process_time()
        actions = self.scheduler.step(event)
        self.step_s += time.process_time() - began
        for action in actions:
            if isinstance(action, Submit):
                self.running[action.engine].extend(action.samples)
            elif isinstance(action, Score):
                self.scores += action.samples
            elif isinstance(action, Judge):
                self.judges += action.groups
            elif isinstance(action, Deliver):
                consumed = sum(len(group.samples) for group in action.groups)
                self.num_consumed += consumed
                self.offer(len(action.groups))

    def round(self) -> None:
        """One report of each engine, and what comes of it."""
        for engine, running in self.running.items():
            progress = tuple((d.sample, d.attempt, NUM_TOKENS // 2) for d in running)
            self.num_progress += len(progress)
            self.tell(Progressed(id=self._id(), engine=engine, progress=progress))
            ends = tuple(
                SampleEnd(
                    sample=dispatch.sample,
                    attempt=dispatch.attempt,
                    reason=FinishReason.STOP,
                    num_tokens=NUM_TOKENS,
                    versions=((0, NUM_TOKENS),),
                )
                for dispatch in (
                    running.popleft() for _ in range(min(self.end_batch, len(running)))
                )
            )
            if ends:
                self.tell(SamplesFinished(id=self._id(), engine=engine, ends=ends))
            if self.scores:
                scores = tuple((name, 1.0) for name in self.scores)
                self.scores.clear()
                self.tell(SamplesScored(id=self._id(), scores=scores))
            if self.judges:
                verdicts = tuple((name, None) for name in self.judges)
                self.judges.clear()
                self.tell(GroupsJudged(id=self._id(), verdicts=verdicts))
            if not self.scheduler.state.waiting:
                groups = max(1, self.num_groups // 16)
                self.tell(BatchAsked(id=self._id(), batch=self.next_id, groups=groups))


def measure_speed(in_flight: int, num_samples: int) -> dict[str, float]:
    """Events a second while so many samples are in flight."""
    load = Load(in_flight, end_batch=max(1, in_flight // 2 // NUM_ENGINES // 4))
    for _ in range(6):
        load.round()
    gc.collect()
    before, load.step_s, load.num_progress = _transitions(load), 0.0, 0
    consumed = load.num_consumed
    began = time.process_time()
    while load.num_consumed - consumed < num_samples:
        load.round()
    total_s = time.process_time() - began
    events = _transitions(load) - before
    return {
        "lifecycle_events": events,
        "lifecycle_events_per_s": round(events / load.step_s),
        "lifecycle_events_per_s_with_caller": round(events / total_s),
        "progress_reports_per_lifecycle_event": round(load.num_progress / events, 2),
        "samples_per_s": round((load.num_consumed - consumed) / load.step_s),
    }


def _transitions(load: Load) -> int:
    """Transitions made so far, from the counts: a sample's state says how many it had."""
    counts = load.scheduler.counts
    return (
        counts.queued
        + 2 * counts.running
        + 4 * counts.scoring
        + 5 * counts.ready
        + 6 * counts.consumed
    )


def measure_memory(in_flight: int) -> float:
    """Bytes of Python objects for each sample in flight, half of them running."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    load = Load(in_flight, end_batch=max(1, in_flight // 2 // NUM_ENGINES // 4))
    load.running.clear()
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / load.scheduler.counts.live


def main() -> None:
    """Prints and writes one row for each number in flight."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--samples", type=int, default=100_000, help="consumed in each row")
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many is kept")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "scheduler.json"
    )
    options = parser.parse_args()
    rows = []
    for in_flight in options.in_flight:
        runs = [measure_speed(in_flight, options.samples) for _ in range(options.repeats)]
        best = max(runs, key=lambda run: run["lifecycle_events_per_s"])
        row = {
            "in_flight": in_flight,
            **best,
            "all_runs_events_per_s": [run["lifecycle_events_per_s"] for run in runs],
            "bytes_per_sample": round(measure_memory(in_flight)),
        }
        print(json.dumps(row))
        rows.append(row)
    machine = f"{platform.machine()}, Python {platform.python_version()}, one core"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
