"""A plug-in that scores gets the options of its role."""

from __future__ import annotations

from pathlib import Path

import pytest

import flowrl as fl
from flowrl.errors import ConfigError
from flowrl.files import read_json_lines
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config

LENGTHS = """
from dataclasses import dataclass

from pydantic import BaseModel

from flowrl.backend.protocols import ScoreResult
from flowrl_backends.verify.plugin import VerifyPlugin


class Options(BaseModel, frozen=True, extra="forbid"):
    factor: float = 1.0


class Scorer:
    def __init__(self, factor):
        self.factor = factor

    def score(self, request):
        value = self.factor * request.num_tokens
        return ScoreResult(sample=request.sample, score=value, terms={"digit": value})

    def close(self):
        pass


class Lengths(VerifyPlugin):
    name = "lengths"
    options = Options

    def open_score(self, context):
        return Scorer(Options(**context.options).factor)


plugin = Lengths()
"""


@pytest.fixture(autouse=True)
def lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    info = site / "lengths-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lengths\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowrl.backends]\nlengths = lengths_scorer:plugin\n")
    (site / "lengths_scorer.py").write_text(LENGTHS)
    monkeypatch.syspath_prepend(str(site))


SHORT = ["roles.verifier.backend=lengths", "train.steps=1", "stages=[grpo]", "eval.every=0"]


def test_a_scorer_scores_with_the_options_of_its_role(tmp_path: Path):
    config = tiny_config(tmp_path)
    config["train"]["group_size"] = 2
    overrides = [*SHORT, "roles.verifier.options.factor=-100"]
    run = fl.run(None, config, overrides=overrides, display=WatchedDisplay())
    samples = list(read_json_lines(run.folder / "samples.jsonl"))
    assert samples
    assert [s["score"] for s in samples] == [-100.0 * s["num_tokens"] for s in samples]


def test_an_option_that_a_scorer_does_not_have_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"unknown key 'factr' in roles\.verifier\.options"):
        fl.compile(
            None, tiny_config(tmp_path), overrides=[*SHORT, "roles.verifier.options.factr=2"]
        )
