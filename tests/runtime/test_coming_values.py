"""Nodes whose workers answer later: when they begin, and who waits for them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np

import flowrl as fl
from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.runtime.groups import WorkerGroup, resolved
from flowrl.runtime.trainers import Trainer
from tests.runtime.node_world import Worker, lowered, program_of, samples, step_with


class LaterGroup(WorkerGroup):
    """Workers that begin a call when it is asked for, and end it when its result is waited for."""

    def __init__(self, role: str, history: list[str], puts: list[Any]) -> None:
        self._role = role
        self._history = history
        self._puts = puts
        self._worker = Worker()

    def _put(self, batch: SequenceBatch | TrainBatch) -> object:
        self._puts.append(batch)
        return batch

    def call(self, method: str, *arguments: object) -> Future[Any]:
        name = f"{self._role}.{method}"
        self._history.append(f"{name} begins")
        return _Later(self, name, getattr(self._worker, method), list(arguments))


class _Later(Future[Any]):
    def __init__(self, group: LaterGroup, name: str, method: Any, arguments: list[Any]) -> None:
        super().__init__()
        self._ending = group, name, method, arguments

    def result(self, timeout: float | None = None) -> Any:
        group, name, method, arguments = self._ending
        if not self.done():
            group._history.append(f"{name} ends")
            self.set_result(method(*(resolved(each, lambda handle: handle) for each in arguments)))
        return super().result(timeout)


@fl.workflow
def ppo(
    prompts: fl.Prompts,
    actor: fl.Policy,
    reference: fl.Policy,
    critic: fl.Critic,
    verifier: fl.Reward,
):
    rollout = actor.generate(prompts)
    known = reference.logprobs(rollout)
    values = critic.values(rollout)
    advantages, returns = fl.advantage.gae(verifier.score(rollout), values, rollout)
    critic.update(rollout, returns=returns, values=values, loss=fl.loss.value_clip(0.2))
    actor.update(
        rollout,
        advantages=advantages,
        reference=known,
        loss=fl.loss.policy_clip(0.2),
        kl=fl.kl.k3(0.1),
    )


def test_workers_of_two_roles_compute_at_the_same_time_and_a_batch_is_put_once():
    history: list[str] = []
    puts: list[Any] = []
    workers = {}
    for role in ("actor", "reference", "critic"):
        workers[role] = Worker()
        workers[role].train = Trainer(LaterGroup(role, history, puts))
    program = program_of(lowered(ppo), workers, mini_batches=2)
    step = step_with(samples("actor.generate", {"verifier": [0.0, 1.0, 1.0, 0.0]}))
    program.run(step)
    begun = [event for event in history if event.endswith("begins")]
    first_end = next(place for place, event in enumerate(history) if event.endswith("ends"))
    assert {"reference.logprobs begins", "critic.values begins"} <= set(history[:first_end])
    assert begun.count("actor.update begins") == begun.count("critic.update begins") == 2
    assert sum(isinstance(put, SequenceBatch) for put in puts) == 1
    assert sum(isinstance(put, TrainBatch) for put in puts) == 2
    assert np.all(np.isfinite(list(step.seconds.values())))
