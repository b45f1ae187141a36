"""The local executor: runs compiled stages on this machine, in one process and its scorers.

    prepare data and models -> open workers -> for each stage: steps, evaluations, checkpoints
    -> export the model, write summary.json

A run lives in its run folder. Everything that decides what comes next (weights, optimizer, random
state, data cursor, scheduler, counters) is in a checkpoint, so a run that goes on from one ends
with the same weights, bit for bit, as one that was never stopped.

With `executor=eager` the same stages are run line by line (`flowrl.runtime.eager.stage`), with all
else as it is. A person may sit at a breakpoint for hours, so nothing watches the time then.

Ctrl-C, or SIGTERM, ends a run with a checkpoint of the last step boundary: a rollout that is under
way is given up (it changed no weights), an update is finished. A second one ends at once, without.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import yaml

from flowrl.compiler import CompiledStage
from flowrl.config.schema import RunConfig
from flowrl.errors import ConfigError, RewardError
from flowrl.graph import Op, format_graph, graph_to_json
from flowrl.observe.display import Display, PlainDisplay, TimeToGo, open_display
from flowrl.observe.rows import RunInfo, Summary
from flowrl.observe.run_folder import RunFolder
from flowrl.observe.run_status import RunStatus
from flowrl.observe.run_text import go_on_text
from flowrl.observe.trackers import TrackerContext, Trackers
from flowrl.runtime.checkpoint.run_files import InputFiles
from flowrl.runtime.checkpoint.store import (
    Checkpoint,
    CheckpointInterval,
    CheckpointStore,
    FileEntries,
    Position,
)
from flowrl.runtime.driver.run_summary import RunTotals, StepWarnings, ended_at
from flowrl.runtime.driver.sources import BatchNotFilled
from flowrl.runtime.driver.stage import Stage
from flowrl.runtime.driver.step_report import StepResult
from flowrl.runtime.driver.threads import Watchdog
from flowrl.runtime.executor import executor_of
from flowrl.runtime.setup.open_run import OpenRun
from flowrl.runtime.setup.user_inputs import RunInputs
from flowrl.runtime.spans import DRIVER, SPANS
from flowrl.runtime.status_writer import StatusWriter
from flowrl.user_lines import breakpoints_left_out

STOPS = (signal.SIGINT, signal.SIGTERM)
"""Signals that a run answers by stopping at the next step boundary."""


def run_local(
    config: RunConfig, stages: Sequence[CompiledStage], *, display: Display | None = None
) -> tuple[Path, Summary]:
    """Runs compiled stages in a new run folder.

    Returns:
        The run folder and its summary.

    Raises:
        FlowError: whatever ends the run early.
        KeyboardInterrupt: after Ctrl-C, once the checkpoint is written.
    """
    with new_run(config, stages) as (folder, inputs):
        return folder.path, execute(folder, inputs, None, display)


@contextmanager
def new_run(
    config: RunConfig, stages: Sequence[CompiledStage]
) -> Iterator[tuple[RunFolder, RunInputs]]:
    """Opens a run folder with configuration, graphs and plans, and the user's inputs.

    Both are caught while the block runs.

    Raises:
        FlowError: this executor cannot run the stages, or the data, a reward or an environment
            cannot be used; no folder is made then.
    """
    executor_of(config).require_runnable(config, stages)
    with (
        closing(RunInputs(config, stages)) as inputs,
        RunFolder.create(config.runtime.runs, config.name) as folder,
    ):
        inputs.settle(folder.path / "models")
        InputFiles(config, stages, folder.path).write()
        folder.write_config(config_yaml(inputs.config))
        for stage in stages:
            folder.write_graph(stage.name, format_graph(stage.graph), graph_to_json(stage.graph))
            folder.write_plan(stage.name, stage.plan.to_dict(), stage.plan.to_yaml())
        yield folder, inputs


def is_done(checkpoint: Checkpoint, stage: CompiledStage) -> bool:
    """True if the checkpoint's stage is over; one that has more steps by now continues."""
    position = checkpoint.position
    ended_early = ended_at(checkpoint.state, position.stage, position.step)
    enough = position.step >= stage.config.train.steps
    return bool(checkpoint.state.get("stage_done")) and (ended_early or enough)


def config_yaml(config: RunConfig) -> str:
    """Returns the resolved configuration, defaults included, as YAML that `load_config` reads."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)


class _Interrupt:
    """Ctrl-C, or SIGTERM as a scheduler sends it, as a flag that is looked at between polls.

    Attributes:
        asked: The run was asked to stop.
        forced: It was asked again.
    """

    def __init__(self) -> None:
        self.asked = False
        self.forced = False

    def __call__(self) -> bool:
        return self.asked

    @contextmanager
    def installed(self, stalled: Callable[[], Exception | None]) -> Iterator[None]:
        """Handles SIGINT and SIGTERM while the block runs.

        Args:
            stalled: The watchdog's reason, where it was the watchdog that interrupted.
        """

        def handle(number: int, frame: FrameType | None) -> None:
            reason = stalled() if number == signal.SIGINT else None
            if reason is not None:
                raise reason
            if self.asked:
                self.forced = True
                raise KeyboardInterrupt
            self.asked = True
            # Not print: the signal may have come in the middle of another one.
            os.write(2, b"\nstopping at the next step boundary; a second time ends at once\n")

        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread receives signals; another caller handles them itself
            return
        before = [signal.signal(number, handle) for number in STOPS]
        try:
            yield
        finally:
            for number, handler in zip(STOPS, before, strict=True):
                signal.signal(number, handler)


def execute(
    folder: RunFolder,
    inputs: RunInputs,
    checkpoint: Checkpoint | None,
    display: Display | None,
    notes: Sequence[str] = (),
) -> Summary:
    """Makes the steps that are left of a run, until it ends or is asked to stop."""
    interrupt = _Interrupt()
    with ExitStack() as stack:
        run = stack.enter_context(opened_run(folder, inputs, checkpoint, display, notes, interrupt))
        watchdog: Watchdog | None = None
        if inputs.config.executor != "eager":
            watchdog = Watchdog(inputs.config.runtime.stall_timeout_s, run.describe)
            run.watch(watchdog.beat)
            stack.enter_context(watchdog)
        stack.enter_context(
            interrupt.installed(lambda: None if watchdog is None else watchdog.stalled)
        )
        return run.run()


@contextmanager
def opened_run(
    folder: RunFolder,
    inputs: RunInputs,
    checkpoint: Checkpoint | None = None,
    display: Display | None = None,
    notes: Sequence[str] = (),
    interrupt: _Interrupt | None = None,
) -> Iterator[Run]:
    """Opens a run that is ready to begin; its workers are closed after the block.

    Args:
        interrupt: Asks it to stop; by default nothing does.
    """
    config, stages = inputs.config, inputs.stages
    screen = _open_display(config) if display is None else display
    with ExitStack() as stack:
        if display is None:
            stack.callback(screen.close)
        screen.start(
            RunInfo(
                name=config.name,
                folder=folder.path,
                stages=tuple(stage.name for stage in stages),
            )
        )
        if config.executor == "eager":
            screen.note("eager: line by line, rewards in this process and without a time limit")
        for note in notes:
            screen.note(note)
        asked = _Interrupt() if interrupt is None else interrupt
        if not gc.get_freeze_count():  # as `Run.turns` has it
            stack.callback(gc.unfreeze)
        inputs.executor.begin(folder.path)
        opened = OpenRun(config, stages, folder, inputs, screen, stop=asked)
        stack.callback(opened.close)
        trackers = _open_trackers(config, stages, folder, checkpoint, screen.warn)
        stack.callback(trackers.close)
        run = Run(config, stages, folder, screen, opened, checkpoint, asked, trackers)
        SPANS.take()  # of a run before
        megabytes = config.runtime.trace_mb
        with StatusWriter(folder.path, run.status, megabytes << 20) as writer:
            run.watch(writer.beat)
            yield run


def _open_trackers(
    config: RunConfig,
    stages: Sequence[CompiledStage],
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    warn: Callable[[str], None],
) -> Trackers:
    position = None if checkpoint is None else checkpoint.position
    devices = {
        stage.name: len(
            {
                device
                for placement in stage.plan.placements
                if placement.head != "none"  # a role without a model is scored on a host's CPUs
                for device in placement.devices
            }
        )
        for stage in stages
    }

    def context(name: str) -> TrackerContext:
        return TrackerContext(
            name=config.name,
            folder=folder.path,
            config=config.model_dump(mode="json"),
            options=config.tracking.options.get(name, {}),
            resumed_at=None if position is None else (position.stage, position.step),
        )

    tracking = config.tracking
    return Trackers(tracking.to, tracking.names, context, devices.__getitem__, warn)


def _open_display(config: RunConfig) -> Display:
    # A live panel and a debugger's prompt would write over each other.
    return PlainDisplay() if config.executor == "eager" else open_display()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A step to make.

    Attributes:
        index: Index of its stage.
        number: Number of the step in its stage, from 1.
        make: Makes and records it.
    """

    index: int
    number: int
    make: Callable[[], StepResult]


class Run:
    """The loop over stages and steps.

    Attributes:
        summary: Summary of the run, once it is over.
        loop: The stage that runs now.
    """

    def __init__(
        self,
        config: RunConfig,
        stages: Sequence[CompiledStage],
        folder: RunFolder,
        display: Display,
        opened: OpenRun,
        checkpoint: Checkpoint | None,
        interrupt: _Interrupt,
        trackers: Trackers,
    ) -> None:
        self._trackers = trackers
        self._config = config
        self._stages = stages
        self._folder = folder
        self._display = display
        self._open = opened
        self._checkpoint = checkpoint
        self._interrupt = interrupt
        self._store = CheckpointStore(folder.checkpoints, config.runtime.keep_checkpoints)
        self._interval = CheckpointInterval(config.runtime)
        self._totals = RunTotals(config)
        self._warnings = StepWarnings(display.warn)
        self.summary: Summary | None = None
        self.loop: Stage | None = None
        self._turn: tuple[CompiledStage | None, int] = (None, 0)
        self._between_steps = ""

    def describe(self) -> str:
        """Returns who waits for whom."""
        return self._open.describe()

    def status(self) -> RunStatus:
        """Returns what it does; may be called in another thread."""
        doing, rollouts = self._open.status()
        stage, step = self._turn
        return RunStatus(
            pid=os.getpid(),
            executor=self._open.executor,
            stage="" if stage is None else stage.name,
            step=step,
            steps=0 if stage is None else stage.config.train.steps,
            doing=self._between_steps or doing,
            stall_timeout_s=self._config.runtime.stall_timeout_s,
            rollouts=rollouts,
        )

    @contextmanager
    def _doing(self, text: str) -> Iterator[None]:
        """Shows in the status what the block does."""
        self._between_steps = text
        try:
            yield
        finally:
            self._between_steps = ""

    def watch(self, beat: Callable[[], None]) -> None:
        """Calls `beat`, too, whenever something moves from now on."""
        before = self._open.beat

        def both() -> None:
            before()
            beat()

        self._open.beat = both

    def run(self) -> Summary:
        """Makes every step that is not done yet, and ends the run."""
        for turn in self.turns():
            with self._stopping(turn.index):
                turn.make()
                if self._interrupt():
                    raise KeyboardInterrupt
        assert self.summary is not None
        return self.summary

    def turns(self) -> Iterator[Turn]:
        """Yields the steps that are left, one by one; each must be made before the next is taken.

        What lies between (opening workers, evaluations, stop checks, checkpoints, the export) is
        done on the way to the next one.
        """
        first, step = 0, 0
        if self._checkpoint is not None:
            state = self._checkpoint.state
            self._totals.restore(state)
            position = self._checkpoint.position
            first, step = position.stage_index, position.step
            if is_done(self._checkpoint, self._stages[first]):
                first, step = first + 1, 0
        self._display.note(f"checkpoints: {self._interval}")
        self._open.open(self._checkpoint)
        # Libraries and data rows live as long as the run; without this each full collection of the
        # garbage collector walks over all of them (0.1 s) in the middle of a step. A program that
        # has frozen its own objects keeps control over them.
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
        self._interval.restart()
        for index in range(first, len(self._stages)):
            resumed = self._checkpoint if index == first and step else None
            yield from self._turns_of(index, step if index == first else 0, resumed)
        self.summary = self._end()

    def _turns_of(self, index: int, done: int, checkpoint: Checkpoint | None) -> Iterator[Turn]:
        """Yields the steps of a stage.

        What belongs to the boundary after a step (a stop check, an evaluation, a checkpoint) is
        settled before the next step, also where a run was stopped in between.
        """
        stage = self._stages[index]
        last = index == len(self._stages) - 1
        logged = [str(node.attr("name")) for node in stage.graph.of_op(Op.LOG)]
        self._turn = (stage, done)
        self._display.stage(stage.name, stage.config.train.steps, logged)
        if not stage.graph.of_op(Op.UPDATE):
            self._display.note(f"{stage.name} updates no model: its result is samples and numbers")
        if (stop := stage.config.stop) is not None:
            reached = f"{stop.metric} reaches {stop.at_least:g} on held-out data"
            self._display.note(f"{stage.name} ends before that when {reached}")
        self.loop = self._open.begin_stage(index, checkpoint)
        to_go = TimeToGo(stage.config.train.steps)
        step = done
        if last and self._totals.before is None:
            with self._stopping(index):
                self._totals.before = self._evaluate(stage.name, done)
        while not self._is_over(index, step):
            step += 1
            self._turn = (stage, step)
            yield Turn(index=index, number=step, make=partial(self._make, step, to_go))
        if last:
            with self._stopping(index):
                self._totals.after = self._evaluate(stage.name, step)
        self._save(index, step, done=True)

    def _is_over(self, index: int, step: int) -> bool:
        with self._stopping(index):
            return self._settle(index, step) or step >= self._stages[index].config.train.steps

    def _make(self, step: int, to_go: TimeToGo) -> StepResult:
        assert self.loop is not None
        self._open.beat()
        with SPANS.of(DRIVER, f"step {step}"):
            result = self.loop.step(step)
        self._record(result, to_go.step(step, result.metrics.wall_s))
        return result

    def begin_step_again(self, index: int) -> None:
        """Goes back to the last boundary, from a step that was given up and changed no weights."""
        self.loop = self._open.begin_step_again(index)

    @contextmanager
    def _stopping(self, index: int) -> Iterator[None]:
        """Writes a checkpoint of the last boundary where the block is asked to stop."""
        try:
            yield
        except (KeyboardInterrupt, RewardError, BatchNotFilled) as reason:
            # All come up at a boundary or in a rollout, where no weights have changed since; but a
            # person may leave the debugger anywhere.
            failed = isinstance(reason, RewardError | BatchNotFilled)
            to_save = failed or self._is_asked_to_stop()
            if to_save and self.loop is not None and not self.loop.has_learned:
                self._save_stopped(index, failed=failed)
            raise

    def _settle(self, index: int, step: int) -> bool:
        """Does what belongs to the boundary after `step`; whether the stage ends here early."""
        stage = self._stages[index]
        settled = self._totals.settled(stage.name, step)
        if settled is not None or step == 0:
            return bool(settled)
        reached = self._reached(stage, step)
        inside = not reached and step < stage.config.train.steps
        every = self._config.eval.every
        if inside and index == len(self._stages) - 1 and every and step % every == 0:
            self._evaluate(stage.name, step)
        self._totals.settle(stage.name, step, reached)
        if inside and self._interval.is_due(step):
            self._save(index, step, done=False)
        return reached

    def _record(self, result: StepResult, eta_s: float) -> None:
        started = time.monotonic()
        limit = self._config.runtime.log_samples
        rows = result.samples[:limit] if limit else result.samples
        if rows:
            self._folder.write_samples(rows)
            self._display.samples(rows)
        self._folder.write_step(result.metrics)
        self._trackers.step(result.metrics)
        self._totals.add(result, logging_s=time.monotonic() - started)
        self._display.step(result.metrics, eta_s)
        self._warnings.check(result.metrics)

    def _reached(self, stage: CompiledStage, step: int) -> bool:
        stop = stage.config.stop
        if stop is None or step % stop.check_every:
            return False
        metrics = self._evaluate(stage.name, step, num=stop.num)
        if metrics is None:
            return False
        if stop.metric not in metrics:
            raise ConfigError(
                "the scorer does not report what the stage stops by",
                where="stop.metric",
                found=stop.metric,
                expected=f"one of {', '.join(sorted(metrics))}",
                hint="name one of these in stop.metric",
            )
        if metrics[stop.metric] < stop.at_least:
            return False
        self._display.note(
            f"{stage.name} stops at step {step}: {stop.metric} {metrics[stop.metric]:.2f} "
            f"reached {stop.at_least:g}"
        )
        return True

    def _evaluate(
        self, stage: str, step: int, num: int | None = None
    ) -> Mapping[str, float] | None:
        # Breakpoints in a reward are for the steps; held-out samples are hundreds.
        is_eager = self._config.executor == "eager"
        with breakpoints_left_out() if is_eager else nullcontext(), SPANS.of(DRIVER, "evaluate"):
            rows = self._open.evaluate(stage, step, num)
        if not rows:
            return None
        metrics: dict[str, float] = {}
        for row in rows:
            self._folder.write_evaluation(row)
            self._trackers.evaluation(row)
            self._display.evaluation(stage, step, row.named_metrics())
            self._totals.add_evaluation(row)
            metrics |= row.named_metrics()
        if num is None and self._config.eval.keep_best:
            self._keep_best(step, metrics)
        return metrics

    def _keep_best(self, step: int, metrics: Mapping[str, float]) -> None:
        metric = self._config.eval.metric
        if metric not in metrics:
            raise ConfigError(
                "the scorer does not report the metric of the best model",
                where="eval.metric",
                found=metric,
                expected=f"one of {', '.join(sorted(metrics))}",
                hint="name one of these in eval.metric, or set eval.keep_best=false",
            )
        if self._totals.is_best(metrics[metric]):
            folder = self._open.export_best()
            self._display.note(f"best model: step {step}, {metric} {metrics[metric]:.3f}, {folder}")

    def _save(self, index: int, step: int, *, done: bool) -> None:
        assert self.loop is not None
        self._folder.sync()
        position = Position(stage_index=index, step=step, stage=self._stages[index].name)
        state = {**self._totals.state(), **self._open.state(), "stage_done": done}
        state["stage"] = self.loop.state()
        loop = self.loop

        def write(folder: Path) -> FileEntries:
            described = self._open.save(folder)
            loop.save(folder)
            return described

        with SPANS.of(DRIVER, "checkpoint"), self._doing("a checkpoint is written"):
            self._store.save(position, write, state)
        self._interval.restart()

    def _is_asked_to_stop(self) -> bool:
        return self._interrupt() and not self._interrupt.forced

    def _save_stopped(self, index: int, *, failed: bool) -> None:
        name = self._stages[index].name
        step = self._totals.step_of(name)
        self._save(index, step, done=False)
        self._display.note(
            f"stopped after step {step} of {name}; {go_on_text(str(self._folder), failed=failed)}"
        )

    def _end(self) -> Summary:
        with self._doing("the model is exported"):
            self._open.export()
        summary = self._totals.summary(self._folder, self._open.num_held_out)
        self._folder.write_summary(summary)
        self._display.end(summary)
        return summary
