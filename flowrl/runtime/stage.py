"""One stage of a run: steps of a workflow, each from prompts to published weights.

Two kinds, told apart by the graph: a rollout stage generates, scores and judges through the
RolloutScheduler before the batch part of the graph runs; a supervised stage takes examples as they
are. Both count steps from 1 and can be written down between steps and go on elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from flowrl.algo import resolve_filter
from flowrl.backend.protocols import OptimizerStep
from flowrl.data import PromptCursor
from flowrl.errors import CheckpointError
from flowrl.graph import Graph, Op
from flowrl.ids import SampleId, sample_id
from flowrl.observe.rows import SampleRow, StepMetrics
from flowrl.runtime.batch_program import BatchProgram, StepBatch
from flowrl.runtime.materials import Solutions
from flowrl.runtime.payloads import Payload, behaviour_logprobs, sequence_batch
from flowrl.runtime.rollouts import Collected, GroupJudge, RolloutDriver
from flowrl.specs import FilterSpec, FinishReason

__all__ = ["RolloutStage", "Stage", "StepResult", "SupervisedStage", "group_judge", "part_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did: a row of metrics.jsonl and its rows of samples.jsonl."""

    metrics: StepMetrics
    samples: Sequence[SampleRow]


class Stage(Protocol):
    """Steps one by one; `state` is what a checkpoint at the last step boundary holds."""

    def step(self, number: int) -> StepResult:
        """Makes step `number`. Interrupted before its update, it has changed no weights."""
        ...

    def state(self) -> dict[str, object]:
        """JSON of the last boundary: after the last whole step, also in the middle of the next."""
        ...


def group_judge(graph: Graph) -> GroupJudge | None:
    """The verdicts of a graph's filters on whole groups; None where it has no filter."""
    specs = [node.attr("spec") for node in graph.of_op(Op.FILTER)]
    filters = [(spec, resolve_filter(spec)) for spec in specs if isinstance(spec, FilterSpec)]
    if not filters:
        return None

    def judge(groups: Sequence[Sequence[float]]) -> list[str | None]:
        scores = np.concatenate([np.asarray(group, np.float64) for group in groups])
        sizes = np.array([len(group) for group in groups])
        numbers = np.repeat(np.arange(len(groups)), sizes)
        first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        verdicts: list[str | None] = [None] * len(groups)
        for spec, keeps in filters:
            kept = np.logical_and.reduceat(keeps(scores, numbers), first)
            for group in np.flatnonzero(~kept):
                verdicts[group] = verdicts[group] or spec.reason
        return verdicts

    return judge


class SupervisedStage:
    """Learns from examples: prompt and solution, no rollout."""

    def __init__(
        self,
        *,
        name: str,
        program: BatchProgram,
        cursor: PromptCursor,
        solutions: Solutions,
        examples_per_step: int,
    ) -> None:
        self._name = name
        self._program = program
        self._cursor = cursor
        self._solutions = solutions
        self._examples_per_step = examples_per_step
        self._boundary: dict[str, object] = {"cursor": cursor.to_json()}

    def step(self, number: int) -> StepResult:
        """One batch of examples."""
        started = time.monotonic()
        items = self._cursor.take(self._examples_per_step)
        payloads = [
            (sample_id(item.group, 0), Payload(item=item, tokens=self._solutions.of(item)))
            for item in items
        ]
        batch = StepBatch(sequences=sequence_batch(payloads, [item.group for item in items]))
        self._program.run(batch)
        self._boundary = {"cursor": self._cursor.to_json()}
        lengths = batch.sequences.response_lengths
        metrics = StepMetrics(
            stage=self._name,
            step=number,
            num_samples=len(payloads),
            num_tokens=int(lengths.sum()),
            length_mean=float(lengths.mean()),
            length_max=int(lengths.max()),
            wall_s=time.monotonic() - started,
            seconds=batch.seconds,
        )
        return StepResult(metrics=_with_updates(metrics, batch.updates), samples=())

    def state(self) -> dict[str, object]:
        """The data cursor."""
        return self._boundary


class RolloutStage:
    """Generates, scores, judges and updates; every sample is scheduled on its own.

    Args:
        begin_rollout: Called before each rollout (the plan's residency switches).
    """

    def __init__(
        self,
        *,
        name: str,
        graph: Graph,
        program: BatchProgram,
        cursor: PromptCursor,
        driver: RolloutDriver,
        prompts_per_step: int,
        begin_rollout: Callable[[], None],
    ) -> None:
        self._name = name
        self._program = program
        self._cursor = cursor
        self._driver = driver
        self._begin_rollout = begin_rollout
        self._prompts_per_step = prompts_per_step
        self._outputs = [
            (node.id, field.name)
            for node in graph.of_op(Op.GENERATE, Op.SCORE, Op.FILTER)
            for field in node.outputs
        ]
        self._boundary = self._written()

    def step(self, number: int) -> StepResult:
        """One batch of prompts, from generation to published weights."""
        started = time.monotonic()
        version = self._driver.scheduler.version
        items = self._cursor.take(self._prompts_per_step)
        self._begin_rollout()
        self._driver.offer(items)
        collected = self._driver.collect(number, len(items))
        batch = self._batch(collected)
        self._program.run(batch)
        self._boundary = self._written()
        seconds = {
            "generate": collected.seconds.generate,
            "score": collected.seconds.score_wait,
            **batch.seconds,
        }
        metrics = StepMetrics(
            stage=self._name,
            step=number,
            version=version,
            num_samples=len(batch.sequences),
            filtered_groups=collected.num_filtered_groups,
            dropped_samples=len(collected.dropped),
            wall_s=time.monotonic() - started,
            seconds=seconds,
        )
        metrics = _with_updates(_with_rollout(metrics, collected), batch.updates)
        return StepResult(metrics=metrics, samples=_sample_rows(self._name, number, collected))

    def state(self) -> dict[str, object]:
        """Data cursor and scheduler."""
        return self._boundary

    def _written(self) -> dict[str, object]:
        return {"cursor": self._cursor.to_json(), "scheduler": self._driver.scheduler.to_json()}

    def _batch(self, collected: Collected) -> StepBatch:
        rows = [row for _, members in collected.groups for row in members]
        groups = [group for group, members in collected.groups for _ in members]
        sequences = sequence_batch(rows, groups)
        values = {
            "rollout_logprobs": behaviour_logprobs(sequences, rows),
            "score": np.array([payload.score for _, payload in rows], np.float32),
        }
        return StepBatch(
            sequences=sequences,
            values={(node, name): values[name] for node, name in self._outputs if name in values},
        )


def part_of(state: Mapping[str, object], name: str) -> Mapping[str, object]:
    """A named part of a written state.

    Raises:
        CheckpointError: it is not there.
    """
    part = state.get(name)
    if not isinstance(part, Mapping):
        raise CheckpointError(f"the checkpoint holds no {name}", where="state.json")
    return part


def _with_rollout(metrics: StepMetrics, collected: Collected) -> StepMetrics:
    """The row with the rewards and lengths of all scored samples, filtered ones too."""
    kept = [payload for _, members in collected.groups for _, payload in members]
    scored = kept + [payload for _, payload, _ in collected.filtered]
    if not scored:
        return metrics
    scores = np.array([payload.score for payload in scored], np.float64)
    lengths = np.array([len(payload.tokens) for payload in scored])
    truncated = sum(payload.finish is FinishReason.LENGTH for payload in scored)
    return replace(
        metrics,
        num_tokens=int(lengths.sum()),
        reward_mean=float(scores.mean()),
        reward_std=float(scores.std()),
        length_mean=float(lengths.mean()),
        length_max=int(lengths.max()),
        truncated=truncated / len(scored),
    )


def _with_updates(metrics: StepMetrics, updates: Sequence[OptimizerStep]) -> StepMetrics:
    """The row with means over the step's optimizer updates; the learning rate is of the last."""
    if not updates:
        return metrics
    named: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.metrics.items():
            named.setdefault(name, []).append(value)
    means = {name: float(np.mean(values)) for name, values in named.items()}
    return replace(
        metrics,
        loss=float(np.mean([update.loss for update in updates])),
        grad_norm=float(np.mean([update.grad_norm for update in updates])),
        learning_rate=updates[-1].learning_rate,
        skipped_updates=sum(update.skipped for update in updates),
        kl=means.pop("kl", None),
        clip_fraction_low=means.pop("clip_fraction_low", None),
        clip_fraction_high=means.pop("clip_fraction_high", None),
        extra=means,
    )


def _sample_rows(stage: str, step: int, collected: Collected) -> list[SampleRow]:
    consumed = ((s, p, "consumed", "") for _, members in collected.groups for s, p in members)
    filtered = ((s, p, "filtered", reason) for s, p, reason in collected.filtered)
    dropped = ((s, p, "dropped", reason) for s, p, reason in collected.dropped)
    rows: Iterable[tuple[SampleId, Payload, str, str]] = (*consumed, *filtered, *dropped)
    return [
        SampleRow(
            stage=stage,
            step=step,
            sample=sample,
            prompt=payload.item.prompt,
            response=payload.text,
            answer=payload.item.row.answer,
            score=payload.score,
            terms=payload.terms,
            num_tokens=len(payload.tokens),
            finish=payload.finish or "",
            versions=payload.versions,
            end=end,
            reason=reason,
        )
        for sample, payload, end, reason in rows
    ]
