"""No schedule of the simulated scheduler breaks a bound on schedules."""

from __future__ import annotations

import pytest

from tests.proofs import schedule_bounds
from tests.proofs.schedule_bounds import PART, WHOLE, BoundCheck, check_case, main


@pytest.mark.parametrize(
    "case", PART, ids=lambda c: f"K{c.slots}-N{c.samples}-a{c.staleness}-s{c.sigma:g}"
)
def test_a_part_of_the_grid_keeps_every_bound(case):
    broken = [check for check in check_case(case) if not check.holds]
    assert not broken


def test_the_grid_covers_what_is_claimed_of_it():
    assert {c.slots for c in WHOLE} >= {8, 256}
    assert max(c.samples for c in WHOLE) == 4096
    assert {c.staleness for c in WHOLE} >= {0, 8}
    assert {c.sigma for c in WHOLE} >= {0.0, 1.5}
    assert set(PART) <= set(WHOLE)


def test_bounds_are_near_where_nothing_is_left_to_chance():
    """Equal lengths and full slots: a batch takes exactly its share, and no bound is idle talk."""
    case = next(c for c in PART if (c.slots, c.samples, c.staleness, c.sigma) == (8, 512, 1, 0.0))
    checks = {check.name: check for check in check_case(case)}
    assert checks["one batch"].found == 512 * 200 / 8
    assert checks["step"].found == 2 * 512 * 200 / 8


def test_a_broken_bound_is_told_and_ends_with_1(monkeypatch, capsys):
    monkeypatch.setattr(schedule_bounds, "PART", PART[:1])
    monkeypatch.setattr(
        schedule_bounds, "check_case", lambda case: [BoundCheck(name="step", found=3.0, bound=2.0)]
    )
    assert main([]) == 1
    told = capsys.readouterr().out
    assert "step          1 cases, 1 broken, nearest 1.5000" in told
    assert "K=8 N=64 a=0 sigma=0: 3 > 2" in told
