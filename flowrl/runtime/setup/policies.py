"""The models of a run: opened as the plans place them, published, refreshed, saved and restored.

Three kinds of roles have a model:

- one of its own: opened before the first stage, it lasts as long as the run;
- a copy that some stage trains (a critic that begins as the policy): copied when the first stage
  that uses it begins; from then on it lasts like the others;
- a copy that no stage trains (a reference): copied at the beginning of every stage that uses it,
  and closed with the stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path

from flowrl.backend.protocols import PolicyContext
from flowrl.compiler import CompiledStage
from flowrl.config.schema import RunConfig
from flowrl.data import Tokenizer
from flowrl.errors import CheckpointError
from flowrl.files import folder_atomically
from flowrl.graph import Op
from flowrl.ids import EngineId, RoleName, engine_id
from flowrl.plan.local import LocalEngines
from flowrl.plan.schema import Placement
from flowrl.runtime.checkpoint.store import Checkpoint, FileEntries
from flowrl.runtime.driver.graph_parts import (
    RoleUse,
    is_due,
    optimizer_updates,
    role_of,
)
from flowrl.runtime.executor import Executor
from flowrl.runtime.local.engine_fleet import EngineFleet
from flowrl.runtime.setup.prepared_inputs import RoleModel
from flowrl.runtime.workers import PolicyWorker
from flowrl.specs import AdamW


class OpenPolicies:
    """See the module.

    Args:
        executor: Opens the workers.
        placements: Placements of every role with a model.
        kv_tokens: Tokens that the KV cache of a role's engine holds, where the plans say so.
        folder: Folder of the run.
        beat: Called whenever a worker was opened.
        published: Called with an engine and the version that it serves from now on.

    Attributes:
        use: The operations of each role.
        models: Folder and tokenizer of the roles with a model of their own; set by `open`.
    """

    def __init__(
        self,
        config: RunConfig,
        use: RoleUse,
        executor: Executor,
        placements: Mapping[RoleName, Placement],
        kv_tokens: Mapping[RoleName, int],
        folder: Path,
        *,
        max_length: int,
        beat: Callable[[], None],
        published: Callable[[EngineId, int], None],
    ) -> None:
        self._config = config
        self.use = use
        self._executor = executor
        self._placements = placements
        self._kv_tokens = kv_tokens
        self._folder = folder
        self._max_length = max_length
        self._beat = beat
        self._published = published
        self._lasting: dict[RoleName, PolicyWorker] = {}
        self._frozen_copies: dict[RoleName, PolicyWorker] = {}
        self.models: Mapping[RoleName, RoleModel] = {}

    def __getitem__(self, role: RoleName) -> PolicyWorker:
        return self._frozen_copies[role] if role in self._frozen_copies else self._lasting[role]

    def tokenizer(self, role: RoleName) -> Tokenizer:
        """Returns the tokenizer of a role's model; a copy has that of the role it copies."""
        return self.models[self.use.owner(role)].tokenizer

    @property
    def workers(self) -> dict[RoleName, PolicyWorker]:
        """All that are open, by role."""
        return {**self._lasting, **self._frozen_copies}

    # Opening and closing

    def open(self, models: Mapping[RoleName, RoleModel], checkpoint: Checkpoint | None) -> None:
        """Opens the roles that live as long as the run, and restores what a checkpoint holds."""
        self.models = models
        for role in models:
            self._beat()
            self._lasting[role] = self._open(role, models[role].folder, fresh=models[role].fresh)
        if checkpoint is None:
            return
        versions = checkpoint.state.get("versions")
        assert isinstance(versions, Mapping)  # the reader of the checkpoint has checked it
        for role in self._lasting:
            self._restore(role, checkpoint)
        for role in self.use.models:
            if role in self._lasting or self.use.is_frozen_copy(role) or role not in versions:
                continue
            folder = self._folder / "copies" / role
            if not folder.exists():
                self._export(self.use.owner(role), folder)  # for its shape: weights are restored
            self._lasting[role] = self._open(role, folder, fresh=False)
            self._restore(role, checkpoint)

    def _open(self, role: RoleName, folder: Path, *, fresh: bool) -> PolicyWorker:
        placement = self._placements[role]
        owner = self.use.owner(role)
        if placement.dtype == "none":
            placement = replace(placement, dtype=self._placements[owner].dtype)
        device, config = placement.devices[0], self._config.roles[role]
        context = PolicyContext(
            role=role,
            model=folder,
            fresh=fresh,
            device="cpu" if device.startswith("cpu") else device,
            dtype=placement.dtype,
            seed=derive_seed(self._config.seed, "weights", role),
            num_slots=placement.num_slots or config.num_slots,
            max_length=self._max_length,
            trainable=self.use.is_trained(role),
            stop_token_ids=tuple(self.tokenizer(role).stop_ids),
            num_threads=self._config.runtime.num_threads,
            head=self.use.head(role),
            options=config.options,
            engine_options=config.engine_options,
            devices=placement.devices,
            layout=asdict(placement.layout),
            kv_tokens=self._kv_tokens.get(role, 0),
        )
        return self._executor.open_policy(placement, context, generates=self.use.generates(role))

    def close(self) -> None:
        """Ends every worker; idempotent."""
        with ExitStack() as stack:  # one worker that cannot be closed leaves no other open
            for worker in (*self._lasting.values(), *self._frozen_copies.values()):
                stack.callback(worker.close)
            self._lasting.clear()
            self._frozen_copies.clear()

    def open_fleet(self, role: RoleName, engines: LocalEngines, most: int) -> EngineFleet:
        """Opens engines of a role in processes of their own, with the weights that it has now.

        Args:
            most: Engines that this machine has memory for.
        """
        worker = self[role]
        fleet = self._executor.open_fleet(
            [engine_id(role, number) for number in range(engines.processes)],
            self._placements[role].backend,
            worker.context,
            export=lambda folder: worker.train.export(folder).result(),
            fallback=self._folder / "sync",
            cores=engines.cores,
            most=most,
        )
        try:
            fleet.publish(fleet.written(worker.version))
        except BaseException:
            fleet.close()
            raise
        return fleet

    # Stages

    def begin_stage(self, stage: CompiledStage, checkpoint: Checkpoint | None) -> None:
        """Makes copies and optimizers of a stage, or takes up those of a checkpoint in it."""
        for worker in self._frozen_copies.values():
            worker.close()
        self._frozen_copies.clear()
        for role in stage.graph.roles:
            if role not in self.use.models or self.use.source_of(role) is None:
                continue
            if self.use.is_frozen_copy(role):
                self._keep(stage, role, checkpoint)
            elif role not in self._lasting:
                folder = self._folder / "copies" / role
                self._export(self.use.owner(role), folder)
                self._lasting[role] = self._open(role, folder, fresh=False)
        if checkpoint is None:
            self._begin_optimizers(stage)
        for node in stage.graph.of_op(Op.GENERATE):
            if self[role_of(node)].stale:
                self.publish(role_of(node))  # what an earlier stage trained without publishing

    def _keep(self, stage: CompiledStage, role: RoleName, checkpoint: Checkpoint | None) -> None:
        """Opens a role that keeps another's weights as they are when the stage begins."""
        folder = self._folder / "copies" / stage.name / role
        if checkpoint is None:
            self._export(self.use.owner(role), folder)
        elif not folder.exists():
            # What it copied has been trained since, so it cannot be made again.
            raise CheckpointError(
                f"the weights that role {role!r} has kept since stage {stage.name!r} began "
                "are gone",
                where=str(folder),
                hint="put the folder back, or start a new run",
            )
        self._frozen_copies[role] = self._open(role, folder, fresh=False)
        if checkpoint is not None:
            self._restore(role, checkpoint)

    def _begin_optimizers(self, stage: CompiledStage) -> None:
        train = stage.config.train
        due = Counter(
            role_of(node)
            for node in optimizer_updates(stage.graph)
            for number in range(1, train.steps + 1)
            if is_due(node, number)
        )
        for role in {role_of(node): None for node in stage.graph.of_op(Op.UPDATE)}:
            options = self._config.optimizer_of(role, train)
            num_updates = due[role] * train.mini_batches
            self._lasting[role].train.begin(AdamW(**options.model_dump()), num_updates).result()

    # Weights on their way

    def publish(self, role: RoleName) -> None:
        """Serves a role's weights to its engine, under the next version."""
        worker = self[role]
        worker.publish(worker.version + 1)
        self._published(worker.engine_id, worker.version)

    def refresh(self, role: RoleName, source: RoleName, decay: float = 0.0) -> None:
        """Gives a role the weights that another one has now; with a decay, averages its own."""
        scratch = self._folder / "sync" / role
        self._export(source, scratch)
        self[role].train.load(scratch, decay).result()
        if self[role].generate is not None:
            self.publish(role)

    def _export(self, role: RoleName, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder_atomically(folder) as target:
            self._lasting[role].train.export(target).result()

    def export(self, role: RoleName, folder: Path) -> None:
        """Writes a role's weights as a Hugging Face folder."""
        self[role].train.export(folder).result()

    # Checkpoints

    def state(self) -> dict[str, object]:
        """Returns a checkpoint's state of the models, without the workers' own files."""
        return {
            "versions": {role: worker.version for role, worker in self.workers.items()},
            "stale": [role for role, worker in self.workers.items() if worker.stale],
        }

    def save(self, folder: Path) -> FileEntries:
        """Has every worker whose weights change write its state into `folder/ROLE`.

        Returns:
            What the workers say of their files.
        """
        writing: dict[RoleName, Future[FileEntries]] = {}
        for role, worker in self.workers.items():
            if self._changes(role):
                target = folder / role
                target.mkdir()
                writing[role] = worker.train.save(target)
        return {
            f"{role}/{name}": entry
            for role, written in writing.items()
            for name, entry in written.result().items()
        }

    def _changes(self, role: RoleName) -> bool:
        """True if the weights of a role may differ from those of its model's folder."""
        return self.use.is_trained(role) or bool(self.use.does(role, Op.SYNC))

    def _restore(self, role: RoleName, checkpoint: Checkpoint) -> None:
        worker = self[role]
        versions, stale = (checkpoint.state.get(key) for key in ("versions", "stale"))
        version = versions.get(role) if isinstance(versions, Mapping) else None
        if not isinstance(version, int) or not isinstance(stale, list):
            raise CheckpointError(
                f"the checkpoint holds no version of role {role!r}", where=str(checkpoint.path)
            )
        if self._changes(role):
            worker.train.restore(checkpoint.path / role).result()
        if worker.generate is not None:
            worker.publish(version)
        # The next publication gets the number that it would have got without the stop.
        worker.stale = role in stale


def derive_seed(seed: int, *names: str) -> int:
    """Returns a 63-bit seed for `names`, e.g. `derive_seed(0, "rollout", "grpo", "0/17/3")`.

    Everything random in a run is seeded so, from the run's seed and logical names alone. Nothing
    depends on the wall clock, on arrival order or on how many numbers were generated before, so a
    sample has the same tokens in a resumed run, on another engine and in another batch.
    """
    text = "\x1f".join((str(seed), *names))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
