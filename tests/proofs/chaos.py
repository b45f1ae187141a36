"""Kills processes of real runs at random moments, and checks what becomes of the runs.

    python -m tests.proofs.chaos --kills 50 --seed 0 --executor ray

Each kill has a run of its own, of three small steps; its program, victim and moment are drawn from
the seed and the kill's number. The runs of one executor share one Ray cluster, but those whose
raylet is killed. Checked is:

- every run ends by itself, or does when it is resumed, in bounded time;
- of every sample that was offered, the log of samples has at most one end, and the scheduler has
  the rest (from the journal and samples.jsonl): none is consumed twice, none lost;
- synchronous runs (`single`, `episodes`) consume the same samples as a run that nobody disturbs,
  and end with the same weights, bit for bit; asynchronous ones (`async`) consume as many.

It prints a row for each kill. The exit code is 1 where anything of this does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.arguments import at_least_one
from flowrl.files import read_json_lines
from flowrl.rollout.events import PromptsOffered
from flowrl.rollout.journal import replay
from flowrl.runtime.checkpoint.journal import _joined, rollout_journals
from tests.proofs.chaos_run import MOMENTS, Order, Report
from tests.runtime.many_programs import games_of
from tests.runtime.tiny_runs import tiny_config
from tests.warm_processes import WarmProcesses

__all__ = ["Chaos", "Kill", "Outcome", "main"]

STEPS = 3
LIMIT_S = 400.0
"""Seconds in which a run ends, whatever happens to it."""
MAX_RESUMES = 2
TIMED_OUT = 124
PROGRAMS = ("single", "episodes", "async")
VICTIMS = {
    "local": ("driver", "engine", "scorer"),
    "ray": (
        "driver",
        "trainer actor",
        "engine actor",
        "scorer actor",
        "scorer of an actor",
        "environment actor",
        "raylet",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Whom to kill, and when; `share` is how far among all such moments of a run."""

    executor: str
    program: str
    victim: str
    moment: str
    share: float
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What followed a kill.

    Attributes:
        moment: The moment, with its number among all of its kind in an undisturbed run.
        killed: The process by name; "" if the run had none at that moment.
        followed: How the run's own process ended.
        weights: Whether they are those of an undisturbed run; None if that is not promised.
        violations: What should not be.
    """

    kill: Kill
    number: int
    moment: str
    killed: str
    followed: str
    restarts: int
    resumes: int
    consumed: int
    lost: int
    twice: int
    weights: bool | None
    violations: tuple[str, ...]
    seconds: float

    def row(self) -> str:
        equal = {True: "equal", False: "DIFFER", None: "-"}[self.weights]
        kill = self.kill
        return (
            f"{self.number:4d} {kill.executor:5} {kill.program:8} {kill.victim:18} "
            f"{self.moment:17} {self.restarts:8d} {self.resumes:7d} {self.consumed:8d} "
            f"{self.lost:4d} {self.twice:5d} {equal:7} {self.seconds:6.1f}  {self.followed}"
            + "".join(f"\n     VIOLATION: {text}" for text in self.violations)
        )


HEADER = (
    "kill where program  victim             moment            restarts resumes consumed lost twice "
    "weights seconds  what followed"
)


def drawn(seed: int, number: int, executor: str) -> Kill:
    """Returns a kill of the series that the seed has."""
    choice = random.Random(f"chaos/{seed}/{number}")
    victim = choice.choice(VICTIMS[executor])
    # Episodes have neither scorers nor engines in processes of their own.
    everywhere = ("driver", "trainer actor", "raylet")
    others = PROGRAMS if victim in everywhere else ("single", "async")
    program = "episodes" if victim == "environment actor" else choice.choice(others)
    moments = [name for name in MOMENTS if program != "episodes" or name != "scoring"]
    return Kill(
        executor=executor,
        program=program,
        victim=victim,
        moment=choice.choice(moments),
        share=choice.random(),
        choice=choice.randrange(8),
    )


def config_of(program: str, executor: str, runs: Path) -> dict[str, Any]:
    """Returns the configuration of a run of three steps, with a checkpoint after each."""
    if program == "episodes":
        config = games_of(runs)
        config["roles"] = {name: config["roles"][name] for name in ("actor", "game")}
    else:
        config = {**tiny_config(runs), "stage": {}}
        del config["roles"]["reference"]
        config["roles"]["actor"]["num_engines"] = 2
    if program == "async":
        config |= {"stages": ["async_grpo"], "args": {}}
        config["train"] = {**config["train"], "max_staleness": 1}
    else:
        workflow = program
        if program == "ranks":  # as `single`, with a trainer of two processes
            workflow = "single"
            config["roles"]["actor"]["ranks"] = 2
        file = Path(__file__).with_name("chaos_programs.py")
        config |= {"stages": [workflow], "workflow": f"{file}:{workflow}", "args": {}}
    config["train"] = {**config["train"], "steps": STEPS, "prompts_per_step": 4}
    config["eval"] = {**config["eval"], "every": 0, "num": 2}
    config["rewards"] = {**config["rewards"], "timeout_s": 20.0} if config["rewards"] else {}
    if program == "episodes":
        config["roles"]["game"]["timeout_s"] = 20.0
    config["runtime"] = {"runs": str(runs), "checkpoint_every": 1, "stall_timeout_s": 180.0}
    return {**config, "executor": executor, "name": program}


class Chaos:
    """Runs kills one after the other, in folders below one of its own."""

    def __init__(self, warm: WarmProcesses, folder: Path) -> None:
        self._warm = warm
        self._folder = folder
        self._undisturbed: dict[tuple[str, str], tuple[Path, Report]] = {}
        self._number = 0
        self.address: dict[str, str] = {}

    def undisturbed(self, executor: str, program: str) -> tuple[Path, Report]:
        """Returns folder and report of a run that nobody disturbs."""
        if (executor, program) not in self._undisturbed:
            runs = self._folder / f"undisturbed-{executor}"
            order = Order(
                folder=str(runs / program),
                report=str(self._folder / f"undisturbed-{executor}-{program}.json"),
                config=config_of(program, executor, runs),
            )
            code, text = self._run(order, shared=True)
            if code:
                raise SystemExit(f"the undisturbed run of {program} failed:\n{text}")
            self._undisturbed[executor, program] = runs / program, _report(order)
        return self._undisturbed[executor, program]

    def kill(self, kill: Kill) -> Outcome:
        """Makes a run with a kill in it, resumes it as often as needed, and checks it."""
        self._number += 1
        expected, counted = self.undisturbed(kill.executor, kill.program)
        runs = self._folder / str(self._number)
        total = counted.moments[kill.moment]
        order = Order(
            folder=str(runs / kill.program),
            report=str(self._folder / f"{self._number}.json"),
            config=config_of(kill.program, kill.executor, runs),
            victim=kill.victim,
            moment=kill.moment,
            number=1 + int(kill.share * total),
            choice=kill.choice,
        )
        began, shared = time.monotonic(), kill.victim != "raylet"
        code, text = self._run(order, shared)
        report = _report(order)
        while not (code or report.killed) and order.number > 1:
            # Runs differ in how often they come to a moment, so that the last may not be there.
            shutil.rmtree(runs)
            order = replace(order, number=order.number // 2)
            code, text = self._run(order, shared)
            report = _report(order)
        followed, violations = _ending(code, report, text), []
        if not report.killed:
            violations.append(f"it ended before the kill: {text[-300:]}")
        resumes = 0
        restarts = report.restarts
        run = Path(order.folder)
        while code and resumes < MAX_RESUMES:
            resumes += 1
            again = replace(order, victim="", report=f"{order.report}.{resumes}", config=None)
            if not (run / "config.yaml").exists():
                again = replace(again, config=order.config)
            code, text = self._run(again, shared)
            restarts += _report(again).restarts
        if code:
            violations.append(f"it does not end: {_ending(code, _report(order), text)}")
            found = (0, 0, 0)
            weights = None
        else:
            found = _accounts(run)
            weights = None
            if kill.program != "async":
                weights = _weights(run) == _weights(expected)
                if _samples(run) != _samples(expected):
                    violations.append("other samples were consumed than in the undisturbed run")
            elif found[0] != _accounts(expected)[0]:
                violations.append(f"{found[0]} samples consumed, {_accounts(expected)[0]} expected")
        consumed, lost, twice = found
        if lost or twice:
            violations.append(f"{lost} samples lost, {twice} consumed twice")
        if weights is False:
            violations.append("the weights differ from those of the undisturbed run")
        if not violations:
            shutil.rmtree(runs, ignore_errors=True)
        return Outcome(
            kill=kill,
            number=self._number,
            moment=f"{kill.moment} {order.number}/{total}",
            killed=report.killed,
            followed=followed,
            restarts=restarts,
            resumes=resumes,
            consumed=consumed,
            lost=lost,
            twice=twice,
            weights=weights,
            violations=tuple(violations),
            seconds=round(time.monotonic() - began, 1),
        )

    def _run(self, order: Order, shared: bool) -> tuple[int, str]:
        """Returns the exit code of a run's process, and what it printed."""
        Path(order.folder).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile("w+") as output, _environment(self.address if shared else {}):
            process = self._warm.start(
                "tests.proofs.chaos_run",
                [json.dumps(asdict(order))],
                streams=(subprocess.DEVNULL, output, output),
            )
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = TIMED_OUT
            finally:
                process.kill()
            output.seek(0)
            return code, output.read()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _report(order: Order) -> Report:
    path = Path(order.report)
    return Report(**json.loads(path.read_text())) if path.exists() else Report()


def _ending(code: int, report: Report, text: str) -> str:
    if code == 0:
        return "the run went on"
    if code == -9:
        return "died, resumed"
    if code == TIMED_OUT:
        return f"did not end in {LIMIT_S:g} s: {text[-300:]}"
    return " ".join(report.error.split())[:200] or f"exit code {code}: {text[-300:]}"


def _samples(run: Path) -> list[str]:
    rows = read_json_lines(run / "samples.jsonl")
    return sorted(f"{row['step']} {row['sample']} {row['response']} {row['end']}" for row in rows)


def _weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def _accounts(run: Path) -> tuple[int, int, int]:
    """Returns how many samples were consumed, are lost, and have more ends than one."""
    rows = list(read_json_lines(run / "samples.jsonl"))
    ends = Counter(str(row["sample"]) for row in rows)
    (files,) = rollout_journals(run)
    journal = _joined(files.files)
    size = journal.open().settings.num_members
    offered = {
        f"{group}/{member}"
        for event in journal.events
        if isinstance(event, PromptsOffered)
        for group in event.groups
        for member in range(size)
    }
    counts = replay(journal).counts
    assert counts.conserved
    by_end = Counter(row["end"] for row in rows)
    # Filtered ones are reported with the next batch.
    waiting = counts.live + counts.filtered - by_end["filtered"]
    lost = len(offered - set(ends)) - waiting
    return by_end["consumed"], abs(lost), sum(number > 1 for number in ends.values())


@contextmanager
def _cluster(chaos: Chaos) -> Iterator[None]:
    """One cluster for all runs; they join it as any other."""
    from flowrl.runtime.ray.cluster import RayCluster

    cluster = RayCluster()
    import ray

    chaos.address = {
        name: os.environ[name]
        for name in os.environ
        if name.startswith("RAY_") and name != "RAY_ADDRESS"
    } | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    try:
        yield
    finally:
        cluster.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=at_least_one, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--executor", choices=["local", "ray"], default="ray")
    parser.add_argument(
        "--only", type=at_least_one, nargs="+", help="the kills of these numbers alone"
    )
    options = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    outcomes: list[Outcome] = []
    folder = Path(tempfile.mkdtemp(prefix="flowrl-chaos-"))
    with closing(WarmProcesses()) as warm:
        chaos = Chaos(warm, folder)
        print(HEADER, flush=True)
        with _cluster(chaos) if options.executor != "local" else nullcontext():
            for number in range(1, options.kills + 1):
                if number not in (options.only or [number]):
                    continue
                outcome = chaos.kill(drawn(options.seed, number, options.executor))
                outcome = replace(outcome, number=number)
                outcomes.append(outcome)
                print(outcome.row(), flush=True)
    violated = [outcome.number for outcome in outcomes if outcome.violations]
    if violated:
        print(f"violations in kills {violated}; their runs are in {folder}")
        return 1
    shutil.rmtree(folder)
    print(f"{len(outcomes)} kills, no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
