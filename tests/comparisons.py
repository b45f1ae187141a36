"""Where tests find what they compare with, and what continuous integration does not let pass.

`CI` in the environment means that nobody looks at what was skipped or rewritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

__all__ = ["fails_in_ci", "reference_folder", "refuse_updates"]

_REPOSITORY = Path(__file__).resolve().parent.parent


def refuse_updates(environment: Mapping[str, str]) -> None:
    """Raises where golden files are to be rewritten by continuous integration."""
    if environment.get("CI") and environment.get("FLOWRL_UPDATE_GOLDEN"):
        raise pytest.UsageError(
            "FLOWRL_UPDATE_GOLDEN is refused where CI is set: a test that writes what it compares "
            "with cannot fail. Unset it, and commit the golden files that it writes elsewhere."
        )


def reference_folder(environment: Mapping[str, str]) -> Path:
    """The folder of other libraries' figures: FLOWRL_REFERENCE, or `shared` beside the checkout.

    Without the folder the test is skipped; in continuous integration it fails where the folder was
    named.
    """
    named = environment.get("FLOWRL_REFERENCE")
    folder = Path(named) if named else _REPOSITORY.parent / "shared"
    if folder.is_dir():
        return folder
    missing = f"no reference data at {folder}; set FLOWRL_REFERENCE to have it checked"
    if named and environment.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


def fails_in_ci(
    report: pytest.TestReport, fixtures: tuple[str, ...] | list[str], environment: Mapping[str, str]
) -> bool:
    """Whether a test was skipped in continuous integration although its reference data is there."""
    if not (environment.get("CI") and report.skipped and "reference_data" in fixtures):
        return False
    try:
        reference_folder(environment)
    except pytest.skip.Exception:
        return False
    return True
