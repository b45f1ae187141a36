"""Selections of samples, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.algo.resolve import resolve_select
from flowrl.errors import RewardError
from flowrl.graph.ir import format_attr
from flowrl.graph.serialization import parse_attr
from flowrl.specs import SelectSpec
from flowrl.specs.filters import BestAndWorst, Parsed, RandomK, Threshold, Top

SCORES = [1.0, 3.0, 3.0, 2.0, 5.0, 5.0, 0.0]
GROUPS = [7, 7, 7, 7, 2, 2, 9]
IDS = [f"0/{group}/{member}" for member, group in enumerate(GROUPS)]


def rows(spec: SelectSpec, **other: list[float]) -> list[int]:
    scores = other.get("scores", SCORES)
    found: list[int] = resolve_select(spec)(scores, GROUPS, IDS).tolist()
    return found


@pytest.mark.parametrize(
    "spec",
    [
        Top(k=2),
        Threshold(at_least=-0.5),
        BestAndWorst(tolerance=0.5),
        RandomK(k=2, seed=3),
        Parsed(),
    ],
)
def test_a_selection_reads_back_from_its_text(spec: SelectSpec) -> None:
    assert parse_attr(format_attr(spec)) == spec


def test_the_best_of_each_group_in_the_order_of_the_batch() -> None:
    assert rows(Top(k=1)) == [1, 4, 6]
    assert rows(Top(k=2)) == [1, 2, 4, 5, 6]
    assert rows(Top(k=3)) == [1, 2, 3, 4, 5, 6]


def test_a_threshold_keeps_the_samples_that_reach_it_whatever_their_group() -> None:
    assert not Threshold(at_least=0.0).pairs
    assert rows(Threshold(at_least=3.0)) == [1, 2, 4, 5]  # 3.0 itself is enough
    assert rows(Threshold(at_least=np.nextafter(3.0, 4.0))) == [4, 5]
    assert rows(Threshold(at_least=0.0)) == [0, 1, 2, 3, 4, 5, 6]
    assert rows(Threshold(at_least=5.5)) == []
    below_zero = [-1.0, -3.0, -2.0, -1.0, -1.5, -1.0, -4.0]
    assert rows(Threshold(at_least=-1.0), scores=below_zero) == [0, 3, 5]


def test_a_threshold_keeps_rows_of_a_group_together() -> None:
    chosen = resolve_select(Threshold(at_least=1.0))([1, 1, 0, 1, 1], [0, 1, 0, 1, 0], IDS[:5])
    assert chosen.tolist() == [0, 4, 1, 3]


def test_best_and_worst_make_a_pair_where_they_differ() -> None:
    assert BestAndWorst().pairs
    assert not Top(k=1).pairs
    assert rows(BestAndWorst()) == [1, 0]
    assert rows(BestAndWorst(tolerance=2.0)) == []
    assert rows(BestAndWorst(), scores=[0, 0, 0, 1, 2, 3, 4]) == [3, 0, 5, 4]


def test_a_draw_depends_on_ids_and_seed_alone() -> None:
    drawn = rows(RandomK(k=2))
    assert drawn == sorted(drawn)
    assert [GROUPS[row] for row in drawn] == [7, 7, 2, 2, 9]
    assert rows(RandomK(k=2), scores=[0.0] * 7) == drawn
    # The same samples in another batch, in another order.
    order = [3, 1, 0, 2]
    alone = resolve_select(RandomK(k=2))(np.zeros(4), [0] * 4, [IDS[i] for i in order])
    assert {order[row] for row in alone} == set(drawn[:2])
    others = {tuple(rows(RandomK(k=2, seed=seed))) for seed in range(20)}
    assert len(others) > 1


def test_every_sample_is_drawn_equally_often() -> None:
    counts = np.zeros(4)
    for seed in range(400):
        counts[resolve_select(RandomK(k=1, seed=seed))(np.zeros(4), [0] * 4, IDS[:4])] += 1
    assert counts.sum() == 400
    # Four standard deviations of a share of a quarter.
    assert (np.abs(counts - 100) < 4 * (400 * 0.25 * 0.75) ** 0.5).all()


def test_no_samples_select_none() -> None:
    for spec in (Top(k=1), Threshold(at_least=0.0), BestAndWorst(), RandomK(k=1)):
        assert resolve_select(spec)([], [], []).tolist() == []


def test_a_score_that_is_not_finite_cannot_be_ranked() -> None:
    for spec in (Top(k=1), Threshold(at_least=0.0), BestAndWorst()):
        with pytest.raises(RewardError, match="not finite"):
            rows(spec, scores=[float("nan")] * 7)
