"""Batches that calls of trainers name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.backend.batch import TrainBatch
from flowrl.runtime.groups import DataRef, LocalGroup
from tests.runtime.node_world import samples


class Trainer:
    def __init__(self) -> None:
        self.got: list[Any] = []

    def update_sum(self, parts: Sequence[Any]) -> None:
        self.got.append(parts)

    def close(self) -> None: ...


def test_a_batch_of_an_update_names_the_sequences_that_were_put_before():
    trainer = Trainer()
    group = LocalGroup("actor.train", trainer)
    sequences = samples("actor.generate").sequences
    advantages = np.arange(14, dtype=np.float32)
    put: Any = group.put(sequences)
    ref: DataRef[TrainBatch] = group.put(TrainBatch(sequences=put, advantages=advantages))
    assert len(ref) == 4
    assert ref.lengths.tolist() == [3, 2, 5, 4]
    group.call("update_sum", [(ref, 7), (ref.select([2, 3]).select([1]), 8)])
    (((whole, _), (part, _)),) = trainer.got
    assert whole.sequences is sequences
    assert part.sequences.tokens.tolist() == sequences.tokens[10:].tolist()
    assert part.advantages.tolist() == advantages[10:].tolist()
