"""The oracle runner, and flowrl's formulas against numbers recorded from other libraries.

A small subset of the numbers lies in the repository; the whole set is read where it is there.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import DataError
from flowrl.testing.oracles import Case, Failed, NotOffered, Passed, judge, load, run
from flowrl.testing.oracles.__main__ import main
from flowrl.testing.oracles.runner import ADAPTERS

WHITEN = {
    "family": "advantages",
    "name": "adv_norm__areal__tiny",
    "inputs": {"values": [[1, 3, 9]], "response_mask": [[1, 1, 0]]},
    "options": {"algorithm": "advantage_norm", "ddof": 0, "eps": 0.0},
    "expected": {"advantages": [[-1, 1, 0]]},
    "rtol": 1e-5,
    "atol": 1e-6,
    "compare": "all",
}


def case_of(**changes: Any) -> Case:
    return Case.from_json({**copy.deepcopy(WHITEN), **changes}, None, "here")


def written(folder: Path, *cases: dict[str, Any], family: str | None = "advantages") -> Path:
    path = folder / "cases.json"
    path.write_text(json.dumps({"family": family, "cases": list(cases)}))
    return path


@pytest.mark.parametrize("family", ADAPTERS)
def test_formulas_equal_the_recorded_numbers_in_the_repository(
    family: str, repository: Path
) -> None:
    cases = load([repository / "tests/data/oracles_small.json"])
    chosen = [case for case in cases if case.family == family]
    tally = run(chosen)[family]
    assert tally.failed == []
    assert tally.passed >= 0.9 * len(chosen) > 0


def test_the_numbers_in_the_repository_name_their_source(repository: Path) -> None:
    for case in load([repository / "tests/data/oracles_small.json"]):
        assert {"repo", "commit", "file", "function"} <= set(case.source), case.name


def test_all_recorded_numbers_are_met_or_refused_with_a_reason(reference_data: Path) -> None:
    tallies = run(load([reference_data / "oracles"]))
    assert {name: tally.failed for name, tally in tallies.items() if tally.failed} == {}
    passed = sum(tally.passed for tally in tallies.values())
    refused = sum(len(tally.not_offered) for tally in tallies.values())
    assert passed > 600
    assert refused < 0.1 * (passed + refused)


def test_a_number_within_the_tolerance_passes_and_one_beyond_it_fails() -> None:
    near = {"advantages": [[-1.00001, 1, 0]]}
    assert judge(case_of(expected=near)) == Passed()
    verdict = judge(case_of(expected={"advantages": [[-1.1, 1, 0]]}))
    assert isinstance(verdict, Failed)
    assert verdict.reason == "advantages[0][0]: got -1, want -1.1 (1 of 3 differ)"


def test_padding_is_compared_only_where_the_case_says_all() -> None:
    garbage = {"advantages": [[-1, 1, 77]]}
    assert isinstance(judge(case_of(expected=garbage)), Failed)
    assert judge(case_of(expected=garbage, compare="response_mask")) == Passed()


def test_a_result_that_is_missing_or_of_another_shape_fails() -> None:
    missing = judge(case_of(expected={"advantages": [[-1, 1, 0]], "loss": 0.0}))
    assert missing == Failed("no result loss")
    shaped = judge(case_of(expected={"advantages": [-1, 1, 0]}))
    assert shaped == Failed("advantages: got shape (1, 3), want (3,)")


def test_an_adapter_that_raises_is_a_failed_case() -> None:
    verdict = judge(case_of(options={"algorithm": "unheard of"}))
    assert verdict == Failed("KeyError: 'unheard of'")
    assert isinstance(judge(case_of(family="cooking")), Failed)


def test_a_library_that_returned_no_number_where_flowrl_has_one_is_not_a_pass() -> None:
    verdict = judge(case_of(expected={"advantages": [[None, 1, 0]]}))
    assert isinstance(verdict, NotOffered)
    # Nor is it a failure, but another number in the same case that differs is one.
    assert isinstance(judge(case_of(expected={"advantages": [[None, 2, 0]]})), Failed)
    # A value that was not recorded at all is skipped.
    assert judge(case_of(expected={"advantages": [[-1, 1, 0]], "loss": None})) == Passed()
    assert isinstance(judge(case_of(expected={"advantages": None})), NotOffered)


def test_the_command_ends_with_the_counts_and_fails_exactly_when_a_case_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(written(tmp_path, WHITEN))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "advantages: 1 passed, 0 failed, 0 not offered",
        "1 passed, 0 failed, 0 not offered",
    ]
    wrong = {**WHITEN, "name": "wrong", "expected": {"advantages": [[0, 0, 0]]}}
    written(tmp_path, WHITEN, wrong)
    assert main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("failed: advantages: wrong: advantages[0][0]: got -1, want 0")
    assert lines[-1] == "1 passed, 1 failed, 0 not offered"


def test_families_without_an_adapter_yet_are_named_and_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    balance = {**WHITEN, "family": "seq_balancing", "compare": "upper_bound"}
    assert main([str(written(tmp_path, balance))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "seq_balancing: later (1 cases)",
        "0 passed, 0 failed, 0 not offered",
    ]


def test_a_path_without_cases_is_an_error_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "absent.json")]) == 2
    assert "absent.json" in capsys.readouterr().err
    with pytest.raises(DataError, match="holds no oracle files"):
        load([tmp_path])
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(DataError, match="holds no oracle cases"):
        load([tmp_path])
    (tmp_path / "list.json").write_text('{"family": "advantages", "cases": [{"name": "x"}]}')
    with pytest.raises(DataError, match="lacks keys"):
        load([tmp_path])
