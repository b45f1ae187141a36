"""Calls of groups of workers, and batches that calls name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.runtime.groups import DataRef, Dispatch, LocalGroup, _gathered
from tests.runtime.node_world import samples


class Rank:
    def __init__(self, number: int) -> None:
        self.number = number
        self.got: list[Any] = []

    def first_tokens(self, batch: SequenceBatch, scale: float) -> np.ndarray:
        self.got.append(batch)
        return batch.tokens[batch.offsets[:-1]] * scale

    def name(self, parts: Sequence[Any] = ()) -> int:
        self.got.append(parts)
        return self.number


def test_rows_are_shared_among_the_ranks_and_their_results_joined_in_order():
    sequences = samples("actor.generate").sequences
    expected = sequences.tokens[sequences.offsets[:-1]] * 2.0
    for size in (1, 2, 3):
        ranks = [Rank(number) for number in range(size)]
        group = LocalGroup("actor.train", ranks)
        ref = group.put(sequences)
        found = group.call("first_tokens", ref, 2.0, dispatch=Dispatch.ROWS).result()
        assert found.tolist() == expected.tolist()
        assert sum(len(rank.got[0]) for rank in ranks) == len(sequences)


def test_results_that_come_at_the_same_time_are_joined_once():
    waiting: list[Callable[[Any], object]] = []

    class Late(Future[Any]):
        def add_done_callback(self, fn: Callable[[Any], object]) -> None:
            waiting.append(fn)

    def join(results: list[Any]) -> list[Any]:
        joined.append(results)
        notify()  # as another thread does at this moment
        return results

    def notify() -> None:
        while waiting:
            waiting.pop(0)(None)

    joined: list[list[Any]] = []
    futures = [Late(), Late()]
    for number, future in enumerate(futures):
        future.set_result(number)
    gathered = _gathered(futures, join)
    notify()
    assert gathered.result(0) == [0, 1]
    assert joined == [[0, 1]]


def test_all_ranks_or_the_first_make_a_call_and_the_first_one_answers():
    ranks = [Rank(number) for number in range(3)]
    group = LocalGroup("actor.train", ranks)
    assert group.call("name", dispatch=Dispatch.ALL).result() == 0
    assert group.call("name", dispatch=Dispatch.ONE).result() == 0
    assert [len(rank.got) for rank in ranks] == [2, 1, 1]


def test_a_batch_of_an_update_names_the_sequences_that_were_put_before():
    rank = Rank(0)
    group = LocalGroup("actor.train", [rank])
    sequences = samples("actor.generate").sequences
    advantages = np.arange(14, dtype=np.float32)
    put: Any = group.put(sequences)
    ref: DataRef[TrainBatch] = group.put(TrainBatch(sequences=put, advantages=advantages))
    assert len(ref) == 4
    assert ref.lengths.tolist() == [3, 2, 5, 4]
    group.call("name", [(ref, 7), (ref.select([2, 3]).select([1]), 8)], dispatch=Dispatch.ALL)
    (((whole, _), (part, _)),) = rank.got
    assert whole.sequences is sequences
    assert part.sequences.tokens.tolist() == sequences.tokens[10:].tolist()
    assert part.advantages.tolist() == advantages[10:].tolist()
