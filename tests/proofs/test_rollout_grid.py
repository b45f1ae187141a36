"""Planned rollouts beside simulated ones, over a grid."""

from __future__ import annotations

import json

import pytest

from tests.proofs import rollout_grid
from tests.proofs.rollout_grid import (
    AMPLE,
    PART,
    WHOLE,
    RolloutCase,
    RolloutCheck,
    check_case,
    main,
)


def name(case: RolloutCase) -> str:
    cache = f"x{case.cache:g}" if case.cache else "ample"
    return f"R{case.replicas}-n{case.samples}-K{case.slots}-s{case.sigma:g}-{cache}"


@pytest.mark.parametrize("case", PART, ids=name)
def test_no_case_of_a_part_of_the_grid_is_far_off(case: RolloutCase):
    check = check_case(case)
    assert not check.far, (check.planned_s, check.simulated_s, check.error_s)


def test_the_grid_covers_what_is_claimed_of_it():
    assert {case.replicas for case in WHOLE} == {1, 2, 8, 32}
    assert {case.samples for case in WHOLE} == {8, 32, 128, 512}
    assert {case.slots for case in WHOLE} >= {8, 16, 64, 512}
    assert {case.sigma for case in WHOLE} == {0.1, 0.3, 0.5, 1.0, 1.5}
    assert {case.cache for case in WHOLE} == {AMPLE, 4.0, 2.0, 1.2}
    assert set(PART) <= set(WHOLE)


def test_a_case_that_is_far_off_is_told_and_ends_with_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(rollout_grid, "PART", PART[:2])
    monkeypatch.setattr(
        rollout_grid,
        "check_case",
        lambda case: RolloutCheck(case=case, planned_s=8.0, simulated_s=10.0, error_s=0.2),
    )
    out = tmp_path / "cases.json"
    assert main(["--json", str(out)]) == 1
    told = capsys.readouterr().out
    assert "8.00     10.00  0.800   2.0 %  far" in told
    assert "all             2 cases, median 20.0 % off, 2 above 5 %, 2 above 10 %" in told
    assert [case["ratio"] for case in json.loads(out.read_text())] == [0.8, 0.8]


def test_chance_is_no_error():
    near = RolloutCheck(case=PART[0], planned_s=8.0, simulated_s=10.0, error_s=0.3)
    assert not near.far
