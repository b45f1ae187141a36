"""Predictions beside what runs measured."""

from __future__ import annotations

import pytest

from flowrl.observe.rows import StepMetrics
from flowrl.sim.compare import beside, beside_text
from tests.sim.worlds import run, small_model


def row(step: int, wall: float, **seconds: float) -> StepMetrics:
    return StepMetrics(stage="grpo", step=step, wall_s=wall, seconds=seconds)


def test_every_kind_of_work_stands_beside_its_measurement():
    report = run(small_model(learn_s=5.0))
    rows = [row(n, 14.0, generate=8.5, update=4.0, advantage=0.5) for n in range(1, 8)]
    pairs = {pair.what: pair for pair in beside(report, rows)}
    assert list(pairs) == ["step", "generate", "update", "sync", "advantage", "host"]
    assert (pairs["step"].predicted_s, pairs["step"].measured_s) == (13.0, 14.0)
    assert pairs["step"].error == pytest.approx(13 / 14 - 1)
    assert (pairs["update"].predicted_s, pairs["update"].measured_s) == (5.0, 4.0)
    assert (pairs["advantage"].predicted_s, pairs["advantage"].measured_s) == (0.0, 0.5)
    assert pairs["host"].measured_s == pytest.approx(1.0)
    assert pairs["sync"].error is None


def test_steps_that_warm_up_are_left_out_of_longer_runs():
    report = run(small_model())
    slow, quick = [row(n, 100.0) for n in (1, 2, 3)], [row(n, 10.0) for n in (4, 5, 6)]
    assert beside(report, slow + quick)[0].measured_s == 10.0
    assert beside(report, slow)[0].measured_s == 100.0
    assert beside(report, []) == []


def test_the_table_is_aligned():
    report = run(small_model(learn_s=5.0))
    lines = beside_text(beside(report, [row(1, 13.5, generate=0.25)])).splitlines()
    assert lines == [
        "medians       predicted    measured",
        "  step          13.00 s     13.50 s     -4 %",
        "  generate       8.00 s      250 ms  +3100 %",
        "  update         5.00 s           0",
        "  sync                0           0",
        "  host                0     13.25 s   -100 %",
    ]
