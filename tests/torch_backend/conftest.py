"""Model folders of the trainer's tests, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch_backend.trainer_fixtures import folder_of


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def qwen(models: Path) -> Path:
    return folder_of("qwen2", models)
