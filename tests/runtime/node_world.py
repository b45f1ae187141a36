"""A batch program over workers that only remember, for tests of what nodes get and give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.backend.protocols import OptimizerStep, UpdateSpec
from flowrl.config.schema import TrainConfig
from flowrl.graph import Graph
from flowrl.ids import GroupId, NodeId, RoleName, SampleId
from flowrl.passes import Context, run_passes
from flowrl.program.workflow import Workflow
from flowrl.runtime.driver.batch_program import BatchProgram, StepContext
from flowrl.runtime.driver.graph_parts import GraphParts
from flowrl.runtime.driver.mismatch_guard import MismatchGuard
from flowrl.runtime.driver.payloads import Payload, SampleSet, StepBatch
from flowrl.runtime.driver.texts import Texts
from flowrl.runtime.groups import LocalGroup
from flowrl.runtime.trainers import Trainer
from flowrl.specs import Sampling

MASK = [0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 1]
"""Prompts of different lengths; the third sample has a hole where another than the policy wrote."""
OFFSETS = [0, 3, 5, 10, 14]
GROUPS = [0, 0, 1, 1]


class Worker:
    """Remembers what it was asked; its numbers follow from positions alone.

    Args:
        kl: What each update measures.
    """

    def __init__(self, kl: float = 0.0) -> None:
        self.train = Trainer(LocalGroup("actor.train", self))
        self.generate = None
        self.stale = False
        self.updates: list[tuple[TrainBatch, UpdateSpec]] = []
        self.temperatures: list[float] = []
        self.resets = 0
        self.sums: list[list[UpdateSpec]] = []
        self._kl = kl

    def update(self, batch: TrainBatch, spec: UpdateSpec) -> list[OptimizerStep]:
        self.updates.append((batch, spec))
        metrics = {"kl": self._kl, "num_samples": float(len(spec.mini_batches[0]))}
        step = OptimizerStep(
            loss=1.0, grad_norm=2.0, learning_rate=0.1, num_tokens=9, metrics=metrics
        )
        return [step]

    def update_sum(
        self, terms: Sequence[tuple[TrainBatch, UpdateSpec]]
    ) -> list[list[OptimizerStep]]:
        self.sums.append([spec for _, spec in terms])
        return [[self.update(batch, spec)[0] for batch, spec in terms]]

    def reset_optimizer(self) -> None:
        self.resets += 1

    def logprobs(self, sequences: SequenceBatch, temperature: float) -> np.ndarray:
        self.temperatures.append(temperature)
        return -np.arange(len(sequences.tokens), dtype=np.float32) / 7

    def squares(self, sequences: SequenceBatch, temperature: float) -> np.ndarray:
        self.temperatures.append(temperature)
        return np.arange(len(sequences.tokens), dtype=np.float32) / 20

    def values(self, sequences: SequenceBatch) -> np.ndarray:
        positions = np.arange(len(sequences.tokens), dtype=np.float32)
        return np.where(sequences.response_mask, positions / 10, 0).astype(np.float32)

    def scores(self, sequences: SequenceBatch) -> np.ndarray:
        return sequences.lengths.astype(np.float32)

    def token_scores(self, sequences: SequenceBatch) -> np.ndarray:
        positions = np.arange(len(sequences.tokens), dtype=np.float32)
        return np.where(sequences.response_mask, positions, 0).astype(np.float32)


def lowered(workflow: Workflow, **context: Any) -> Graph:
    """The workflow's lowered graph."""
    return run_passes(workflow.trace(), Context(**context))


def samples(
    origin: str,
    scores: Mapping[str, Sequence[float]] | None = None,
    *,
    turn: Sequence[int] | None = None,
    token_reward: Sequence[float] | None = None,
    state: Sequence[int] | None = None,
) -> SampleSet:
    """Four samples in two groups, as `MASK` and `OFFSETS` say, with scores by role."""
    names = tuple(GroupId(f"0/{group}") for group in GROUPS)
    payloads = [Payload(item=None) for _ in GROUPS]  # type: ignore[arg-type]
    for role, values in (scores or {}).items():
        for payload, value in zip(payloads, values, strict=True):
            payload.scores[RoleName(role)] = value
    return SampleSet.of(
        NodeId(origin),
        SequenceBatch(
            samples=tuple(SampleId(f"{name}/{i % 2}") for i, name in enumerate(names)),
            tokens=np.arange(14),
            offsets=np.array(OFFSETS),
            response_mask=np.array(MASK, bool),
            groups=np.array(GROUPS),
            turn=None if turn is None else np.array(turn),
            token_reward=None if token_reward is None else np.array(token_reward, np.float32),
            state=None if state is None else np.array(state),
        ),
        names,
        payloads,
    )


def scored_late(role: RoleName, samples: SampleSet, texts: Texts) -> np.ndarray:
    """The place of each sample, as what a role scores when the batch is there."""
    return np.arange(len(samples), dtype=np.float32)


def program_of(
    graph: Graph,
    workers: Mapping[str, Worker],
    *,
    mini_batches: int = 1,
    effects: list[str] | None = None,
    sampling: Sampling | None = None,
    texts: Texts | None = None,
) -> BatchProgram:
    """A program over `workers`; what it publishes and refreshes is told to `effects`."""
    told = [] if effects is None else effects
    parts = GraphParts(graph)
    plan = SimpleNamespace(
        sizes=SimpleNamespace(mini_batches=mini_batches),
        operation=lambda node: SimpleNamespace(micro_batch=4, recompute="none"),
    )
    given = sampling or Sampling(max_tokens=4)
    return BatchProgram(
        parts,
        plan,  # type: ignore[arg-type]
        StepContext(
            policies=workers,  # type: ignore[arg-type]
            publish=lambda role: told.append(f"publish {role}"),
            refresh=lambda role, source, decay: told.append(
                f"refresh {role} of {source}" + (f" with decay {decay}" if decay else "")
            ),
            before=lambda node: None,
            beat=lambda: None,
            score=scored_late,
            guard=MismatchGuard(TrainConfig()),
        ),
        {node.id: given for node in graph.nodes},
        texts or Texts({}),
    )


def step_with(*sets: SampleSet, number: int = 1) -> StepBatch:
    """A step whose rollouts' logprobs are -1, -2, -3, ... in the order of tokens."""
    step = StepBatch(number=number, sets={s.origin: s for s in sets})
    for each in sets:
        drawn = -np.arange(1, 15, dtype=np.float32)
        step.values[each.origin, "rollout_logprobs"] = np.where(np.array(MASK, bool), drawn, 0)
    return step
