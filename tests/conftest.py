"""Settings for every test: one thread of arithmetic, reference data, no network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before numpy or torch are imported by any test: results and times must not depend on how many
# cores the machine has, and child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """Figures and oracle values of other libraries; `FLOWRL_REFERENCE` names another folder."""
    folder = Path(os.environ.get("FLOWRL_REFERENCE", REPOSITORY.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}; set FLOWRL_REFERENCE to have it checked")
    return folder
