"""Models that learning tests go on from, each made once a session.

`FLOWRL_SEED` is the seed of all of them and of every run; `benchmarks/learning.py` tries several.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

import flowrl as fl
from flowrl.api import RunResult
from flowrl.observe.display import SilentDisplay


@pytest.fixture(scope="session")
def seed() -> int:
    """Of everything random."""
    return int(os.environ.get("FLOWRL_SEED", "0"))


def supervised(
    train: dict[str, Any], stop: dict[str, Any] | None, seed: int, repository: Path, runs: Path
) -> RunResult:
    """The quickstart's model after supervised fine-tuning."""
    config: dict[str, Any] = yaml.safe_load((repository / "configs/quickstart.yaml").read_text())
    del config["stage"]
    config |= {
        "name": "supervised",
        "seed": seed,
        "stages": ["sft"],
        "train": train | {"sampling": config["train"]["sampling"]},
        "stop": stop,
        "runtime": {"runs": str(runs)},
    }
    return fl.run(None, config, display=SilentDisplay())


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory, repository: Path, seed: int) -> Path:
    """A model that gets four sums in ten right: what the supervised stage of the quickstart leaves.

    A little less, so that there is more to learn.
    """
    config = yaml.safe_load((repository / "configs/quickstart.yaml").read_text())
    sft = config["stage"]["sft"]
    stop = sft["stop"] | {"at_least": 0.35}
    runs = tmp_path_factory.mktemp("warm_start")
    result = supervised(sft["train"], stop, seed, repository, runs)
    assert result.summary.after is not None
    assert 0.3 < result.summary.after < 0.5
    return result.folder / "model"


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory, repository: Path, seed: int) -> Path:
    """A model that can add: what the stage `teach` of two configs leaves."""
    stages = [
        yaml.safe_load((repository / "configs" / f"{name}.yaml").read_text())["stage"]["teach"]
        for name in ("opd", "ppo_rm")
    ]
    assert stages[0] == stages[1]
    runs = tmp_path_factory.mktemp("teacher")
    result = supervised(stages[0]["train"], None, seed, repository, runs)
    assert result.summary.after is not None
    assert result.summary.after > 0.95
    return result.folder / "model"
