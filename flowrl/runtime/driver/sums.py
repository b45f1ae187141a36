"""Sums of losses: the terms of an update that wait for each other, and what is reported of them.

The nodes of a sum run one after the other without changing weights; each leaves its term here. The
last one makes the optimizer updates of all, also where its own set or that of others is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowrl.backend.batch import TrainBatch
from flowrl.backend.protocols import OptimizerStep, UpdateSpec
from flowrl.runtime.driver.batch_nodes import split_groups
from flowrl.runtime.driver.payloads import Term
from flowrl.runtime.groups import DataRef


def aligned(terms: Sequence[Term]) -> list[list[tuple[DataRef[TrainBatch], UpdateSpec]]]:
    """Returns the batches of each optimizer update, one of every term.

    There are as many as the smallest set has mini-batches, and the others are cut into as many.
    """
    count = min(len(term.spec.mini_batches) for term in terms)
    cuts = [split_groups(term.groups.tolist(), count) for term in terms]
    return [
        [
            (term.batch, replace(term.spec, mini_batches=(rows[update],)))
            for term, rows in zip(terms, cuts, strict=True)
        ]
        for update in range(count)
    ]


def merged(terms: Sequence[Term], made: Sequence[OptimizerStep]) -> OptimizerStep:
    """Returns one optimizer update with the weighted sum of the losses.

    Metrics of the first term have their names, those of the k-th are `term.k/NAME`; the loss of
    every term is `term.k/loss`, without its weight.
    """
    metrics: dict[str, float] = {}
    for term, step in zip(terms, made, strict=True):
        prefix = "" if term.number == 1 else f"term.{term.number}/"
        metrics |= {f"{prefix}{name}": value for name, value in step.metrics.items()}
        metrics[f"term.{term.number}/loss"] = step.loss
    return replace(
        made[0],
        loss=sum(term.spec.weight * step.loss for term, step in zip(terms, made, strict=True)),
        num_tokens=sum(step.num_tokens for step in made),
        metrics=metrics,
    )
