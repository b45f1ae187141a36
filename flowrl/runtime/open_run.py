"""The open workers of a local run and what binds them: data, models, engines, scorers.

It lasts from the first evaluation to the export, over all stages: the policy that one stage
leaves is the one that the next begins with.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from flowrl.backend.protocols import PolicyContext
from flowrl.compiler import CompiledStage, sampling_of
from flowrl.config.schema import RunConfig
from flowrl.data import PromptCursor, PromptItem, fingerprint
from flowrl.errors import CheckpointError
from flowrl.files import folder_atomically
from flowrl.graph import Node, Op
from flowrl.ids import RoleName, SampleId
from flowrl.observe.display import Display
from flowrl.observe.rows import EvaluationRow
from flowrl.observe.run_folder import RunFolder
from flowrl.plan.schema import Placement
from flowrl.rollout import RolloutScheduler, SchedulerSettings
from flowrl.runtime.batch_program import BatchProgram
from flowrl.runtime.checkpoint import Checkpoint
from flowrl.runtime.evaluation import evaluation_metrics
from flowrl.runtime.materials import Materials, prepare_materials, require_room
from flowrl.runtime.residency import Residency
from flowrl.runtime.rollouts import FailureBudget, GroupJudge, RolloutDriver
from flowrl.runtime.scoring import ScoringPool
from flowrl.runtime.seeds import derive_seed
from flowrl.runtime.stage import RolloutStage, Stage, SupervisedStage, group_judge, part_of
from flowrl.runtime.workers import PolicyWorker, open_policy, open_scoring
from flowrl.specs import AdamW, Sampling

__all__ = ["OpenRun"]

_VERIFIER = "verify"
"""What scores held-out samples where no workflow has a scoring role but the config has rewards."""


class OpenRun:
    """Opened once a run; see the module.

        open -> (begin_stage -> steps)* -> export -> close

    Attributes:
        beat: Called whenever something moved.
        num_held_out: Prompts of a full evaluation.
    """

    def __init__(
        self,
        config: RunConfig,
        stages: Sequence[CompiledStage],
        folder: RunFolder,
        display: Display,
        *,
        stop: Callable[[], bool],
    ) -> None:
        self._config = config
        self._stages = stages
        self._folder = folder
        self._display = display
        self._stop = stop
        self._policies: dict[RoleName, PolicyWorker] = {}
        self._copies: dict[RoleName, PolicyWorker] = {}
        self._scoring: ScoringPool | None = None
        self._materials: Materials | None = None
        self._failures = FailureBudget(config.rewards.max_failures)
        self._driver: RolloutDriver | None = None
        self.beat: Callable[[], None] = lambda: None
        self.num_held_out = 0
        self._held_out_fingerprint = ""

    def describe(self) -> str:
        """Who waits for whom, for the watchdog."""
        return self._driver.describe() if self._driver is not None else "workers are being opened"

    # -- opening and closing -----------------------------------------------------------------

    def open(self, checkpoint: Checkpoint | None) -> None:
        """Reads data, opens every worker, restores what a checkpoint holds."""
        roles = [role for role in self._roles() if self._config.roles[role].copy_of is None]
        self._scoring = self._open_scoring()
        self._materials = prepare_materials(
            self._config,
            self._folder.path / "models",
            roles=roles,
            policy=self._policy_role,
            supervised=any(not stage.graph.of_op(Op.GENERATE) for stage in self._stages),
            max_length=self._max_length,
        )
        self._require_room(self._materials)
        self.num_held_out = len(self._held_out(None))
        self._held_out_fingerprint = fingerprint(self._materials.held_out)
        for note in self._materials.notes:
            self._display.warn(note)
        for role in roles:
            self.beat()
            self._policies[role] = self._open_policy(role)
        if checkpoint is not None:
            self._restore(checkpoint)

    def _require_room(self, materials: Materials) -> None:
        """Every response that will be drawn must fit behind its prompt."""
        for stage in self._stages:
            for node in stage.graph.of_op(Op.GENERATE):
                sampling = node.attr("sampling")
                assert isinstance(sampling, Sampling)
                require_room(materials.train.prompts, sampling.max_tokens, self._max_length)
        if self._scoring is not None:
            require_room(materials.held_out, self._last_sampling().max_tokens, self._max_length)

    def _open_policy(self, role: RoleName) -> PolicyWorker:
        assert self._materials is not None
        placement = self._placement(role)
        model = self._materials.models[role]
        trainable = any(
            node.role == role for stage in self._stages for node in stage.graph.of_op(Op.UPDATE)
        )
        context = self._context(placement, model.folder, trainable=trainable)
        context = replace(
            context, fresh=model.fresh, stop_token_ids=tuple(model.tokenizer.stop_ids)
        )
        generates = role == self._policy_role or any(
            node.role == role for stage in self._stages for node in stage.graph.of_op(Op.GENERATE)
        )
        return open_policy(placement, context, generates=generates)

    def _context(self, placement: Placement, folder: Path, *, trainable: bool) -> PolicyContext:
        device = placement.devices[0]
        return PolicyContext(
            role=RoleName(placement.role),
            model=folder,
            fresh=False,
            device="cpu" if device.startswith("cpu") else device,
            dtype=placement.dtype,
            seed=derive_seed(self._config.seed, "weights", placement.role),
            num_slots=placement.num_slots or self._config.roles[placement.role].num_slots,
            max_length=self._max_length,
            trainable=trainable,
            stop_token_ids=(),
            num_threads=self._config.runtime.num_threads,
        )

    def _open_scoring(self) -> ScoringPool | None:
        config = self._config.rewards
        scorers = [node for stage in self._stages for node in stage.graph.of_op(Op.SCORE)]
        if scorers:
            role = str(scorers[-1].role)
            backend = self._config.roles[role].backend
        elif config.terms:
            role, backend = _VERIFIER, _VERIFIER
        else:
            return None
        terms = tuple(term.model_dump(mode="json") for term in config.terms)
        return open_scoring(
            backend, role, terms, timeout_s=config.timeout_s, workers=config.workers
        )

    def close(self) -> None:
        """Ends every worker; idempotent."""
        with ExitStack() as stack:  # one worker that cannot be closed leaves no other open
            for worker in (*self._policies.values(), *self._copies.values()):
                stack.callback(worker.close)
            if self._scoring is not None:
                stack.callback(self._scoring.close)
            self._policies.clear()
            self._copies.clear()
            self._scoring = None

    # -- what the plans say ------------------------------------------------------------------

    def _roles(self) -> list[RoleName]:
        """Roles with a model, in order of first use."""
        scoring = {node.role for s in self._stages for node in s.graph.of_op(Op.SCORE)}
        used = [role for stage in self._stages for role in stage.graph.roles]
        used += [RoleName(c) for r in used if (c := self._config.roles[r].copy_of) is not None]
        return [role for role in dict.fromkeys(used) if role not in scoring]

    @property
    def _policy_role(self) -> RoleName:
        """The policy that is evaluated and exported: the last one updated."""
        updates = [node for stage in self._stages for node in stage.graph.of_op(Op.UPDATE)]
        role = updates[-1].role
        assert role is not None  # the verifier of graphs proves it
        return role

    def _placement(self, role: str) -> Placement:
        """The role's placement in the last plan that has one."""
        found = [p for stage in self._stages for p in stage.plan.placements if p.role == role]
        return found[-1]

    @property
    def _max_length(self) -> int:
        return max(stage.plan.sizes.max_length for stage in self._stages)

    @property
    def _policy(self) -> PolicyWorker:
        return self._policies[self._policy_role]

    # -- stages ------------------------------------------------------------------------------

    def begin_stage(self, index: int, checkpoint: Checkpoint | None) -> Stage:
        """Makes a stage ready: optimizer, reference copies, scheduler, cursor.

        Args:
            checkpoint: Of the middle of this stage; None begins it.
        """
        stage = self._stages[index]
        train = stage.config.train
        if checkpoint is None:
            optimizer = AdamW(**train.optimizer.model_dump())
            updates = Counter(_role(node) for node in stage.graph.of_op(Op.UPDATE))
            for role, in_a_step in updates.items():
                num_updates = train.steps * train.mini_batches * in_a_step
                self._policies[role].train.begin(optimizer, num_updates)
        self._open_copies(stage, begins=checkpoint is None)
        self._driver = None
        state = None if checkpoint is None else part_of(checkpoint.state, "stage")
        if stage.graph.of_op(Op.GENERATE):
            return self._rollout_stage(stage, state)
        return self._supervised_stage(stage, state)

    def _open_copies(self, stage: CompiledStage, *, begins: bool) -> None:
        """Opens roles that keep another role's weights as they are when the stage begins."""
        for worker in self._copies.values():
            worker.close()
        self._copies.clear()
        for role in stage.graph.roles:
            source = self._config.roles[role].copy_of
            if source is None:
                continue
            folder = self._folder.path / "copies" / stage.name / role
            if not begins and not folder.exists():
                # What it copied has been trained since, so it cannot be made again.
                raise CheckpointError(
                    f"the weights that role {role!r} has kept since stage {stage.name!r} began "
                    "are gone",
                    where=str(folder),
                    hint="put the folder back, or start a new run",
                )
            if begins:
                folder.parent.mkdir(parents=True, exist_ok=True)
                with folder_atomically(folder) as target:
                    self._policies[RoleName(source)].train.export(target)
            placement = self._placement(role)
            if placement.dtype == "none":
                placement = replace(placement, dtype=self._placement(source).dtype)
            context = self._context(placement, folder, trainable=False)
            self._copies[role] = open_policy(placement, context, generates=False)

    def _supervised_stage(
        self, stage: CompiledStage, state: Mapping[str, object] | None
    ) -> SupervisedStage:
        assert self._materials is not None
        assert self._materials.solutions is not None
        train = stage.config.train
        return SupervisedStage(
            name=stage.name,
            # Likelihoods are of the model as it is, whatever temperature its rollouts will have.
            program=self._program(stage, replace(sampling_of(stage.config), temperature=1.0)),
            cursor=self._cursor(stage, state, supervised=True),
            solutions=self._materials.solutions,
            examples_per_step=train.prompts_per_step,
        )

    def _rollout_stage(
        self, stage: CompiledStage, state: Mapping[str, object] | None
    ) -> RolloutStage:
        train = stage.config.train
        (node,) = stage.graph.of_op(Op.GENERATE)
        sampling, group_size = node.attr("sampling"), node.attr("n")
        assert isinstance(sampling, Sampling)
        assert isinstance(group_size, int)
        judge = group_judge(stage.graph)
        if state is None:
            scheduler = RolloutScheduler(
                SchedulerSettings(
                    group_size=group_size,
                    max_staleness=train.max_staleness,
                    judges_groups=judge is not None,
                )
            )
        else:
            scheduler = RolloutScheduler.from_json(dict(part_of(state, "scheduler")))
        if self._policies[_role(node)].stale:
            self._publish(_role(node))  # what an earlier stage trained without publishing
        driver = self._new_driver(
            _role(node), scheduler, sampling, group_size, f"rollout/{stage.name}", judge
        )
        self._driver = driver
        residency = Residency(stage.plan, {**self._policies, **self._copies})
        return RolloutStage(
            name=stage.name,
            graph=stage.graph,
            program=self._program(stage, sampling),
            cursor=self._cursor(stage, state, supervised=False),
            driver=driver,
            prompts_per_step=train.prompts_per_step,
            begin_rollout=lambda: residency.switch(node.id),
        )

    def _program(self, stage: CompiledStage, sampling: Sampling) -> BatchProgram:
        policies = {**self._policies, **self._copies}
        residency = Residency(stage.plan, policies)
        return BatchProgram(
            stage.graph,
            stage.plan,
            policies,
            sampling,
            self._publish,
            residency.switch,
            lambda: self.beat(),
        )

    def _cursor(
        self, stage: CompiledStage, state: Mapping[str, object] | None, *, supervised: bool
    ) -> PromptCursor:
        assert self._materials is not None
        prompts = self._materials.examples if supervised else self._materials.train
        if state is not None:
            return PromptCursor.from_json(part_of(state, "cursor"), prompts)
        return PromptCursor(prompts, derive_seed(self._config.seed, "data", stage.name))

    def _new_driver(
        self,
        role: RoleName,
        scheduler: RolloutScheduler,
        sampling: Sampling,
        group_size: int,
        purpose: str,
        judge: GroupJudge | None,
    ) -> RolloutDriver:
        assert self._scoring is not None
        assert self._materials is not None
        worker = self._policies[role]
        seed = self._config.seed

        def seed_of(sample: SampleId) -> int:
            return derive_seed(seed, purpose, sample)

        driver = RolloutDriver(
            scheduler=scheduler,
            engines={worker.engine_id: worker.engine},
            scoring=self._scoring,
            tokenizer=self._materials.models[role].tokenizer,
            sampling=sampling,
            group_size=group_size,
            seed_of=seed_of,
            judge=judge,
            failures=self._failures,
            beat=lambda: self.beat(),
            stop=self._stop,
            stall_timeout_s=self._config.runtime.stall_timeout_s,
        )
        if worker.version > scheduler.version:
            driver.publish(worker.version)
        return driver

    def _publish(self, role: RoleName) -> None:
        worker = self._policies[role]
        worker.publish(worker.version + 1, self._folder.path / "sync" / role)
        if self._driver is not None and self._driver.serves(worker.engine_id):
            self._driver.publish(worker.version)

    # -- evaluation --------------------------------------------------------------------------

    def evaluate(self, stage: str, step: int, num: int | None) -> EvaluationRow | None:
        """Draws one sample for each held-out prompt and averages score and terms.

        The same random streams are used at every evaluation, so that two of them differ by the
        policy alone.

        Args:
            num: Takes the first `num` held-out prompts; None takes `eval.num`.

        Returns:
            None where there is no held-out data or nothing scores.

        Raises:
            RewardError: no sample was scored.
        """
        assert self._materials is not None
        items = self._held_out(num)
        if not items or self._scoring is None:
            return None
        started = time.monotonic()
        role = self._policy_role
        if self._policies[role].stale:
            self._publish(role)  # a supervised stage trains without publishing
        # An evaluation is a rollout that the plan's switches do not name. What goes on after it
        # gives the memory back again before the first pass that needs it.
        self._policies[role].engine.wake()
        temperature = self._config.eval.temperature
        sampling = replace(self._last_sampling(), temperature=temperature)
        scheduler = RolloutScheduler(SchedulerSettings(group_size=1))
        stage_driver = self._driver
        driver = self._driver = self._new_driver(role, scheduler, sampling, 1, "eval", None)
        try:
            driver.offer(items)
            collected = driver.collect(0, len(items))
        finally:
            self._driver = stage_driver
        payloads = [payload for _, members in collected.groups for _, payload in members]
        return EvaluationRow(
            stage=stage,
            step=step,
            num=len(payloads),
            temperature=temperature,
            metrics=evaluation_metrics(payloads),
            seconds=time.monotonic() - started,
        )

    def _held_out(self, num: int | None) -> tuple[PromptItem, ...]:
        assert self._materials is not None
        everything = self._materials.held_out
        return everything[: num or self._config.eval.num or len(everything)]

    def _last_sampling(self) -> Sampling:
        """How the last rollout stage draws; a run without one uses the last stage's settings."""
        nodes = [node for stage in self._stages for node in stage.graph.of_op(Op.GENERATE)]
        if nodes:
            sampling = nodes[-1].attr("sampling")
            assert isinstance(sampling, Sampling)
            return sampling
        return sampling_of(self._stages[-1].config)

    # -- checkpoints -------------------------------------------------------------------------

    def state(self) -> dict[str, object]:
        """What a checkpoint holds of the run beside the workers' own files."""
        return {
            "versions": {role: worker.version for role, worker in self._policies.items()},
            "stale": [role for role, worker in self._policies.items() if worker.stale],
            "reward_failures": self._failures.failed,
            "held_out": self._held_out_fingerprint,
        }

    def save(self, folder: Path) -> None:
        """Has every policy write its state into `folder/ROLE`."""
        for role, worker in self._policies.items():
            target = folder / role
            target.mkdir()
            worker.train.save(target)

    def export(self, folder: Path) -> None:
        """Writes the trained policy as a Hugging Face folder."""
        self._policy.train.export(folder)

    def _restore(self, checkpoint: Checkpoint) -> None:
        failed, stale = (checkpoint.state.get(key) for key in ("reward_failures", "stale"))
        versions = part_of(checkpoint.state, "versions")
        if not isinstance(failed, int) or not isinstance(stale, list):
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
                hint="restore the data file and its templates, or start a new run",
            )
        self._failures.failed = failed
        for role, worker in self._policies.items():
            worker.train.restore(checkpoint.path / role)
            version = versions.get(role)
            if not isinstance(version, int):
                raise CheckpointError(
                    f"the checkpoint holds no version of role {role!r}", where=str(checkpoint.path)
                )
            if worker.generate is not None:
                worker.publish(version, self._folder.path / "sync" / role)
            # The next publication gets the number that it would have got without the stop.
            worker.stale = role in stale


def _role(node: Node) -> RoleName:
    assert node.role is not None  # the verifier of graphs proves it
    return node.role
