"""The published planner's fixtures, others of their form, and what cannot be read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from flowrl.errors import ConfigError
from flowrl.plan.search import Kind, leaves
from flowrl.testing.planner_fixture_file import Fixture, read_fixtures
from flowrl.testing.planner_fixtures import (
    answer,
    interpolated,
    main,
    problem_of,
    seconds_of,
)

KNOWN = str(Path(__file__).parents[1] / "data" / "planner_fixtures.yaml")

CHAIN = {
    "name": "chain",
    "devices": 16,
    "batch": 64,
    "graph": [["rollout", "score"], ["score", "inference"], ["inference", "actor"]],
    "whole_pool_cost_s": {"rollout": 40, "score": 8, "inference": 8, "actor": 24},
}

REST = {"rollout": 4, "score": 4, "inference": 4}
"""Devices of all but the last stage."""


def written(tmp_path, *rows) -> str:
    path = tmp_path / "fixtures.yaml"
    path.write_text(yaml.safe_dump({"fixtures": list(rows)}))
    return str(path)


def only(path: str, name: str | None = None) -> Fixture:
    (fixture,) = read_fixtures(path, name)
    assert isinstance(fixture, Fixture)
    return fixture


def test_the_published_planner_is_never_faster(capsys) -> None:
    assert main([KNOWN]) == 0
    printed = capsys.readouterr().out
    assert "temporal  ours      335.000 s   theirs        335 s" in printed
    assert "spatial   ours      289.096 s   theirs      289.1 s" in printed
    assert printed.count("at least as fast") == 2


def test_the_published_spatial_answer_scores_as_published() -> None:
    fixture = only(KNOWN, "case1_1p5b_or_7b_128_devices")
    placed = {}
    for task in problem_of(fixture, Kind.SPATIAL).tasks:
        wanted = fixture.source_planner.spatial_devices[task.id]
        # Of numbers that take equally long the smallest is kept: 71 and not 80 for the rollout.
        placed[task.id] = [o.seconds for o in task.options if o.devices <= wanted][-1]
    # W / g = 8 and 4: 10 * 8 / 1.8 and 101 * 4 / 1.4; enough rollout instances keep it at 224.
    assert placed["rollout"] == 224
    assert placed["inference"] == pytest.approx(44.444, abs=1e-3)
    assert placed["actor"] == pytest.approx(288.571, abs=1e-3)
    found = answer(fixture).ours[Kind.SPATIAL][1]
    # 224 / 512 + 44.4 / 512 + 288.6: one prompt through, then the slowest's pace.
    assert seconds_of(fixture, found) == pytest.approx(289.1, abs=0.05)


def test_a_cycle_is_placed_together_or_apart(tmp_path) -> None:
    fixture = only(KNOWN, "maniskill_4_devices")
    found = answer(fixture)
    # Two devices each: 20 environments take 0.8 and 0.6. Theirs, 1 and 3: 40 take 0.85.
    assert found.ours[Kind.HYBRID][0] == pytest.approx(100.8)
    assert found.theirs[Kind.HYBRID] == pytest.approx(100.85)
    (region, actor) = leaves(found.ours[Kind.HYBRID][1])
    assert region.option.form == "apart: env 2, rollout 2"
    assert actor.option.devices == 4


def test_longer_chains_diamonds_and_critics_are_planned(tmp_path) -> None:
    diamond = CHAIN | {
        "name": "diamond",
        "graph": [
            ["rollout", "score"],
            ["rollout", "inference"],
            ["score", "actor"],
            ["inference", "actor"],
        ],
    }
    ppo = {
        "name": "ppo",
        "devices": 24,
        "batch": 64,
        "tp": {"actor": 2},
        "graph": [
            *(["rollout", judge] for judge in ("reference", "reward", "values")),
            *([judge, "actor"] for judge in ("reference", "reward", "values")),
            *([judge, "critic"] for judge in ("reward", "values")),
        ],
        "whole_pool_cost_s": {
            "rollout": 40,
            "reference": 8,
            "reward": 8,
            "values": 8,
            "actor": 24,
            "critic": 24,
        },
    }
    for row in (CHAIN, diamond, ppo):
        found = answer(only(written(tmp_path, row)))
        total = sum(row["whole_pool_cost_s"].values())
        assert found.ours[Kind.TEMPORAL][0] <= total
        assert found.ours[Kind.HYBRID][0] <= found.ours[Kind.SPATIAL][0]
        assert found.theirs == {}


@pytest.mark.parametrize("count", [2, 3, 6])
def test_chains_and_fans_of_any_names_and_numbers_are_planned(tmp_path, capsys, count) -> None:
    names = [*("generation", "judge", "rm", "ref", "values", "old", "critic")[: count - 1], "actor"]
    chain = [list(pair) for pair in pairwise(names)]
    fan = [[names[0], name] for name in names[1:-1]] + [[name, "actor"] for name in names[1:-1]]
    for graph in (chain, fan or chain):
        row = {
            "name": "any",
            "devices": 24,
            "batch": 48,
            "group_size": 4,
            "max_running_requests": 32,
            "graph": graph,
            "whole_pool_cost_s": {name: 4.0 + at for at, name in enumerate(names)},
        }
        assert main([written(tmp_path, row)]) == 0
        assert "stages taken for rollouts: generation" in capsys.readouterr().out
        found = answer(only(written(tmp_path, row))).ours
        assert found[Kind.HYBRID][0] <= min(found[Kind.TEMPORAL][0], found[Kind.SPATIAL][0])


def test_published_devices_alone_are_scored_by_the_model(tmp_path) -> None:
    known = only(KNOWN, "case1_1p5b_or_7b_128_devices")
    row = known.model_dump(exclude={"measured_on_cluster", "source_planner"})
    for key in ("spatial_devices", "devices"):
        given = {key: {"rollout": 80, "inference": 16, "actor": 32}}
        found = answer(only(written(tmp_path, {**row, "source_planner": given})))
        assert found.theirs[Kind.SPATIAL] == pytest.approx(289.1, abs=0.05)


def test_published_devices_may_be_some_that_ours_may_not_take(tmp_path) -> None:
    # 24 prompts of a mini-batch have no 5 equal parts; what was published is scored all the same.
    row = CHAIN | {"batch": 96, "num_minibatches": 4}
    given = {"rollout": 4, "score": 4, "inference": 3, "actor": 5}
    theirs = answer(only(written(tmp_path, row | {"source_planner": {"devices": given}}))).theirs
    shared = answer(only(written(tmp_path, row | {"source_planner": {"spatial_devices": given}})))
    assert theirs == shared.theirs
    # 24 * 16 / 5 / 1.32 and 8 * 16 / 3 / 1.5333; 8 * 4 / 1.4; 160: the rollout's pace.
    parts = 40 * 4 + (8 * 4 / 1.4 + 8 * (16 / 3) / (1 + 1.6 / 3) + 24 * 3.2 / 1.32) / 96
    assert theirs[Kind.SPATIAL] == pytest.approx(parts)
    cycle = only(KNOWN, "maniskill_4_devices").model_dump(exclude={"source_planner"})
    cycle |= {"batch": 8, "num_minibatches": 4}
    cycle["source_planner"] = {"devices": {"env": 1, "rollout": 3, "actor": 3}}
    # 40 environments on one device beside 14 on each of three; then 100 * 4 / 3 / 1.1333.
    found = answer(only(written(tmp_path, cycle))).theirs[Kind.HYBRID]
    assert found == pytest.approx(0.85 + 100 * (4 / 3) / (1 + 0.4 / 3))


def test_the_best_by_the_published_model_is_found_where_the_searchs_own_prefers_another(
    tmp_path,
) -> None:
    row = {
        "name": "diamond",
        "devices": 12,
        "batch": 64,
        "group_size": 16,
        "graph": [["rollout", "a"], ["rollout", "b"], ["a", "c"], ["b", "c"]],
        "whole_pool_cost_s": {"rollout": 300.0, "a": 71.0, "b": 0.05, "c": 66.0},
        "max_running_requests": 300,
        "tp": {"c": 2},
    }
    # Four instances of 270 samples hold all 1,024; the rest take turns on the other eight devices.
    rest = (71.0 + 0.05 + 66.0) * 1.5 / 1.15
    seconds, _ = answer(only(written(tmp_path, row))).ours[Kind.HYBRID]
    assert seconds == pytest.approx((300.0 + rest) / 64 + 300.0 * 63 / 64, rel=1e-9)


@pytest.mark.parametrize("devices", [2, 8, 16])
def test_a_cycle_on_other_numbers_of_devices_with_two_stages_after_it(tmp_path, devices) -> None:
    row = only(KNOWN, "maniskill_4_devices").model_dump(exclude={"source_planner"})
    row |= {"devices": devices, "whole_pool_cost_s": {"critic": 20, "actor": 30}}
    found = answer(only(written(tmp_path, row)))
    # All but one device take less in the model than all: 16 / 15 / 1.107.
    assert 48 < found.ours[Kind.HYBRID][0] < 52


def test_one_that_is_slower_is_told(tmp_path, capsys) -> None:
    row = CHAIN | {"source_planner": {"temporal_s": 80.0, "spatial_s": 1.0}}
    assert main([written(tmp_path, row)]) == 1
    assert "SLOWER than theirs" in capsys.readouterr().out


def test_theirs_is_compared_in_the_digits_it_is_printed_with() -> None:
    fixture = Fixture(name="x", devices=1)
    assert fixture.half_digit(289.1) == pytest.approx(0.05)


def test_seconds_between_measured_environments_are_interpolated() -> None:
    table = {10: 0.4, 20: 0.6}
    assert [interpolated(table, at) for at in (5, 10, 15, 30)] == pytest.approx(
        [0.4, 0.4, 0.5, 0.8]
    )
    assert interpolated({10: 0.4}, 20) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": "eight"}, "valid integer"),
        ({"devices": True}, "not true or false"),
        ({"devices": 1_000_000}, "devices: Input should be less than or equal to 4096"),
        ({"whole_pool_cost_s": {"rollout": float("inf")}}, "rollout: Input should be a finite"),
        ({"graph": [["rollout", "rollout"]]}, "chain: graph: The graph has a cycle: rollout"),
        ({"graph": [["rollout", "actr"]]}, "'actr' has no costs"),
        ({"batch": None}, "batch is missing"),
        ({"graph": [["rollout", "actor"], ["actor", "rollout"]]}, "The graph has a cycle"),
        ({"whole_pool_cost_s": {}}, "whole_pool_cost_s or cost_by_envs_s is missing"),
        ({"cost_by_envs_s": {"env": {1: 2.0}}}, "A cycle has two roles"),
        (
            {"cost_by_envs_s": {"env": {1: 2.0}, "policy": {1: 2.0}}},
            "num_envs is missing",
        ),
        ({"source_planner": {"devices": {"rollout": 4}}}, "devices lack 'score'"),
        (
            {"source_planner": {"devices": dict.fromkeys(CHAIN["whole_pool_cost_s"], 8)}},
            "32 devices are more than there are",
        ),
        (
            {"tp": {"actor": 4}, "source_planner": {"spatial_devices": {"actor": 3, **REST}}},
            "actor cannot run on the published planner's 3 devices",
        ),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path, capsys, change, message) -> None:
    assert main([written(tmp_path, CHAIN | change)]) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_none_are_told(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_fixtures(str(tmp_path / "none.yaml"))
    path = tmp_path / "x.yaml"
    path.write_text("rows: []")
    with pytest.raises(ConfigError, match="has no fixtures"):
        read_fixtures(str(path))
    with pytest.raises(ConfigError, match="no fixture 'x'"):
        read_fixtures(KNOWN, "x")


def test_a_folder_in_the_place_of_a_file_is_told_with_the_files_in_it(tmp_path, capsys) -> None:
    assert main([str(tmp_path)]) == 2
    assert "no YAML file in it" in capsys.readouterr().err
    for name in ("a.yaml", "planner_fixtures.yml", "b.txt"):
        (tmp_path / name).write_text("fixtures: []")
    assert main([str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "This is a folder, not a file of fixtures" in told
    assert f"{tmp_path}/a.yaml, {tmp_path}/planner_fixtures.yml in it" in told
    assert f"such as {tmp_path}/planner_fixtures.yml" in told
    assert "b.txt" not in told
