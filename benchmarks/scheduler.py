"""How fast the rollout scheduler is, and how much memory a sample takes.

    python benchmarks/scheduler.py [--in-flight 1000 10000 100000] [--output FILE]

So many samples are in flight at once (offered and not yet consumed), in groups of 8 on engines
that hold half of them. Each round every engine reports progress of all it runs, ends a part of
them, and their scores and verdicts come back; batches are asked for as they fill. The validator is
off. Two sets of rules:

- `default`: everything that is offered is admitted; no publication.
- `policies`: age budget, spare members, longest first, weighted shares of two sources, quarantine,
  deadlines and repacking all at once, and a publication for each batch.

A lifecycle event is one transition of one sample; a sample that nothing goes wrong with has six
(admitted, running, generated, scoring, ready, consumed). Progress reports are counted apart. Time
is the processor time of `step` alone; `with_caller` adds making the events and reading the actions.

The baseline is measured in the same run, on the same numbers of samples: `bare_dicts` moves each
sample's name through six dictionaries, one for each state, and does nothing else. No scheduler in
Python that knows each sample's state can do less; `ratio_to_bare_dicts` is what the rules cost.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
import tracemalloc
from collections import deque
from itertools import pairwise
from pathlib import Path

from arguments import json_file
from flowrl.files import write_result
from flowrl.ids import EngineId, GroupId, SampleId, group_id, sample_id
from flowrl.rollout.actions import (
    Abort,
    ContinueEngine,
    Deliver,
    Dispatch,
    Judge,
    NeedPrompts,
    PauseEngine,
    Score,
    Submit,
)
from flowrl.rollout.events import (
    BatchAsked,
    EngineJoined,
    Event,
    GroupsJudged,
    Progressed,
    PromptsOffered,
    SampleEnd,
    SamplesFinished,
    SamplesScored,
    WeightsPublished,
)
from flowrl.rollout.policies.engines import LongestFirst, Quarantine, RepackTail
from flowrl.rollout.policies.limits import Patience
from flowrl.rollout.policies.prompts import AgeBudget, OverSampling, WeightedShares
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.specs import FinishReason

GROUP_SIZE = 8
NUM_ENGINES = 16
NUM_TOKENS = 64
STALENESS = 4
SOURCES = ("math", "code")


def default_rules(num_groups: int) -> SchedulerSettings:
    """Rules of a run that offers everything itself."""
    return SchedulerSettings(group_size=GROUP_SIZE, max_staleness=STALENESS, judges_groups=True)


def all_policies(num_groups: int) -> SchedulerSettings:
    """Rules that use every policy that a healthy run can use at once."""
    return SchedulerSettings(
        group_size=GROUP_SIZE - 1,
        max_staleness=STALENESS,
        judges_groups=True,
        refill=True,
        admission=AgeBudget(groups=max(1, num_groups // (STALENESS + 1))),
        over_sampling=OverSampling(members=1),
        order=LongestFirst(),
        fairness=WeightedShares(shares=tuple((source, 1.0) for source in SOURCES)),
        quarantine=Quarantine(),
        patience=Patience(heartbeat_s=1e6, stall_s=1e6),
        repack=RepackTail(),
    )


RULES = {"default": default_rules, "policies": all_policies}


class Load:
    """Keeps a scheduler full of samples."""

    def __init__(self, rules: str, in_flight: int, end_batch: int) -> None:
        self.num_groups = in_flight // GROUP_SIZE
        self.scheduler = RolloutScheduler(RULES[rules](self.num_groups))
        budget = self.scheduler.settings.budget
        self.batch_groups = budget.groups if budget else max(1, self.num_groups // 16)
        self.publishes = budget is not None
        self.end_batch = end_batch
        self.running: dict[EngineId, deque[tuple[Dispatch, int]]] = {}
        self.gone: set[SampleId] = set()  # aborted
        self.scores: list[SampleId] = []
        self.judges: list[GroupId] = []
        self.next_id = 0
        self.next_group = 0
        self.version = 0
        self.untrained = 0
        self.step_s = 0.0
        self.num_consumed = 0
        self.num_progress = 0
        for number in range(NUM_ENGINES):
            engine = EngineId(f"engine[{number}]")
            self.running[engine] = deque()
            capacity = max(1, in_flight // 2 // NUM_ENGINES)
            self.tell(EngineJoined(id=self._id(), engine=engine, capacity=capacity))
        if budget is None:
            self.offer(self.num_groups)

    def _id(self) -> int:
        self.next_id += 1
        return self.next_id

    def offer(self, num_groups: int, source: str = "") -> None:
        """Offers fresh groups."""
        numbers = range(self.next_group, self.next_group + num_groups)
        self.next_group += num_groups
        groups = tuple(group_id(n // 10_000, n % 10_000) for n in numbers)
        self.tell(PromptsOffered(id=self._id(), groups=groups, source=source))

    def tell(self, event: Event) -> None:
        """Steps one event, timed, and remembers what the actions ask for."""
        began = time.process_time()
        actions = self.scheduler.step(event)
        self.step_s += time.process_time() - began
        for action in actions:
            if isinstance(action, Submit):
                self.running[action.engine].extend((d, self.version) for d in action.samples)
            elif isinstance(action, Score):
                self.scores += action.samples
            elif isinstance(action, Judge):
                self.judges += action.groups
            elif isinstance(action, Abort):
                self.gone.update(action.samples)
            elif isinstance(action, Deliver):
                self.num_consumed += sum(len(group.samples) for group in action.groups)
                self.untrained += 1
                if not self.publishes:
                    self.offer(len(action.groups))
            elif isinstance(action, NeedPrompts):
                self.offer(action.groups, action.source)
            else:
                assert not isinstance(action, PauseEngine | ContinueEngine), action

    def round(self) -> None:
        """One report of each engine, and what comes of it."""
        for engine in self.running:
            self._report(engine)
            if self.scores:
                scores = tuple((name, 1.0) for name in self.scores)
                self.scores.clear()
                self.tell(SamplesScored(id=self._id(), scores=scores))
            if self.judges:
                verdicts = tuple((name, None) for name in self.judges)
                self.judges.clear()
                self.tell(GroupsJudged(id=self._id(), verdicts=verdicts))
            if self.publishes and self.untrained:
                self.untrained -= 1
                self.version += 1
                self.tell(WeightsPublished(id=self._id(), version=self.version))
            if not self.scheduler.state.waiting:
                self.tell(BatchAsked(id=self._id(), batch=self.next_id, groups=self.batch_groups))

    def _report(self, engine: EngineId) -> None:
        running = self.running[engine]
        progress = tuple((d.sample, d.attempt, NUM_TOKENS // 2) for d, _ in running)
        self.num_progress += len(progress)
        self.tell(Progressed(id=self._id(), engine=engine, progress=progress))
        ends = tuple(
            SampleEnd(
                sample=dispatch.sample,
                attempt=dispatch.attempt,
                reason=FinishReason.STOP,
                num_tokens=NUM_TOKENS,
                versions=((version, NUM_TOKENS),),
            )
            for dispatch, version in (
                running.popleft() for _ in range(min(self.end_batch, len(running)))
            )
            if dispatch.sample not in self.gone
        )
        if ends:
            self.tell(SamplesFinished(id=self._id(), engine=engine, ends=ends))


def measure_speed(rules: str, in_flight: int, num_samples: int) -> dict[str, float]:
    """Events a second while so many samples are in flight."""
    load = Load(rules, in_flight, end_batch=max(1, in_flight // 2 // NUM_ENGINES // 4))
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
    """Transitions made so far, from the counts: a sample's state says how many it had at least."""
    counts = load.scheduler.counts
    return (
        counts.queued
        + 2 * counts.running
        + 4 * counts.scoring
        + 5 * counts.ready
        + 6 * counts.consumed
        + 2 * counts.dropped  # spare members: admitted, and dropped wherever they were
    )


def measure_baseline(in_flight: int, num_samples: int) -> int:
    """Moves a second of names through six dictionaries, with so many names in them."""
    admitted, running, generated, scoring, ready, consumed = ({} for _ in range(6))
    states: list[dict[SampleId, None]] = [admitted, running, generated, scoring, ready, consumed]
    names = [
        sample_id(group_id(0, number), member)
        for number in range(-(-(in_flight + num_samples) // GROUP_SIZE))
        for member in range(GROUP_SIZE)
    ]
    admitted.update(dict.fromkeys(names[:in_flight]))
    gc.collect()
    began = time.process_time()
    for name, moving in zip(names[in_flight : in_flight + num_samples], names, strict=False):
        admitted[name] = None
        for before, after in pairwise(states):
            del before[moving]
            after[moving] = None
    return round(num_samples * len(states) / (time.process_time() - began))


def measure_memory(rules: str, in_flight: int) -> float:
    """Bytes of Python objects for each sample in flight, half of them running."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    load = Load(rules, in_flight, end_batch=max(1, in_flight // 2 // NUM_ENGINES // 4))
    load.running.clear()
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / load.scheduler.counts.live


def measure_row(rules: str, in_flight: int, num_samples: int, repeats: int) -> dict[str, object]:
    """Scheduler and baseline in turns; the best of each is kept, because others only slow down."""
    runs, baselines = [], []
    for _ in range(repeats):
        runs.append(measure_speed(rules, in_flight, num_samples))
        baselines.append(measure_baseline(in_flight, num_samples))
    best = max(runs, key=lambda run: run["lifecycle_events_per_s"])
    return {
        "rules": rules,
        "in_flight": in_flight,
        **best,
        "all_runs_events_per_s": [run["lifecycle_events_per_s"] for run in runs],
        "bare_dicts_events_per_s": max(baselines),
        "ratio_to_bare_dicts": round(best["lifecycle_events_per_s"] / max(baselines), 3),
        "bytes_per_sample": round(measure_memory(rules, in_flight)),
    }


def main() -> None:
    """Prints and writes one row for each set of rules and number in flight."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--in-flight", type=int, nargs="+", default=[1_000, 3_000, 10_000, 30_000, 100_000]
    )
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--samples", type=int, default=60_000, help="consumed in each run")
    parser.add_argument("--repeats", type=int, default=2, help="the best of so many is kept")
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=json_file, default=str(results / "scheduler.json"))
    options = parser.parse_args()
    rows = []
    for rules in options.rules:
        for in_flight in options.in_flight:
            row = measure_row(rules, in_flight, options.samples, options.repeats)
            print(json.dumps(row), flush=True)
            rows.append(row)
    machine = f"{platform.machine()}, Python {platform.python_version()}, one core"
    write_result(options.output, json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
