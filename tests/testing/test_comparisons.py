"""Continuous integration neither rewrites what it compares with nor skips what it could compare."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.comparisons import fails_in_ci, reference_folder, refuse_updates


def test_golden_files_are_not_rewritten_in_ci():
    refuse_updates({"CI": "true"})
    refuse_updates({"FLOWRL_UPDATE_GOLDEN": "1"})
    with pytest.raises(pytest.UsageError, match="FLOWRL_UPDATE_GOLDEN is refused where CI is set"):
        refuse_updates({"CI": "true", "FLOWRL_UPDATE_GOLDEN": "1"})


def test_reference_data_that_was_named_and_is_missing_is_a_failure_in_ci_alone(tmp_path: Path):
    there = {"FLOWRL_REFERENCE": str(tmp_path)}
    assert reference_folder(there) == reference_folder({**there, "CI": "true"}) == tmp_path
    missing = {"FLOWRL_REFERENCE": str(tmp_path / "none")}
    with pytest.raises(pytest.skip.Exception, match="no reference data at"):
        reference_folder(missing)
    with pytest.raises(pytest.fail.Exception, match="no reference data at"):
        reference_folder({**missing, "CI": "true"})


@pytest.mark.parametrize(
    ("skipped", "fixture", "environment", "fails"),
    [
        (True, "reference_data", {"CI": "true"}, True),
        (False, "reference_data", {"CI": "true"}, False),
        (True, "reference_data", {}, False),
        (True, "tmp_path", {"CI": "true"}, False),
    ],
)
def test_a_comparison_that_is_skipped_although_its_data_is_there_fails_in_ci(
    tmp_path: Path, skipped: bool, fixture: str, environment: dict[str, str], fails: bool
):
    report = SimpleNamespace(skipped=skipped)
    environment = {"FLOWRL_REFERENCE": str(tmp_path), **environment}
    assert fails_in_ci(report, [fixture], environment) == fails  # type: ignore[arg-type]
