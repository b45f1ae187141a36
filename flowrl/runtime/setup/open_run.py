"""The open resources of a run, from its first evaluation to the export: data, models, scorers.

They last over all stages: the policy at the end of one stage is the one at the start of the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

from flowrl.backend.batch import Floats
from flowrl.compiler import CompiledStage
from flowrl.config.schema import RunConfig
from flowrl.data import fingerprint
from flowrl.errors import CheckpointError, RewardError
from flowrl.files import folder_atomically
from flowrl.graph import Op
from flowrl.ids import EngineId, RoleName
from flowrl.observe.display import Display
from flowrl.observe.rows import EvaluationRow
from flowrl.observe.run_folder import RunFolder
from flowrl.observe.run_status import RolloutStatus
from flowrl.observe.scale_requests import RequestBox
from flowrl.plan.schema import Placement
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.runtime.checkpoint.journal import RolloutJournals
from flowrl.runtime.checkpoint.store import Checkpoint, FileEntries
from flowrl.runtime.driver.collected_batch import FailureBudget, Scorers
from flowrl.runtime.driver.graph_parts import GraphParts, RoleUse
from flowrl.runtime.driver.rollout_driver import RolloutDriver
from flowrl.runtime.driver.stage import Stage, part_of
from flowrl.runtime.driver.threads import RolloutThread
from flowrl.runtime.setup.evaluation import (
    HeldOutSet,
    evaluated_rollout,
    evaluated_spec,
    evaluation_row,
    held_out_score,
    held_out_sets,
    rows_of_rollout,
    with_pairs,
)
from flowrl.runtime.setup.policies import OpenPolicies
from flowrl.runtime.setup.rollouts import DriverMaker, RolloutSpec
from flowrl.runtime.setup.stage import StageMaker
from flowrl.runtime.setup.user_inputs import RunInputs


class OpenRun:
    """Opened once a run; see the module.

        open -> (begin_stage -> steps)* -> export -> close

    Args:
        inputs: Inputs of the run; closed with it.

    Attributes:
        beat: Called whenever something moved.
        num_held_out: Prompts of a full evaluation.
    """

    def __init__(
        self,
        config: RunConfig,
        stages: Sequence[CompiledStage],
        folder: RunFolder,
        inputs: RunInputs,
        display: Display,
        *,
        stop: Callable[[], bool],
    ) -> None:
        self._config = config
        self._stages = stages
        self._inputs = inputs
        self._stop = stop
        self._folder = folder
        self._requests = RequestBox(folder.path)
        self._display = display
        self._failures = FailureBudget(
            config.rewards.max_failures, score=config.rewards.failure_score
        )
        graphs = [stage.graph for stage in stages]
        self._parts = [GraphParts(graph) for graph in graphs]
        self._use = RoleUse(config, graphs)
        self._scorers = inputs.scorers
        self._policies = OpenPolicies(
            config,
            self._use,
            inputs.executor,
            self._placements(),
            self._kv_tokens(),
            folder.path,
            max_length=self._max_length,
            beat=lambda: self.beat(),
            published=self._published,
        )
        self._drivers = DriverMaker(
            config,
            self._policies,
            inputs.executor,
            max_length=self._max_length,
            failures=self._failures,
            beat=lambda: self.beat(),
            stop=stop,
        )
        self._prepared_inputs = inputs.prepared_inputs
        self._stage: Stage | None = None
        self._thread: RolloutThread | None = None
        self._evaluating: RolloutDriver | None = None
        self.beat: Callable[[], None] = lambda: None
        self.num_held_out = 0
        self._held_out_sets: list[HeldOutSet] = []
        self._held_out_fingerprint = ""

    @property
    def executor(self) -> str:
        """What runs it, and where; for people."""
        return self._inputs.executor.description

    def describe(self) -> str:
        """Returns who waits for whom, for the watchdog."""
        if self._evaluating is not None:
            return self._evaluating.describe()
        return "workers are being opened" if self._stage is None else self._stage.describe()

    def status(self) -> tuple[str, list[RolloutStatus]]:
        """Returns what the trainer does and what each rollout does; in any thread."""
        evaluating, stage = self._evaluating, self._stage
        rollouts = [] if stage is None else stage.status()
        if evaluating is not None:
            return "held-out data is measured", [*rollouts, evaluating.status("evaluation")]
        return "workers are being opened" if stage is None else stage.doing, rollouts

    # Opening and closing

    def open(self, checkpoint: Checkpoint | None) -> None:
        """Opens every policy, restores what a checkpoint holds."""
        held_out = self._prepared_inputs.held_out
        self._held_out_sets = held_out_sets(self._config.eval, held_out)
        self.num_held_out = sum(len(own.items) for own in self._held_out_sets if not own.name)
        everything = [item for items in held_out.values() for item in items]
        self._held_out_fingerprint = fingerprint(everything)
        for note in self._prepared_inputs.notes:
            self._display.warn(note)
        if checkpoint is not None:
            self._check(checkpoint)
        self._policies.open(self._prepared_inputs.models, checkpoint)

    def close(self) -> None:
        """Ends every worker; idempotent."""
        with ExitStack() as stack:
            if self._thread is not None:
                # Last of all: processes that it restarted die with it.
                stack.callback(self._thread.close)
            # The inputs own the executor, which ends after everything that it has opened.
            for opened in (self._inputs, self._policies, self._drivers):
                stack.callback(opened.close)
            stack.callback(self._end_stage)

    def _end_stage(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.close()

    def _rollout_thread(self) -> RolloutThread:
        """Returns the thread of asynchronous rollouts, opened when it is first needed."""
        if self._thread is None:
            self._thread = RolloutThread()
        return self._thread

    # Values of the plans

    def _placements(self) -> dict[RoleName, Placement]:
        """Returns each role's placement in the last plan that has one."""
        return {
            RoleName(placement.role): placement
            for stage in self._stages
            for placement in stage.plan.placements
        }

    def _kv_tokens(self) -> dict[RoleName, int]:
        """Returns the KV tokens of each role's engines, of the plans that say so."""
        return {
            RoleName(operation.role): operation.kv_tokens
            for stage in self._stages
            for operation in stage.plan.operations
            if operation.role is not None and operation.kv_tokens
        }

    @property
    def _max_length(self) -> int:
        return self._inputs.max_length

    # Stages

    def begin_stage(self, index: int, checkpoint: Checkpoint | None) -> Stage:
        """Makes a stage ready: optimizers, copies, schedulers, cursors.

        Args:
            checkpoint: A checkpoint in the middle of this stage; None begins it.
        """
        self._end_stage()
        stage = self._stages[index]
        self._policies.begin_stage(stage, checkpoint)
        if checkpoint is None:
            self._stage = self._maker().make(stage, None)
        else:
            state = part_of(checkpoint.state, "stage")
            self._stage = self._maker().make(stage, state, checkpoint.path)
        return self._stage

    def begin_step_again(self, index: int) -> Stage:
        """Returns the stage at its last boundary, after a step that was given up.

        That step must have changed no weights, and have left nothing in the engines.
        """
        assert self._stage is not None
        state, buffers = self._stage.state(), self._stage.buffers
        self._stage.close()
        self._stage = self._maker().make(self._stages[index], state, buffers=buffers)
        return self._stage

    def _maker(self) -> StageMaker:
        return StageMaker(
            config=self._config,
            prepared_inputs=self._prepared_inputs,
            policies=self._policies,
            scorers=self._scorers,
            drivers=self._drivers,
            failures=self._failures,
            beat=lambda: self.beat(),
            stop=self._stop,
            thread=self._rollout_thread,
            journals=RolloutJournals(
                folder=self._folder.path,
                max_bytes=self._config.runtime.journal_mb << 20,
            ),
            requests=self._requests,
        )

    def _published(self, engine: EngineId, version: int) -> None:
        if self._stage is not None:
            self._stage.publish(engine, version)

    # Evaluation

    def evaluate(self, stage: str, step: int, num: int | None) -> list[EvaluationRow]:
        """Generates samples for held-out prompts and averages score and terms, for each set.

        Args:
            num: Measures the first `num` prompts of `data.eval` only, one sample each; None
                measures every set as `eval` says.

        Returns:
            A row for each set; none without held-out data, or without a policy and a scorer. Where
            the stage trains on pairs of the data and `data.eval` has pairs, its row has their
            metrics too.

        Raises:
            RewardError: no sample of a set was scored.
        """
        started = time.monotonic()
        pairs = self._pair_margins(num)
        rows = self._responses_measured(stage, step, num)
        if not pairs:
            return rows
        if not any(not row.name for row in rows):
            number = len(next(iter(pairs.values())))
            rows = [EvaluationRow(stage=stage, step=step, num=number, temperature=0.0), *rows]
        return [row if row.name else with_pairs(row, pairs, started) for row in rows]

    def _pair_margins(self, num: int | None) -> dict[RoleName, Floats]:
        """Measures the first `num` held-out pairs, or all that an evaluation takes."""
        prepared, limit = self._prepared_inputs, num or self._config.eval.num
        items = prepared.held_out_pairs[: limit or None]
        if self._stage is None or not items or prepared.held_out_responses is None:
            return {}
        with self._stage.quiet():
            return self._stage.pair_margins(items, prepared.held_out_responses.of)

    def _responses_measured(self, stage: str, step: int, num: int | None) -> list[EvaluationRow]:
        """Measures every set by responses of the policy; returns nothing where none is scored."""
        role = self._use.policy
        sets = self._held_out_sets
        if role is None or not sets:
            return []
        evaluated = evaluated_rollout(role, self._parts)
        part = None if evaluated is None else evaluated[1]
        if evaluated is not None:
            sets = rows_of_rollout(sets, *evaluated)
        reported = held_out_score(self._config, role, self._parts)
        scorers = self._scorers.of_evaluation(part, reported)
        if not (scorers or (part is not None and part.node.op is Op.INTERACT)):
            return []
        if num is not None:
            sets = [replace(own, items=own.items[:num], samples=1) for own in sets if not own.name]
        if sets and self._policies[role].stale:
            self._policies.publish(role)  # a supervised stage trains without publishing
        reported = self._scorers.observing if reported is None else reported
        last = self._stages[-1].config
        specs = [evaluated_spec(role, evaluated, last, own, reported) for own in sets]
        return [
            self._measure(stage, step, spec, scorers, own)
            for spec, own in zip(specs, sets, strict=True)
        ]

    def _measure(
        self,
        stage: str,
        step: int,
        spec: RolloutSpec,
        scorers: Mapping[RoleName, Scorers],
        held_out: HeldOutSet,
    ) -> EvaluationRow:
        started = time.monotonic()
        # An evaluation is a rollout that the plan's switches do not name. What goes on after it
        # frees the memory again before the first pass that needs it.
        self._policies[spec.role].engine.wake()
        scheduler = RolloutScheduler(SchedulerSettings(group_size=held_out.samples))
        with nullcontext() if self._stage is None else self._stage.quiet():
            driver = self._evaluating = self._drivers.make(spec, scheduler, scorers)
            try:
                driver.offer(held_out.items)
                collected = driver.collect(0, len(held_out.items))
            except RewardError as reason:
                reason.where = f"evaluation at step {step} of {stage}, {reason.where}"
                raise
            finally:
                self._evaluating = None
        groups = [[payload for _, payload in members] for _, members in collected.groups]
        return evaluation_row(stage, step, held_out, groups, started)

    # Checkpoints

    def export_best(self) -> Path:
        """Writes the model as it is now into `best/` of the run folder, and returns that folder."""
        result = self._use.policy or self._use.trained
        assert result is not None  # it was measured
        with folder_atomically(self._folder.best) as folder:
            self._policies.export(result, folder)
        return self._folder.best

    def state(self) -> dict[str, object]:
        """Returns a checkpoint's state of the run, without the workers' own files."""
        return {
            **self._policies.state(),
            "reward_failures": self._failures.failed,
            "held_out": self._held_out_fingerprint,
        }

    def save(self, folder: Path) -> FileEntries:
        """Has every policy write its state into `folder/ROLE`; see `OpenPolicies.save`."""
        return self._policies.save(folder)

    def export(self) -> None:
        """Writes the run's model, and next to it that of every other role that the run trained.

        A run that trains nothing has none.
        """
        result = self._use.trained
        if result is None:
            return
        self._folder.export_model(lambda folder: self._policies.export(result, folder))
        for role in self._use.models:
            if role != result and self._use.is_trained(role):
                with folder_atomically(self._folder.path / "trained" / role) as folder:
                    self._policies.export(role, folder)

    def _check(self, checkpoint: Checkpoint) -> None:
        """Takes up what a checkpoint holds of the run itself."""
        failed, versions = (checkpoint.state.get(key) for key in ("reward_failures", "versions"))
        if not isinstance(failed, int) or not isinstance(versions, dict):
            raise CheckpointError(
                "the checkpoint lacks what this version of flowrl writes",
                where=str(checkpoint.path),
                hint="resume it with the version of flowrl that wrote it",
            )
        held_out = checkpoint.state.get("held_out", self._held_out_fingerprint)
        if held_out != self._held_out_fingerprint:
            raise CheckpointError(
                "the held-out data changed since the checkpoint was written",
                where="data.eval",
                found=f"fingerprint {self._held_out_fingerprint}",
                expected=f"fingerprint {held_out}",
                hint="restore the data file and its templates, start a new run, or go on with "
                "other data (--accept-changes; in Python accept_changes=True)",
            )
        self._failures.failed = failed
