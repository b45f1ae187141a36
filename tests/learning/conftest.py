"""A model that gets four sums in ten right, which every learning test goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import flowrl as fl
from flowrl.observe.display import SilentDisplay


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """The model folder that the supervised stage of the quickstart leaves, made once a session."""
    config: dict[str, Any] = yaml.safe_load((repository / "configs/quickstart.yaml").read_text())
    sft = config.pop("stage")["sft"]
    sampling = {"sampling": config["train"]["sampling"]}
    config |= {
        "name": "warm",
        "stages": ["sft"],
        "train": sft["train"] | sampling,
        "stop": sft["stop"] | {"at_least": 0.35},
        "runtime": {"runs": str(tmp_path_factory.mktemp("warm_start"))},
    }
    result = fl.run(None, config, display=SilentDisplay())
    assert result.summary.after is not None
    assert 0.3 < result.summary.after < 0.5
    return result.folder / "model"
